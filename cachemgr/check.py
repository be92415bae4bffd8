"""Recounts an executor's pools from scratch and reports every contradiction."""

from collections import Counter
from collections.abc import Iterator

from cachemgr import siblings
from cachemgr.admin_api import PoolViolation
from cachemgr.block import Block
from cachemgr.keys import child_key
from cachemgr.leases import MAX_LEASES, effective_priority, leases_of
from cachemgr.pool import Pool
from cachemgr.registry import Executor
from cachemgr.retention import SHARED
from cachemgr.tiers import account_of
from cachemgr.transfers import Purpose


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
        self._backups()
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
            self._report(bool(hold.owners) and hold.name != "", 0, "a hold has no owner")

    def _expected_references(self) -> Iterator[Block]:
        for sequence in self._executor.sequences.values():
            for table in sequence.tables:
                if table.pool is self._pool:
                    yield from table.references()
                    yield from sequence.private
        for hold in self._executor.holds:
            yield from (block for pool, block in hold.blocks if pool is self._pool)
        # Those that wait for others of their kind hold what they have, too.
        groups = (ticket.together for ticket in self._executor.tickets.values() if ticket.pool is self._pool)
        for ticket in {ticket for group in groups for ticket in group}:
            yield from (ticket.target, *ticket.anchors)
            if ticket.source is not None and ticket.holds_source:
                yield ticket.source

    def _counters(self) -> None:
        pool = self._pool
        for tier in pool.tiers:
            mine = [block for block in self._blocks if pool.tier_of(block) is tier]
            used = sum(block.refs > 0 for block in mine)
            cached = len(mine) - used
            name = tier.kind.name.lower()
            self._report(tier.used == used, 0, f"counts {tier.used} used {name} blocks, {used} are")
            self._report(tier.cached == cached, 0, f"counts {tier.cached} cached {name} blocks, {cached} are")
            backups = pool.backups.places.values() if tier is pool.backups.tier else ()
            slots = sorted([*tier.empty, *tier.withheld, *(block.slot for block in mine), *backups])
            every = list(range(tier.offset + 1, tier.offset + tier.size + 1))
            self._report(slots == every, 0, f"a {name} slot is lost or has two states")
            for account, share in tier.shares.items():
                theirs = [block for block in mine if account_of(block) is account]
                used = sum(block.refs > 0 for block in theirs)
                self._report(
                    (share.count, share.used) == (len(theirs), used), 0, f"a quota's {name} blocks are miscounted"
                )
        for place, block in enumerate(pool.blocks):
            if block is not None:
                self._report(block.slot == place, place, f"holds a block that says place {block.slot}")
                self._report(bool(block.refs) or block.parent is not None, place, "is neither used, cached nor empty")

    def _backups(self) -> None:
        pool, backups = self._pool, self._pool.backups
        for block, place in backups.places.items():
            on_device = block.parent is not None and pool.is_on_device(block)
            self._report(on_device and block not in backups.open, block.slot, "has a backup that it does not need")
            filled = pool.tier_at(place) is backups.tier and backups.tier.generation(place) != 0
            self._report(filled, place, "is a backup and was never filled")
        running = [ticket for ticket in self._executor.tickets.values() if ticket.purpose is Purpose.BACKUP]
        mine = {ticket for ticket in running if ticket.pool is pool}
        wanted = {ticket for ticket in mine if ticket.source is not None}
        self._report(backups.running == len(mine), 0, "counts backups that nobody makes")
        self._report(set(backups.open.values()) == wanted, 0, "waits for a backup that nobody makes")
        for block, ticket in backups.open.items():
            right = ticket.source is block and block.parent is not None and pool.is_on_device(block)
            self._report(right, block.slot, "has a backup under way that it does not need")
        for below in backups.heirs:
            left = below.parent is None and below.refs > 0 and pool.blocks[below.slot] is below
            self._report(left, below.slot, "is to be inherited and not in use")

    def _order(self) -> None:
        pool, listed = self._pool, set()
        for tier in pool.tiers:
            owned = [(None, tier.order), *((account, share.order) for account, share in tier.shares.items())]
            for account, order in owned:
                for priority, bit, blocks in order.rings():
                    self._report(bit == bool(blocks), 0, f"the bit of priority {priority} is wrong")
                    ages = [block.recency for block in blocks]
                    self._report(ages == sorted(ages), 0, f"priority {priority} is not in order of use")
                    for block in blocks:
                        listed.add(block)
                        whose = account_of(block) if account_of(block) in tier.shares else None
                        right = block.priority == priority and pool.tier_of(block) is tier and whose is account
                        self._report(right, block.slot, "is in another's order of loss")
        for block in self._blocks:
            leaf = pool.window is not None or not block.near
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
            holders = [lease.wish.holder for lease in leases if lease.wish.holder != SHARED]
            self._report(len(set(holders)) == len(holders), block.slot, "has two leases of one holder")
            self._report(len(leases) <= MAX_LEASES, block.slot, "has too many leases")
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
            self._report(
                child_key(parent.key, block.tokens, block.domain.extra) == key, block.slot, "has a key of other tokens"
            )
            self._report(block in siblings.each(parent), block.slot, "is not among its parent's children")
            self._report(pool.node(parent.key) is parent, block.slot, "stands on a node that cannot be found")
            self._report(block.writer is None, block.slot, "is in the index and still being written")
            waits = block in pool.leaving and block not in pool.moving
            self._report(not waits, block.slot, "is computed and waits for a copy out of its slot")
            if pool.window is None:
                self._standing(block)
                near = sum(pool.tier_of(child) is pool.tier_of(block) for child in siblings.each(block))
                self._report(block.near == near, block.slot, f"counts {block.near} children near it, {near} are")
        for node in [*pool.bare.values(), *pool.index.values()]:
            children = siblings.each(node)
            ordered = [("" if child.domain is None else child.domain.extra, child.tokens) for child in children]
            self._report(ordered == sorted(ordered), 0, "siblings are out of order")
            self._report(all(child.parent is node for child in children), 0, "a child has another parent")
            self._report(bool(children) or isinstance(node, Block), 0, "a node without block or children is kept")

    def _standing(self, block: Block) -> None:
        parent = block.parent
        if isinstance(parent, Block):
            pool = self._pool
            self._report(parent.depth == block.depth - 1, block.slot, "has a parent of another depth")
            free_parent = block.refs > 0 and pool.is_on_device(block) and not parent.refs
            self._report(not free_parent, block.slot, "is used and its parent is not")
            higher = pool.tier_of(parent).kind <= pool.tier_of(block).kind
            self._report(higher, block.slot, "lies in a higher tier than its parent")
        else:
            # What lies in a lower tier may outlive what it stands on, and waits for that to be computed again.
            is_first = block.domain is not None and parent is not None and parent.key == block.domain.key
            outlived = block.depth > 0 and not is_first and not self._pool.is_on_device(block)
            self._report(outlived or (is_first and block.depth == 0), block.slot, "has lost its parent")

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
                first = 0 if sequence.has_moved else sequence.computed // sequence.block_size
                for block in (*table.blocks[first:], *sequence.private):
                    if block is not None:
                        self._report(block not in owners, block.slot, "is written by two sequences")
                        self._report(block.writer is sequence, block.slot, "is written by one that does not own it")
                        self._report(block.parent is None, block.slot, "is written while it can be found")
                        owners[block] = sequence.handle
