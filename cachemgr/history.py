"""What a pool remembers of the past, within bounds: when blocks were used, and how blocks were lost."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from cachemgr.api import RemovalCause

# Times are kept this finely, for so many uses back.
_RESOLUTION_SECONDS = 0.1
_MAX_MARKS = 36_000


class Lost(NamedTuple):
    """How a block left the index: why, at which time, for which sequence, and the priority that it had."""

    cause: RemovalCause
    time: float
    for_sequence_id: str
    priority: int


class LostBlocks:
    """The last `capacity` keys that left an index and have not come back."""

    __slots__ = ("_capacity", "_lost")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lost: dict[bytes, Lost] = {}

    def add(self, key: bytes, lost: Lost) -> None:
        """A block has left."""
        if not self._capacity:
            return
        self._lost.pop(key, None)
        if len(self._lost) >= self._capacity:
            del self._lost[next(iter(self._lost))]
        self._lost[key] = lost

    def came_back(self, key: bytes) -> None:
        """The block is in the index again."""
        self._lost.pop(key, None)

    def get(self, key: bytes) -> Lost | None:
        """How a block was lost, None when that is not known."""
        return self._lost.get(key)


class UseTimes:
    """From the number of a use to the time at which it was, in seconds."""

    __slots__ = ("_numbers", "_times")

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._times: list[float] = []

    def note(self, number: int, now: float) -> None:
        """A use with a larger number than all before."""
        if self._times and now - self._times[-1] < _RESOLUTION_SECONDS:
            return
        self._numbers.append(number)
        self._times.append(now)
        if len(self._times) > _MAX_MARKS:
            del self._numbers[: _MAX_MARKS // 2], self._times[: _MAX_MARKS // 2]

    def at(self, number: int) -> float:
        """When the use was; for one too long ago the oldest time that is known."""
        if not self._times:
            return 0.0
        return self._times[max(0, bisect_right(self._numbers, number) - 1)]
