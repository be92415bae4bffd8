"""Brings what the store remembers of executors into the index, in parts between which other calls are answered."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

import structlog
from prometheus_client import Gauge

if TYPE_CHECKING:
    from cachemgr.oplog.operations import Operations
    from cachemgr.persistence.index_reading import Reading
    from cachemgr.persistence.redis_index import IndexStore

RECOVERING = Gauge("kvkeep_recovering_executors", "Executors whose remembered blocks are not all back yet.")
log = structlog.get_logger()


class Recoveries:
    """A task for each executor whose remembered blocks are still to come; `run` has them all."""

    def __init__(self, operations: Operations, store: IndexStore) -> None:
        self._operations = operations
        self._store = store
        self._asked: asyncio.Queue[Reading] = asyncio.Queue()
        self._running: set[Reading] = set()

    def begin(self, reading: Reading) -> None:
        """The executor is registered: what is read, or will be, comes into the index. Once is enough."""
        if reading not in self._running:
            self._running.add(reading)
            RECOVERING.set(len(self._running))
            self._asked.put_nowait(reading)

    async def run(self) -> None:
        """For ever. What fails in it is a defect, and ends the process."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._recover(await self._asked.get()))

    def _is_wanted(self, reading: Reading) -> bool:
        """Whether the executor is still registered for which a reading was begun."""
        if not self._store.is_current(reading):
            return False
        return not reading.num_blocks or self._operations.manager.is_recovering(reading.executor_id)

    async def _recover(self, reading: Reading) -> None:
        executor_id, operations, store = reading.executor_id, self._operations, self._store
        await reading.is_complete.wait()
        begin = monotonic()
        for part in store.parts(reading):
            if not self._is_wanted(reading):
                break
            operations.put_back(executor_id, store.epoch_of(executor_id), part)
            # Calls that wait come first.
            await asyncio.sleep(0)
        self._running.discard(reading)
        RECOVERING.set(len(self._running))
        if not self._is_wanted(reading):
            store.leave(reading)
            log.info("an executor is gone before its remembered blocks are back", executor=executor_id)
            return
        operations.end_recovery(executor_id, store.epoch_of(executor_id), store.pins(reading))
        store.taken_back(reading)
        restored = operations.manager.cached_blocks(executor_id)
        log.info(
            "remembered blocks are back",
            executor=executor_id,
            remembered=reading.num_blocks,
            device_blocks=restored.device_blocks,
            lower_blocks=restored.lower_blocks,
            seconds=round(monotonic() - begin, 3),
        )
