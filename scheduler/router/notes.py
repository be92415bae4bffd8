"""What engines will have cached soon: the prompts that they were just given. Pure: no clock.

Events tell of a block only once it is computed. Until then a burst of prompts with one prefix would scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# A note stays so long after the first token of its prompt, in seconds: events come sooner.
NOTE_SECONDS = 2.0
# Prompts that begin with the same block, of one engine: the newest are kept.
_KEPT = 16


@dataclass(slots=True, eq=False)
class Note:
    """A prompt that an engine was given. until: in seconds of the monotonic clock; None while it has no first token."""

    engine: str
    keys: Sequence[int]
    until: float | None = None


class _Place(NamedTuple):
    engine: str
    first_key: int


class Notes:
    """Notes by engine and first block, which all prompts with a common prefix share."""

    def __init__(self) -> None:
        self._notes: dict[_Place, list[Note]] = {}

    def add(self, engine: str, keys: Sequence[int]) -> Note | None:
        """The engine is given a prompt with these keys; None for a prompt without a full block."""
        if not keys:
            return None
        note = Note(engine, keys)
        kept = self._notes.setdefault(_Place(engine, keys[0]), [])
        kept.append(note)
        if len(kept) > _KEPT:
            del kept[0]
        return note

    def remove(self, note: Note) -> None:
        """The prompt will not be computed there."""
        place = _Place(note.engine, note.keys[0])
        kept = [other for other in self._notes.get(place, ()) if other is not note]
        if kept:
            self._notes[place] = kept
        else:
            self._notes.pop(place, None)

    def match(self, engine: str, keys: Sequence[int], now: float) -> int:
        """Blocks at the begin of a prompt that the engine computes, or has just computed."""
        if not keys:
            return 0
        place = _Place(engine, keys[0])
        kept = self._notes.get(place, ())
        live = [note for note in kept if note.until is None or note.until > now]
        if len(live) < len(kept):
            self._notes[place] = live
            if not live:
                del self._notes[place]
        return max((_common(note.keys, keys) for note in live), default=0)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Equal keys at the begin of two prompts. A key stands for all before it: the first difference is searched for."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
