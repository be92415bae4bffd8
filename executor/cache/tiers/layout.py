"""Where things lie in a lower tier's file: a header, a table of what the slots hold, then the slots group by group."""

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from executor.cache.pool import KvPools

PAGE = 4096
MAGIC = b"kvkeep\r\n"
# Raise when the meaning of a file's bytes changes.
VERSION = 1
# Per slot: the ticket of the copy that filled it, 0 for none; the checksum of its bytes.
ENTRY = np.dtype([("generation", "<u8"), ("checksum", "<u8")])
_HEADER = struct.Struct("<8sIIQ32s32s")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class FileLayout:
    """Of one file. block_bytes: per layer group. slots: of each group. identity: SHA-256 of what decides the bytes.

    boot: what the file is good for, 32 bytes; zeros when its checksums find what a crash of the machine tore.
    """

    block_bytes: tuple[int, ...]
    slots: int
    identity: bytes
    boot: bytes = bytes(32)

    @property
    def header(self) -> bytes:
        """What a file of this layout begins with."""
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
        """Where a group's first slot begins."""
        before = sum(padded(count) for count in self.block_bytes[:group])
        return PAGE + padded(self.table_bytes) + self.slots * before

    def place(self, group: int, slot: int) -> int:
        """Where a slot begins; slots are numbered from 1."""
        return self.start(group) + (slot - 1) * padded(self.block_bytes[group])

    def entry(self, group: int, slot: int) -> int:
        """Where a slot's entry begins."""
        return PAGE + (group * self.slots + slot - 1) * ENTRY.itemsize


def padded(count: int) -> int:
    """Bytes in whole pages."""
    return -(-count // PAGE) * PAGE


def slots_within(size: int, block_bytes: Sequence[int]) -> int:
    """Slots per group that a file of this size has; 0 when it has none."""
    each = sum(padded(count) + ENTRY.itemsize for count in block_bytes)
    return max(0, (size - 2 * PAGE) // each)


def least_size(block_bytes: Sequence[int]) -> int:
    """Bytes of a file with one slot per group."""
    return 2 * PAGE + sum(padded(count) + ENTRY.itemsize for count in block_bytes)


def layout_of(pools: KvPools, fingerprint: bytes, size: int, *, checksums: bool) -> FileLayout:
    """How blocks of these pools lie in a file of at most this size. fingerprint: of the model, 32 bytes."""
    groups = [(*pool.k[:, 0].shape, str(pool.k.dtype), pool.group.shape.window) for pool in pools.pools]
    identity = hashlib.sha256(json.dumps([fingerprint.hex(), pools.block_size, groups]).encode()).digest()
    block_bytes = tuple(pool.block_bytes for pool in pools.pools)
    # What reached the disk when the machine went down is told by checksums only.
    boot = bytes(32) if checksums else hashlib.sha256(_boot_id()).digest()
    return FileLayout(block_bytes, slots_within(size, block_bytes), identity, boot)


def _boot_id() -> bytes:
    return _BOOT_ID.read_bytes() if _BOOT_ID.exists() else os.urandom(32)
