"""Conditions that must hold in a fleet in calm: nothing leaks, and the routers' views agree with the caches."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Sequence

from protos.generation.v1 import generation_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2 as kv
from tests.chaos.checks import SETTLE_SECONDS, check_pools, check_store
from tests.chaos.measuring import CALL_SECONDS, Manager
from tests.chaos.recovery import Prober
from tests.chaos.report import DEVICE_SHARE
from tests.chaos.requests import Known
from tests.chaos.stage import ENGINES, ROUTERS, SHARDS, Stage, engines_of
from tests.chaos.stub_executor import FAULT
from tests.stack import metrics
from tests.support.generation import generate
from tests.support.patience import patience

# Time until a router's notes of sent requests have expired, and its metrics are up to date.
NOTES_SECONDS = 3.0
REQUEST_SECONDS = patience(60)


async def check_fleet(stage: Stage, prober: Prober, known: Sequence[Known]) -> list[str]:
    """Faults of a fleet without requests."""
    faults = [fault for shard in range(SHARDS) for fault in await _check_shard(prober.managers[shard], shard)]
    faults += await _check_idle(prober)
    await asyncio.sleep(NOTES_SECONDS)
    for router in range(ROUTERS):
        faults += await _check_view(stage, prober, f"router-{router}", known)
    return faults


async def check_fleet_store(stage: Stage, prober: Prober) -> list[str]:
    """Whether Redis and the index of each shard agree."""
    faults = []
    for shard, manager in enumerate(prober.managers):
        executors = [f"executor-{engine}" for engine in engines_of(shard)]
        faults += await check_store(stage, manager, f"cachemgr-{shard}", executors, DEVICE_SHARE)
    return faults


def logged(stage: Stage, names: Iterable[str], event: str) -> list[dict[str, object]]:
    """Log entries of processes about an event, over all their starts."""
    found = []
    for name in names:
        for line in stage.stack.log_path(name).read_text(errors="replace").splitlines():
            if f'"{event}"' in line:
                said = json.loads(line)
                if said.get("event") == event:
                    found.append(said)
    return found


def contradictions(stage: Stage) -> list[str]:
    """Contradictions that stub executors have noticed."""
    executors = [f"executor-{engine}" for engine in range(ENGINES)]
    return [f"an executor noticed: {said['cause']}" for said in logged(stage, executors, FAULT)]


def continued(stage: Stage) -> int:
    """Requests that routers have continued elsewhere, as their engine was lost or made no progress."""
    routers = [f"router-{router}" for router in range(ROUTERS)]
    events = ("engine lost", "requests leave an engine")
    return sum(int(str(said["requests"])) for event in events for said in logged(stage, routers, event))


async def _check_shard(manager: Manager, shard: int) -> list[str]:
    """No sequence, hold, or ended lease is left, and the shard has exactly its executors."""
    faults = [f"cachemgr-{shard}: {fault}" for fault in await check_pools(manager)]
    pools = {pool.pool_id for pool in await manager.pools()}
    expected = {f"executor-{engine}/0" for engine in engines_of(shard)}
    if {pool.partition("/")[0] for pool in pools} != {pool.partition("/")[0] for pool in expected}:
        faults.append(f"cachemgr-{shard} has the pools {sorted(pools)}")
    holds = await manager.admin.ListHolds(kv.ListHoldsRequest(), timeout=CALL_SECONDS)
    if holds.holds:
        faults.append(f"cachemgr-{shard} has {len(holds.holds)} holds")
    for pool in pools:
        request = kv.ListLeasesRequest(pool_id=pool, page_size=1000)
        leases = (await manager.admin.ListLeases(request, timeout=CALL_SECONDS)).leases
        over = sum(
            one.lease.HasField("remaining_duration") and one.lease.remaining_duration.ToNanoseconds() <= 0
            for one in leases
        )
        if over:
            faults.append(f"{pool} has {over} leases that are over")
    return faults


async def _check_idle(prober: Prober) -> list[str]:
    """No engine and no router has a request, and each router has all engines and their caches."""
    faults = []
    for engine in range(ENGINES):
        loads = await prober.stub(f"scheduler-{engine}").GetLoads(pb.GetLoadsRequest(), timeout=CALL_SECONDS)
        if loads.running_requests or loads.waiting_requests:
            faults.append(f"engine {engine} still runs {loads.running_requests}, {loads.waiting_requests} wait")
    for router in range(ROUTERS):
        name = f"router-{router}"
        loads = await prober.stub(name).GetLoads(pb.GetLoadsRequest(), timeout=CALL_SECONDS)
        if loads.running_requests or loads.waiting_requests:
            faults.append(f"{name} still runs {loads.running_requests}, {loads.waiting_requests} wait")
        found = await prober.engines(name)
        for engine in range(ENGINES):
            one = found.get(f"executor-{engine}", pb.RoutedEngine())
            if not (one.ready and one.view_complete):
                faults.append(f"{name} does not have engine {engine}: {one.obstacle or 'its view is not complete'}")
    return faults


async def _check_view_size(stage: Stage, managers: Sequence[Manager], router: str) -> list[str]:
    """Whether a router's view soon has as many blocks as all shards have, by their keys."""
    deadline = time.monotonic() + SETTLE_SECONDS / 4
    while True:
        keys = {key for manager in managers for key, *_ in (await manager.index()).values()}
        count = await _metric(stage, router, "view_blocks")
        if count == len(keys):
            return []
        if time.monotonic() > deadline:
            return [f"the view of {router} has {count:.0f} blocks of {len(keys)}"]
        await asyncio.sleep(0.1)


async def _check_view(stage: Stage, prober: Prober, router: str, known: Sequence[Known]) -> list[str]:
    """The router's expectations for known prompts agree with the admissions, up to a part of a block."""
    faults = []
    [block_size] = {pool.block_size for manager in prober.managers for pool in await manager.pools()}
    for one in known:
        # Samples of one request share blocks that are not cached yet.
        if one.request.n > 1:
            continue
        request = pb.StreamGenerateRequest()
        request.CopyFrom(one.request)
        # The answer is known already, so one token is enough.
        request.max_tokens = 1
        # The previous request may have evicted blocks.
        faults += await _check_view_size(stage, prober.managers, router)
        before = await _metric(stage, router, "expected_cached_tokens_total")
        output = await generate(prober.stub(router), request, REQUEST_SECONDS)
        expected = await _metric(stage, router, "expected_cached_tokens_total") - before
        if not 0 <= output.usage.cached_tokens - expected < block_size:
            found = output.usage.cached_tokens
            faults.append(f"{router} expected {expected:.0f} cached tokens of {one.name}, and {found} were there")
        if output.token_ids != one.samples[0].token_ids[:1]:
            faults.append(f"{router} answers {one.name} with other tokens")
    return faults


async def _metric(stage: Stage, router: str, name: str) -> float:
    """Sum over the labels of a metric."""
    samples = await asyncio.to_thread(lambda: list(metrics(stage.metrics[router])))
    return sum(value for sample, _, value in samples if sample == f"kvkeep_router_{name}")
