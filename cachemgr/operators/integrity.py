"""Recounts an executor's pools from scratch and reports every contradiction."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from cachemgr.blocks.block import Block, Node, account_of
from cachemgr.blocks.block_pool import BlockPool
from cachemgr.blocks.eviction_order import position
from cachemgr.blocks.prefix_tree import children_of
from cachemgr.blocks.tier import Tier
from cachemgr.retention.leases import MAX_LEASES, effective_priority, leases_of
from cachemgr.sequences.clients import Executor
from cachemgr.sequences.copies import Purpose
from cachemgr.sequences.sequence import Sequence
from cachemgr.slices import pop_batches
from cachemgr.types import PoolViolation
from protos.kvcommon.block_keys import child_key

# Yields contradictions, and None after each small piece. The state must not change between the pieces.
Part = Callable[[], Iterator[PoolViolation | None]]


def parts(executor: Executor, pools: list[BlockPool]) -> list[Part]:
    """Returns the checks of the given pools that belong to this executor. They may run at different moments."""
    return [
        partial(_Check(executor, pool).run, part)
        for pool in executor.pools
        if pool in pools
        for part in (
            _Check.references,
            _Check.counters,
            _Check.slots,
            _Check.write_through_copies,
            _Check.order,
            _Check.leases,
            _Check.keys,
            _Check.tree,
            _Check.pending,
            _Check.writers,
        )
    ]


class _Check:
    def __init__(self, executor: Executor, pool: BlockPool) -> None:
        self._executor = executor
        self._pool = pool
        self._blocks: list[Block] = []
        self._violations: list[PoolViolation] = []

    def run(self, part: Callable[[_Check], Iterator[None]]) -> Iterator[PoolViolation | None]:
        """Runs one part from the beginning."""
        self._blocks, self._violations = [], []
        blocks = self._pool.blocks
        for start in range(0, len(blocks), 512):
            self._blocks += filter(None, blocks[start : start + 512])
            yield None
        for _ in part(self):
            yield None
        yield from self._violations
        # A few at a time, since freeing very many at once takes long.
        for _ in pop_batches(self._blocks):
            yield None

    def _report(self, condition: bool, index: int, message: str) -> None:
        """Reports a contradiction unless the condition holds. index: the block's; 0 if the pool contradicts itself."""
        if condition:
            return
        slot = 0
        if index:
            # A wrong index may be in no tier.
            tier = next((one for one in reversed(self._pool.tiers) if index > one.offset), self._pool.device)
            slot = index - tier.offset
            if tier is not self._pool.device:
                message = f"in the {tier.kind.name.lower()} tier: {message}"
        self._violations.append(PoolViolation(self._pool.pool_id, slot, message))

    def references(self) -> Iterator[None]:
        """Checks that each block has exactly the known references."""
        expected: Counter[Block] = Counter()
        for block in self._expected_references():
            expected[block] += 1
            yield
        for block in self._blocks:
            yield
            counted = expected.pop(block, 0)
            self._report(block.refs == counted, block.index, f"has {block.refs} references, {counted} are known")
        for block in expected:
            self._report(False, block.index, "is referred to and not in the pool")
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
        # Tickets that wait for other tickets of their prefetch keep their references.
        groups = (ticket.together for ticket in self._executor.tickets.values() if ticket.pool is self._pool)
        for ticket in {ticket for group in groups for ticket in group}:
            if ticket.purpose is Purpose.CLEAR:
                continue
            yield from (ticket.target, *ticket.held_ancestors)
            if ticket.source is not None and ticket.holds_source:
                yield ticket.source

    def counters(self) -> Iterator[None]:
        """Checks that counters of tiers and quotas, and the next block to evict among quotas, match a recount."""
        pool = self._pool
        for tier in pool.tiers:
            name = tier.kind.name.lower()
            used = cached = indexed = 0
            # Slots that were seen; and by account, all blocks and blocks in use.
            seen = bytearray(tier.size + 1)
            accounts = {account: [0, 0] for account in tier.accounts.shares}
            copies = pool.write_through.copies.values() if tier is pool.write_through.tier else ()
            for index in itertools.chain(tier.all_empty(), tier.withheld, copies):
                self._mark(tier, seen, index)
                yield
            for block in self._blocks:
                yield
                if pool.tier_of(block) is not tier:
                    continue
                self._mark(tier, seen, block.index)
                used += block.refs > 0
                cached += not block.refs
                indexed += block.parent is not None
                owner = account_of(block)
                if owner in accounts:
                    accounts[owner][0] += 1
                    accounts[owner][1] += block.refs > 0
            tickets = [ticket for ticket in self._executor.tickets.values() if ticket.purpose is Purpose.CLEAR]
            indexes = sorted(
                one.target.index for one in tickets if one.pool is pool and pool.tier_of(one.target) is tier
            )
            self._report(
                indexes == sorted(tier.clearing), 0, f"has other open overwrites of {name} slots than it waits for"
            )
            possible = tier.used + tier.cached + tier.num_empty
            self._report(0 <= tier.to_withhold <= possible, 0, f"has to withhold more {name} slots than it has")
            self._report(
                tier.clearing.issubset(tier.withheld),
                0,
                f"waits for the overwriting of a {name} slot that is not withheld",
            )
            self._report(tier.used == used, 0, f"counts {tier.used} used {name} blocks, {used} are")
            self._report(tier.cached == cached, 0, f"counts {tier.cached} cached {name} blocks, {cached} are")
            self._report(tier.indexed == indexed, 0, f"counts {tier.indexed} indexed {name} blocks, {indexed} are")
            once = not seen[0] and seen.count(1) == tier.size
            self._report(once, 0, f"a {name} slot is lost or has two states")
            for account, share in tier.accounts.shares.items():
                right = [share.count, share.used] == accounts[account]
                self._report(right, 0, f"a quota's {name} blocks are miscounted")
                yield
            protected, best = 0, None
            for share in tier.accounts.shares.values():
                yield
                protected += share.protected()
                first = share.order.first() if share.count > share.floor else None
                if first is not None and (best is None or position(first) < position(best)):
                    best = first
            right = tier.accounts.protected == protected
            self._report(right, 0, f"protects another number of {name} blocks than its shares do")
            self._report(tier.accounts.first_of_shares() is best, 0, f"would evict another {name} block than the first")

    def slots(self) -> Iterator[None]:
        """Checks that each block is at its index, and is in use or cached."""
        for index, at in enumerate(self._pool.blocks):
            yield
            if at is not None:
                self._report(at.index == index, index, f"holds a block of index {at.index}")
                self._report(bool(at.refs) or at.parent is not None, index, "is neither used, cached nor empty")

    @staticmethod
    def _mark(tier: Tier, seen: bytearray, index: int) -> None:
        slot = index - tier.offset
        # Entry 0 is for slots that the tier does not have.
        seen[slot if 1 <= slot <= tier.size else 0] += seen[slot if 1 <= slot <= tier.size else 0] < 2

    def write_through_copies(self) -> Iterator[None]:
        """Checks that only device blocks that need a write-through copy have one, and that open copies have tickets."""
        pool, write_through = self._pool, self._pool.write_through
        for block, index in write_through.copies.items():
            yield
            on_device = block.parent is not None and pool.is_on_device(block)
            self._report(
                on_device and block not in write_through.open,
                block.index,
                "has a write-through copy that it does not need",
            )
            filled = pool.tier_at(index) is write_through.tier and write_through.tier.generation(index) != 0
            self._report(filled, index, "is a write-through copy and was never filled")
        running = [ticket for ticket in self._executor.tickets.values() if ticket.purpose is Purpose.WRITE_THROUGH]
        mine = {ticket.number for ticket in running if ticket.pool is pool}
        wanted = {ticket.number for ticket in running if ticket.pool is pool and ticket.source is not None}
        awaited = {ticket.number for ticket in write_through.open.values()}
        self._report(write_through.running == len(mine), 0, "counts write-through copies without a ticket")
        self._report(awaited == wanted, 0, "waits for a write-through copy without a ticket")
        for block, ticket in write_through.open.items():
            right = ticket.source is block and block.parent is not None and pool.is_on_device(block)
            self._report(right, block.index, "has a write-through copy in flight that it does not need")
        for below in write_through.successors:
            left = below.parent is None and below.refs > 0 and pool.blocks[below.index] is below
            self._report(left, below.index, "has a successor and is not in use")

    def order(self) -> Iterator[None]:
        """Checks that exactly the evictable blocks are in the eviction order."""
        pool, listed = self._pool, set()
        for tier in pool.tiers:
            owned = [
                (None, tier.accounts.order),
                *((account, share.order) for account, share in tier.accounts.shares.items()),
            ]
            for account, order in owned:
                for priority, bit, ring in order.walk():
                    age, some = -1, False
                    for block, is_linked in ring:
                        yield
                        some = True
                        if is_linked:
                            self._report(age <= block.recency, 0, f"priority {priority} is not in order of use")
                            age = block.recency
                        listed.add(block)
                        whose = account_of(block) if account_of(block) in tier.accounts.shares else None
                        right = block.priority == priority and pool.tier_of(block) is tier and whose is account
                        self._report(right, block.index, "is in the eviction order of another tier or account")
                    self._report(bit == some, 0, f"the bit of priority {priority} is wrong")
        for block in self._blocks:
            yield
            leaf = pool.window is not None or not block.children_in_tier
            self._report(
                (block in listed) == (not block.refs and leaf), block.index, "is wrongly in or out of the order"
            )
        for block in listed:
            yield
            in_pool = pool.blocks[block.index] is block
            self._report(in_pool, 0, "a block that is not in the pool is in the eviction order")

    def leases(self) -> Iterator[None]:
        """Checks that priorities follow from the leases."""
        for block in self._blocks:
            yield
            leases = list(leases_of(block))
            self._report(
                block.priority == effective_priority(block), block.index, "has another priority than its leases"
            )
            self._report(
                all(lease.block is block and lease.pool is self._pool for lease in leases),
                block.index,
                "has a lease of another block",
            )
            holders = [lease.request.holder for lease in leases]
            self._report(len(set(holders)) == len(holders), block.index, "has two leases of one holder")
            self._report(len(leases) <= MAX_LEASES, block.index, "has too many leases")
            self._report(
                not leases or bool(block.refs) or block.parent is not None, block.index, "has leases and is empty"
            )
            waiting = any(lease.deadline is None and lease.request.duration is not None for lease in leases)
            self._report(
                not waiting or block.refs > 0, block.index, "is evictable, but the clock of a lease has not started"
            )

    def keys(self) -> Iterator[None]:
        """Checks that the index by key has exactly the blocks of the prefix tree."""
        pool = self._pool
        indexed = 0
        for block in self._blocks:
            yield
            if block.parent is not None:
                indexed += 1
                self._report(pool.tree.by_key.get(block.key) is block, block.index, "is not in the index under its key")
        self._report(len(pool.tree.by_key) == indexed, 0, "index and blocks do not agree")

    def tree(self) -> Iterator[None]:
        """Checks that the index is the tree that the keys define."""
        pool = self._pool
        parents: dict[Block, Node] = {}
        for node in itertools.chain(pool.tree.tombstones.values(), pool.tree.by_key.values()):
            before: tuple[object, ...] | None = None
            self._report(node.children is not None or isinstance(node, Block), 0, "a node without a child is kept")
            for child in children_of(node):
                yield
                self._report(child.parent is node, 0, "a child has another parent")
                extra = b"" if child.scope is None else child.scope.extra
                self._report(before is None or before <= (extra, child.tokens), 0, "siblings are out of order")
                before = (extra, child.tokens)
                parents[child] = node
        for key, block in pool.tree.by_key.items():
            yield
            parent = block.parent
            if parent is None or block.scope is None:
                self._report(False, block.index, "is in the index without a parent or scope")
                continue
            self._report(block.key == key, block.index, "is in the index under another key")
            self._report(
                child_key(parent.key, block.tokens, block.scope.extra) == key, block.index, "has a key of other tokens"
            )
            self._report(parents.get(block) is parent, block.index, "is not among its parent's children")
            self._report(pool.tree.node(parent.key) is parent, block.index, "has a parent that cannot be found")
            self._report(block.writer is None, block.index, "is in the index and still being written")
            waits = block in pool.offloader.draining and block not in pool.offloader.offloading
            self._report(not waits, block.index, "is in the index while its slot's previous bytes are copied")
            if pool.window is None:
                self._standing(block)
                near = sum(pool.tier_of(child) is pool.tier_of(block) for child in children_of(block))
                self._report(
                    block.children_in_tier == near,
                    block.index,
                    f"counts {block.children_in_tier} children in its tier, {near} are",
                )
        # In parts, since freeing a million entries at once takes long.
        while parents:
            parents.popitem()
            yield

    def _standing(self, block: Block) -> None:
        parent = block.parent
        if isinstance(parent, Block):
            pool = self._pool
            self._report(parent.depth == block.depth - 1, block.index, "has a parent of another depth")
            free_parent = block.refs > 0 and pool.is_on_device(block) and not parent.refs
            self._report(not free_parent, block.index, "is in use and its parent is not")
            higher = pool.tier_of(parent).kind <= pool.tier_of(block).kind
            self._report(higher, block.index, "lies in a higher tier than its parent")
        else:
            # A block of a lower tier may outlive its parent until the parent is computed again.
            is_first = block.scope is not None and parent is not None and parent.key == block.scope.key
            outlived = block.depth > 0 and not is_first and not self._pool.is_on_device(block)
            self._report(outlived or (is_first and block.depth == 0), block.index, "has lost its parent")

    def pending(self) -> Iterator[None]:
        """Checks that each pending block has a live sequence that fills it."""
        for key, block in self._pool.pending.items():
            yield
            writer = block.writer
            if not isinstance(writer, Sequence):
                self._report(False, block.index, "is pending without a sequence that fills it")
                continue
            alive = self._executor.sequences.get(writer.handle) is writer and not writer.void and not writer.no_store
            self._report(alive, block.index, "is pending for a sequence that will not fill it")
            tables = [table.blocks for table in writer.tables if table.pool is self._pool]
            promised = any(
                index < len(writer.keys) and writer.keys[index] == key and mine is block
                for blocks in tables
                for index, mine in enumerate(blocks)
            )
            self._report(promised, block.index, "is pending under a key that its writer does not have")

    def writers(self) -> Iterator[None]:
        """Checks that a block that a sequence may still write belongs to that sequence alone and is not indexed."""
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
                first = 0 if sequence.has_evicted_tokens else sequence.computed // sequence.block_size
                for block in (*table.blocks[first:], *sequence.private):
                    yield
                    if block is not None:
                        self._report(block not in owners, block.index, "is written by two sequences")
                        self._report(
                            block.writer is sequence,
                            block.index,
                            "has another writer than the sequence that fills it",
                        )
                        self._report(block.parent is None, block.index, "is written while it can be found")
                        owners[block] = sequence.handle
