"""Quotas in a tier: the blocks of each account, and whose block is evicted next. `Tier` asks for both."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from cachemgr.blocks.block import Account, Block
from cachemgr.blocks.eviction_queue import EvictionQueue, position
from cachemgr.types import TierKind


class Share:
    """The blocks of one account in a tier."""

    __slots__ = ("account", "ceiling", "count", "floor", "order", "used")

    def __init__(self, account: Account, kind: TierKind) -> None:
        self.account = account
        self.floor = account.floor(kind)
        self.ceiling = account.ceiling(kind)
        self.count = 0
        self.used = 0
        self.order = EvictionQueue()

    def protected(self, claimed: int = 0) -> int:
        """Cached blocks that only the account may evict, once sequences have claimed `claimed` of them."""
        return max(0, min(self.count, self.floor) - self.used - claimed)

    @property
    def is_full(self) -> bool:
        """Whether the account's next block must replace one of the account's own blocks."""
        return self.ceiling is not None and self.count >= self.ceiling


class Shares:
    """Finds the share whose block is evicted next, of thousands of shares: all, or only shares above their floor.

    In the heap, a share has the position of its first block or an earlier position, which is corrected when found.
    """

    __slots__ = ("_floors_count", "_heap", "_positions", "_pushes")

    def __init__(self, *, floors_count: bool) -> None:
        self._floors_count = floors_count
        # (priority, recency, number of the push, share); stale if it differs from the share's current position.
        self._heap: list[tuple[int, int, int, Share]] = []
        self._positions: dict[Share, tuple[int, int]] = {}
        self._pushes = 0

    def note(self, share: Share, at: tuple[int, int], most: int) -> None:
        """Notes that a share has an evictable block at this position. There are at most `most` shares."""
        position = self._positions.get(share)
        if (position is not None and position <= at) or not self._may_lose(share):
            return
        if len(self._heap) > 64 + 2 * most:
            self._positions = {known: at for known, at in self._positions.items() if known.order.first() is not None}
            self._heap = [entry for entry in self._heap if self._positions.get(entry[3]) == entry[:2]]
            heapify(self._heap)
        self._push(share, at)

    def _may_lose(self, share: Share) -> bool:
        return not self._floors_count or share.count > share.floor

    def first(self) -> Block | None:
        heap = self._heap
        while heap:
            priority, recency, _, share = heap[0]
            at = priority, recency
            if self._positions.get(share) != at:
                heappop(heap)
                continue
            block = share.order.first() if self._may_lose(share) else None
            if block is not None and position(block) == at:
                return block
            heappop(heap)
            del self._positions[share]
            if block is not None:
                self._push(share, position(block))
        return None

    def _push(self, share: Share, at: tuple[int, int]) -> None:
        self._positions[share] = at
        self._pushes += 1
        heappush(self._heap, (*at, self._pushes, share))
