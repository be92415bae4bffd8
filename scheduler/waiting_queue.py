"""Requests that wait for blocks, in the order in which they get them."""

import bisect

from scheduler.request import Candidate


class WaitingQueue:
    """Sorted by rank: a preempted request comes back to the place it had."""

    def __init__(self) -> None:
        self._candidates: list[Candidate] = []

    def __len__(self) -> int:
        return len(self._candidates)

    @property
    def head(self) -> Candidate | None:
        """Who is next."""
        return self._candidates[0] if self._candidates else None

    def first(self, count: int) -> list[Candidate]:
        """Those who are next, in their order."""
        return self._candidates[:count]

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
