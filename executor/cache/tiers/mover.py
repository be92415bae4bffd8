"""Moves the bytes of one copy between tiers, and checks what comes up."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from executor import metrics
from executor.cache.tiers.device import DeviceBlocks
from executor.cache.tiers.layout import Bytes
from executor.cache.tiers.slot_file import CacheSlotError, SlotFile
from executor.step import Copy, Tier

# Weight of the newest measurement in what a block takes.
NEWEST = 0.1


class Mover:
    """Called from several threads, on different slots."""

    def __init__(self, device: DeviceBlocks, files: Mapping[Tier, SlotFile], *, checksums: bool) -> None:
        self._device = device
        self._files = files
        self._checksums = checksums
        self._local = threading.local()
        # What a block takes from a tier to the device of late, in seconds.
        self.block_times: dict[Tier, float] = {}

    def run(self, copy: Copy, after: Any, source_read: Callable[[], None]) -> None:
        """Does a copy, once the device is past the mark `after`. Raises CacheSlotError, OSError, RuntimeError.

        source_read: called when the source may be written again, if that is before the end.
        """
        begin = time.perf_counter()
        if not copy.source:
            self._zero(copy)
        elif copy.source_tier is Tier.DEVICE:
            self._down(copy, after, source_read)
        elif copy.target_tier is Tier.DEVICE:
            self._up(copy, after)
            self._note_time(copy.source_tier, time.perf_counter() - begin)
        else:
            self._across(copy)

    def void(self, copy: Copy) -> None:
        """What is left of a copy that failed: nobody may find in its target what was there before."""
        if copy.target_tier is not Tier.DEVICE:
            self._files[copy.target_tier].claim(copy.group, copy.target)

    def _down(self, copy: Copy, after: Any, source_read: Callable[[], None]) -> None:
        target, slot = self._files[copy.target_tier], (copy.group, copy.target)
        if target.in_place:
            target.claim(*slot)
        data = target.room(*slot, self._staging(target))
        self._device.read(copy.group, copy.source, data, after)
        source_read()
        if not target.in_place:
            # Only now: a disk may take its time, and the source is wanted.
            target.claim(*slot)
        checksum = _digest(data) if self._checksums else 0
        target.store(*slot, data)
        target.settle(*slot, copy.ticket, checksum)
        _count(copy, data)

    def _up(self, copy: Copy, after: Any) -> None:
        data, _ = self._good(copy)
        self._device.write(copy.group, copy.target, data, after)
        _count(copy, data)

    def _across(self, copy: Copy) -> None:
        target, slot = self._files[copy.target_tier], (copy.group, copy.target)
        target.claim(*slot)
        data, checksum = self._good(copy)
        target.store(*slot, data)
        target.settle(*slot, copy.ticket, checksum)
        _count(copy, data)

    def _zero(self, copy: Copy) -> None:
        target, slot = self._files[copy.target_tier], (copy.group, copy.target)
        target.claim(*slot)
        data = target.room(*slot, self._staging(target))
        data.fill(0)
        target.store(*slot, data)

    def _good(self, copy: Copy) -> tuple[Bytes, int]:
        """What the source holds, and its checksum; what comes up a tier is what was put there."""
        source, slot = self._files[copy.source_tier], (copy.group, copy.source)
        if not source.generation(*slot):
            raise CacheSlotError("the slot holds nothing")
        data, checksum = source.fetch(*slot, self._staging(source)), source.checksum(*slot)
        if self._checksums and copy.target_tier < copy.source_tier and _digest(data) != checksum:
            metrics.CHECKSUM_MISMATCHES.labels(copy.source_tier.name.lower()).inc()
            raise CacheSlotError("the slot's bytes are not those that were put there")
        return data, checksum

    def _staging(self, file: SlotFile) -> Bytes:
        """Of the thread."""
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
