"""Recounts an executor's pools from scratch and reports every contradiction."""

from collections import Counter
from collections.abc import Iterator

from cachemgr import siblings
from cachemgr.api import PoolViolation
from cachemgr.block import Block
from cachemgr.keys import child_key
from cachemgr.leases import effective_priority, leases_of
from cachemgr.pool import Pool
from cachemgr.registry import Executor


def check(executor: Executor, pools: list[Pool]) -> list[PoolViolation]:
    """All contradictions in those of the pools that are this executor's."""
    found: list[PoolViolation] = []
    for pool in executor.pools:
        if pool in pools:
            check = _Check(executor, pool)
            check.run()
            found += check.violations
    return found


class _Check:
    def __init__(self, executor: Executor, pool: Pool) -> None:
        self._executor = executor
        self._pool = pool
        self._blocks = [block for block in pool.blocks if block is not None]
        self.violations: list[PoolViolation] = []

    def run(self) -> None:
        self._references()
        self._counters()
        self._order()
        self._leases()
        self._index()
        self._pending()
        self._writers()

    def _report(self, condition: bool, slot: int, message: str) -> None:
        if not condition:
            self.violations.append(PoolViolation(self._pool.pool_id, slot, message))

    def _references(self) -> None:
        expected = Counter(self._expected_references())
        for block in self._blocks:
            counted = expected.pop(block, 0)
            self._report(block.refs == counted, block.slot, f"has {block.refs} references, {counted} are known")
        for block in expected:
            self._report(False, block.slot, "is referred to and not in the pool")
        for hold in self._executor.holds:
            self._report(bool(hold.owners), 0, "a hold has no owner")

    def _expected_references(self) -> Iterator[Block]:
        for sequence in self._executor.sequences.values():
            for table in sequence.tables:
                if table.pool is self._pool:
                    yield from table.references()
        for hold in self._executor.holds:
            yield from (block for pool, block in hold.blocks if pool is self._pool)
        for ticket in self._executor.tickets.values():
            if ticket.pool is self._pool:
                yield from (ticket.source, ticket.target, *ticket.anchors)

    def _counters(self) -> None:
        pool = self._pool
        total = pool.spec.num_blocks
        used = sum(block.refs > 0 for block in self._blocks)
        cached = len(self._blocks) - used
        self._report(pool.used == used, 0, f"counts {pool.used} used blocks, {used} are")
        self._report(pool.cached == cached, 0, f"counts {pool.cached} cached blocks, {cached} are")
        self._report(len(pool.empty) + used + cached == total, 0, "empty, cached and used blocks are not all blocks")
        slots = sorted([*pool.empty, *(block.slot for block in self._blocks)])
        self._report(slots == list(range(1, total + 1)), 0, "a slot is lost or has two states")
        for slot, block in enumerate(pool.blocks):
            if block is not None:
                self._report(block.slot == slot, slot, f"holds a block that says slot {block.slot}")
                self._report(bool(block.refs) or block.parent is not None, slot, "is neither used, cached nor empty")

    def _order(self) -> None:
        pool, listed = self._pool, set()
        for priority, bit, blocks in pool.order.rings():
            self._report(bit == bool(blocks), 0, f"the bit of priority {priority} is wrong")
            ages = [block.recency for block in blocks]
            self._report(ages == sorted(ages), 0, f"priority {priority} is not in order of use")
            for block in blocks:
                listed.add(block)
                self._report(block.priority == priority, block.slot, f"is listed with priority {priority}")
        for block in self._blocks:
            leaf = pool.window is not None or block.children is None
            self._report(
                (block in listed) == (not block.refs and leaf), block.slot, "is wrongly in or out of the order"
            )
        self._report(listed <= set(self._blocks), 0, "a block that is not in the pool is in the eviction order")

    def _leases(self) -> None:
        for block in self._blocks:
            leases = list(leases_of(block))
            self._report(block.priority == effective_priority(block), block.slot, "has not its leases' priority")
            self._report(
                all(lease.block is block and lease.pool is self._pool for lease in leases),
                block.slot,
                "has a lease of another block",
            )
            holders = {lease.wish.holder for lease in leases}
            self._report(len(holders) == len(leases), block.slot, "has two leases of one holder")
            self._report(
                not leases or bool(block.refs) or block.parent is not None, block.slot, "has leases and is empty"
            )
            waiting = any(lease.deadline is None and lease.wish.duration is not None for lease in leases)
            self._report(not waiting or block.refs > 0, block.slot, "can be taken, and the clock of a lease stands")

    def _index(self) -> None:
        pool = self._pool
        indexed = {block for block in self._blocks if block.parent is not None}
        self._report(set(pool.index.values()) == indexed, 0, "index and blocks do not agree")
        for key, block in pool.index.items():
            parent = block.parent
            if parent is None or block.domain is None:
                self._report(False, block.slot, "is in the index without a parent or domain")
                continue
            self._report(block.key == key, block.slot, "is in the index under another key")
            self._report(child_key(parent.key, block.tokens) == key, block.slot, "has a key of other tokens")
            self._report(block in siblings.each(parent), block.slot, "is not among its parent's children")
            self._report(pool.node(parent.key) is parent, block.slot, "stands on a node that cannot be found")
            self._report(block.writer is None, block.slot, "is in the index and still being written")
            if pool.window is None:
                self._standing(block)
        for node in [*pool.bare.values(), *pool.index.values()]:
            children = siblings.each(node)
            ordered = [child.tokens for child in children]
            self._report(ordered == sorted(ordered), 0, "siblings are out of order")
            self._report(all(child.parent is node for child in children), 0, "a child has another parent")
            self._report(bool(children) or isinstance(node, Block), 0, "a node without block or children is kept")

    def _standing(self, block: Block) -> None:
        parent = block.parent
        if isinstance(parent, Block):
            self._report(parent.depth == block.depth - 1, block.slot, "has a parent of another depth")
            self._report(not block.refs or parent.refs > 0, block.slot, "is used and its parent is not")
        else:
            is_root = block.domain is not None and parent is not None and parent.key == block.domain.key
            self._report(is_root and block.depth == 0, block.slot, "has lost its parent")

    def _pending(self) -> None:
        for key, block in self._pool.pending.items():
            writer = block.writer
            if writer is None:
                self._report(False, block.slot, "is promised by nobody")
                continue
            alive = self._executor.sequences.get(writer.handle) is writer and not writer.void and not writer.no_store
            self._report(alive, block.slot, "is promised by a sequence that will not write it")
            places = [table.blocks for table in writer.tables if table.pool is self._pool]
            promised = any(
                place < len(writer.keys) and writer.keys[place] == key and mine is block
                for blocks in places
                for place, mine in enumerate(blocks)
            )
            self._report(promised, block.slot, "is promised under a key that its writer does not have")

    def _writers(self) -> None:
        """Whatever a sequence may still write to is its own and nobody can find it."""
        owners: dict[Block, int] = {}
        for sequence in self._executor.sequences.values():
            lengths = {len(table.blocks) for table in sequence.tables}
            self._report(len(lengths) == 1, 0, f"sequence {sequence.handle} has tables of different lengths")
            self._report(sequence.computed <= len(sequence.tokens), 0, "more is computed than known")
            if sequence.void:
                continue
            for table in sequence.tables:
                if table.pool is not self._pool:
                    continue
                for block in table.blocks[sequence.computed // sequence.block_size :]:
                    if block is not None:
                        self._report(block not in owners, block.slot, "is written by two sequences")
                        self._report(block.writer is sequence, block.slot, "is written by one that does not own it")
                        self._report(block.parent is None, block.slot, "is written while it can be found")
                        owners[block] = sequence.handle
