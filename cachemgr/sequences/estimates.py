"""How many blocks a sequence needs, exactly, and which blocks its admission would evict, quotas aside."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from cachemgr.blocks.block import Block
from cachemgr.blocks.eviction_queue import precedes
from cachemgr.blocks.radix_tree import children_of
from cachemgr.retention.leases import offload_floor
from cachemgr.sequences.sequence import first_needed
from cachemgr.sequences.token_eviction_state import blocks_for
from cachemgr.types import BlockEstimate, PredictedEviction

if TYPE_CHECKING:
    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.blocks.tier import Tier
    from cachemgr.sequences.sequence import Sequence


def before_admission(sequence: Sequence, matched: list[list[Block | None]], max_new_tokens: int) -> list[BlockEstimate]:
    """For a sequence that is not admitted, with its prefix hit by group: its first step allocates all its blocks.

    Blocks in use cost nothing; cached blocks without a reference count as free ones. A sequence that evicts tokens has
    both of its tables at once.
    """
    size, tokens = sequence.block_size, len(sequence.tokens)
    found = []
    for group, table in enumerate(sequence.tables):
        blocks = matched[group]
        held = sum(block is not None and block.refs > 0 and table.pool.is_on_device(block) for block in blocks)
        absent = sum(block is None for block in blocks)
        step = blocks_for(sequence.slots_for(tokens), size) - held - absent
        last = sequence.peak_blocks(tokens + max_new_tokens) - held - absent
        if table.pool.window is not None:
            # It has all blocks of its tokens at once; later blocks replace those that leave the window.
            last = min(last, max(step, _blocks_in_window(table.pool.window, tokens, tokens + max_new_tokens, size)))
        found.append(BlockEstimate(table.pool.spec.group, len(blocks) - absent, step, last))
    return found


def while_running(sequence: Sequence, step_tokens: int, max_new_tokens: int) -> list[BlockEstimate]:
    """For a live sequence: the blocks that its next step and all its steps need beyond its present ones."""
    size = sequence.block_size
    known = len(sequence.tokens)
    found = []
    for table in sequence.tables:
        have = len(table.blocks) + len(sequence.private)
        step = max(0, sequence.peak_blocks(sequence.computed + step_tokens) - have)
        window = table.pool.window
        last = max(0, sequence.peak_blocks(known + max_new_tokens) - have)
        if window is not None:
            # Beyond these, each further block replaces one that leaves the window.
            present = sum(block is not None for block in table.blocks)
            need = _blocks_in_window(window, known, known + max_new_tokens, size)
            last = max(0, min(last, max(step, need - present)))
        found.append(BlockEstimate(table.pool.spec.group, 0, step, last))
    return found


def _blocks_in_window(window: int, start: int, end: int, size: int) -> int:
    """The most blocks that a sequence holds at once while it grows from one length to another."""
    return min(blocks_for(end, size) - first_needed(start, window, size), blocks_for(window, size) + 1)


def evictions(groups: Iterable[tuple[BlockPool, set[Block], int]]) -> list[PredictedEviction]:
    """The evictions for so many allocations per pool, with the blocks that stay as they are claimed."""
    takings = [(_Allocations(pool, claimed), count) for pool, claimed, count in groups]
    windowed = [taking for taking, _ in takings if taking.pool.window is not None]
    for taking, count in takings:
        for _ in range(count):
            taking.take()
        if taking.pool.window is None:
            for other in windowed:
                other.drop_unmatchable(taking.gone)
    return [eviction for taking, _ in takings for eviction in taking.evictions()]


class _Order:
    """The eviction order of a tier. `gone` are blocks that have left the cache, and `claimed` ones stay."""

    def __init__(self, pool: BlockPool, tier: Tier, claimed: set[Block], gone: set[Block]) -> None:
        self._pool = pool
        self._tier = tier
        self._claimed = claimed
        self._gone = gone
        # Only as many are read as are evicted: a tier may have a million.
        self._listed = (block for block in tier.in_order() if block not in claimed)
        self._next = next(self._listed, None)
        # Those that have moved here, and parents whose children have left: (priority, recency, slot, block).
        self._others: list[tuple[int, int, int, Block]] = []
        # Children in this tier, where that has changed.
        self._near: dict[Block, int] = {}
        self._left: set[Block] = set()

    def has(self, block: Block) -> bool:
        """Whether a block is in this tier, or has moved here."""
        return block not in self._left and (block in self._near or self._pool.tier_of(block) is self._tier)

    def first(self) -> Block | None:
        """The block that is evicted next."""
        while self._next is not None and self._next in self._gone:
            self._next = next(self._listed, None)
        while self._others and self._others[0][-1] in self._gone:
            heappop(self._others)
        other = self._others[0][-1] if self._others else None
        if other is not None and (self._next is None or precedes(other, self._next)):
            return other
        return self._next

    def take_first(self) -> Block | None:
        """Evicts the next block; its parent may be next then."""
        block = self.first()
        if block is None:
            return None
        if block is self._next:
            self._next = next(self._listed, None)
        else:
            heappop(self._others)
        self._left.add(block)
        parent = block.parent
        if self._pool.window is None and isinstance(parent, Block) and self.has(parent) and not parent.refs:
            self._near[parent] = self._near.get(parent, parent.children_in_tier) - 1
            self._offer(parent)
        return block

    def add(self, block: Block) -> None:
        """A block moves here."""
        is_here = [self.has(child) and child not in self._gone for child in children_of(block)]
        self._near[block] = 0 if self._pool.window is not None else sum(is_here)
        self._offer(block)

    def _offer(self, block: Block) -> None:
        if not self._near[block] and block not in self._claimed:
            heappush(self._others, (block.priority, block.recency, block.index, block))


class _Allocations:
    """Simulates allocations in one pool."""

    def __init__(self, pool: BlockPool, claimed: set[Block]) -> None:
        self.pool = pool
        # Blocks that leave the cache.
        self.gone: set[Block] = set()
        self._claimed = claimed
        lower = pool.device.below
        self._device = _Order(pool, pool.device, claimed, self.gone)
        self._below = None if lower is None else _Order(pool, lower, claimed, self.gone)
        self._lower = lower
        self._empty = pool.device.num_empty
        self._empty_below = 0 if lower is None else lower.num_empty
        # The newest write-through copy is evicted first.
        self._copies = reversed(pool.write_through.copies)
        self._without_copy: set[Block] = set()
        self._copied: set[Block] = set()
        # By priority: evicted blocks, and how many of them are offloaded.
        self._evicted: dict[int, list[int]] = {}

    def evictions(self) -> list[PredictedEviction]:
        """Evictions by priority."""
        group = self.pool.spec.group
        return [PredictedEviction(group, priority, *counts) for priority, counts in sorted(self._evicted.items())]

    def take(self) -> None:
        """Allocates an empty slot, or that of the next victim."""
        if self._empty:
            self._empty -= 1
            return
        block = self._device.take_first()
        if block is not None:
            self._count(block, offloaded=self._offloads(block))

    def drop_unmatchable(self, lost: set[Block]) -> None:
        """Removes the blocks of a window whose keys a group with full attention has lost: they can never match."""
        for key in {block.key for block in lost}:
            block = self.pool.tree.by_key.get(key)
            if block is None or block.refs or block in self._claimed or block in self.gone:
                continue
            if self._below is not None and self._below.has(block):
                self._empty_below += 1
            elif self.pool.is_on_device(block):
                self._count(block, offloaded=False)
                self._empty += 1
                self._drop_copy(block)
            self.gone.add(block)

    def _count(self, block: Block, *, offloaded: bool) -> None:
        counts = self._evicted.setdefault(block.priority, [0, 0])
        counts[0] += 1
        counts[1] += offloaded

    def _offloads(self, block: Block) -> bool:
        pool, below = self.pool, self._below
        carries = pool.window is None and any(child not in self.gone for child in children_of(block))
        may = carries or block.priority >= offload_floor(block, pool.offload_min_priority)
        has_lower_copy = self._has_lower_copy(block)
        if below is not None and may and (has_lower_copy or self._finds_lower_slot(block, carries)):
            (self._without_copy if has_lower_copy else self._copied).add(block)
            below.add(block)
            return True
        self._drop_copy(block)
        self._lose(block)
        return False

    def _finds_lower_slot(self, block: Block, carries: bool) -> bool:
        assert self._below is not None
        if self._empty_below:
            self._empty_below -= 1
            return True
        for other in self._copies if self._lower is self.pool.write_through.tier else ():
            if self._has_lower_copy(other):
                self._without_copy.add(other)
                return True
        least = self._below.first()
        if least is None or not (carries or precedes(least, block)):
            return False
        self._below.take_first()
        if least in self._copied or (self._lower is not None and self._lower.below is None):
            # A copy that no scheduler has received is recalled: the block is in no tier.
            self._lose(least)
        return True

    def _has_lower_copy(self, block: Block) -> bool:
        return block in self.pool.write_through.copies and block not in self._without_copy

    def _drop_copy(self, block: Block) -> None:
        if self._has_lower_copy(block):
            self._without_copy.add(block)
            self._empty_below += 1

    def _lose(self, block: Block) -> None:
        self.gone.add(block)
        if self.pool.window is not None or block.children is None:
            return
        for child in self.pool.tree.descendants(block):
            if child not in self.gone:
                self.gone.add(child)
                # A slot that a copy still uses is not freed.
                is_free = not child.refs and child not in self._copied
                self._empty_below += is_free and self._below is not None and self._below.has(child)
