"""Copies the bytes of one block between tiers, and checks them when they return to a higher tier."""

import threading
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

import xxhash

from executor import metrics
from executor.cache.tiers.device import DeviceBlocks
from executor.cache.tiers.layout import Bytes
from executor.cache.tiers.slot_file import CacheSlotError, SlotFile
from executor.step import Copy, Tier

# Weight of the newest measurement in the moving average of a block's time.
NEWEST = 0.1


class BlockCopier:
    """Called from several threads, on different slots."""

    def __init__(self, device: DeviceBlocks, files: Mapping[Tier, SlotFile], *, checksums: bool) -> None:
        self._device = device
        self._files = files
        self._checksums = checksums
        self._local = threading.local()
        # Seconds to copy a block from a tier to the device, a moving average.
        self.block_times: dict[Tier, float] = {}

    def run(
        self, copy: Copy, after: Any, source_read: Callable[[], None], together: int
    ) -> Generator[None, None, None]:
        """Begins a copy and yields; the caller calls `finish`, then resumes the generator, which ends the copy.

        Copies from and to the device begin once the device is past the mark `after`. source_read: called once the
        source may be overwritten; not called if that is only when the copy ends. together: number of copies
        that the thread begins before it calls `finish`. Raises CacheSlotError, OSError, RuntimeError.
        """
        begin = time.perf_counter()
        if not copy.source:
            self._zero(copy)
            yield
        elif copy.source_tier is Tier.DEVICE:
            yield from self._offload(copy, after, source_read)
        elif copy.target_tier is Tier.DEVICE:
            yield from self._onload(copy, after)
            self._note_time(copy.source_tier, (time.perf_counter() - begin) / together)
        else:
            self._between_files(copy)
            yield

    def finish(self) -> None:
        """Waits until the device has done all copies that this thread has begun. Raises RuntimeError."""
        self._device.finish()

    def void(self, copy: Copy) -> None:
        """Empties the target of a copy that failed: its old contents must not be found."""
        if copy.target_tier is not Tier.DEVICE:
            self._files[copy.target_tier].claim(copy.group, copy.target)

    def _offload(self, copy: Copy, after: Any, source_read: Callable[[], None]) -> Generator[None, None, None]:
        target, slot = self._files[copy.target_tier], (copy.group, copy.target)
        if target.in_place:
            target.claim(*slot)
        data = target.buffer(*slot, self._staging(target))
        self._device.begin_read(copy.group, copy.source, data, after)
        yield
        source_read()
        if not target.in_place:
            # Claimed only now: a slow disk must not delay the release of the source slot.
            target.claim(*slot)
        checksum = _digest(data) if self._checksums else 0
        target.store(*slot, data)
        target.commit(*slot, copy.ticket, checksum)
        _count(copy, data)

    def _onload(self, copy: Copy, after: Any) -> Generator[None, None, None]:
        # On a GPU, the device copies the previous block while this thread verifies a block.
        data, _ = self._good(copy)
        self._device.begin_write(copy.group, copy.target, data, after)
        yield
        _count(copy, data)

    def _between_files(self, copy: Copy) -> None:
        target, slot = self._files[copy.target_tier], (copy.group, copy.target)
        target.claim(*slot)
        data, checksum = self._good(copy)
        target.store(*slot, data)
        target.commit(*slot, copy.ticket, checksum)
        _count(copy, data)

    def _zero(self, copy: Copy) -> None:
        target, slot = self._files[copy.target_tier], (copy.group, copy.target)
        target.claim(*slot)
        data = target.buffer(*slot, self._staging(target))
        data.fill(0)
        target.store(*slot, data)

    def _good(self, copy: Copy) -> tuple[Bytes, int]:
        """Returns the source's bytes and checksum, verified on the way to a higher tier. Raises CacheSlotError."""
        source, slot = self._files[copy.source_tier], (copy.group, copy.source)
        if not source.generation(*slot):
            raise CacheSlotError("the slot holds nothing")
        data, checksum = source.fetch(*slot, self._staging(source)), source.checksum(*slot)
        if self._checksums and copy.target_tier < copy.source_tier and _digest(data) != checksum:
            metrics.CHECKSUM_MISMATCHES.labels(copy.source_tier.name.lower()).inc()
            raise CacheSlotError("the slot's bytes do not match their checksum")
        return data, checksum

    def _staging(self, file: SlotFile) -> Bytes:
        """Returns the thread's staging memory."""
        if not hasattr(self._local, "staging"):
            self._local.staging = self._device.staging(max(file.layout.block_bytes))
        return self._local.staging  # type: ignore[no-any-return]

    def _note_time(self, tier: Tier, seconds: float) -> None:
        known = self.block_times.get(tier, seconds)
        self.block_times[tier] = known + NEWEST * (seconds - known)


def _digest(data: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(data.data)


def _count(copy: Copy, data: Bytes) -> None:
    metrics.COPIED_BYTES.labels(copy.source_tier.name.lower(), copy.target_tier.name.lower()).inc(len(data))
