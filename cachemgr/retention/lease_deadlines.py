"""Which leases end when: a queue per duration, as what runs equally long ends in the order of its start."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachemgr.retention.leases import Lease

# Entries that are kept before those of leases that have ended otherwise are looked for.
_MIN_LIMIT = 10_000


class Deadlines:
    """Leases whose clocks run. A lease is added and taken in constant time while there are few durations."""

    def __init__(self) -> None:
        self._queues: dict[float, deque[Lease]] = {}
        # (deadline of the first, number of the queue, duration) of every queue.
        self._heads: list[tuple[float, int, float]] = []
        self._made = 0
        self._size = 0
        self._limit = _MIN_LIMIT

    def __len__(self) -> int:
        return self._size

    def add(self, lease: Lease, now: float, seconds: float) -> None:
        """Starts a clock; `now` never goes back."""
        lease.deadline = now + seconds
        queue = self._queues.get(seconds)
        if queue is None:
            queue = self._queues[seconds] = deque()
            self._made += 1
            heappush(self._heads, (lease.deadline, self._made, seconds))
        queue.append(lease)
        self._size += 1
        if self._size > self._limit:
            self._drop_ended()

    def is_due(self, now: float) -> bool:
        """Whether there is a lease whose time is over."""
        return bool(self._heads) and self._heads[0][0] <= now

    def due(self, now: float, count: int) -> Iterator[Lease]:
        """Takes so many leases whose time is over, in the order of the deadlines; some may have ended otherwise."""
        heads, queues = self._heads, self._queues
        while count and self.is_due(now):
            _, number, seconds = heappop(heads)
            queue = queues[seconds]
            # As far as no other queue comes in between.
            until = min(now, heads[0][0]) if heads else now
            while count and queue and _deadline(queue[0]) <= until:
                count -= 1
                self._size -= 1
                yield queue.popleft()
            if queue:
                heappush(heads, (_deadline(queue[0]), number, seconds))
            else:
                del queues[seconds]

    def _drop_ended(self) -> None:
        """Leases that a later wish or a lost block has ended would wait for their time, however long it is."""
        for seconds, queue in list(self._queues.items()):
            alive = deque(lease for lease in queue if lease.block is not None)
            if alive:
                self._queues[seconds] = alive
            else:
                del self._queues[seconds]
        numbers = {seconds: number for _, number, seconds in self._heads}
        self._heads = [(_deadline(queue[0]), numbers[seconds], seconds) for seconds, queue in self._queues.items()]
        heapify(self._heads)
        self._size = sum(map(len, self._queues.values()))
        self._limit = max(_MIN_LIMIT, 2 * self._size)


def _deadline(lease: Lease) -> float:
    assert lease.deadline is not None
    return lease.deadline
