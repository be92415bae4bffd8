"""One tier of a pool: its slots, empty or not. `quota.py` has the accounts that its blocks count against."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from cachemgr.blocks.block import Account, Block
from cachemgr.blocks.quota import TierAccounts
from cachemgr.blocks.unread_slots import UnreadSlots
from cachemgr.types import RemovalCause, TierKind


@dataclass(slots=True)
class TierCounters:
    """What happened in a tier since its pool was registered; `removed` is by cause.

    `written_through` counts copies of blocks that stayed on the device, `restored` blocks from before a restart.
    `idle_before_eviction_seconds` is the sum over a sample of the evictions, which `timed_evictions` counts.
    """

    allocated: int = 0
    removed: list[int] = field(default_factory=lambda: [0] * len(RemovalCause))
    offloaded: int = 0
    onloaded: int = 0
    copied_bytes: int = 0
    failed_copies: int = 0
    written_through: int = 0
    restored: int = 0
    timed_evictions: int = 0
    idle_before_eviction_seconds: float = 0.0

    @property
    def evicted(self) -> int:
        """Blocks that were dropped for other blocks, or because the pool shrank."""
        return self.removed[RemovalCause.EVICTED] + self.removed[RemovalCause.POOL_SHRUNK]

    @property
    def mean_idle_before_eviction(self) -> float:
        """Mean seconds from the last use of a block to its eviction; 0 before the first timed eviction."""
        return self.idle_before_eviction_seconds / self.timed_evictions if self.timed_evictions else 0.0

    def note_idle_before_eviction(self, seconds: float) -> None:
        """Notes an eviction `seconds` after the last use of the block."""
        self.timed_evictions += 1
        self.idle_before_eviction_seconds += seconds


# Indexes that were never allocated become `empty` in portions of this size.
_PORTION = 4096


class Tier:
    """Slots 1..size of one kind of memory.

    Indexes number the slots of all tiers of a pool consecutively; the first slot is at index `offset` + 1. `used`
    counts blocks with references, `cached` blocks without. Slots that the pool may not use are `withheld`;
    `to_withhold` counts slots that are still to be withheld, once they are free.
    """

    def __init__(self, kind: TierKind, offset: int, size: int, below: Tier | None = None) -> None:
        """`below` is the next lower tier that has slots; evicted blocks are offloaded there."""
        self.kind = kind
        self.below = below
        self.offset = offset
        self.size = size
        self.used = 0
        self.cached = 0
        # Blocks of the prefix tree, in use or not.
        self.indexed = 0
        self.withheld: list[int] = []
        # How many slots are still to be withheld, once they are free.
        self.to_withhold = 0
        # Withheld indexes that the executor has yet to overwrite.
        self.clearing: set[int] = set()
        self.counters = TierCounters()
        # By slot of a lower tier: the ticket of the copy that filled it. Steps fill the device's slots.
        self.generations = array("Q", bytes(0 if kind is TierKind.DEVICE else 8 * (size + 1)))
        # Indexes of empty slots, in the order in which they are taken. Indexes that were never allocated are added in
        # portions, since listing millions would delay a registration. While such indexes are left, the queue is not
        # empty.
        self.empty: deque[int] = deque()
        self._fresh = range(offset + 1, offset + size + 1)
        self._refill()
        # Set while stored blocks are read: free slots outside `empty`, which may hold a stored block.
        self.unread: UnreadSlots | None = None
        # The evictable blocks, and the accounts that blocks count against.
        self.accounts = TierAccounts(kind)

    @property
    def total(self) -> int:
        """Slots that may be used."""
        return self.size - len(self.withheld) - self.to_withhold

    @property
    def free(self) -> int:
        """Slots that can be allocated: empty slots and slots of cached blocks."""
        free = self.size - len(self.withheld) - self.to_withhold - self.used
        # Pins and overwriting take slots that hold blocks, so `used` may exceed the total while slots are to be
        # withheld.
        return free if free > 0 else 0

    @property
    def num_empty(self) -> int:
        """Slots without a known block; withheld slots do not count."""
        return len(self.empty) + len(self._fresh) + len(self.unread or ())

    def all_empty(self) -> list[int]:
        return [*self.empty, *self._fresh, *map(self.offset.__add__, self.unread or ())]

    def take_empty(self, *, newest: bool = False) -> int:
        """Takes the first index of the queue of empty slots (`newest`: the last). Requires an empty index."""
        if not self.empty:
            assert self.unread is not None
            return self.offset + self.unread.take()
        index = self.empty.pop() if newest else self.empty.popleft()
        if not self.empty:
            self._refill()
        return index

    def set_empty(self, indexes: Iterable[int]) -> None:
        self.empty = deque(indexes)
        self._fresh = range(0)

    def _refill(self) -> None:
        self.empty.extend(self._fresh[:_PORTION])
        self._fresh = self._fresh[_PORTION:]

    def withhold(self, count: int) -> None:
        """Withholds `count` slots. Requires that `count` slots are empty."""
        goal = len(self.withheld) + count
        fresh = self._fresh[max(0, len(self._fresh) - count) :]
        self._fresh = self._fresh[: len(self._fresh) - len(fresh)]
        self.withheld.extend(reversed(fresh))
        for _ in range(min(len(self.empty), count - len(fresh))):
            self.withheld.append(self.take_empty(newest=True))
        if len(self.withheld) < goal:
            assert self.unread is not None
            self.withheld.extend(map(self.offset.__add__, self.unread.take_many(goal - len(self.withheld))))

    @property
    def num_ready(self) -> int:
        """Slots that `release_withheld` can make usable: withheld without overwriting, or still to be withheld."""
        return len(self.withheld) - len(self.clearing) + self.to_withhold

    def release_withheld(self, count: int) -> None:
        """Makes `count` more slots usable, first slots that are still to be withheld. Requires `count` ready slots."""
        kept = min(self.to_withhold, count)
        self.to_withhold -= kept
        count -= kept
        if not count:
            return
        if self.clearing:
            self.withheld.sort(key=lambda index: index not in self.clearing)
        self.empty.extend(islice(reversed(self.withheld), count))
        del self.withheld[-count:]

    def await_stored_blocks(self, filled: Sequence[int]) -> None:
        """Makes the empty slots unread: stored blocks may be there. `filled` has 0 for slots that were never filled."""
        is_whole = self.num_empty == self.size
        free = None if is_whole else (index - self.offset for index in self.all_empty())
        self.unread = UnreadSlots(islice(filled, self.size), free)
        self.set_empty(())

    def is_unread(self, slot: int) -> bool:
        """Whether a stored block may be in a slot."""
        return self.unread is not None and 1 <= slot <= self.size and slot in self.unread

    def end_stored_blocks(self) -> None:
        """Makes unread slots empty: no stored block follows."""
        if self.unread is not None:
            self.empty.extend(map(self.offset.__add__, self.unread))
            self.unread = None

    def generation(self, index: int) -> int:
        """The ticket of the copy that filled an index; 0 on the device."""
        return self.generations[index - self.offset] if self.generations else 0

    def fill(self, index: int, generation: int) -> None:
        """Notes the ticket of the copy that fills an index."""
        if self.generations:
            self.generations[index - self.offset] = generation

    def free_for(self, account: Account | None, *, claimed: Collection[Block] = (), within_ceiling: bool = True) -> int:
        """Slots that can be allocated for an account, within other accounts' floors and its own ceiling.

        `claimed` are cached blocks that are about to be used. Negative if slots are missing, for example if the account
        has more blocks than its ceiling.
        """
        return self.accounts.allowed(self.free - len(claimed), account, claimed, within_ceiling=within_ceiling)
