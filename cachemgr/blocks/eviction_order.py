"""The order in which cached blocks are evicted."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from cachemgr.blocks.block import Block

# A block's position within its priority has its index in this many low bits.
_SLOT_BITS = 40


class EvictionQueue:
    """The evictable blocks in eviction order: by priority, and LRU within a priority.

    Each priority has a ring in order of use, and a heap for blocks that return to the middle of the ring: when a
    lease ends, or when a block loses its last child. One bit marks each priority that has blocks.
    """

    __slots__ = ("_bits", "_in_heap", "_rings")

    def __init__(self) -> None:
        self._bits = 0
        # Marks blocks in a heap: their `lru_prev` and `lru_next` are this block.
        self._in_heap = Block(0)
        # By priority, made on demand: each of very many tenants may have an order.
        self._rings: dict[int, _LruList] = {}

    def append(self, block: Block) -> None:
        """Adds a block that was used more recently than all others."""
        priority = block.priority
        ring = self._rings.get(priority)
        if ring is None:
            ring = self._rings[priority] = _LruList(self._in_heap)
        ring.append(block)
        self._bits |= 1 << priority

    def insert(self, block: Block) -> None:
        """Adds a block at the position that its recency gives it."""
        priority = block.priority
        ring = self._rings.get(priority)
        if ring is None:
            ring = self._rings[priority] = _LruList(self._in_heap)
        ring.insert(block)
        self._bits |= 1 << priority

    def remove(self, block: Block) -> None:
        """Removes a block; its priority must be the one that it was added with."""
        ring = self._rings[block.priority]
        ring.remove(block)
        if not ring.size:
            self._bits &= ~(1 << block.priority)

    def first(self) -> Block | None:
        """The block that is evicted next; None without evictable blocks."""
        bits = self._bits
        return self._rings[(bits & -bits).bit_length() - 1].first() if bits else None

    @property
    def size(self) -> int:
        return sum(ring.size for ring in self._rings.values())

    def walk(self) -> Iterator[tuple[int, bool, Iterator[tuple[Block, bool]]]]:
        """Yields, for checks, each priority, its bit, and (block, is linked) pairs, linked blocks first and by age."""
        for priority, ring in sorted(self._rings.items()):
            yield priority, bool(self._bits >> priority & 1), ring.walk()


class _LruList:
    """The evictable blocks of one priority."""

    __slots__ = ("_end", "_heap", "_in_heap", "_reinserted", "size")

    def __init__(self, in_heap: Block) -> None:
        self._in_heap = in_heap
        end = Block(0)
        end.lru_prev = end.lru_next = end
        self._end = end
        # Blocks that are not linked, by their position in the order; the heap also has stale positions.
        # Positions are numbers, since very many are sorted at once when too many are stale.
        self._reinserted: dict[int, Block] = {}
        self._heap: list[int] = []
        self.size = 0

    def append(self, block: Block) -> None:
        newest = self._end.lru_prev
        assert newest is not None
        self._link(newest, block, self._end)
        self.size += 1

    def insert(self, block: Block) -> None:
        end, recency = self._end, block.recency
        oldest, newest = end.lru_next, end.lru_prev
        assert oldest is not None
        assert newest is not None
        self.size += 1
        if oldest is end or recency < oldest.recency:
            self._link(end, block, oldest)
        elif recency > newest.recency:
            self._link(newest, block, end)
        else:
            if len(self._heap) > 2 * self.size:
                self._sort()
            key = _heap_key(block)
            self._reinserted[key] = block
            heappush(self._heap, key)
            block.lru_prev = block.lru_next = self._in_heap

    def remove(self, block: Block) -> None:
        older, newer = block.lru_prev, block.lru_next
        assert older is not None
        assert newer is not None
        if older is self._in_heap:
            del self._reinserted[_heap_key(block)]
        else:
            older.lru_next = newer
            newer.lru_prev = older
        block.lru_prev = block.lru_next = None
        self.size -= 1

    def first(self) -> Block | None:
        oldest, heap, late = self._end.lru_next, self._heap, self._reinserted
        if heap and heap[0] not in late:
            self._pop()
            heap = self._heap
        if heap and (oldest is self._end or oldest is None or heap[0] >> _SLOT_BITS < oldest.recency):
            return late[heap[0]]
        return oldest

    def _pop(self) -> None:
        """Takes stale positions from the top of the heap."""
        heap, late = self._heap, self._reinserted
        for _ in range(1 + len(heap) // 8):
            heappop(heap)
            if not heap or heap[0] in late:
                return
        # Building the heap again once is faster than popping very many stale positions.
        self._sort()

    def _sort(self) -> None:
        self._heap = list(self._reinserted)
        heapify(self._heap)

    def walk(self) -> Iterator[tuple[Block, bool]]:
        block = self._end.lru_next
        while block is not None and block is not self._end:
            yield block, True
            block = block.lru_next
        # Blocks may come and go during the iteration.
        for block in list(self._reinserted.values()):
            yield block, False

    @staticmethod
    def _link(older: Block, block: Block, newer: Block) -> None:
        block.lru_prev = older
        block.lru_next = newer
        older.lru_next = block
        newer.lru_prev = block


def _heap_key(block: Block) -> int:
    """A block's unique position within its priority, by recency."""
    return block.recency << _SLOT_BITS | block.index


def position(block: Block) -> tuple[int, int]:
    """The position of a block in the eviction order."""
    return block.priority, block.recency


def precedes(block: Block, other: Block) -> bool:
    """Whether a block is evicted before another."""
    if block.priority != other.priority:
        return block.priority < other.priority
    return block.recency < other.recency
