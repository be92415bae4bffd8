"""Restart of the cache manager with a real Redis that holds a whole cache: duration, and lost blocks.

The same code runs as in the real process, but in one process and without gRPC. Stalls are process time between two
turns of the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.scale.row import Row
from cachemgr.manager import CacheManager
from cachemgr.persistence.pending_changes import PendingChanges
from cachemgr.persistence.redis_index import IndexStore
from cachemgr.rpc.data_service import CacheManagerService
from cachemgr.rpc.event_feed import EventFeed
from cachemgr.rpc.mutations import ManagerClock, Mutations, ServiceContext
from cachemgr.types import AdmitRequest, ManagerConfig, Retention, RetentionRange, SyncRequest
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.redis_client import open_redis
from tests.support.local_redis import LocalRedis

EXECUTOR, SCHEDULER = "e", "s"
BLOCK = 16
# Blocks of a prompt, and prompts between two writes.
CHAIN, FLUSH = 50, 2_000
LASTS = 86_400.0
# A turn of an idle loop takes less.
IDLE_SECONDS = 1e-4


class Life:
    """One life of a manager with its store, set up like the real process."""

    def __init__(self, epoch: int, url: str) -> None:
        self.clock = clock = ManagerClock(time.monotonic)
        queue = PendingChanges()
        config = ManagerConfig(capacity_ahead_tokens=0, free_watermark=0.0, lease_seconds=1e6)
        self.manager = CacheManager(epoch, clock, config, queue, queue)
        mutations = Mutations(self.manager, clock)
        self.store = IndexStore(open_redis(url), queue, self.manager.queries, mutations, epoch=epoch)
        self.service = CacheManagerService(ServiceContext(mutations, EventFeed(self.manager.queries), self.store))
        self.syncs = 0
        self._recovering: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts; registrations are possible afterwards."""
        await self.store.start()
        self._recovering = asyncio.create_task(self.store.run())

    async def stop(self) -> None:
        """Stops; Redis keeps its contents."""
        assert self._recovering is not None
        self._recovering.cancel()
        await self.store.close()

    async def register(self, blocks: int, written: bytes = b"") -> pb.RegisterExecutorResponse:
        """Registers a scheduler and an executor that has written to `blocks` slots, to each in the first step."""
        scheduler = pb.RegisterSchedulerRequest(scheduler_id=SCHEDULER, scheduler_epoch=self.manager.epoch)
        await self.service.RegisterScheduler(scheduler, None)
        pool = pb.PoolSpec(group=0, num_blocks=blocks, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32",
                           block_bytes=64, last_write_steps=written)  # fmt: skip
        request = pb.RegisterExecutorRequest(executor_id=EXECUTOR, executor_epoch=1, model="m", block_size=BLOCK,
                                             model_fingerprint=bytes(32), pools=[pool])  # fmt: skip
        return await self.service.RegisterExecutor(request, None)

    def cache(self, first: int, tokens: int, **options: Any) -> None:
        """Computes and releases a prompt of consecutive ids."""
        prompt = array("I", range(first, first + tokens))
        self.syncs += 1
        self.clock.advance()
        name, epoch = f"q{self.syncs}", self.manager.epoch
        admission = self.manager.admit(AdmitRequest(name, SCHEDULER, epoch, EXECUTOR, prompt, **options))
        assert admission.admitted
        handles = [admission.sequence_handle]
        done = SyncRequest(SCHEDULER, epoch, epoch, self.syncs, 1, handles, [tokens], [0], [], released_handles=handles)
        self.manager.sync(done)


def rows(blocks: int) -> Iterator[Row]:
    """The rows of this module."""
    with tempfile.TemporaryDirectory() as folder:
        redis = LocalRedis(Path(folder))
        try:
            yield from asyncio.run(_restart(blocks, redis.url))
        finally:
            redis.stop()


async def _restart(blocks: int, url: str) -> list[Row]:
    before = await _fill(blocks, url)
    found: list[Row] = [Row("blocks in Redis, one of them leased by as many sessions", before[0], "blocks")]
    gc.collect()
    life = Life(2, url)
    await life.start()
    with _watched() as seen:
        begun = time.perf_counter()
        answer = await life.register(blocks + 1, bytes([1]) * (blocks + 1))
        registered = time.perf_counter() - begun
        while life.manager.is_recovering(EXECUTOR):
            await asyncio.sleep(0.01)
        taken = time.perf_counter() - begun
    await life.store.flush()
    after = _kept(life.manager)
    found += [
        Row("until the executor is registered", registered, "s", 5),
        Row("blocks restored by then", answer.restored_blocks, "blocks"),
        Row("until all are restored", taken, "s"),
        Row("process time of that", seen["busy"], "s"),
        Row("longest stall", seen["longest"] * 1e3, "ms", 50),
        Row("lost blocks", before[0] - after[0], "blocks", 0),
        Row("lost leases, but those that another covers", before[1] - after[1], "leases", 0),
        Row("slots where Redis differs afterwards", len(await life.store.compare([EXECUTOR]) or ()), "", 0),
    ]
    await life.stop()
    return found


async def _fill(blocks: int, url: str) -> tuple[int, int]:
    life = Life(1, url)
    await life.start()
    await life.register(blocks + 1)
    for number in range((blocks - 1) // CHAIN):
        life.cache((number + 1) * CHAIN * BLOCK, CHAIN * BLOCK, salt=f"s{number % 100}", session_id=f"t{number % 100}")
        if not number % FLUSH:
            await life.store.flush()
    retention = Retention((RetentionRange(0, None, 60, LASTS),))
    for number in range(blocks):
        life.cache(0, BLOCK + 1, session_id=f"x{number}", retention=retention, no_store=number > 0)
    await life.store.flush()
    kept = _kept(life.manager)
    await life.stop()
    return kept


def _kept(manager: CacheManager) -> tuple[int, int]:
    """Cached blocks, and leases of them."""
    return manager.cached_blocks(EXECUTOR).device_blocks, sum(
        1 for _ in filter(None, manager.queries.leases(f"{EXECUTOR}/0", ""))
    )


@contextmanager
def _watched() -> Iterator[dict[str, float]]:
    """The longest process time between two turns of the event loop, and all process time except idle turns."""
    seen = {"longest": 0.0, "busy": 0.0}

    async def watch() -> None:
        while True:
            before = time.process_time()
            await asyncio.sleep(0)
            spent = time.process_time() - before
            seen["longest"] = max(seen["longest"], spent)
            seen["busy"] += spent if spent > IDLE_SECONDS else 0.0

    watching = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        watching.cancel()
