"""Live sequences with their tables and open copies, and the executors and schedulers that they belong to."""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from cachemgr.blocks.block import Block, CacheScope, account_of
from cachemgr.blocks.block_pool import BlockPool
from cachemgr.blocks.cache_scopes import CacheScopes
from cachemgr.blocks.extra_keys import extend_keys, extra_bytes
from cachemgr.retention.plan import RetentionPlan
from cachemgr.sequences.holds import Holds
from cachemgr.sequences.token_eviction_state import TokenEvictionState, blocks_for
from cachemgr.slices import Steps, read_batches
from cachemgr.types import (
    AccountKey,
    Admission,
    ExecutorSpec,
    ExtraKey,
    GhostReport,
    Prefix,
    RemovalCause,
    Restored,
    Retention,
    SyncAnswer,
    Table,
    Transfer,
)
from protos.kvcommon.tokens import pack, packed_bytes

if TYPE_CHECKING:
    from cachemgr.blocks.block import Account
    from cachemgr.blocks.recovery import Recovery
    from cachemgr.blocks.tier import Tier


class Purpose(enum.Enum):
    # Into a block of a sequence, from a cached block or its beginning.
    ONLOAD = "onload"
    # To a lower tier; the source is the block that has the slot now.
    OFFLOAD = "offload"
    # To the device, before a sequence needs the block.
    PREFETCH = "prefetch"
    # No source: the target is overwritten.
    ZERO = "zero"
    # No source: the target is a slot that its pool may no longer use.
    CLEAR = "clear"
    # To a lower tier as well. The source has no reference of the copy: None once it is evicted.
    WRITE_THROUGH = "write_through"


# For so long after blocks were missing, none are granted that no sequence must have.
_SHORT_SECONDS = 1.0
# Looked up once, not for each of very many copies.
_ONLOAD, _OFFLOAD, _PREFETCH = Purpose.ONLOAD, Purpose.OFFLOAD, Purpose.PREFETCH


class Outcome(enum.Enum):
    """How a copy ended. A cancelled copy was never sent to the executor."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False, repr=False)
class Ticket:
    """One open copy. It takes over a reference to its source and one to its target.

    The source of an offload is the block that has its slot now. It needs no reference while a sequence has it: that
    sequence runs the copy before it computes. It gets one, `holds_source`, when it would become empty. Without a
    scheduler the executor receives the copy with its next renewal.
    """

    number: int
    purpose: Purpose
    pool: BlockPool
    source: Block | None
    target: Block
    num_tokens: int = 0
    scheduler: Scheduler | None = None
    holds_source: bool = False
    sequence: Sequence | None = None
    # As long as the copy may still be recalled.
    opened_by: OpenedCopies | None = None
    # Index of the target in the table of the sequence.
    index: int = 0
    held_ancestors: list[Block] = field(default_factory=list)
    prefetch: Prefetch | None = None
    transfer: Transfer = field(init=False)

    def __post_init__(self) -> None:
        self.holds_source = self.purpose is _ONLOAD or self.purpose is _PREFETCH
        self.transfer = self._transfer()

    def _transfer(self) -> Transfer:
        pool, source = self.pool, self.source
        spec, slot, to = pool.spec, self.target.index, pool.tier_of(self.target)
        to.fill(slot, self.number)
        origin = to if source is None else pool.tier_of(source)
        # Half the time of Transfer(...).
        return tuple.__new__(
            Transfer,
            (
                self.number,
                spec.group,
                0 if source is None else source.index - origin.offset,
                slot - to.offset,
                self.num_tokens or pool.block_size,
                spec.block_bytes,
                origin.kind,
                to.kind,
            ),
        )

    @property
    def together(self) -> list[Ticket]:
        """The copies that release their blocks together: those of its prefetch, or it alone."""
        return [self] if self.prefetch is None else self.prefetch.tickets

    def offer(self) -> None:
        """The offloaded block may be evicted at another time than before."""
        if self.opened_by is not None:
            self.opened_by.offer(self)

    def detach(self, table: GroupTable) -> None:
        """Separates the copy from its sequence. The ancestors of a device source stay referenced."""
        assert self.sequence is not None
        assert self.source is not None
        self.sequence.tickets.discard(self)
        self.sequence = None
        if self.pool.tier_of(self.source) is not self.pool.device:
            return
        for index, block in enumerate(table.blocks[: self.index]):
            standing = table.duplicate_refs.get(index, block)
            if standing is not None:
                self.pool.acquire(standing)
                self.held_ancestors.append(standing)

    def end(self, outcome: Outcome) -> None:
        """Releases its blocks; a block whose bytes were not copied is lost."""
        if self.sequence is not None:
            self.sequence.tickets.discard(self)
        if outcome is Outcome.FAILED:
            self.pool.tier_of(self.source or self.target).counters.failed_copies += 1
        if self.purpose is Purpose.OFFLOAD:
            self.pool.offloader.ended(self)
            if outcome is Outcome.DONE:
                self.pool.offloader.drained(self.target)
            else:
                self._lose(self.target)
        elif self.purpose is Purpose.WRITE_THROUGH:
            self.pool.write_through.ended(self, done=outcome is Outcome.DONE)
        elif self.purpose is Purpose.ZERO and outcome is not Outcome.DONE:
            # It is requested again.
            self.pool.zero_on_free.add(self.target)
        elif self.purpose is Purpose.CLEAR:
            self.pool.cleared(self.target.index, done=outcome is Outcome.DONE)
            return
        elif self.purpose is Purpose.ONLOAD and outcome is Outcome.FAILED and self._is_below(self.source):
            self._lose(self.source)
        if self.prefetch is not None:
            self.prefetch.ended(self, failed=outcome is not Outcome.DONE)
            return
        self.give_up()

    def give_up(self) -> None:
        if self.holds_source and self.source in self.pool.zero_on_free and self.target.parent is None:
            # Bytes that were forgotten meanwhile may have been copied there.
            self.pool.zero_on_free.add(self.target)
        self.pool.release(self.target)
        if self.source is not None and self.holds_source:
            self.pool.release(self.source)
        for block in reversed(self.held_ancestors):
            self.pool.release(block)

    def lose_source(self) -> None:
        """The bytes of the source cannot be read."""
        self._lose(self.source)

    def _is_below(self, block: Block | None) -> bool:
        return block is not None and self.pool.tier_of(block) is not self.pool.device

    def _lose(self, block: Block | None) -> None:
        if block is None:
            return
        self.pool.write_through.reject(block)
        if block.parent is not None:
            self.pool.discard_subtree(block, RemovalCause.COPY_FAILED)


class Tickets(dict[int, Ticket]):
    """The open copies of an executor by their numbers. `next_number` never gives a number twice."""

    def __init__(self, next_number: Callable[[], int]) -> None:
        self._next_number = next_number

    def open(
        self,
        purpose: Purpose,
        pool: BlockPool,
        source: Block | None,
        target: Block,
        num_tokens: int = 0,
        scheduler: Scheduler | None = None,
    ) -> Ticket:
        """Opens a copy. `num_tokens` is 0 where it copies all bytes of a block."""
        ticket = Ticket(self._next_number(), purpose, pool, source, target, num_tokens, scheduler)
        self[ticket.number] = ticket
        return ticket


class OpenedCopies:
    """The copies for a sequence that no scheduler has received, in their order.

    Until then a lower tier may evict the block of an offload: the copy is recalled. The victims are in a heap per tier,
    as a long prompt opens a copy for each of its blocks when all tiers are full.
    """

    __slots__ = ("_heaps", "_tickets")

    def __init__(self) -> None:
        self._tickets: dict[int, Ticket] = {}
        # By tier, of one account or for None of all blocks: (priority, recency, number, ticket). An entry is stale once
        # its block has a child in its tier, has stopped moving, or has another priority; `offer` adds the next one.
        self._heaps: dict[tuple[Tier, Account | None], list[tuple[int, int, int, Ticket]]] = {}

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets.values())

    def add(self, ticket: Ticket) -> None:
        """A copy that has just been opened."""
        self._tickets[ticket.number] = ticket
        if ticket.purpose is _OFFLOAD:
            ticket.opened_by = self
            self.offer(ticket)

    def offer(self, ticket: Ticket) -> None:
        """The offloaded block may have become evictable, or is evicted at another time."""
        block = ticket.target
        if block.children_in_tier:
            return
        tier, account = ticket.pool.tier_of(block), account_of(block)
        entry = (block.priority, block.recency, ticket.number, ticket)
        heappush(self._heaps.setdefault((tier, None), []), entry)
        if account is not None:
            heappush(self._heaps.setdefault((tier, account), []), entry)

    def first(self, tier: Tier, account: Account | None) -> Block | None:
        """The offloaded block that a tier evicts first, of one account or of all."""
        heap = self._heaps.get((tier, account))
        while heap:
            priority, _, _, ticket = heap[0]
            block = ticket.target
            moving = ticket.opened_by is self and block in ticket.pool.offloader.offloading
            if moving and block.parent is not None and not block.children_in_tier and block.priority == priority:
                return block
            heappop(heap)
        return None

    def recall(self, ticket: Ticket) -> None:
        """The copy will not run."""
        del self._tickets[ticket.number]
        ticket.opened_by = None

    def take(self) -> tuple[Transfer, ...]:
        """The copies, to send in this order: from now on none can be recalled."""
        transfers = tuple([ticket.transfer for ticket in self._tickets.values()])
        self.clear()
        return transfers

    def clear(self) -> None:
        for ticket in self._tickets.values():
            ticket.opened_by = None
        self._tickets.clear()
        self._heaps.clear()


class Prefetch:
    """A prefetch: copies of a chain to the device. All blocks are replaced together, after the last copy."""

    def __init__(self, pool: BlockPool, tickets: list[Ticket]) -> None:
        self._pool = pool
        self.tickets = tickets
        self._open = len(tickets)
        self._failed: set[Ticket] = set()
        for ticket in tickets:
            ticket.prefetch = self

    def ended(self, ticket: Ticket, *, failed: bool) -> None:
        self._open -= 1
        if failed:
            self._failed.add(ticket)
        if self._open:
            return
        good = True
        for ticket in self.tickets:
            source = ticket.source
            assert source is not None
            good = good and ticket not in self._failed
            if self._pool.tree.by_key.get(source.key) is not source:
                continue
            parent = source.parent
            good = good and (
                not isinstance(parent, Block) or self._pool.window is not None or self._pool.is_on_device(parent)
            )
            if good:
                self._pool.supersede(ticket.target, source, 0)
        for ticket in self.tickets:
            if ticket in self._failed:
                ticket.lose_source()
        for ticket in reversed(self.tickets):
            ticket.give_up()


_NOT_ADMITTED = Admission(False)


@dataclass(slots=True, eq=False, repr=False)
class GroupTable:
    """The blocks of one sequence in one pool; None where the window does not need one.

    Blocks before `committed` hold the tokens of their keys, and are indexed where they may be. `window_start` is the
    first index that the window has not released. `duplicate_refs` are indexed blocks that equal blocks of this table
    and that other sequences use: the references keep them until their children are evicted.
    """

    pool: BlockPool
    blocks: list[Block | None] = field(default_factory=list)
    committed: int = 0
    window_start: int = 0
    duplicate_refs: dict[int, Block] = field(default_factory=dict)

    def slots(self, start: int = 0) -> Table:
        """The slots from an index on."""
        slots = tuple([0 if block is None else block.index for block in self.blocks[start:]])
        return Table(self.pool.spec.group, slots)

    def references(self, start: int = 0) -> Iterator[Block]:
        """All referenced blocks from an index on, last ones first."""
        for index in range(len(self.blocks) - 1, start - 1, -1):
            block = self.blocks[index]
            if block is not None:
                yield block
            if index in self.duplicate_refs:
                yield self.duplicate_refs[index]

    def refer_to_duplicate(self, block_index: int, equal: Block) -> None:
        """Keeps an indexed block that equals a block of the table: later blocks of the table may be its children."""
        before = self.duplicate_refs.get(block_index)
        if self.pool.window is not None or before is equal:
            return
        self.pool.acquire(equal)
        self.duplicate_refs[block_index] = equal
        if before is not None:
            self.pool.release(before)

    def cut(self, start: int) -> None:
        """Releases the blocks from an index on, tail first."""
        for block in self.references(start):
            self.pool.release(block)
        del self.blocks[start:]
        self.duplicate_refs = {index: block for index, block in self.duplicate_refs.items() if index < start}
        self.committed = min(self.committed, start)
        self.window_start = min(self.window_start, start)


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """Lengths in tokens: computed <= known, and both <= capacity once the sequence is admitted or extended.

    With an eviction policy the capacity is for kept tokens.
    """

    sequence_id: str
    handle: int
    scheduler: Scheduler
    executor: Executor
    tokens: array[int]
    scope: CacheScope
    retention: RetentionPlan
    no_store: bool
    extra_keys: tuple[ExtraKey, ...] = ()
    # Blocks that reach behind so many tokens are not stored; None for no bound.
    store_limit: int | None = None
    computed: int = 0
    cached_tokens: int = 0
    # Keys of its full blocks, as far as they were needed.
    keys: list[bytes] = field(default_factory=list)
    # Last executor step that may have written to its blocks.
    step: int = 0
    void: bool = False
    # No byte of its blocks may outlive it.
    forgotten: bool = False
    tables: list[GroupTable] = field(init=False)
    # None for a sequence that keeps all its tokens.
    eviction: TokenEvictionState | None = None
    # Open copies into its blocks.
    tickets: set[Ticket] = field(default_factory=set)
    # Copies for its blocks that no scheduler has received yet.
    opened: OpenedCopies = field(default_factory=OpenedCopies)
    # Sequences that may share blocks which this one has not filled, and those whose blocks this one shares.
    dependents: set[Sequence] = field(default_factory=set)
    waits_on: set[Sequence] = field(default_factory=set)
    # Seconds from the release by owner of a hold.
    holds: dict[str, float] = field(default_factory=dict)
    content: object = None
    admission: Admission = _NOT_ADMITTED

    def __post_init__(self) -> None:
        self.tables = [GroupTable(pool) for pool in self.executor.pools]

    @classmethod
    def probe(cls, executor: Executor, prefix: Prefix) -> Sequence:
        """A sequence for a look-up, with one token more, as the last token is never matched."""
        tokens = pack([*prefix.token_ids, 0])
        scope = executor.scopes.of(prefix.salt, prefix.adapter_id)
        no_scheduler: Any = None
        retention = RetentionPlan(Retention(), 0, "")
        return cls("", 0, no_scheduler, executor, tokens, scope, retention, True, prefix.extra_keys)

    @property
    def block_size(self) -> int:
        return self.executor.block_size

    @property
    def num_blocks(self) -> int:
        """Length of each of its tables."""
        return len(self.tables[0].blocks)

    @property
    def capacity(self) -> int:
        """Tokens that fit into its tables."""
        return self.num_blocks * self.executor.block_size

    def stores_to(self, tokens: int) -> bool:
        """Whether a block that ends behind so many tokens may be left in the cache."""
        return not self.no_store and (self.store_limit is None or tokens <= self.store_limit)

    @property
    def has_evicted_tokens(self) -> bool:
        """Whether it has evicted tokens: its slots are not those of its leading tokens any more."""
        return self.eviction is not None and self.eviction.has_begun

    @property
    def private(self) -> list[Block]:
        """Blocks for its first eviction, besides those in its table."""
        return [] if self.eviction is None else self.eviction.private

    @property
    def most_computed(self) -> int:
        """Tokens that can be computed into its table; without a bound once it has evicted tokens."""
        eviction = self.eviction
        if eviction is None:
            return self.capacity
        return len(self.tokens) if eviction.has_begun else eviction.usable(self.capacity)

    def slots_for(self, tokens: int) -> int:
        """Slots of its present table that so many known tokens use at most."""
        return tokens if self.eviction is None else self.eviction.slots_for(tokens)

    def peak_blocks(self, tokens: int) -> int:
        """Blocks that it has at once in each pool, at most, until it has so many tokens."""
        if self.eviction is None:
            return blocks_for(tokens, self.block_size)
        return self.eviction.peak_blocks(tokens, self.block_size, no_store=self.no_store)

    def packed(self, start: int, end: int) -> bytes:
        """Bytes of the tokens in [start, end)."""
        return packed_bytes(self.tokens[start:end])

    def key(self, index: int) -> bytes:
        """Key of a full block; of the root for -1."""
        if index < 0:
            return self.scope.key
        if index >= len(self.keys):
            fresh = packed_bytes(self.tokens[len(self.keys) * self.block_size :])
            extend_keys(self.keys, self.scope.key, fresh, self.block_size, self.extra_keys)
        return self.keys[index]

    def extra_of(self, start: int, end: int) -> bytes:
        """Digests of content that the tokens of a block stand for."""
        return extra_bytes(self.extra_keys, start, end) if self.extra_keys else b""

    def block_scope(self, start: int, end: int) -> CacheScope:
        """The cache scope of a block with these tokens."""
        return self.executor.scopes.with_extra(self.scope, self.extra_of(start, end)) if self.extra_keys else self.scope

    def slots(self, start: int = 0) -> tuple[Table, ...]:
        """Its tables from an index on."""
        return tuple([table.slots(start) for table in self.tables])

    @property
    def blocks_held(self) -> int:
        """Blocks over all groups, without those that left a window."""
        return sum(block is not None for table in self.tables for block in table.blocks) + len(self.private)

    def depend_on_writers(self) -> None:
        """Notes every sequence that has yet to fill a block of this one."""
        for table in self.tables:
            for block in table.blocks:
                writer = None if block is None else block.writer
                if isinstance(writer, Sequence) and writer is not self:
                    self.waits_on.add(writer)
                    writer.dependents.add(self)


_SCOPE = attrgetter("scope")


class GhostCaches(Protocol):
    """Simulates caches of other sizes and eviction orders from the sequences of one pool."""

    pool: BlockPool

    def admitted(self, sequence: Sequence, now: float, *, is_read: bool, source: bytes) -> None:
        """A sequence was admitted; `is_read` if it has looked for cached blocks.

        `source` is the key of the block whose beginning it copies or takes over, empty for none.
        """

    def stored(self, sequence: Sequence) -> int:
        """Leading blocks of a sequence that hold the tokens of their keys."""

    def released(self, sequence: Sequence, stored: int) -> None:
        """A sequence has released its blocks, of which so many were stored."""

    def report(self, since: float | None) -> GhostReport:
        """The hits of the caches since about a time, or since the beginning."""


class Executor:
    """One epoch of an executor."""

    def __init__(
        self,
        spec: ExecutorSpec,
        deadline: float,
        pools: list[BlockPool],
        scopes: CacheScopes,
        tickets: Tickets,
        holds: Holds,
        *,
        stores_partial: bool,
        ghosts: GhostCaches | None = None,
        recovery: Recovery | None = None,
    ) -> None:
        """`deadline` is the time at which its lease ends. With `stores_partial`, partly filled blocks can be found.

        `recovery` is given while stored blocks are still to be restored.
        """
        self.spec = spec
        self.executor_id = spec.executor_id
        self.epoch = spec.executor_epoch
        self.block_size = spec.block_size
        self.deadline = deadline
        self.pools = pools
        self.scopes = scopes
        self.tickets = tickets
        self.holds = holds
        self.stores_partial = stores_partial
        self.ghosts = ghosts
        self.recovery = recovery
        self.sequences: dict[int, Sequence] = {}
        # When blocks were last missing, for a sequence that runs or one that waits.
        self.short_at = -math.inf

    def is_short(self, now: float) -> bool:
        """Whether sequences lack blocks. Schedulers ask again for those that wait, several times a second."""
        return now - self.short_at < _SHORT_SECONDS

    def cached(self) -> Restored:
        """Indexed blocks, in use or not."""
        device = sum(pool.device.indexed for pool in self.pools)
        return Restored(device, sum(len(pool.tree.by_key) for pool in self.pools) - device)

    def change_accounts(self, changed: Iterable[AccountKey]) -> Steps[None]:
        """Books the blocks of these accounts anew, whose quotas are new or deleted.

        Until its turn a block counts against the quota of before; new blocks count against the new quota.
        """
        scopes = self.scopes.outdated(changed)
        if not scopes:
            return
        for sequence in self.sequences.values():
            sequence.scope = self.scopes.current(sequence.scope)
        superseding: list[tuple[BlockPool, list[Block]]] = [(pool, []) for pool in self.pools]
        for pool, blocks in superseding:
            pool.superseding.append(blocks)
        yield
        for pool, later in superseding:
            for part in read_batches(range(len(pool.blocks))):
                self._rebook(pool, pool.blocks[part[0] : part[-1] + 1], scopes)
                yield
            # The blocks that they replace may not have been looked at.
            self._rebook(pool, [block for block in later if pool.blocks[block.index] is block], scopes)
        for pool, blocks in superseding:
            pool.superseding = [one for one in pool.superseding if one is not blocks]

    def _rebook(self, pool: BlockPool, blocks: Iterable[Block | None], scopes: AbstractSet[CacheScope]) -> None:
        there = list(filter(None, blocks))
        # Not block by block in Python: most are of other scopes.
        for block in compress(there, map(scopes.__contains__, map(_SCOPE, there))):
            assert block.scope is not None
            pool.rebook(block, self.scopes.current(block.scope))


class Scheduler:
    """One epoch of a scheduler."""

    def __init__(self, scheduler_id: str, epoch: int, deadline: float) -> None:
        self.scheduler_id = scheduler_id
        self.epoch = epoch
        self.deadline = deadline
        self.sequences: dict[int, Sequence] = {}
        # Names of executors that it has had sequences in.
        self.executors: set[str] = set()
        self.void: set[int] = set()
        self.sync_number = 0
        self.sync_answer = SyncAnswer()

    def has_void_sequences_in(self, executor: Executor) -> bool:
        """Whether it has sequences in an earlier registration of the executor, whose slots others have by now.

        Their steps stop when the scheduler has received that they are void and has released them.
        """
        return bool(self.void) and any(
            sequence.executor is not executor and sequence.executor.executor_id == executor.executor_id
            for sequence in self.sequences.values()
        )


def first_needed(tokens: int, window: int | None, block_size: int) -> int:
    """Index of the first block that the token at position `tokens` attends to: it sees itself and window - 1 before."""
    return 0 if window is None else max(0, (tokens - window + 1) // block_size)
