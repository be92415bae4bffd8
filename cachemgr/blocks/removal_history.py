"""A bounded history of a pool: when blocks were used, and how they were removed."""

from __future__ import annotations

from bisect import bisect_right

from cachemgr.retention.priority import DEFAULT_PRIORITY
from cachemgr.types import Removal, RemovalCause

# The resolution of the times of uses, and the number of times that are kept.
_RESOLUTION_SECONDS = 0.1
_MAX_MARKS = 36_000
# Tenant and salt, if there is no owner.
NO_OWNER: tuple[str | None, str | None] = (None, None)


class RemovalHistory:
    """The last keys that left an index and have not returned: at least `capacity` / 2 of them, at most `capacity`."""

    __slots__ = ("_half", "_newer", "_older")

    def __init__(self, capacity: int) -> None:
        """`capacity` is at least 1."""
        self._half = (capacity + 1) // 2
        # The older half is dropped as a whole, since finding a dictionary's oldest entry again and again is slow.
        self._older: dict[bytes, Removal] = {}
        self._newer: dict[bytes, Removal] = {}

    def add(
        self,
        key: bytes,
        cause: RemovalCause,
        time: float,
        for_sequence_id: str = "",
        priority: int = DEFAULT_PRIORITY,
        for_owner: tuple[str | None, str | None] = NO_OWNER,
        lease_ended: bool = False,
    ) -> None:
        """Adds a removal; the parameters are the fields of Removal."""
        newer = self._newer
        # Takes a third of the time of Removal(...); runs for each removed block.
        newer[key] = tuple.__new__(Removal, (cause, time, for_sequence_id, priority, for_owner, lease_ended))
        if len(newer) >= self._half:
            self._older = newer
            self._newer = {}

    def discard(self, key: bytes) -> None:
        self._newer.pop(key, None)
        self._older.pop(key, None)

    def get(self, key: bytes) -> Removal | None:
        """Returns how a block was lost; None if unknown."""
        return self._newer.get(key) or self._older.get(key)


class UseTimes:
    """Maps the number of a use to its time in seconds."""

    __slots__ = ("_begin", "_end", "_last", "_numbers", "_times")

    def __init__(self) -> None:
        # The last answer, and the range of numbers for which the answer holds. Blocks are evicted in the order of their
        # uses, so most questions are within the range of the last answer.
        self._begin, self._end, self._last = 0, 0, 0.0
        self._numbers: list[int] = []
        self._times: list[float] = []

    def note(self, number: int, now: float) -> None:
        """Notes a use; its number must be larger than all earlier numbers."""
        if self._times and now - self._times[-1] < _RESOLUTION_SECONDS:
            return
        self._numbers.append(number)
        self._times.append(now)
        if len(self._times) > _MAX_MARKS:
            del self._numbers[: _MAX_MARKS // 2], self._times[: _MAX_MARKS // 2]

    def at(self, number: int) -> float:
        """The time of a use; for a use too long ago, the oldest known time."""
        if self._begin <= number < self._end:
            return self._last
        if not self._times:
            return 0.0
        position = bisect_right(self._numbers, number)
        if 0 < position < len(self._numbers):
            self._begin, self._end, self._last = (
                self._numbers[position - 1],
                self._numbers[position],
                self._times[position - 1],
            )
        return self._times[max(0, position - 1)]
