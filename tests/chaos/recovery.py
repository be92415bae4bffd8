"""How soon requests that need the disturbed process of a fleet succeed again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc

from bench.result import spread
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from tests.chaos.measuring import CALL_SECONDS, Manager
from tests.chaos.stage import ENGINES, REDIS, ROUTERS, SHARDS, Stage, admin_of, engines_of
from tests.stack import metrics
from tests.support.generation import Output, generate, greedy_request
from tests.support.patience import patience

# The time after which everything that needs the disturbed process must succeed.
RECOVERY_SECONDS = patience(60)
# The time limit of one request, after which another request tries; the report has the cost of a lost request.
PROBE_SECONDS = patience(1.25)
# Seconds between two requests.
LOOK_SECONDS = 0.1
# Tokens of a prompt: some blocks.
PROMPT, OUTPUT = 64, 2
# Number of prompts that each router must find before its view counts as complete, and their length: long enough to
# outweigh an engine's other work.
VIEWED, VIEWED_PROMPT = 2, 640
# Time until computed prompts are in the views.
EVENT_SECONDS = 0.3
_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 100), ("grpc.enable_retries", 0)]


@dataclass(frozen=True)
class Recovery:
    """After a disturbance of a role: seconds from its end, or from a kill, until requests that need it succeed."""

    role: str
    disturbance: str
    seconds: float


def summary(recoveries: Sequence[Recovery]) -> list[dict[str, Any]]:
    """The spread of seconds by role and disturbance."""
    found: dict[tuple[str, str], list[float]] = {}
    for one in recoveries:
        found.setdefault((one.role, one.disturbance), []).append(one.seconds)
    return [
        {"role": role, "disturbance": disturbance, **spread(seconds)}
        for (role, disturbance), seconds in sorted(found.items())
    ]


class Prober:
    """Asks each part of a fleet separately. Use it in an async with statement.

    expected: the output of a prompt, if it is known. `faults` takes wrong answers.
    """

    def __init__(self, stage: Stage, seed: int, expected: Callable[[list[int], int], list[int]] | None) -> None:
        self.faults: list[str] = []
        self._stage = stage
        self.managers = [Manager(admin_of(stage.stack, shard)) for shard in range(SHARDS)]
        self._rng = random.Random(f"probes {seed}")
        self._expected = expected
        self._channels = {
            name: grpc.aio.insecure_channel(str(stage.stack.address(name)), options=_OPTIONS)
            for name in (
                *(f"scheduler-{engine}" for engine in range(ENGINES)),
                *(f"router-{router}" for router in range(ROUTERS)),
            )
        }

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels.values():
            await channel.close()
        for manager in self.managers:
            await manager.__aexit__()

    async def recovered(self, target: str) -> bool:
        """Waits until requests that need a process or a way between two processes succeed; whether they do in time."""
        deadline = time.monotonic() + RECOVERY_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(grpc.aio.AioRpcError, OSError):
                if await self._succeeds(target):
                    return True
            await asyncio.sleep(LOOK_SECONDS)
        return False

    async def _succeeds(self, target: str) -> bool:
        """One try. Raises AioRpcError, and OSError for metrics that are not served."""
        if target == REDIS:
            return all([await self._is_stored(shard) for shard in range(SHARDS)])
        if " events of " in target:
            return await self._is_viewed(_number(target))
        role = target.partition("-")[0]
        if role == "router":
            await self.ask(target.partition(" ")[0], self.prompt())
        if " to engine-" in target:
            return await self._is_ready(target.partition(" ")[0], _number(target))
        if role in ("scheduler", "executor", "engine"):
            engine = int(target.partition("-")[2].partition(" ")[0])
            await self.ask(f"scheduler-{engine}", self.prompt())
            return all([await self._is_ready(f"router-{router}", engine) for router in range(ROUTERS)])
        if role == "cachemgr":
            for engine in engines_of(_number(target)):
                await self.ask(f"scheduler-{engine}", self.prompt())
        return True

    def prompt(self, length: int = PROMPT) -> list[int]:
        """A prompt that has never been sent."""
        return [self._rng.randrange(1, 300) for _ in range(length)]

    def stub(self, name: str) -> rpc.GenerationServiceAsyncStub:
        """The stub of a scheduler or a router."""
        found: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(self._channels[name])
        return found

    async def ask(self, name: str, prompt: list[int]) -> Output:
        """One request. Raises AioRpcError."""
        output = await generate(self.stub(name), greedy_request(prompt, OUTPUT), PROBE_SECONDS)
        if self._expected is not None and output.token_ids != self._expected(prompt, OUTPUT):
            self.faults.append(f"{name} answers a prompt of {len(prompt)} random tokens with wrong ones")
        return output

    async def engines(self, router: str) -> dict[str, pb.RoutedEngine]:
        """A router's engines by executor. Raises AioRpcError."""
        stub: rpc.RouterServiceAsyncStub = rpc.RouterServiceStub(self._channels[router])
        answer = await stub.ListEngines(pb.ListEnginesRequest(), timeout=CALL_SECONDS)
        return {engine.executor_id: engine for engine in answer.engines}

    async def _is_ready(self, router: str, engine: int) -> bool:
        found = (await self.engines(router)).get(f"executor-{engine}")
        return found is not None and found.ready

    async def _is_stored(self, shard: int) -> bool:
        """Whether Redis agrees with the shard's index: no change is pending, and the rest is equal."""
        address = self._stage.metrics[f"cachemgr-{shard}"]
        said = {name: value for name, _, value in await asyncio.to_thread(lambda: list(metrics(address)))}
        if not said["kvkeep_redis_up"] or said["kvkeep_redis_pending_blocks"]:
            return False
        request = kv.CheckPoolRequest(compare_with_store=True)
        report = await self.managers[shard].admin.CheckPool(request, timeout=CALL_SECONDS)
        return report.store_compared and not report.violations

    async def _is_viewed(self, shard: int) -> bool:
        """Whether both routers send new prompts to the engine of the shard that has just computed them."""
        prompts = [(f"router-{router}", self.prompt(VIEWED_PROMPT)) for router in range(ROUTERS) for _ in range(VIEWED)]
        engine = f"scheduler-{self._rng.choice(engines_of(shard))}"
        await asyncio.gather(*(self.ask(engine, prompt) for _, prompt in prompts))
        await asyncio.sleep(EVENT_SECONDS)
        outputs = await asyncio.gather(*(self.ask(router, prompt) for router, prompt in prompts))
        return all(output.usage.cached_tokens for output in outputs)


def _number(target: str) -> int:
    return int(target.rpartition("-")[2])
