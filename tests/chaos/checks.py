"""What must hold in calm."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc

from protos.kvcache.v1 import kvcache_pb2 as kv
from tests.chaos.measuring import CALL_SECONDS, ExecutorLog, Manager
from tests.chaos.stage import Stage
from tests.stack import metrics

SETTLE_SECONDS = 60.0
# Until what has changed is in Redis.
WRITTEN_SECONDS = 10.0
CHECK_SECONDS = 60.0


async def until_idle(manager: Manager) -> str:
    """Waits until no sequence holds a block and no copy is in flight; what is left after a long time, in words."""
    deadline, left = time.monotonic() + SETTLE_SECONDS, ""
    while time.monotonic() < deadline:
        try:
            live = await manager.sequences()
            pools: list[tuple[str, list[Any]]] = [
                (pool.pool_id, [pool, *pool.lower_tiers]) for pool in await manager.pools()
            ]
            # In lower tiers, too: a copy holds what it reads and writes.
            used = {pool_id: count for pool_id, tiers in pools if (count := sum(tier.used_blocks for tier in tiers))}
        except grpc.aio.AioRpcError as error:
            left = f"the cache manager does not answer: {error.code().name}"
        else:
            if not live and not used:
                return ""
            left = f"{len(live)} sequences are live, and blocks are used: {used or 'none'}"
        await asyncio.sleep(0.1)
    return left


def _unaccounted(pool: kv.Pool) -> list[str]:
    """Slots of a pool that are neither free nor cached."""
    found = [(tier.tier, tier.total_blocks, tier.free_blocks, tier.used_blocks) for tier in pool.lower_tiers]
    found.append((kv.TIER_DEVICE, pool.total_blocks, pool.free_blocks, pool.used_blocks))
    return [
        f"{pool.pool_id}: {total - free} of {total} slots of {kv.Tier.Name(tier)} are not free, {used} used"
        for tier, total, free, used in found
        if free != total or used
    ]


async def check_pools(manager: Manager) -> list[str]:
    """Faults of a stack without requests."""
    left = await until_idle(manager)
    report = await manager.admin.CheckPool(kv.CheckPoolRequest(), timeout=CHECK_SECONDS)
    faults = [left] if left else []
    faults += [f"CheckPool: {one.pool_id} slot {one.slot}: {one.message}" for one in report.violations]
    if not report.pools:
        faults.append("no executor is registered")
    return faults + [fault for pool in report.pools for fault in _unaccounted(pool)]


async def check_store(stage: Stage, manager: Manager) -> list[str]:
    """Whether Redis holds what the index does; by the manager's own comparison and by a death.

    A restart is the comparison that counts: only restored blocks can be found.
    """
    faults = await _until_written(stage) or await _compare(manager)
    before = await manager.index()
    log = ExecutorLog(stage)
    await stage.restart("cachemgr")
    await log.registered()
    after = await manager.index()
    if after != before:
        missing, fresh = before.keys() - after.keys(), after.keys() - before.keys()
        other = sum(before[slot] != after[slot] for slot in before.keys() & after.keys())
        faults.append(
            f"after a calm restart of the cache manager {len(missing)} of {len(before)} blocks are missing, "
            f"{len(fresh)} are new and {other} are others"
        )
    return faults


async def _until_written(stage: Stage) -> list[str]:
    """Waits until the cache manager says that Redis has everything."""
    deadline = time.monotonic() + WRITTEN_SECONDS
    while time.monotonic() < deadline:
        said = {name: value for name, _, value in await asyncio.to_thread(metrics, stage.metrics["cachemgr"])}
        if said["kvkeep_redis_up"] and not said["kvkeep_redis_pending_blocks"]:
            return []
        await asyncio.sleep(0.1)
    return [f"Redis has not taken all changes within {WRITTEN_SECONDS:.0f} s"]


async def _compare(manager: Manager) -> list[str]:
    """The cache manager's own comparison, again until it agrees or time is over."""
    deadline = time.monotonic() + WRITTEN_SECONDS
    while True:
        report = await manager.admin.CheckPool(kv.CheckPoolRequest(compare_with_store=True), timeout=CHECK_SECONDS)
        faults = [f"Redis: {one.pool_id} slot {one.slot}: {one.message}" for one in report.violations]
        if not report.store_compared:
            faults.append("Redis could not be compared with the index")
        if not faults or time.monotonic() > deadline:
            return faults
        await asyncio.sleep(CALL_SECONDS / 10)
