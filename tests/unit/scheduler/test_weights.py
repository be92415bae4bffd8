"""Other weights of the executor: an operator has them loaded, running requests go on, and they outlive the executor."""

import asyncio
import time

import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.errors import ServiceError
from protos.rpc.identity import Identity, PermissionDeniedError, Role, assume
from scheduler.core import executor_client
from scheduler.request import MAX_FAILURES
from tests.support.generation import generate, greedy_request
from tests.support.patience import patience
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.stack import Stack, StackFactory, prompt_of, run


async def update(stack: Stack, version: str, path: str) -> int:
    """Returns the blocks of other weights."""
    request = pb.UpdateWeightsRequest(weight_version=version, path=path)
    return (await stack.scheduler.service.admin.UpdateWeights(request)).other_blocks


def restart(stack: Stack) -> None:
    """The executor's process dies and starts again."""
    stack.executor.restart()
    stack.manager.register()


async def test_running_requests_go_on_with_other_weights(stack: Stack) -> None:
    stack.executor.step_seconds = 0.005
    prompt, begun = prompt_of(21), asyncio.Event()
    running = asyncio.create_task(generate(stack.stub, greedy_request(prompt, 60), patience(60), begun))
    await begun.wait()
    assert await update(stack, "v1", "step-1") == 7
    assert (await running).token_ids == stack.executor.expected(prompt, 60)
    assert (stack.executor.sessions, stack.executor.updates) == (2, ["v1"])


async def test_an_executor_that_starts_again_gets_the_weights_again(stack: Stack) -> None:
    await update(stack, "v1", "step-1")
    restart(stack)
    await run(stack, greedy_request(prompt_of(5), 3))
    assert (stack.executor.weights, stack.executor.updates) == (("v1", "step-1"), ["v1", "v1"])
    await update(stack, "", "")
    restart(stack)
    await run(stack, greedy_request(prompt_of(5), 3))
    assert stack.executor.updates == ["v1", "v1", ""]


async def test_a_scheduler_that_starts_again_knows_the_weights(run_stack: StackFactory) -> None:
    executor = FakeExecutor()
    executor.weights = "v1", "step-1"
    async with run_stack(executor) as stack:
        await run(stack, greedy_request(prompt_of(5), 3))
        assert executor.updates == []
        restart(stack)
        await run(stack, greedy_request(prompt_of(5), 3))
        assert executor.updates == ["v1"]


async def test_without_its_weights_an_executor_computes_nothing_until_an_operator_chooses_others(stack: Stack) -> None:
    await update(stack, "v1", "step-1")
    stack.executor.broken_weights.add("step-1")
    restart(stack)
    before = len(stack.executor.steps)
    running = asyncio.create_task(generate(stack.stub, greedy_request(prompt_of(5), 3), patience(60)))
    await asyncio.sleep(0.5)  # subject: nothing is computed meanwhile
    assert (running.done(), len(stack.executor.steps)) == (False, before)
    await update(stack, "", "")
    assert (await running).token_ids == stack.executor.expected(prompt_of(5), 3)


async def test_while_an_executor_reads_weights_it_computes_with_no_others_than_those_of_before(stack: Stack) -> None:
    await update(stack, "v1", "step-1")
    stack.executor.broken_weights.add("step-1")
    restart(stack)
    stack.executor.reads_weights.clear()
    updating = asyncio.create_task(update(stack, "v2", "step-2"))
    running = asyncio.create_task(generate(stack.stub, greedy_request(prompt_of(5), 3), patience(60)))
    async with asyncio.timeout(patience(20)):
        while "v2" not in stack.executor.reads:
            await asyncio.sleep(0.01)
    before = len(stack.executor.steps)
    await asyncio.sleep(0.7)  # subject: nothing is computed meanwhile
    assert (running.done(), len(stack.executor.steps)) == (False, before)
    stack.executor.reads_weights.set()
    await updating
    assert (await running).token_ids == stack.executor.expected(prompt_of(5), 3)


async def test_an_update_whose_operator_does_not_wait_is_not_taken_back(stack: Stack) -> None:
    stack.executor.reads_weights.clear()
    updating = asyncio.create_task(update(stack, "v1", "step-1"))
    async with asyncio.timeout(patience(20)):
        while not stack.executor.reads:
            await asyncio.sleep(0.01)
    updating.cancel()
    await asyncio.sleep(0)
    stack.executor.reads_weights.set()
    async with asyncio.timeout(patience(20)):
        while not stack.executor.updates:
            await asyncio.sleep(0.01)
    await run(stack, greedy_request(prompt_of(5), 3))
    assert (stack.executor.weights, stack.executor.updates) == (("v1", "step-1"), ["v1"])
    restart(stack)
    await run(stack, greedy_request(prompt_of(5), 3))
    assert stack.executor.updates == ["v1", "v1"]


async def test_weights_that_cannot_be_loaded_again_are_tried_less_and_less_often(stack: Stack) -> None:
    await update(stack, "v1", "step-1")
    stack.executor.broken_weights.add("step-1")
    before, begin = stack.executor.reads.count("v1"), time.monotonic()
    restart(stack)
    async with asyncio.timeout(patience(20)):
        while stack.executor.reads.count("v1") < before + 3:
            await asyncio.sleep(0.01)
    # After pauses of 0.5 and 1.5 seconds.
    assert time.monotonic() - begin > 4 * executor_client.FIRST_PAUSE_SECONDS


async def test_updates_are_no_failures_of_the_requests_that_they_interrupt(stack: Stack) -> None:
    stack.executor.gate.clear()
    running = asyncio.create_task(generate(stack.stub, greedy_request(prompt_of(21), 3), patience(60)))
    for number in range(MAX_FAILURES + 1):
        sessions = stack.executor.sessions
        async with asyncio.timeout(patience(20)):
            while not stack.scheduler.requests.num_running:
                await asyncio.sleep(0.01)
        # A step of it is in flight.
        await asyncio.sleep(0.05)
        await update(stack, f"v{number}", "step")
        async with asyncio.timeout(patience(20)):
            while stack.executor.sessions == sessions:
                await asyncio.sleep(0.01)
        assert stack.scheduler.requests.obstacle == ""
    stack.executor.gate.set()
    assert (await running).token_ids == stack.executor.expected(prompt_of(21), 3)


async def test_weights_that_cannot_be_loaded_change_nothing(stack: Stack) -> None:
    stack.executor.broken_weights.add("step-1")
    with pytest.raises(ServiceError) as caught:
        await update(stack, "v1", "step-1")
    assert list(caught.value.fields) == ["path"]
    restart(stack)
    await run(stack, greedy_request(prompt_of(5), 3))
    assert stack.executor.updates == []


async def test_an_operator_of_a_tenant_may_not(stack: Stack) -> None:
    assume(Identity("operator", Role.OPERATOR, "acme"))
    with pytest.raises(PermissionDeniedError):
        await update(stack, "v1", "step-1")
    assert stack.executor.updates == []
