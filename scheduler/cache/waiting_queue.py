"""Requests that wait for blocks, in the order in which they will get blocks."""

import asyncio
import bisect
from collections.abc import Set
from itertools import islice

from scheduler.request import Account, AdmissionAttempt


class WaitingQueue:
    """Sorted by rank: a preempted request returns to its position."""

    def __init__(self) -> None:
        # Samples that hold blocks.
        self.num_running = 0
        # Set with every change; the cache client clears it.
        self.changed = asyncio.Event()
        self._attempts: list[AdmissionAttempt] = []

    def __len__(self) -> int:
        return len(self._attempts)

    def first(self, count: int, full: Set[Account] = frozenset()) -> list[AdmissionAttempt]:
        """Returns the next `count` attempts in order, without those of accounts that are `full`."""
        if not full:
            return self._attempts[:count]
        return list(islice((item for item in self._attempts if full.isdisjoint(item.request.cache.accounts)), count))

    def push(self, attempt: AdmissionAttempt) -> None:
        bisect.insort(self._attempts, attempt, key=lambda item: item.request.rank)
        self.changed.set()

    def remove(self, arrival: int) -> bool:
        for index, attempt in enumerate(self._attempts):
            if attempt.request.arrival == arrival:
                del self._attempts[index]
                self.changed.set()
                return True
        return False
