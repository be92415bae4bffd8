"""Requests that wait for blocks, in the order in which they get them."""

import bisect
from collections.abc import Set
from itertools import islice

from scheduler.request import Account, Candidate


class WaitingQueue:
    """Sorted by rank: a preempted request comes back to the place it had."""

    def __init__(self) -> None:
        self._candidates: list[Candidate] = []

    def __len__(self) -> int:
        return len(self._candidates)

    def first(self, count: int, full: Set[Account] = frozenset()) -> list[Candidate]:
        """Those who are next, in their order; requests of accounts that are `full` are passed over."""
        if not full:
            return self._candidates[:count]
        return list(islice((one for one in self._candidates if full.isdisjoint(one.request.wishes.accounts)), count))

    def push(self, candidate: Candidate) -> None:
        """Puts a candidate at its place."""
        bisect.insort(self._candidates, candidate, key=lambda item: item.request.rank)

    def remove(self, arrival: int) -> bool:
        """Takes a request out; False when it is not here."""
        for index, candidate in enumerate(self._candidates):
            if candidate.request.arrival == arrival:
                del self._candidates[index]
                return True
        return False
