"""Two engines behind one cache manager, which starts again while one engine's scheduler does not reach it.

The executors know what each of their slots holds, and say so where a sequence finds something else.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from protos.generation.v1 import generation_pb2_grpc as rpc
from tests.chaos.stage import STUB, STUB_STEP_SECONDS, Stage
from tests.chaos.stub_executor import FAULT
from tests.stack import FleetStack
from tests.support.generation import generate, greedy_request
from tests.support.patience import patience
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.stack import prompt_of

CACHED = prompt_of(100)
STREAMS = [prompt_of(30, seed) for seed in range(2, 6)]
TOKENS = 120
WAY = "scheduler-1 to cachemgr"
WAITING = "waiting for the executor's scheduler"


@asynccontextmanager
async def two_engines(lease_seconds: float) -> AsyncIterator[Stage]:
    """Without a router; the way of the second scheduler to the cache manager can be cut."""
    stack = FleetStack(engines=2, executor_max_tokens=4096, cachemgr_lease_seconds=lease_seconds)
    stack.modules = {
        name: STUB if name.startswith("executor") else module
        for name, module in stack.modules.items()
        if name != "router"
    }
    stage = Stage(stack, seed=1, tell=print)
    stack.own["scheduler-1"]["cachemgr_address"] = f"unix:{stage.link(WAY, stack.address('cachemgr-0'))}"
    for number in range(2):
        stack.own[f"executor-{number}"]["executor_stub_step_seconds"] = STUB_STEP_SECONDS
    async with stage:
        yield stage
    assert stage.failures == []


def log_of(stage: Stage, name: str) -> str:
    return stage.stack.log_path(name).read_text()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(patience(40)):
        while not condition():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("stays_away", [False, True], ids=["comes back in time", "stays away for longer than a lease"])
async def test_no_sequence_finds_what_a_scheduler_that_was_cut_off_had_written(stays_away: bool) -> None:
    async with two_engines(lease_seconds=2 if stays_away else 60) as stage:
        async with grpc.aio.insecure_channel(str(stage.stack.address("scheduler-1"))) as channel:
            stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
            await generate(stub, greedy_request(CACHED, 4))
            begun = [asyncio.Event() for _ in STREAMS]
            tasks = [
                asyncio.create_task(generate(stub, greedy_request(prompt, TOKENS), begun=event))
                for prompt, event in zip(STREAMS, begun, strict=True)
            ]
            await asyncio.gather(*(event.wait() for event in begun))
            stage.links[WAY].cut()
            await stage.restart("cachemgr-0", away=0.0)
            await until(lambda: WAITING in log_of(stage, "executor-1"))
            if stays_away:
                await until(lambda: log_of(stage, "executor-1").count("registered with the cache manager") == 2)
            stage.links[WAY].mend()
            outputs = [output.token_ids for output in await asyncio.gather(*tasks)]
            again = await generate(stub, greedy_request(CACHED, 4))
        engine = FakeExecutor()
        assert outputs == [engine.expected(prompt, TOKENS) for prompt in STREAMS]
        assert again.token_ids == engine.expected(CACHED, 4)
        assert again.usage.cached_tokens >= len(CACHED) // 2
        for number in range(2):
            assert FAULT not in log_of(stage, f"executor-{number}")
        # The executor ended the session only of the scheduler that stayed away, and the other engine waited for nobody.
        assert "executor lost" not in log_of(stage, "scheduler-0")
        assert ("executor lost" in log_of(stage, "scheduler-1")) is stays_away
