"""Live sequences with their block tables."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cachemgr.blocks.block import Block, CacheScope
from cachemgr.blocks.block_pool import BlockPool
from cachemgr.blocks.extra_keys import extend_keys, extra_bytes
from cachemgr.retention.sequence_retention import SequenceRetention
from cachemgr.sequences.copies import OpenedCopies, Ticket
from cachemgr.sequences.token_eviction_state import TokenEvictionState, blocks_for
from cachemgr.types import Admission, ExtraKey, Prefix, Retention, Table
from protos.kvcommon.tokens import pack, packed_bytes

if TYPE_CHECKING:
    from cachemgr.sequences.clients import Executor, Scheduler


_NOT_ADMITTED = Admission(False)


@dataclass(slots=True, eq=False, repr=False)
class GroupTable:
    """The blocks of one sequence in one pool; None if the window does not need the block.

    Blocks before `committed` hold the tokens of their keys, and are indexed if allowed. `window_start` is the first
    index that the window has not released. `duplicate_refs` are indexed blocks that equal blocks of this table and that
    other sequences use. They stay referenced, since later blocks of this table may be their children.
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
        """Yields all referenced blocks from an index on, last blocks first."""
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
    retention: SequenceRetention
    no_store: bool
    extra_keys: tuple[ExtraKey, ...] = ()
    # Blocks that end after this many tokens are not stored; None for no limit.
    store_limit: int | None = None
    computed: int = 0
    cached_tokens: int = 0
    # Keys of its full blocks, computed on demand.
    keys: list[bytes] = field(default_factory=list)
    # Last executor step that may have written to its blocks.
    step: int = 0
    void: bool = False
    # Whether the bytes of its blocks must not outlive it.
    forgotten: bool = False
    tables: list[GroupTable] = field(init=False)
    # None for a sequence that keeps all its tokens.
    eviction: TokenEvictionState | None = None
    # Open copies into its blocks.
    tickets: set[Ticket] = field(default_factory=set)
    # Copies for its blocks that no scheduler has received yet.
    opened: OpenedCopies = field(default_factory=OpenedCopies)
    # Sequences that may share blocks that this sequence has yet to fill, and sequences whose blocks it shares.
    dependents: set[Sequence] = field(default_factory=set)
    waits_on: set[Sequence] = field(default_factory=set)
    # By owner of a hold: its duration in seconds after the release.
    holds: dict[str, float] = field(default_factory=dict)
    content: object = None
    admission: Admission = _NOT_ADMITTED

    def __post_init__(self) -> None:
        self.tables = [GroupTable(pool) for pool in self.executor.pools]

    @classmethod
    def probe(cls, executor: Executor, prefix: Prefix) -> Sequence:
        """Makes a sequence for a lookup, with one extra token, since the last token is never matched."""
        tokens = pack([*prefix.token_ids, 0])
        scope = executor.scopes.of(prefix.salt, prefix.adapter_id)
        no_scheduler: Any = None
        retention = SequenceRetention(Retention(), 0, "")
        return cls("", 0, no_scheduler, executor, tokens, scope, retention, True, prefix.extra_keys)

    @property
    def block_size(self) -> int:
        return self.executor.block_size

    @property
    def num_blocks(self) -> int:
        """The length of each of its tables."""
        return len(self.tables[0].blocks)

    @property
    def capacity(self) -> int:
        """Tokens that fit into its tables."""
        return self.num_blocks * self.executor.block_size

    def storable(self, tokens: int) -> int:
        """How many of N = `tokens` leading tokens may stay in the cache: within its limit, before it evicts tokens."""
        if self.no_store:
            return 0
        if self.eviction is not None and self.eviction.first is not None:
            tokens = min(tokens, self.eviction.first)
        return tokens if self.store_limit is None else min(tokens, self.store_limit)

    def stores_to(self, tokens: int) -> bool:
        """Whether a block that ends after N = `tokens` tokens may stay in the cache."""
        return self.storable(tokens) == tokens

    @property
    def has_evicted_tokens(self) -> bool:
        """Whether it has evicted tokens, so that its slots no longer hold its leading tokens."""
        return self.eviction is not None and self.eviction.has_begun

    @property
    def private(self) -> list[Block]:
        """Blocks for its first eviction, besides the blocks in its table."""
        return [] if self.eviction is None else self.eviction.private

    @property
    def most_computed(self) -> int:
        """Tokens that can be computed into its table; unlimited once it has evicted tokens."""
        eviction = self.eviction
        if eviction is None:
            return self.capacity
        return len(self.tokens) if eviction.has_begun else eviction.usable(self.capacity)

    def slots_for(self, tokens: int) -> int:
        """Slots of its present table that N = `tokens` known tokens use at most."""
        return tokens if self.eviction is None else self.eviction.slots_for(tokens)

    def peak_blocks(self, tokens: int) -> int:
        """The maximum number of blocks per pool at once, until it has N = `tokens` tokens."""
        if self.eviction is None:
            return blocks_for(tokens, self.block_size)
        return self.eviction.peak_blocks(tokens, self.block_size, no_store=self.no_store)

    def packed(self, start: int, end: int) -> bytes:
        """Bytes of the tokens in [start, end)."""
        return packed_bytes(self.tokens[start:end])

    def key(self, index: int) -> bytes:
        """Key of a full block; -1 gives the root's key."""
        if index < 0:
            return self.scope.key
        if index >= len(self.keys):
            fresh = packed_bytes(self.tokens[len(self.keys) * self.block_size :])
            extend_keys(self.keys, self.scope.key, fresh, self.block_size, self.extra_keys)
        return self.keys[index]

    def extra_of(self, start: int, end: int) -> bytes:
        """The extra bytes of a block with these tokens."""
        return extra_bytes(self.extra_keys, start, end) if self.extra_keys else b""

    def block_scope(self, start: int, end: int) -> CacheScope:
        """The cache scope of a block with these tokens."""
        return self.executor.scopes.with_extra(self.scope, self.extra_of(start, end)) if self.extra_keys else self.scope

    def slots(self, start: int = 0) -> tuple[Table, ...]:
        """Its tables from an index on."""
        return tuple([table.slots(start) for table in self.tables])

    @property
    def blocks_held(self) -> int:
        """Number of blocks over all groups, without blocks that left a window."""
        return sum(block is not None for table in self.tables for block in table.blocks) + len(self.private)

    def depend_on_writers(self) -> None:
        """Notes every sequence that has yet to fill a block of this sequence."""
        for table in self.tables:
            for block in table.blocks:
                writer = None if block is None else block.writer
                if isinstance(writer, Sequence) and writer is not self:
                    self.waits_on.add(writer)
                    writer.dependents.add(self)


def first_needed(tokens: int, window: int | None, block_size: int) -> int:
    """Index of the first block that the token at position `tokens` sees: itself and window - 1 earlier tokens."""
    return 0 if window is None else max(0, (tokens - window + 1) // block_size)
