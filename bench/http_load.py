"""Many HTTP streams for minutes, some of which are cancelled: errors, cost and freed blocks.

Run it with `make bench-http-load`, for example ARGS="--seconds 60 --streams 64". It prints what callers saw, what each
process took per output token, how much of that is HTTP (the same load over gRPC, for a shorter time), memory over time,
and how soon the blocks of a disconnected caller are free, under the load and without it. The pool and the cache
manager's history of events, which grow up to a bound, are filled first. The status is 1 when anything but 429 went
wrong, memory grew, blocks stayed in use, or a disconnected caller's blocks were freed too late.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil
import uvloop
from google.protobuf.field_mask_pb2 import FieldMask

from bench.callers import SILENT_SECONDS, Grpc, Http, Load, Way, ask
from bench.http_load_report import Counters, Found, Phase, show
from bench.result import Result, add_json_argument, spread
from bench.runs import Others, cpu_seconds, processes
from cachemgr.types import ManagerConfig
from protos.generation.v1 import generation_pb2_grpc as generation_rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from tests.stack import MODULES, Stack, metrics
from tests.support.generation import generate, greedy_request
from tests.support.idle import until_idle
from tests.support.ports import free_address

SAMPLE_SECONDS = 10.0
# After this time allocators have all the memory that they need.
WARM_SECONDS = 60.0
POLL_SECONDS = 0.02
# Output tokens of a caller that disconnects while there is no other caller, its pieces before, and repetitions.
ALONE_TOKENS, ALONE_PIECES, ALONE_TIMES = 4_000, 3, 20
# Stands for a model that takes a fixed time for a step and no processor; it takes prompts of any length.
STUB = "bench.stub_executor"
STUB_SETTINGS = {"scheduler_max_batched_tokens": 8_192}
FILL_TOKENS = 512
PREFIX = "kvkeep_scheduler_"
MB = 1e6


@dataclass
class Watch:
    """Resident megabytes, open files and HTTP connections of each process over time."""

    running: dict[str, psutil.Process]
    http_port: int
    samples: list[dict[str, Any]] = field(default_factory=list)

    async def watch(self) -> None:
        """Takes samples without end."""
        begin = time.monotonic()
        while True:
            self.samples.append({"second": round(time.monotonic() - begin, 1), **self.look()})
            await asyncio.sleep(SAMPLE_SECONDS)

    def look(self) -> dict[str, Any]:
        """Returns the current sample."""
        serving = [process for name, process in self.running.items() if name.startswith(("scheduler", "frontend"))]
        connections = [one for process in serving for one in process.net_connections("tcp")]
        return {
            "mb": {name: process.memory_info().rss / MB for name, process in self.running.items()},
            "files": {name: process.num_fds() for name, process in self.running.items()},
            "connections": sum(one.laddr.port == self.http_port and bool(one.raddr) for one in connections),
        }

    def drift(self) -> dict[str, tuple[float, float]]:
        """Megabytes after the warm-up and at the end, each the median of three samples."""
        warm = [sample["mb"] for sample in self.samples if sample["second"] >= WARM_SECONDS]
        first, last = warm[:3], warm[-3:]
        return {
            name: (statistics.median(one[name] for one in first), statistics.median(one[name] for one in last))
            for name in self.running
            if warm
        }


class Bench:
    """A stack, and the ways to send requests to it."""

    def __init__(self, stack: Stack, given: argparse.Namespace) -> None:
        self._stack = stack
        self._streams = given.streams
        self._step = None if given.step_ms is None else round(given.step_ms * 1e3)
        # A stub has no memory to fill.
        self._fills = given.pool_tokens // FILL_TOKENS if given.step_ms is None else 1
        self.running = processes(stack)
        front_ends = self.running["scheduler"].children()
        self.running |= {f"frontend-{number}": process for number, process in enumerate(front_ends)}
        self.watch = Watch(self.running, int(stack.http.rpartition(":")[2]))

    @contextlib.asynccontextmanager
    async def admin(self) -> AsyncIterator[kvcache_rpc.CacheAdminServiceAsyncStub]:
        """The cache manager's service for operators."""
        async with grpc.aio.insecure_channel(self._stack.admin) as channel:
            yield kvcache_rpc.CacheAdminServiceStub(channel)

    @contextlib.asynccontextmanager
    async def grpc(self) -> AsyncIterator[Grpc]:
        """Opens one channel."""
        async with grpc.aio.insecure_channel(self._stack.scheduler) as channel:
            yield Grpc(channel)

    async def fill(self) -> None:
        """Fills the pool and the cache manager's history of events, which grow up to a bound.

        To fill the history, a rule changes again and again, each time together with all its leases.
        """
        async with grpc.aio.insecure_channel(self._stack.scheduler) as channel, self.admin() as admin:
            rule = kv.RetentionRule(name="history", match=kv.RuleMatch(salt="history"))
            rule.action.retention_priority = 1
            await admin.CreateRetentionRule(kv.CreateRetentionRuleRequest(rule=rule), timeout=10)
            for number in range(self._fills):
                request = greedy_request([1000 + number, *range(1000, 999 + FILL_TOKENS)], 1)
                request.cache.salt = "history"
                request.sampling.seed = self._step or 0
                await generate(generation_rpc.GenerationServiceStub(channel), request)
            events = 0
            while events < ManagerConfig().event_history:
                rule.action.retention_priority ^= 2
                answer = await admin.UpdateRetentionRule(
                    kv.UpdateRetentionRuleRequest(rule=rule, update_mask=FieldMask(paths=["action"])), timeout=10
                )
                events += answer.changed_leases
                if not answer.changed_leases:
                    raise RuntimeError("a rule that changed has changed no lease")
            await admin.DeleteRetentionRule(kv.DeleteRetentionRuleRequest(name=rule.name), timeout=10)

    def counters(self) -> Counters:
        """The scheduler's counters."""
        found: Counters = {}
        for name, labels, value in metrics(self._stack.http):
            if name.startswith(PREFIX) and not labels:
                found[name.removeprefix(PREFIX)] = value
        return found

    def main_thread(self) -> float:
        """Processor seconds of the scheduler's main thread."""
        pid = self.running["scheduler"].pid
        return sum(one.user_time + one.system_time for one in self.running["scheduler"].threads() if one.id == pid)

    async def leave(self, way: Way, salt: str) -> float:
        """Closes a connection in the middle of its output; returns the seconds until its sequence holds no blocks."""
        left = ask("Tell me a story.", ALONE_TOKENS, salt=salt, leaves=ALONE_PIECES, step=self._step)
        async with self.admin() as admin, contextlib.aclosing(way.pieces(left)) as pieces:
            for _ in range(ALONE_PIECES):
                await anext(pieces)
            if not (await admin.ListSequences(kv.ListSequencesRequest(salt=salt), timeout=10)).sequences:
                raise RuntimeError("a sequence that runs is not listed")
            begin = time.monotonic()
            await pieces.aclose()
            return await _until_released(admin, begin, salt=salt)

    async def phase(self, way: Way, seconds: float, seed: int) -> Phase:
        """Runs the load for a time; at the end all callers disconnect at once."""
        begin, cpu, counters, main = time.monotonic(), cpu_seconds(self.running), self.counters(), self.main_thread()
        others = Others(self.running.values())
        async with self.admin() as admin:

            async def freed(salt: str, left: float) -> float:
                return await _until_released(admin, left, salt=salt)

            async with Load(way, freed, streams=self._streams, seed=seed, step=self._step) as load:
                await asyncio.sleep(seconds)
                found = Phase(
                    time.monotonic() - begin,
                    load.tally,
                    _difference(cpu_seconds(self.running), cpu),
                    self.main_thread() - main,
                    others.share(),
                    _difference(self.counters(), counters),
                )
                left = time.monotonic()
            found.all_left = await _until_released(admin, left)
        return found


async def _until_released(admin: kvcache_rpc.CacheAdminServiceAsyncStub, begin: float, **selected: str) -> float:
    async with asyncio.timeout(SILENT_SECONDS):
        while (await admin.ListSequences(kv.ListSequencesRequest(**selected), timeout=10)).sequences:
            await asyncio.sleep(POLL_SECONDS)
    return time.monotonic() - begin


def _difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


async def measure(stack: Stack, given: argparse.Namespace) -> Found:
    """Makes all measurements, one after the other."""
    bench, by_http = Bench(stack, given), Http(stack.http)
    # The first requests of a process also import and compile.
    await bench.leave(by_http, "first")
    await bench.fill()
    before = bench.watch.look()
    watching = asyncio.create_task(bench.watch.watch())
    http = await bench.phase(by_http, given.seconds, 1)
    watching.cancel()
    alone = [await bench.leave(by_http, f"alone-{number}") for number in range(ALONE_TIMES)]
    async with bench.grpc() as by_grpc:
        grpc_phase = await bench.phase(by_grpc, given.grpc_seconds, 2)
    report = await until_idle(stack.admin)
    return Found(
        http,
        grpc_phase,
        alone,
        before,
        bench.watch.look(),
        bench.watch.drift(),
        [str(violation) for violation in report.violations],
        sum(pool.used_blocks for pool in report.pools),
    )


def main() -> int:
    """Starts a stack, measures and judges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--grpc-seconds", type=float, default=60)
    parser.add_argument("--max-running", type=int, default=64, help="how many streams have blocks at a time")
    parser.add_argument("--max-waiting", type=int, default=192, help="beyond it requests are refused with 429")
    parser.add_argument("--frontends", type=int, default=0, help="KVKEEP_SCHEDULER_FRONTENDS")
    parser.add_argument("--dtype", default="auto", help="of weights and cache, as the executor's setting")
    parser.add_argument("--pool-tokens", type=int, default=16_384, help="few enough to be full after a minute")
    parser.add_argument("--step-ms", type=float, help="no model, but steps of this length: only kvkeep has work")
    add_json_argument(parser)
    given = parser.parse_args()
    stub = {} if given.step_ms is None else STUB_SETTINGS
    with Stack(
        modules=MODULES if given.step_ms is None else MODULES | {"executor": STUB},
        scheduler_http_address=free_address(),
        scheduler_frontends=given.frontends,
        scheduler_max_running=given.max_running,
        scheduler_max_waiting=given.max_waiting,
        executor_dtype=given.dtype,
        executor_max_tokens=given.pool_tokens,
        **stub,
    ) as stack:
        found = uvloop.run(measure(stack, given))
    show(found)
    figures = {
        "http": found.http.summary(),
        "grpc": found.grpc.summary(),
        "freed_after_leaving_alone_s": spread(found.alone),
        "files": {"before": found.before["files"], "after": found.after["files"]},
        "drift_mb": found.drift,
    }
    asked = {name: value for name, value in vars(given).items() if name != "json"}
    Result("http_load", figures, asked).write(given.json)
    faults = list(found.faults())
    print("\n" + "\n".join(faults or ["nothing but 429, no growth, no block left"]))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
