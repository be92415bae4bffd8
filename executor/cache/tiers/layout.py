"""The layout of a lower tier's file: a header, a table with an entry per slot, then the slots group by group."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PAGE = 4096
MAGIC = b"kvkeep\r\n"
# To be raised whenever the meaning of a file's bytes changes.
VERSION = 1
# Per slot: the ticket of the copy that filled it, 0 for none; the checksum of its bytes.
ENTRY = np.dtype([("generation", "<u8"), ("checksum", "<u8")])
_HEADER = struct.Struct("<8sIIQ32s32s")
# Bytes of a block, [bytes] uint8, contiguous.
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True)
class FileLayout:
    """Layout of one file. block_bytes: per layer group. slots: of each group. identity: SHA-256 over model and shapes.

    boot: 32 bytes that name the machine's boot for which the file is valid; zeros if checksums find torn blocks.
    """

    block_bytes: tuple[int, ...]
    slots: int
    identity: bytes
    boot: bytes = bytes(32)

    @property
    def header(self) -> bytes:
        """The first bytes of a file of this layout."""
        return _HEADER.pack(MAGIC, VERSION, len(self.block_bytes), self.slots, self.identity, self.boot)

    @property
    def table_bytes(self) -> int:
        """Size of the table, which begins at PAGE: [groups, slots] of ENTRY."""
        return len(self.block_bytes) * self.slots * ENTRY.itemsize

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.start(len(self.block_bytes))

    def start(self, group: int) -> int:
        """Returns where a group's first slot begins."""
        before = sum(padded(count) for count in self.block_bytes[:group])
        return PAGE + padded(self.table_bytes) + self.slots * before

    def offset(self, group: int, slot: int) -> int:
        """Returns where a slot begins in the file; slots are numbered from 1."""
        return self.start(group) + (slot - 1) * padded(self.block_bytes[group])

    def entry(self, group: int, slot: int) -> int:
        """Returns where a slot's entry begins."""
        return PAGE + (group * self.slots + slot - 1) * ENTRY.itemsize


def padded(count: int) -> int:
    """Rounds bytes up to whole pages."""
    return -(-count // PAGE) * PAGE


def slots_within(size: int, block_bytes: Sequence[int]) -> int:
    """Returns the slots per group of a file of this size; 0 if it has none."""
    each = sum(padded(count) + ENTRY.itemsize for count in block_bytes)
    return max(0, (size - 2 * PAGE) // each)


def least_size(block_bytes: Sequence[int]) -> int:
    """Returns the bytes of a file with one slot per group."""
    return 2 * PAGE + sum(padded(count) + ENTRY.itemsize for count in block_bytes)
