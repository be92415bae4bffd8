"""Redis's copy of one executor, while it is read and handed out to be restored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import structlog

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.persistence.lease_clock import with_remaining_times
from cachemgr.persistence.records import RecordError, decode_block, depth_of
from cachemgr.types import PinRecord

# Blocks that are restored at a time: takes a fraction of the time for which the event loop may be blocked.
_PART = 256

log = structlog.get_logger()


class Reading:
    """The copy of one executor. Blocks stay encoded until they are restored, since a million may be in memory."""

    def __init__(self, executor_id: str, *, is_stale: bool) -> None:
        """`is_stale`: whether changes that Redis lacks are no longer known."""
        self.executor_id = executor_id
        self.is_stale = is_stale
        # Whether parts were handed out, or are no longer wanted.
        self.is_spent = False
        self.is_complete = asyncio.Event()
        self.has_been_restored = asyncio.Event()
        self.clear()

    def clear(self) -> None:
        """Clears the reading, to begin again."""
        self.epoch: int | None = None
        self.time = 0.0
        self.pins: list[PinRecord] = []
        self.num_blocks = 0
        # Blocks of another version, counted as they are handed out.
        self.num_unreadable = 0
        self._by_depth: dict[int, list[tuple[bytes, bytes]]] = {}

    def add(self, field: bytes, value: bytes) -> None:
        """Adds a field of the hash of blocks; the same field may be added twice."""
        self._by_depth.setdefault(depth_of(value), []).append((field, value))
        self.num_blocks += 1

    def is_of(self, epoch: int) -> bool:
        """Whether the device's blocks were written in this epoch."""
        return self.epoch == epoch

    def parts(self, epoch: Callable[[], int], time: Callable[[], float]) -> Iterator[list[BlockRecord]]:
        """Yields blocks, parents before children, with their leases' remaining times; each part is handed out once.

        Both callables are called at each part. For a different epoch, only blocks of lower tiers are handed out.
        """
        self.is_spent = True
        for depth in sorted(self._by_depth):
            packed = self._by_depth.pop(depth)
            while packed:
                records, is_current, now = [], self.is_of(epoch()), time()
                for field, value in packed[-_PART:]:
                    try:
                        record = decode_block(field, value)
                    except RecordError:
                        self.num_unreadable += 1
                        continue
                    below = record if is_current else record.below()
                    if below is not None:
                        records.append(with_remaining_times(below, now))
                del packed[-_PART:]
                yield records
        if self.num_unreadable:
            count = self.num_unreadable
            log.warning("blocks of another version are ignored", executor=self.executor_id, blocks=count)
