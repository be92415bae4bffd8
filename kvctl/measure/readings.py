"""The readings of `kvctl top`, and the rates between two of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.duration_pb2 import Duration

from kvctl.measure.metrics import samples
from kvctl.session import Session
from kvctl.shards import Answers, Shard, ShardsError
from kvctl.status import CommandError
from protos.generation.v1 import generation_pb2
from protos.kvcache.v1 import kvcache_pb2 as pb

# The window of hit rates.
WINDOW_SECONDS = 60
# The prefix of a stack's own metrics, and the metric of a process's start, which every process exports.
OURS, START = "kvkeep_", "process_start_time_seconds"


def sees_all(pools: Iterable[pb.Pool]) -> bool:
    """Whether the token, if any, is not limited to one tenant: a tenant's token gets pools without counts of blocks."""
    return all(pool.used_blocks + pool.cached_blocks + pool.free_blocks for pool in pools)


@dataclass(frozen=True)
class ShardReading:
    """A cache manager's answers."""

    pools: list[pb.Pool]
    stats: Mapping[str, pb.GetStatsResponse]
    quotas: list[pb.QuotaUsage]

    @property
    def data(self) -> dict[str, Any]:
        return {"pools": self.pools, "stats": dict(self.stats), "quotas": self.quotas}


@dataclass(frozen=True)
class Reading:
    """The services' answers at one time. trouble: services that did not answer, in words.

    routed: whether requests go through a router. engines: the router's list; None without a router, or if the router
    did not answer.
    """

    at: float
    shards: Answers[ShardReading]
    routed: bool = False
    model: generation_pb2.GetModelResponse | None = None
    loads: generation_pb2.GetLoadsResponse | None = None
    engines: generation_pb2.ListEnginesResponse | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    # The start of each process, in seconds since the epoch.
    started: Mapping[str, float] = field(default_factory=dict)
    trouble: tuple[str, ...] = ()

    def data(self, before: Reading) -> dict[str, Any]:
        """The reading for programs, with the rates since an earlier one."""
        shards: Any = self.shards.data(lambda one: one.data)
        return {
            "model": self.model,
            "loads": self.loads,
            **shards,
            **({} if self.engines is None else {"engines": list(self.engines.engines)}),
            "rates": rates(before, self),
            "trouble": list(self.trouble),
        }


def read(session: Session, metrics: Mapping[str, str]) -> Reading:
    """Asks all services. Raises CommandError when no cache manager answers; other services may be missing."""
    return read_services(session, metrics, session.ask(read_shard))


def read_services(session: Session, metrics: Mapping[str, str], shards: Answers[ShardReading]) -> Reading:
    """Asks the other services, and adds the answers of the cache managers."""
    trouble = [f"cachemgr: {ShardsError({address: error})}" for address, error in shards.failures.items()]
    model = loads = engines = None
    try:
        scheduler = session.scheduler
        model = scheduler.call(scheduler.stub.GetModel, generation_pb2.GetModelRequest())
        loads = scheduler.call(scheduler.stub.GetLoads, generation_pb2.GetLoadsRequest())
    except CommandError as error:
        trouble.append(f"scheduler: {error}")
    if session.router_address:
        try:
            engines = session.list_engines()
        except CommandError as error:
            trouble.append(f"router: {error}")
    found: dict[str, float] = {}
    started: dict[str, float] = {}
    for name, address in metrics.items():
        if not address:
            continue
        try:
            there = samples(address, session.timeout, session.security)
            found |= {sample: value for sample, value in there.items() if sample.startswith(OURS)}
            if START in there:
                started[name] = there[START]
        except (OSError, ValueError):
            trouble.append(f"{name}: no metrics at {address}")
    routed = bool(session.router_address)
    return Reading(time.monotonic(), shards, routed, model, loads, engines, found, started, tuple(trouble))


def read_shard(shard: Shard) -> ShardReading:
    pools = shard.pools()
    # A tenant's token gets its lookups since the start only, not those of a window.
    window = Duration(seconds=WINDOW_SECONDS) if sees_all(pools) else None
    stub = shard.admin.stub
    stats = {
        pool.pool_id: shard.admin.call(stub.GetStats, pb.GetStatsRequest(pool_id=pool.pool_id, window=window))
        for pool in pools
    }
    return ShardReading(pools, stats, list(shard.quotas().quotas))


def rates(before: Reading, now: Reading) -> dict[str, float | None]:
    """Rates and mean times between two readings; None without the metric, and for the mean of no events."""
    elapsed = now.at - before.at

    def grown(name: str) -> float | None:
        if name not in before.metrics or name not in now.metrics:
            return None
        return max(0.0, now.metrics[name] - before.metrics[name])

    def per_second(name: str) -> float | None:
        found = grown(name)
        return None if found is None else found / elapsed

    def mean(name: str) -> float | None:
        total, count = grown(f"{name}_sum"), grown(f"{name}_count")
        return total / count if total is not None and count else None

    front = "kvkeep_router" if now.routed else "kvkeep_scheduler"
    return {
        "steps_per_second": _steps_per_second(before, now),
        "step_seconds": mean("kvkeep_executor_step_seconds"),
        "planning_seconds": mean("kvkeep_scheduler_step_planning_seconds"),
        "cachemgr_wait_seconds": mean("kvkeep_scheduler_step_cachemgr_wait_seconds"),
        "prompt_tokens_per_second": per_second(f"{front}_prompt_tokens_total"),
        "cached_tokens_per_second": per_second(f"{front}_cached_tokens_total"),
        "output_tokens_per_second": per_second(f"{front}_output_tokens_total"),
        "time_to_first_token_seconds": mean(f"{front}_time_to_first_token_seconds"),
        "inter_token_latency_seconds": mean(f"{front}_inter_token_latency_seconds"),
    }


def _steps_per_second(before: Reading, now: Reading) -> float | None:
    """Steps per second of all engines that answered both times. A router's own count is of messages, not of steps."""
    earlier, later = _steps(before), _steps(now)
    both = earlier.keys() & later.keys()
    return sum(max(0, later[name] - earlier[name]) for name in both) / (now.at - before.at) if both else None


def _steps(reading: Reading) -> dict[str, int]:
    """Steps so far by the engine's address, which is empty without a router."""
    if reading.routed:
        listed = () if reading.engines is None else reading.engines.engines
        return {one.address: one.loads.steps for one in listed if one.HasField("loads")}
    return {} if reading.loads is None else {"": reading.loads.steps}
