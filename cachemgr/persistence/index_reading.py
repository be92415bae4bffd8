"""What Redis remembers of an executor, as it is read page by page and taken back part by part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import structlog

from cachemgr.blocks.block_record import BlockRecord, RecordError, decode, depth_of
from cachemgr.persistence.lease_clock import awake
from cachemgr.types import PinRecord

# Blocks that are taken back at a time: a fraction of the time that the event loop may be kept.
_PART = 256

log = structlog.get_logger()


class Reading:
    """The copy of one executor. Blocks stay packed until they are taken: a million of them are in memory at once."""

    def __init__(self, executor_id: str, *, is_stale: bool) -> None:
        """`is_stale` says that changes which Redis lacks are not known any more."""
        self.executor_id = executor_id
        self.is_stale = is_stale
        # Whether parts were handed out, or nobody waits for them any more.
        self.is_spent = False
        self.is_complete = asyncio.Event()
        self.has_been_taken = asyncio.Event()
        self.clear()

    def clear(self) -> None:
        """Begins again."""
        self.epoch: int | None = None
        self.time = 0.0
        self.pins: list[PinRecord] = []
        self.num_blocks = 0
        self._by_depth: dict[int, list[tuple[bytes, bytes]]] = {}

    def add(self, place: bytes, value: bytes) -> None:
        """A field of the hash of blocks; one that is told twice is taken twice."""
        self._by_depth.setdefault(depth_of(value), []).append((place, value))
        self.num_blocks += 1

    def is_of(self, epoch: int) -> bool:
        """Whether what lies on the device was written in this epoch."""
        return self.epoch == epoch

    def parts(self, epoch: Callable[[], int], time: Callable[[], float]) -> Iterator[list[BlockRecord]]:
        """Blocks, parents before children, with the time that remains of their leases; each part is handed out once.

        Both callables are asked at each part. For another epoch only what lies in lower tiers is told.
        """
        self.is_spent = True
        unreadable = 0
        for depth in sorted(self._by_depth):
            packed = self._by_depth.pop(depth)
            while packed:
                records, is_current, now = [], self.is_of(epoch()), time()
                for place, value in packed[-_PART:]:
                    try:
                        record = decode(place, value)
                    except RecordError:
                        unreadable += 1
                        continue
                    below = record if is_current else record.below()
                    if below is not None:
                        records.append(awake(below, now))
                del packed[-_PART:]
                yield records
        if unreadable:
            log.warning("left out blocks that another version wrote", executor=self.executor_id, blocks=unreadable)
