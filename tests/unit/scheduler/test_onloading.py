"""Requests whose blocks come from lower tiers, between the cache manager itself and a fake executor."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence

import pytest
from google.protobuf.duration_pb2 import Duration

from protos.kvcache.v1 import kvcache_pb2
from scheduler.request import Tier
from tests.support.generation import Output, generate
from tests.support.generation import greedy_request as request
from tests.support.patience import patience
from tests.support.scheduler import real_manager
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.real_manager import RealManager
from tests.support.scheduler.stack import Stack, StackFactory, prompt_of

PROMPT = prompt_of(70)
# Prompts that evict all others from the device's 40 blocks.
FILLERS = [prompt_of(75, seed=seed) for seed in (11, 12)]


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor(max_tokens=160)


async def one(
    stack: Stack, prompt: Sequence[int], max_tokens: int = 3, onload_timeout: Duration | None = None, **fields: object
) -> Output:
    """Runs a request; its tokens are right."""
    message = request(list(prompt), max_tokens, **fields)
    if onload_timeout is not None:
        message.cache.onload_timeout.CopyFrom(onload_timeout)
    output = await generate(stack.stub, message, patience(30))
    assert output.token_ids == stack.executor.expected(prompt, max_tokens)
    return output


async def offload(stack: Stack, prompt: Sequence[int] = PROMPT) -> None:
    """Leaves a prompt's blocks in the host tier."""
    await one(stack, prompt)
    for filler in FILLERS:
        await one(stack, filler)
    await stack.manager.unused()


@contextlib.asynccontextmanager
async def offloaded(run_stack: StackFactory, executor: FakeExecutor, **settings: object) -> AsyncIterator[Stack]:
    """A stack with PROMPT's blocks in host memory."""
    async with run_stack(executor=executor, manager=RealManager(executor, host_blocks=60), **settings) as stack:
        await offload(stack)
        yield stack


@pytest.fixture
async def host_stack(run_stack: StackFactory, executor: FakeExecutor) -> AsyncIterator[Stack]:
    """A stack with PROMPT's blocks in host memory."""
    async with offloaded(run_stack, executor) as stack:
        yield stack


async def begin(stack: Stack, prompt: Sequence[int] = PROMPT, **fields: object) -> asyncio.Task[Output]:
    """Starts a request whose blocks do not come before `copying` is set."""
    stack.executor.copying.clear()
    task = asyncio.create_task(one(stack, prompt, **fields))
    await stack.manager.admitted(1)
    await stack.executor.stepped(len(stack.executor.steps) + 1)
    return task


async def test_blocks_in_host_memory_are_onloaded_and_counted_in_the_usage(host_stack: Stack) -> None:
    output = await one(host_stack, PROMPT)
    assert output.usage.cached_tokens >= 68
    assert output.usage.host_tokens >= 60
    assert output.usage.disk_tokens == 0
    assert host_stack.metric("onloaded_tokens_total", tier="host") == output.usage.host_tokens


async def test_blocks_on_disk_are_onloaded(run_stack: StackFactory, executor: FakeExecutor) -> None:
    async with run_stack(executor=executor, manager=RealManager(executor, host_blocks=24, disk_blocks=60)) as stack:
        await offload(stack)
        await one(stack, prompt_of(75, seed=13))
        await stack.manager.unused()
        output = await one(stack, PROMPT)
        assert output.usage.cached_tokens >= 68
        assert output.usage.disk_tokens > 40


async def test_other_sequences_run_while_blocks_are_onloaded(host_stack: Stack, executor: FakeExecutor) -> None:
    waiting = await begin(host_stack)
    await one(host_stack, prompt_of(20, seed=5), 20)
    assert not waiting.done()
    executor.copying.set()
    await waiting


async def test_nothing_else_to_do_the_loop_waits_with_the_executor_and_hears_its_mail(
    host_stack: Stack, executor: FakeExecutor
) -> None:
    waiting = await begin(host_stack)
    await executor.stepped(len(executor.steps) + 3)
    waiting.cancel()
    # It has ended before its copies have.
    await host_stack.manager.released()
    executor.copying.set()
    await host_stack.manager.unused()
    steps = len(executor.steps)
    await asyncio.sleep(0.1)  # subject: nothing is computed meanwhile
    assert len(executor.steps) <= steps + 1


async def test_a_sequence_whose_onloads_are_late_computes_its_blocks(host_stack: Stack, executor: FakeExecutor) -> None:
    output = await (await begin(host_stack, onload_timeout=Duration(nanos=50_000_000)))
    assert (output.usage.cached_tokens, output.usage.host_tokens) == (0, 0)
    tiers = [admission.lowest_tier for admission in host_stack.manager.admissions[-2:]]
    assert tiers == [kvcache_pb2.TIER_UNSPECIFIED, kvcache_pb2.TIER_DEVICE]
    assert host_stack.metric("onload_timeouts_total") == 1
    executor.copying.set()
    await one(host_stack, prompt_of(9))


async def test_the_usual_time_to_wait_is_a_setting(run_stack: StackFactory, executor: FakeExecutor) -> None:
    async with offloaded(run_stack, executor, onload_timeout_seconds=0.05) as stack:
        await (await begin(stack))
        assert stack.metric("onload_timeouts_total") == 1
        executor.copying.set()
        await one(stack, prompt_of(9))


async def test_a_block_that_does_not_come_is_computed(host_stack: Stack, executor: FakeExecutor) -> None:
    failed: list[int] = []
    executor.fails = lambda copy: len(executor.onloaded) > 4 and not failed and not failed.append(copy.ticket)
    output = await one(host_stack, PROMPT)
    assert len(failed) == 1
    assert output.usage.host_tokens == 0


async def test_a_sequence_that_shares_an_onloading_prompt_waits_too(host_stack: Stack, executor: FakeExecutor) -> None:
    executor.copying.clear()
    longer = [*PROMPT, *prompt_of(20, seed=6)]
    tasks = [asyncio.create_task(one(host_stack, prompt)) for prompt in (longer, longer[:-1])]
    await host_stack.manager.admitted(1)
    executor.copying.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("what", ["executor", "manager", "session"])
async def test_whatever_breaks_while_blocks_are_on_their_way_the_answer_comes(
    host_stack: Stack, executor: FakeExecutor, what: str
) -> None:
    manager = host_stack.manager
    waiting = await begin(host_stack)
    match what:
        case "executor":
            executor.restart()
            manager.register()
        case "manager":
            manager.restart()
        case "session":
            executor.break_session()
    await asyncio.sleep(0.05)
    executor.copying.set()
    await waiting


async def preempt(stack: Stack) -> list[Output]:
    """Runs two requests of which the first one needs all blocks at its end."""
    prompts = [prompt_of(70, seed=seed) for seed in (21, 22)]
    # The other resumes when this one ends; blocks that are still being offloaded then cannot be hit. One loop confirms
    # copies and runs steps, and a copy takes less time.
    stack.executor.step_seconds = 3 * real_manager.CONFIRM_SECONDS
    outputs = await asyncio.gather(*[one(stack, prompt, 90) for prompt in prompts])
    assert sum(output.usage.preemptions for output in outputs) > 0
    # That they found their own blocks again is no hit.
    assert not any(output.usage.cached_tokens for output in outputs)
    return outputs


@pytest.mark.parametrize("is_cheap", [True, False])
async def test_a_preempted_sequence_returns_by_copies_only_where_these_are_cheaper(
    run_stack: StackFactory, executor: FakeExecutor, is_cheap: bool
) -> None:
    executor.token_seconds, executor.host_block_seconds = 1e-3, 1e-4 if is_cheap else 0.1
    async with run_stack(executor=executor, manager=RealManager(executor, host_blocks=100)) as stack:
        await offload(stack)
        # What is not known is tried once.
        assert (await one(stack, PROMPT)).usage.host_tokens > 0
        outputs = await preempt(stack)
        assert (stack.metric("swaps_total") > 0) == is_cheap
        assert (stack.metric("recomputations_total") > 0) == (not is_cheap)
        assert (sum(output.usage.host_tokens for output in outputs) > 0) == is_cheap
        if not is_cheap:
            assert stack.manager.admissions[-1].lowest_tier == kvcache_pb2.TIER_DEVICE


async def test_random_traffic_over_all_tiers_is_right_and_leaves_nothing_behind(
    run_stack: StackFactory, executor: FakeExecutor
) -> None:
    rng = random.Random(4)
    manager = RealManager(executor, host_blocks=30, disk_blocks=30)
    executor.fails = lambda copy: rng.random() < (0.02 if copy.source_tier == Tier.HOST else 0.05)
    async with run_stack(
        executor=executor, manager=manager, max_running=8, max_batched_tokens=24, onload_timeout_seconds=0.05
    ) as stack:

        async def some(seed: int) -> None:
            prompt = prompt_of(20 + seed % 50, seed=seed % 9)
            if seed % 5 == 0:
                call = stack.stub.StreamGenerate(request(prompt, 60), timeout=patience(30))
                for _ in range(seed % 4):
                    await call.read()
                call.cancel()
                return
            await one(stack, prompt, 1 + seed % 40, priority=seed % 3)

        async def stutter() -> None:
            while True:
                await asyncio.sleep(rng.random() * 0.02)
                executor.copying.clear()
                await asyncio.sleep(rng.random() * 0.1)
                executor.copying.set()

        stuttering = asyncio.create_task(stutter())
        await asyncio.gather(*[some(seed) for seed in range(100)])
        stuttering.cancel()
        executor.copying.set()
        assert executor.onloaded
        await one(stack, prompt_of(30, seed=99))
