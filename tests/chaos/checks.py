"""Conditions that must hold in calm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

import grpc

from protos.kvcache.v1 import kvcache_pb2 as kv
from tests.chaos.measuring import CALL_SECONDS, BlockSlot, ExecutorLog, Manager
from tests.chaos.stage import Stage
from tests.stack import metrics
from tests.support.patience import patience

SETTLE_SECONDS = patience(60)
# After this time without a change, no change is expected any more.
QUIET_SECONDS = 0.5
# Time until all changes are in Redis.
WRITTEN_SECONDS = patience(10)
CHECK_SECONDS = patience(60)


async def until_idle(manager: Manager) -> str:
    """Waits until no sequence holds a block and no copy is in flight; after a long time returns the rest in words.

    A stack in calm still writes copies through to lower tiers, a few at a time. In between no copy is in flight, and
    in a full tier each copy takes the slot of another block. So the stack is idle when for a while nothing has been
    used, and no block has come or gone.
    """
    deadline, left = time.monotonic() + SETTLE_SECONDS, ""
    quiet, last = time.monotonic(), None
    while time.monotonic() < deadline:
        try:
            live = await manager.sequences()
            pools: list[tuple[str, list[Any]]] = [
                (pool.pool_id, [pool, *pool.lower_tiers]) for pool in await manager.pools()
            ]
            # In lower tiers, too: a copy holds its source and its target.
            used = {pool_id: count for pool_id, tiers in pools if (count := sum(tier.used_blocks for tier in tiers))}
            index = await manager.index()
        except grpc.aio.AioRpcError as error:
            left, last = f"the cache manager does not answer: {error.code().name}", None
        else:
            if live or used or index != last:
                quiet, last = time.monotonic(), index
            elif time.monotonic() > quiet + QUIET_SECONDS:
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


async def check_store(
    stage: Stage,
    manager: Manager,
    name: str = "cachemgr",
    executors: Sequence[str] = ("executor",),
    least_share: float = 1.0,
) -> list[str]:
    """Whether Redis and the index agree: by the manager's own comparison and by a death.

    A restart is the comparison that counts: only restored blocks can be found. executors: those of the manager.
    least_share: share of the blocks that must be in their places. A step that was in flight when its request was
    cancelled may have written after the tokens of a last block. Such a block looks like an overwritten block, and is
    only restored from a copy in a lower tier.
    """
    left = await until_idle(manager)
    faults = ([left] if left else []) + (await _until_written(stage, name) or await _compare(manager))
    before = await manager.index()
    logs = [ExecutorLog(stage, executor) for executor in executors]
    await stage.restart(name)
    for log in logs:
        await log.registered()
    after = await manager.index()
    missing = before.keys() - after.keys()
    moved = {before[slot] for slot in missing}
    fresh = {slot for slot in after.keys() - before.keys() if after[slot] not in moved}
    other = sum(before[slot] != after[slot] for slot in before.keys() & after.keys())
    if fresh or other or len(missing) > (1 - least_share) * len(before):
        faults.append(
            f"after a calm restart of {name} {len(missing)} of {len(before)} blocks are missing, "
            f"{len(fresh)} are new and {other} are others; missing: {_some(missing)}; new: {_some(fresh)}"
        )
    return faults


def _some(blocks: Iterable[BlockSlot]) -> str:
    names = [f"{pool} {kv.Tier.Name(kv.Tier.ValueType(tier))} {slot}" for pool, tier, slot in sorted(blocks)]
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "") or "none"


async def _until_written(stage: Stage, manager: str) -> list[str]:
    """Waits until the cache manager says that Redis has everything."""
    deadline = time.monotonic() + WRITTEN_SECONDS
    while time.monotonic() < deadline:
        said = {name: value for name, _, value in await asyncio.to_thread(metrics, stage.metrics[manager])}
        if said["kvkeep_redis_up"] and not said["kvkeep_redis_pending_blocks"]:
            return []
        await asyncio.sleep(0.1)
    return [f"Redis has not taken all changes within {WRITTEN_SECONDS:.0f} s"]


async def _compare(manager: Manager) -> list[str]:
    """The cache manager's own comparison, repeated until it agrees or the time is over."""
    deadline = time.monotonic() + WRITTEN_SECONDS
    while True:
        report = await manager.admin.CheckPool(kv.CheckPoolRequest(compare_with_store=True), timeout=CHECK_SECONDS)
        faults = [f"Redis: {one.pool_id} slot {one.slot}: {one.message}" for one in report.violations]
        if not report.store_compared:
            faults.append("Redis could not be compared with the index")
        if not faults or time.monotonic() > deadline:
            return faults
        await asyncio.sleep(CALL_SECONDS / 10)
