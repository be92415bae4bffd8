"""A lower tier: slots for blocks in a file, and for each slot the ticket of the copy that filled it."""

import mmap
import os
from abc import ABC, abstractmethod

import numpy as np

from executor.cache.tiers.layout import ENTRY, PAGE, Bytes, FileLayout
from executor.step import Tier

Generations = np.ndarray[tuple[int, int], np.dtype[np.uint64]]


class CacheSlotError(Exception):
    """A slot is empty or its bytes are damaged."""


class SlotFile(ABC):
    """Slots are numbered from 1. The caller makes sure that no other thread uses the slot during a call.

    A slot is filled in this order: `claim`, bytes into `buffer`, `store`, `commit`. A `buffer` outside the slot may be
    filled before `claim`. An interruption after `claim`, even the end of the process, leaves generation 0. All methods
    may raise OSError, and those that read also CacheSlotError.
    """

    tier: Tier
    # Whether `buffer` is in the slot itself.
    in_place: bool

    def __init__(self, layout: FileLayout) -> None:
        self.layout = layout
        # [groups, slots] of ENTRY.
        self._table = self._load_table()

    def generations(self) -> Generations:
        """[groups, slots]: the ticket that filled each slot, 0 for none."""
        return self._table["generation"].astype(np.uint64)

    def generation(self, group: int, slot: int) -> int:
        """The ticket that filled a slot, 0 for none."""
        return int(self._table[group, slot - 1]["generation"])

    def checksum(self, group: int, slot: int) -> int:
        """The checksum of a slot's bytes, as it was given to `commit`."""
        return int(self._table[group, slot - 1]["checksum"])

    def claim(self, group: int, slot: int) -> None:
        """Makes the slot empty."""
        self._table[group, slot - 1] = (0, 0)
        self._store_entry(group, slot, (0, 0))

    def commit(self, group: int, slot: int, generation: int, checksum: int) -> None:
        """Notes that the slot holds the bytes that the copy with this ticket wrote."""
        self._store_entry(group, slot, (generation, checksum))
        self._table[group, slot - 1] = (generation, checksum)

    @abstractmethod
    def buffer(self, group: int, slot: int, staging: Bytes) -> Bytes:
        """Returns where to put the slot's next bytes: in `staging`, or in the slot itself."""

    @abstractmethod
    def store(self, group: int, slot: int, data: Bytes) -> None:
        """Writes a slot's bytes: those in its `buffer`, or different bytes."""

    @abstractmethod
    def fetch(self, group: int, slot: int, staging: Bytes) -> Bytes:
        """Returns the slot's bytes: in `staging`, or the slot itself."""

    @abstractmethod
    def close(self) -> None:
        """Closes the file; no thread may still use it."""

    @abstractmethod
    def _load_table(self) -> np.ndarray[tuple[int, int], np.dtype[np.void]]: ...

    @abstractmethod
    def _store_entry(self, group: int, slot: int, entry: tuple[int, int]) -> None: ...


class HostFile(SlotFile):
    """Memory that outlives the process: a mapped file whose pages are all allocated from the start."""

    tier = Tier.HOST
    in_place = True

    def __init__(self, fd: int, layout: FileLayout) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, layout.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.memory: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        super().__init__(layout)

    def buffer(self, group: int, slot: int, staging: Bytes) -> Bytes:  # noqa: ARG002
        start = self.layout.offset(group, slot)
        return self.memory[start : start + self.layout.block_bytes[group]]

    def store(self, group: int, slot: int, data: Bytes) -> None:
        buffer = self.buffer(group, slot, data)
        if data.ctypes.data != buffer.ctypes.data:
            np.copyto(buffer, data)

    def fetch(self, group: int, slot: int, staging: Bytes) -> Bytes:
        return self.buffer(group, slot, staging)

    def close(self) -> None:
        del self._table, self.memory
        self._map.close()
        os.close(self._fd)

    def _load_table(self) -> np.ndarray[tuple[int, int], np.dtype[np.void]]:
        shape = len(self.layout.block_bytes), self.layout.slots
        return self.memory[PAGE : PAGE + self.layout.table_bytes].view(ENTRY).reshape(shape)

    def _store_entry(self, group: int, slot: int, entry: tuple[int, int]) -> None:
        entries = self._table[group]
        # The generation is written last: it makes the slot valid.
        entries["checksum"][slot - 1] = entry[1]
        entries["generation"][slot - 1] = entry[0]


class DiskFile(SlotFile):
    """On disk, through the kernel's page cache. Not mapped: a failing disk must cause an error, not a signal."""

    tier = Tier.DISK
    in_place = False

    def __init__(self, fd: int, layout: FileLayout) -> None:
        self._fd = fd
        super().__init__(layout)

    def buffer(self, group: int, slot: int, staging: Bytes) -> Bytes:  # noqa: ARG002
        return staging[: self.layout.block_bytes[group]]

    def store(self, group: int, slot: int, data: Bytes) -> None:
        self._write(data, self.layout.offset(group, slot))

    def fetch(self, group: int, slot: int, staging: Bytes) -> Bytes:
        data = self.buffer(group, slot, staging)
        self._read(data, self.layout.offset(group, slot))
        return data

    def close(self) -> None:
        os.close(self._fd)

    def _load_table(self) -> np.ndarray[tuple[int, int], np.dtype[np.void]]:
        table = np.zeros((len(self.layout.block_bytes), self.layout.slots), dtype=ENTRY)
        self._read(table.reshape(-1).view(np.uint8), PAGE)
        return table

    def _store_entry(self, group: int, slot: int, entry: tuple[int, int]) -> None:
        self._write(np.array(entry, dtype=ENTRY).reshape(1).view(np.uint8), self.layout.entry(group, slot))

    def _read(self, into: Bytes, start: int) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done:].data], start + done)
            if not count:
                raise CacheSlotError("the file is shorter than it was")
            done += count

    def _write(self, data: Bytes, start: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:].data, start + done)
