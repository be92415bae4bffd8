"""The tiers below the device, and the copies between all of them."""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from executor.cache.pool import KvPools
from executor.cache.tiers.block_copy import BlockCopier
from executor.cache.tiers.copy_threads import CopyThreads, Ended
from executor.cache.tiers.device import blocks_of
from executor.cache.tiers.files import FileSettings, file_name, open_file
from executor.cache.tiers.hazards import SlotRef
from executor.cache.tiers.layout import FileLayout, slots_within
from executor.cache.tiers.slot_file import DiskFile, Generations, HostFile, SlotFile
from executor.errors import BrokenStorageError
from executor.step import Copy, Tier

log = structlog.get_logger()

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Snapshot:
    """The contents of slots at one moment, and the slots of any tier that open copies will change."""

    tables: Mapping[Tier, Generations]
    changing: Collection[SlotRef]

    def generations(self, tier: Tier, group: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """[slots]: the tickets of the copies that filled a tier's slots; of length 0 without such a tier."""
        return self.tables[tier][group] if tier in self.tables else np.zeros(0, dtype=np.uint64)


class Tiers:
    """The lower tiers of some pools; without files, there are none.

    `begin` and `wait` are called by the thread that works on the device.
    """

    def __init__(self, pools: KvPools, files: Iterable[SlotFile] = (), *, checksums: bool = True) -> None:
        self._files = {file.tier: file for file in files}
        self._device = blocks_of(pools)
        for file in self._files.values():
            if isinstance(file, HostFile):
                self._device.register(file.memory)
        mover = BlockCopier(self._device, self._files, checksums=checksums)
        # Seconds to copy a block from a tier to the device, a moving average, as far as known.
        self.block_times: Mapping[Tier, float] = mover.block_times
        self._copier = CopyThreads(
            mover.run, mover.void, mover.finish, memory_threads=self._device.threads, together=self._device.together
        )

    @property
    def slots(self) -> dict[Tier, int]:
        """Slots per layer group of each existing lower tier."""
        return {tier: file.layout.slots for tier, file in self._files.items()}

    @property
    def busy(self) -> bool:
        """Whether a copy is open; otherwise, there is nothing to wait for."""
        return self._copier.busy

    def begin(self, copies: Sequence[Copy], ended: Ended) -> None:
        """Begins copies that are not within the device; at each slot, copies run in the order of submission.

        ended: called once per copy, in another thread.
        """
        self._copier.submit(copies, ended, self._device.mark())

    def wait(self, reads: Iterable[SlotRef] = (), writes: Iterable[SlotRef] = ()) -> None:
        """Waits until these slots can be read and written. Raises StuckCopyError."""
        self._copier.wait(reads, writes)

    def snapshot(self) -> Snapshot:
        """Returns a snapshot; may be called from any thread."""

        return self._copier.look(
            lambda changing: Snapshot({tier: file.generations() for tier, file in self._files.items()}, changing)
        )

    def drain(self, seconds: float) -> None:
        """Waits for copies, but at most `seconds`."""
        if not self._copier.drain(seconds):
            log.warning("copies still run: their target slots stay empty")

    def close(self) -> None:
        """Closes the files, unless copies still run; no method may be called afterwards."""
        if self.busy:
            return
        for file in self._files.values():
            if isinstance(file, HostFile):
                self._device.unregister(file.memory)
            file.close()


def open_tiers(
    pools: KvPools,
    fingerprint: bytes,
    executor_id: str,
    *,
    host: FileSettings,
    disk: FileSettings,
    checksums: bool,
) -> Tiers:
    """Opens the tiers that have a size, except those with broken storage. fingerprint: of the model, 32 bytes.

    Raises CacheFileError.
    """
    kinds: tuple[tuple[FileSettings, Callable[..., SlotFile], str], ...] = (
        (host, HostFile, "host"),
        (disk, DiskFile, "disk"),
    )
    files = []
    for settings, kind, name in kinds:
        if settings.size:
            layout = layout_of(pools, fingerprint, settings.size, checksums=checksums)
            try:
                files.append(_opened(kind, open_file(settings, file_name(name, executor_id), layout), layout))
            except (BrokenStorageError, OSError) as error:
                # Without the tier, its blocks are computed again, which is better than stopping.
                log.error("a tier is not available", tier=name, cause=str(error))
    return Tiers(pools, files, checksums=checksums)


def _opened(kind: Callable[..., SlotFile], fd: int, layout: FileLayout) -> SlotFile:
    try:
        return kind(fd, layout)
    except BaseException:
        os.close(fd)
        raise


def layout_of(pools: KvPools, fingerprint: bytes, size: int, *, checksums: bool) -> FileLayout:
    """Returns the layout of the pools' blocks in a file of at most `size` bytes. fingerprint: the model's, 32 bytes."""
    groups = [(*pool.k[:, 0].shape, str(pool.k.dtype), pool.group.shape.window) for pool in pools.pools]
    identity = hashlib.sha256(json.dumps([fingerprint.hex(), pools.block_size, groups]).encode()).digest()
    block_bytes = tuple(pool.block_bytes for pool in pools.pools)
    # After a crash of the machine, only checksums show which blocks reached the disk.
    boot = bytes(32) if checksums else hashlib.sha256(_boot_id()).digest()
    return FileLayout(block_bytes, slots_within(size, block_bytes), identity, boot)


def _boot_id() -> bytes:
    return _BOOT_ID.read_bytes() if _BOOT_ID.exists() else os.urandom(32)
