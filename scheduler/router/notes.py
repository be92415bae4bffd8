"""Notes of what engines will soon have cached: the prompts that they were just given. Pure: no clock.

Events tell of a block only once it is computed. Without notes, a burst of prompts with one prefix would scatter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# How long a note stays after the first token of its prompt, in seconds: events come sooner.
NOTE_SECONDS = 2.0
# Prompts kept of one engine that begin with the same block: the newest.
_KEPT = 16


@dataclass(slots=True, eq=False)
class Note:
    """A prompt that an engine was given. is_computed: whether its first token has come."""

    engine: str
    keys: Sequence[int]
    is_computed: bool = False

    @property
    def group(self) -> _Group:
        return _Group(self.engine, self.keys[0])


class _Group(NamedTuple):
    engine: str
    first_key: int


class Notes:
    """Notes by engine and first block, which all prompts with a common prefix share."""

    def __init__(self) -> None:
        self._notes: dict[_Group, list[Note]] = {}
        # Notes of computed prompts with the times when they end, in the order of these times.
        self._ending: deque[tuple[float, Note]] = deque()

    def add(self, engine: str, keys: Sequence[int]) -> Note | None:
        """Notes that an engine is given a prompt with these keys; None for a prompt without a full block."""
        if not keys:
            return None
        note = Note(engine, keys)
        kept = self._notes.setdefault(note.group, [])
        kept.append(note)
        if len(kept) > _KEPT:
            del kept[0]
        return note

    def computed(self, note: Note, now: float) -> None:
        """Notes that the prompt has its first token. now: in seconds, never less than in an earlier call."""
        note.is_computed = True
        self._ending.append((now + NOTE_SECONDS, note))

    def remove(self, note: Note) -> None:
        """Removes a note, because the engine will not compute the prompt."""
        kept = [other for other in self._notes.get(note.group, ()) if other is not note]
        if kept:
            self._notes[note.group] = kept
        else:
            self._notes.pop(note.group, None)

    def match(self, engine: str, keys: Sequence[int], now: float) -> int:
        """Returns how many leading blocks of a prompt the engine computes, or has just computed."""
        while self._ending and self._ending[0][0] <= now:
            self.remove(self._ending.popleft()[1])
        notes = self._notes.get(_Group(engine, keys[0]), ()) if keys else ()
        return max((_common(note.keys, keys) for note in notes), default=0)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Counts the equal leading keys of two prompts. A key stands for all keys before it, so binary search works."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
