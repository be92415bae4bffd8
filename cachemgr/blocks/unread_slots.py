"""Slots of a tier while the blocks of an earlier process are read from the store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import compress, islice

# The states of a slot while stored blocks are read.
_NEVER_FILLED, _FILLED, _EXCLUDED = range(3)


def _excluded(mark: int) -> bytes:
    """Returns a translation table that turns this mark into _EXCLUDED."""
    return bytes(_EXCLUDED if number == mark else number for number in range(256))


class UnreadSlots:
    """Free slots in which a stored block may turn out to be.

    They are allocated last; among them, slots that were never filled come first. Except for `take_many` and iteration,
    each operation takes constant time on average.
    """

    def __init__(self, filled: Iterable[int], free: Iterable[int] | None) -> None:
        """`filled` has a number for each slot from 1 on: 0 if nothing was written. `free` is None for all slots."""
        marks = bytearray(map(bool, filled))
        if free is not None:
            told, marks = marks, bytearray([_EXCLUDED]) * len(marks)
            for slot in free:
                marks[slot - 1] = told[slot - 1]
        self._marks = marks
        # Never filled slots lie from `_begin` on, filled slots before `_end`.
        self._begin, self._end = 0, len(marks)
        self._count = len(marks) - marks.count(_EXCLUDED)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, slot: int) -> bool:
        return self._marks[slot - 1] != _EXCLUDED

    def exclude(self, slot: int) -> None:
        """Removes a slot that is no longer free, or that is known to hold no stored block."""
        self._marks[slot - 1] = _EXCLUDED
        self._count -= 1

    def take(self) -> int:
        """Takes a slot to allocate. Requires that one is left."""
        self._begin = index = self._marks.find(_NEVER_FILLED, self._begin)
        if index < 0:
            self._begin = len(self._marks)
            # A prompt's slots were allocated in ascending order, so the last slots have the fewest descendants.
            self._end = index = self._marks.rfind(_FILLED, 0, self._end)
        assert index >= 0, "no slot is left"
        self.exclude(index + 1)
        return index + 1

    def take_many(self, count: int) -> list[int]:
        """Like `count` calls of `take`, but fast; filled slots come in ascending order."""
        marks = self._marks
        taken = list(islice(self._marked(_NEVER_FILLED), count))
        if taken:
            marks[: taken[-1]] = marks[: taken[-1]].translate(_excluded(_NEVER_FILLED))
        if len(taken) < count:
            filled = list(self._marked(_FILLED))[len(taken) - count :]
            marks[filled[0] - 1 :] = marks[filled[0] - 1 :].translate(_excluded(_FILLED))
            taken += filled
        self._count -= len(taken)
        return taken

    def __iter__(self) -> Iterator[int]:
        """Yields all slots that are left, in ascending order."""
        return self._marked(_NEVER_FILLED, _FILLED)

    def _marked(self, *marks: int) -> Iterator[int]:
        wanted = bytes(mark in marks for mark in range(256))
        return compress(range(1, len(self._marks) + 1), self._marks.translate(wanted))
