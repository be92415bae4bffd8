"""Copies from lower tiers that a session asked for: how many are on their way, and which have ended."""

import threading


class Arrivals:
    """Of one session. `ended` may be called in any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._copied: list[int] = []
        self._failed: list[int] = []
        self._under_way = 0

    def expect(self, count: int) -> None:
        """So many more have begun."""
        with self._changed:
            self._under_way += count

    def ended(self, ticket: int, good: bool) -> None:
        """One has ended."""
        with self._changed:
            (self._copied if good else self._failed).append(ticket)
            self._under_way -= 1
            self._changed.notify_all()

    def take(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those that have ended since the last time: well, and not."""
        if not self._copied and not self._failed:
            return (), ()
        with self._changed:
            taken = tuple(self._copied), tuple(self._failed)
            self._copied.clear()
            self._failed.clear()
            return taken

    def wait(self, seconds: float) -> None:
        """Until one has ended that nobody took, or none is on its way, but not longer."""
        with self._changed:
            self._changed.wait_for(lambda: self._copied or self._failed or self._under_way <= 0, seconds)
