"""Slots of a tier while the blocks of an earlier process are read from the store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import compress, islice

# The state of a slot whose stored block is not read yet, by slot - 1.
_NEVER_FILLED, _FILLED, _EXCLUDED = range(3)


def _excluded(mark: int) -> bytes:
    """A table that makes slots with this mark excluded ones, and keeps others."""
    return bytes(_EXCLUDED if number == mark else number for number in range(256))


class UnreadSlots:
    """Slots that are free, and that a stored block may turn out to be in.

    They are allocated last, slots that were never filled before the others. Each operation takes constant time on
    average.
    """

    def __init__(self, filled: Iterable[int], free: Iterable[int] | None) -> None:
        """`filled` has a number for each slot 1, 2, …, 0 where nothing was written; `free` is None for all slots."""
        marks = bytearray(map(bool, filled))
        if free is not None:
            told, marks = marks, bytearray([_EXCLUDED]) * len(marks)
            for slot in free:
                marks[slot - 1] = told[slot - 1]
        self._marks = marks
        # Slots that were never filled lie behind the one, filled ones before the other.
        self._begin, self._end = 0, len(marks)
        self._count = len(marks) - marks.count(_EXCLUDED)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, slot: int) -> bool:
        return self._marks[slot - 1] != _EXCLUDED

    def exclude(self, slot: int) -> None:
        """The slot is no longer free, or it is known that no stored block is in it."""
        self._marks[slot - 1] = _EXCLUDED
        self._count -= 1

    def take(self) -> int:
        """A slot to allocate. Only call it when one is left."""
        self._begin = index = self._marks.find(_NEVER_FILLED, self._begin)
        if index < 0:
            self._begin = len(self._marks)
            # A prompt got its slots in ascending order: the last ones have the fewest descendants.
            self._end = index = self._marks.rfind(_FILLED, 0, self._end)
        assert index >= 0, "no slot is left"
        self.exclude(index + 1)
        return index + 1

    def take_many(self, count: int) -> list[int]:
        """As `take` so many times, but fast: filled slots come in ascending order."""
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
        """All that are left, ascending."""
        return self._marked(_NEVER_FILLED, _FILLED)

    def _marked(self, *marks: int) -> Iterator[int]:
        wanted = bytes(mark in marks for mark in range(256))
        return compress(range(1, len(self._marks) + 1), self._marks.translate(wanted))
