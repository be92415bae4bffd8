"""Numbers by 64-bit keys, in arrays: thousands of keys are looked up at once; an entry mostly takes 20 to 40 bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Keys: TypeAlias = npt.NDArray[np.uint64]
Numbers: TypeAlias = npt.NDArray[np.uint32]

_LEAST_BITS = 10
# Shares of a table's slots. When more than _FULL are used, a new table begins. The old table's entries fill at most
# _FRESH of the new table.
_FULL, _FRESH = 0.6, 0.45
# Slots of the old table that move to the new table with each added key: all have moved before either table is full.
_MOVED_WITH_A_KEY = 8
# Slots that are processed before other tasks may run: a few milliseconds.
_SLICE = 1 << 15
_END = 1 << 64


class _Slots:
    """Open addressing with linear probing: the search for a key begins at the slot given by its first bits.

    A slot without a key was never used. A key whose number is 0 keeps its slot.
    """

    def __init__(self, bits: int) -> None:
        self.size, self.shift = 1 << bits, 64 - bits
        self.keys: Keys = np.zeros(self.size, np.uint64)
        self.numbers: Numbers = np.zeros(self.size, np.uint32)
        self.used = 0
        # Python reads single elements through memoryviews in a third of the time.
        self.key_at, self.number_at = memoryview(self.keys.data), memoryview(self.numbers.data)

    def get(self, keys: Keys) -> Numbers:
        found = np.zeros(len(keys), np.uint32)
        left, at = np.arange(len(keys)), self._home(keys)
        while len(left):
            there = self.keys[at]
            hit = there == keys
            found[left[hit]] = self.numbers[at[hit]]
            on = ~hit & (there != 0)
            left, at, keys = left[on], (at[on] + 1) & (self.size - 1), keys[on]
        return found

    def add(self, keys: Keys, numbers: Numbers) -> None:
        """Adds entries, none of which is present yet."""
        self.used += len(keys)
        at = self._home(keys)
        while len(keys):
            is_free = self.keys[at] == 0
            self.keys[at[is_free]] = keys[is_free]
            # Several keys may have wanted one slot: only the key that was written last has the slot.
            has_slot = self.keys[at] == keys
            self.numbers[at[has_slot]] = numbers[has_slot]
            at, keys, numbers = (at[~has_slot] + 1) & (self.size - 1), keys[~has_slot], numbers[~has_slot]

    def between(self, first: int, end: int) -> tuple[Keys, Numbers]:
        """Returns the entries whose search begins at one of these slots."""
        last = end
        while last < first + self.size and self.key_at[last & (self.size - 1)]:
            last += 1
        at = np.arange(first, last) & (self.size - 1)
        keys, numbers = self.keys[at], self.numbers[at]
        home = self._home(keys)
        meant = (numbers != 0) & (home >= first) & (home < end)
        return keys[meant], numbers[meant]

    def _home(self, keys: Keys) -> npt.NDArray[np.int64]:
        return (keys >> np.uint64(self.shift)).astype(np.int64)


class KeyTable:
    """Maps keys to numbers from 1 on; 0 stands for no entry. Keys are evenly spread, as hashes are, and never 0.

    A full table moves to a new table bit by bit, in the order of keys, so that no call takes long.
    """

    def __init__(self) -> None:
        self._slots = _Slots(_LEAST_BITS)
        # While entries move: keys below the boundary are in the new table, all other keys in the old table.
        self._old: _Slots | None = None
        self._boundary = _END

    @property
    def size(self) -> int:
        """The number of slots."""
        return self._slots.size

    def get(self, keys: Keys) -> Numbers:
        """Returns the number of each key."""
        if self._old is None:
            return self._slots.get(keys)
        found, has_moved = np.empty(len(keys), np.uint32), keys < self._boundary
        found[has_moved] = self._slots.get(keys[has_moved])
        found[~has_moved] = self._old.get(keys[~has_moved])
        return found

    def change(self, keys: Sequence[int], after: Mapping[int, int]) -> Counter[int]:
        """Replaces each key's number by `after[number]`; returns how many entries had each old number.

        Counts only entries whose number has changed.
        """
        self._make_room(len(keys))
        new, old, boundary = self._slots, self._old or self._slots, self._boundary
        changed: list[int] = []
        for key in keys:
            slots = new if key < boundary else old
            key_at, at = slots.key_at, key >> slots.shift
            while (there := key_at[at]) != key and there:
                at = (at + 1) & (slots.size - 1)
            before = slots.number_at[at]
            number = after[before]
            if number != before:
                slots.number_at[at] = number
                changed.append(before)
                if not there:
                    key_at[at] = key
                    slots.used += 1
        return Counter(changed)

    def change_all(
        self, after: Callable[[list[int]], Mapping[int, int]]
    ) -> Iterator[tuple[Mapping[int, int], Counter[int]]]:
        """Replaces the numbers of all entries, in slices; yields each slice's replacements, and counts as in `change`.

        `after`: returns the replacement of each given number that changes. Between two slices, callers may add and
        change entries, but may not write a number that is being replaced.
        """
        slots, start = self._slots, 0
        while start < slots.size:
            if self._old is not None or self._slots is not slots:
                # Entries may have moved to other slots.
                self._move(_SLICE)
                slots, start = self._slots, 0
                yield {}, Counter()
                continue
            part = slots.numbers[start : start + _SLICE]
            found, counts = np.unique(part, return_counts=True)
            follows = after(found.tolist())
            if follows:
                at = np.searchsorted(found, list(follows))
                wanted = found.copy()
                wanted[at] = list(follows.values())
                part[:] = wanted[np.searchsorted(found, part)]
                yield follows, Counter(dict(zip(follows, counts[at].tolist(), strict=True)))
            else:
                yield {}, Counter()
            start += _SLICE

    def _make_room(self, more: int) -> None:
        """Makes room for `more` further keys."""
        if self._old is not None:
            self._move(more * _MOVED_WITH_A_KEY)
        slots = self._slots
        if slots.used + more <= _FULL * slots.size:
            return
        while self._old is not None:
            self._move(_SLICE)
        bits, live = _LEAST_BITS, int(np.count_nonzero(slots.numbers))
        while live + more > _FRESH * (1 << bits):
            bits += 1
        self._slots, self._old, self._boundary = _Slots(bits), slots, 0
        self._move(more * _MOVED_WITH_A_KEY)

    def _move(self, count: int) -> None:
        """Moves the entries of `count` slots, if any are left."""
        if self._old is None:
            return
        first = self._boundary >> self._old.shift
        end = min(first + count, self._old.size)
        self._slots.add(*self._old.between(first, end))
        self._boundary = end << self._old.shift
        if end == self._old.size:
            self._old, self._boundary = None, _END
