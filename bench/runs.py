"""Runs a case through the real stack and keeps times of tokens, blocks, and CPU and memory of processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil

from bench.result import percentile
from bench.workloads import Case
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from tests.stack import MODULES, Stack, metrics
from tests.support.generation import generate_all, greedy_request

SAMPLE_SECONDS = 0.25
DEADLINE_SECONDS = 3600


class WrongCountError(Exception):
    """A request did not get exactly the tokens that it asked for."""


@dataclass(frozen=True)
class Times:
    """When the tokens of every request came, in seconds after the arrival of all requests."""

    token_times: Sequence[Sequence[float]]
    prompt_tokens: int

    @property
    def seconds(self) -> float:
        """From the arrival to the last token."""
        return max(times[-1] for times in self.token_times)

    @property
    def output_rate(self) -> float:
        """Output tokens per second."""
        return sum(map(len, self.token_times)) / self.seconds

    def gaps(self) -> list[float]:
        """Seconds between the tokens of a request, of all requests."""
        return [after - before for times in self.token_times for before, after in itertools.pairwise(times)]

    def summary(self) -> dict[str, float]:
        """The figures that are shown."""
        first = [times[0] for times in self.token_times]
        gaps = self.gaps()
        return {
            "seconds": self.seconds,
            "output_tokens_per_s": self.output_rate,
            "total_tokens_per_s": self.output_rate + self.prompt_tokens / self.seconds,
            "first_token_mean_s": statistics.mean(first),
            "first_token_p99_s": percentile(first, 0.99),
            "inter_token_mean_ms": statistics.mean(gaps) * 1e3,
            "inter_token_p50_ms": percentile(gaps, 0.5) * 1e3,
            "inter_token_p99_ms": percentile(gaps, 0.99) * 1e3,
        }


@dataclass
class Usage:
    """Resources of the stack during a case: CPU seconds and peak resident bytes by process, peak KV blocks."""

    # Use by other processes as a share of all cores: above a few percent the run says little.
    others: float = 0.0
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    resident_bytes: dict[str, int] = field(default_factory=dict)
    kv_blocks: int = 0
    total_blocks: int = 0
    # Time of the executor's steps by kind of work, if its compiled code measures it.
    kind_seconds: dict[str, float] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "others_cpu": round(self.others, 4),
            "kv_blocks": self.kv_blocks,
            "total_blocks": self.total_blocks,
            "cpu_s": {name: round(value, 3) for name, value in self.cpu_seconds.items()},
            "kind_s": {name: round(value, 4) for name, value in self.kind_seconds.items()},
            "resident_mb": {name: round(value / 1e6, 1) for name, value in self.resident_bytes.items()},
        }


def processes(stack: Stack) -> dict[str, psutil.Process]:
    """Every process of a stack, including Redis, and this process, the client."""
    found = {name: psutil.Process(stack.pid(name)) for name in MODULES}
    found["redis"] = psutil.Process(stack.pid("redis"))
    return {**found, "client": psutil.Process()}


class Others:
    """The share of all cores that processes other than `own` have taken since the creation."""

    def __init__(self, own: Iterable[psutil.Process]) -> None:
        self._own = list(own)
        self._begin = self._times()

    def share(self) -> float:
        """The share: 0 is nothing, 1 is all cores."""
        seconds, busy, own = (after - before for after, before in zip(self._times(), self._begin, strict=True))
        return max(0.0, busy - own) / max(seconds, 1e-9)

    def _times(self) -> tuple[float, float, float]:
        """Seconds of all cores together, busy seconds of all cores, and seconds of our own processes."""
        times = psutil.cpu_times()
        total, own = sum(times), sum(sum(process.cpu_times()[:2]) for process in self._own)
        return total, total - times.idle - times.iowait, own


@contextlib.asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work`, which has no end, until the with statement ends; raises an error that ended `work` earlier."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def watched(stack: Stack) -> AsyncIterator[Usage]:
    """Usage during the with statement; memory and blocks are sampled a few times a second."""
    usage, running = Usage(), processes(stack)
    async with grpc.aio.insecure_channel(stack.admin) as channel:
        admin: kvcache_rpc.CacheAdminServiceAsyncStub = kvcache_rpc.CacheAdminServiceStub(channel)

        async def look() -> None:
            for name, process in running.items():
                resident = process.memory_info().rss
                usage.resident_bytes[name] = max(resident, usage.resident_bytes.get(name, 0))
            pools = (await admin.ListPools(kv.ListPoolsRequest(), timeout=30)).pools
            usage.kv_blocks = max(usage.kv_blocks, sum(pool.used_blocks for pool in pools))
            usage.total_blocks = sum(pool.total_blocks for pool in pools)

        async def look_again() -> None:
            while True:
                await look()
                await asyncio.sleep(SAMPLE_SECONDS)

        before, kinds, others = cpu_seconds(running), kind_seconds(stack), Others(running.values())
        async with in_background(look_again()):
            yield usage
        usage.others = others.share()
        usage.cpu_seconds = {name: after - before[name] for name, after in cpu_seconds(running).items()}
        usage.kind_seconds = {name: after - kinds[name] for name, after in kind_seconds(stack).items()}
        await look()


def kind_seconds(stack: Stack) -> dict[str, float]:
    """Time of the executor's steps so far by kind of work; empty if the stack has no metrics of it."""
    if not stack.executor_metrics:
        return {}
    name = "kvkeep_executor_kind_seconds_total"
    found = [sample for sample in metrics(stack.executor_metrics) if sample[0] == name]
    return {labels.partition('"')[2].rstrip('"'): value for _, labels, value in found}


def cpu_seconds(running: Mapping[str, psutil.Process]) -> dict[str, float]:
    """User and system time so far."""
    return {name: sum(process.cpu_times()[:2]) for name, process in running.items()}


@dataclass(frozen=True)
class Run:
    """One run of a case."""

    times: Times
    usage: Usage
    outputs: list[list[int]]
    cached_tokens: int


async def run(stack: Stack, case: Case, prompts: Sequence[Sequence[int]], output_tokens: int | None = None) -> Run:
    """Sends all requests at once; raises WrongCountError unless each gets its exact number of tokens."""
    count = output_tokens or case.output_tokens
    requests = [greedy_request(prompt, count, reuse=case.reuse) for prompt in prompts]
    async with watched(stack) as usage:
        outputs = await generate_all(stack.scheduler, requests, concurrency=len(requests), seconds=DEADLINE_SECONDS)
    if wrong := [len(output.token_ids) for output in outputs if len(output.token_ids) != count]:
        raise WrongCountError(f"{case.name}: {len(wrong)} requests got another number of tokens than {count}: {wrong}")
    begin = min(output.started for output in outputs)
    return Run(
        Times([[time - begin for time in output.token_times] for output in outputs], sum(map(len, prompts))),
        usage,
        [output.token_ids for output in outputs],
        sum(output.usage.cached_tokens for output in outputs),
    )
