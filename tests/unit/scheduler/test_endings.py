"""However a request ends, its blocks are freed and other requests go on."""

import asyncio
import time

import grpc
import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from scheduler.core import loop
from scheduler.request import MAX_FAILURES
from tests.support.generation import generate, generate_samples
from tests.support.generation import greedy_request as request
from tests.support.patience import patience
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.real_manager import RealManager
from tests.support.scheduler.stack import Stack, StackFactory, prompt_of, refusal, run, waiting
from tests.support.scheduler.tokenizers import EOS, space_prefix_tokenizer


def salted(prompt: list[int], max_tokens: int, **fields: object) -> pb.StreamGenerateRequest:
    """A request of a tenant under a salt that has a quota."""
    asked = request(prompt, max_tokens, **fields)
    asked.cache.salt, asked.cache.tenant_id = "s", "t"
    return asked


async def test_a_client_that_disconnects_frees_everything(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(stack.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        await (
            rpc.GenerationServiceStub(channel).StreamGenerate(request(prompt_of(20), 300), timeout=patience(30)).read()
        )
    await stack.manager.unused()


async def test_cancelling_before_the_first_step_frees_everything(stack: Stack) -> None:
    stack.executor.gate.clear()
    calls = [
        stack.stub.StreamGenerate(request(prompt_of(20, seed=i), 5, n=i), timeout=patience(30)) for i in range(1, 6)
    ]
    await stack.manager.admitted(5)
    for call in calls:
        call.cancel()
    stack.executor.gate.set()
    await stack.manager.unused()
    assert stack.manager.forked_ids == []


async def test_cancelling_while_the_manager_answers_frees_everything(stack: Stack) -> None:
    stack.manager.gate.clear()
    call = stack.stub.StreamGenerate(request(prompt_of(20), 5), timeout=patience(30))
    await waiting(stack, 1)
    call.cancel()
    await waiting(stack, 0)
    stack.manager.gate.set()
    [output] = await run(stack, request(prompt_of(9), 3))
    assert output.token_ids == stack.executor.expected(prompt_of(9), 3)


async def test_a_deadline_that_passes_ends_the_request(stack: Stack) -> None:
    stack.executor.gate.clear()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stack.stub, request(prompt_of(20), 5), 0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    stack.executor.gate.set()
    await stack.manager.unused()


async def test_beyond_the_bound_of_the_queue_requests_are_refused_with_a_time_to_retry(
    run_stack: StackFactory,
) -> None:
    async with run_stack(max_running=1, max_waiting=2) as stack:
        stack.executor.gate.clear()
        tasks = [asyncio.create_task(run(stack, request([1], 2)))]
        await stack.manager.admitted(1)
        # The answer to it is on its way.
        await waiting(stack, 0)
        tasks += [asyncio.create_task(run(stack, request([i], 2))) for i in range(2, 4)]
        await waiting(stack, 2)
        error = await refusal(run(stack, request([9], 2)))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert error.retry_after
        stack.executor.gate.set()
        await asyncio.gather(*tasks)


async def test_all_samples_of_a_request_count_where_the_queue_is_bounded(run_stack: StackFactory) -> None:
    async with run_stack(max_running=4, max_waiting=4) as stack:
        # If nothing waits, more samples than the bound are taken.
        await generate_samples(stack.stub, request([7], 2, n=6))
        stack.executor.gate.clear()
        tasks = [asyncio.create_task(generate_samples(stack.stub, request([1], 2, n=3)))]
        await stack.manager.admitted(1)
        # Its first sample is on its way, and two more follow with its first token.
        await waiting(stack, 2)
        tasks.append(asyncio.create_task(generate_samples(stack.stub, request([2], 2))))
        await stack.manager.admitted(2)
        await waiting(stack, 2)
        error = await refusal(generate_samples(stack.stub, request([9], 2, n=3)))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        tasks.append(asyncio.create_task(generate_samples(stack.stub, request([9], 2, n=2))))
        await stack.manager.admitted(3)
        stack.executor.gate.set()
        await asyncio.gather(*tasks)
        await waiting(stack, 0)
        # Also those of a request that ended before its first token.
        stack.executor.gate.clear()
        leaving = asyncio.create_task(generate_samples(stack.stub, request([1], 2, n=4)))
        await stack.manager.admitted(1)
        await waiting(stack, 3)
        leaving.cancel()
        await waiting(stack, 0)
        stack.executor.gate.set()


async def test_a_request_that_waits_for_its_quota_is_passed_only_by_other_accounts(stack: Stack) -> None:
    executor = stack.executor
    stack.manager.bound("s", 6)
    running = stack.stub.StreamGenerate(salted([1] * 12, 300), timeout=patience(30))
    await running.read()
    executor.gate.clear()
    # The second one would fit beside the running one.
    first, second = salted([2] * 20, 2, request_id="first"), salted([3], 2, request_id="second")
    tasks = [asyncio.create_task(run(stack, first))]
    await waiting(stack, 1)
    tasks.append(asyncio.create_task(run(stack, second)))
    await waiting(stack, 2)
    # The tenant's other salts have free blocks.
    others = request(prompt_of(9), 3)
    others.cache.salt, others.cache.tenant_id = "other", "t"
    passing = [asyncio.create_task(run(stack, one)) for one in (others, request(prompt_of(9), 3))]
    await stack.manager.admitted(3)
    executor.gate.set()
    await asyncio.gather(*passing)
    assert not any(task.done() for task in tasks)
    running.cancel()
    await asyncio.gather(*tasks)
    names = [name.partition("#")[0] for name in stack.manager.admitted_ids]
    assert names[-2:] == ["first", "second"]


async def test_a_request_id_can_be_used_again_when_its_request_has_ended(stack: Stack) -> None:
    call = stack.stub.StreamGenerate(request([1], 300, request_id="same"), timeout=patience(30))
    await call.read()
    assert (await refusal(run(stack, request([2], 2, request_id="same")))).reason == "REQUEST_EXISTS"
    call.cancel()
    await stack.manager.unused()
    [output] = await run(stack, request([2], 2, request_id="same"))
    assert output.token_ids == stack.executor.expected([2], 2)


async def test_a_request_that_kills_the_executor_fails_alone(run_stack: StackFactory) -> None:
    async with run_stack(max_batched_tokens=64) as stack:
        prompts = [prompt_of(15, seed=seed) for seed in range(6)]
        executor = stack.executor
        unknown = set(range(executor.vocab_size)) - {EOS}
        for prompt in prompts:
            unknown -= {*prompt, *executor.expected(prompt, 40)}
        executor.chokes_on = min(unknown)
        good = [asyncio.create_task(generate(stack.stub, request(prompt, 40), patience(60))) for prompt in prompts[:3]]
        bad = asyncio.create_task(run(stack, request([executor.chokes_on] * 20, 5)))
        good += [asyncio.create_task(generate(stack.stub, request(prompt, 40), patience(60))) for prompt in prompts[3:]]
        error = await refusal(bad)
        assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "EXECUTOR_FAILS")
        for prompt, task in zip(prompts, good, strict=True):
            assert (await task).token_ids == executor.expected(prompt, 40)
        # Twice it failed in company and once alone, and one more session served the others to their end.
        assert executor.sessions <= 4


async def test_sessions_that_bring_nothing_are_opened_again_more_and_more_seldom(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "RECONNECT_SECONDS", 0.02)
    stack.executor.chokes_on = 1
    begun = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError):
        await run(stack, request([1] * 20, 5))
    # The second session is opened at once after the first, the next session after four times the pause.
    assert time.monotonic() - begun > 4 * loop.RECONNECT_SECONDS
    assert len(stack.manager.admitted_ids) == MAX_FAILURES
    # After the last of these sessions there is one without the request, now or later.
    assert stack.executor.sessions in (MAX_FAILURES, MAX_FAILURES + 1)


CHANGES: dict[str, tuple[object, str]] = {
    "max_tokens": (80, "pools for 80 tokens instead of 400"),
    "block_size": (8, "another block size"),
    "vocab_size": (9, "another model, tokenizer"),
    "tokenizer_json": (space_prefix_tokenizer().to_str().encode(), "another model, tokenizer"),
    "chat_template": ("{{ messages[0].content }}", "another model, tokenizer"),
    "eos_token_ids": ([1], "another model, tokenizer"),
    "window": (16, "other attention windows"),
    "plain_rotary": (True, "other rotary embeddings"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_changed_executor_ends_the_scheduler(
    run_stack: StackFactory, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while nothing is asked of it: prompts must not be tokenized for a model that was replaced."""
    async with run_stack() as stack:
        await run(stack, request([1, 2], 2))
        value, words = CHANGES[change]
        setattr(stack.executor, change, value)
        stack.executor.restart()
        await asyncio.wait_for(stack.scheduler.failed.wait(), patience(20))
    said = capsys.readouterr().out
    assert "the executor was replaced" in said
    assert words in said
    assert "Traceback" not in said


async def test_requests_of_a_changed_executor_may_be_retried(stack: Stack) -> None:
    running = asyncio.create_task(generate(stack.stub, request([1, 2], 300), patience(30)))
    # From now on the step loop has the sequence, and releases it.
    await stack.executor.stepped(1)
    stack.executor.chat_template = "another"
    stack.executor.restart()
    error = await refusal(running)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "EXECUTOR_REPLACED")


async def test_an_executor_replaced_during_the_start_is_noticed(
    run_stack: StackFactory,
) -> None:
    executor = FakeExecutor()
    executor.restarts_when_described = True
    async with run_stack(executor=executor) as stack:
        await asyncio.wait_for(stack.scheduler.failed.wait(), patience(20))


async def test_an_idle_executor_that_starts_again_is_met_before_a_request_comes(stack: Stack) -> None:
    await run(stack, request([1, 2], 2))
    stack.executor.restart()
    async with asyncio.timeout(patience(20)):
        while stack.executor.sessions < 2:
            await asyncio.sleep(0.01)
    [output] = await run(stack, request([3, 4], 5))
    assert output.token_ids == stack.executor.expected([3, 4], 5)
    assert stack.executor.sessions == 2


async def test_a_scheduler_of_the_same_name_ends_the_earlier_process(
    run_stack: StackFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    async with run_stack() as stack:
        stack.manager.register_scheduler("test", 1 << 63)
        asking = asyncio.create_task(generate(stack.stub, request([1, 2], 2), patience(30)))
        await asyncio.wait_for(stack.scheduler.failed.wait(), patience(20))
        asking.cancel()
    said = capsys.readouterr().out
    assert "another scheduler registered under this name" in said
    assert "Traceback" not in said


async def test_a_scheduler_whose_clock_went_back_replaces_the_earlier_process(run_stack: StackFactory) -> None:
    executor = FakeExecutor()
    manager = RealManager(executor)
    executor.scheduler_epoch = (1 << 62) - 5
    manager.register_scheduler("test", 1 << 62)
    async with run_stack(executor=executor, manager=manager) as stack:
        assert len((await generate(stack.stub, request([1, 2], 3), patience(30))).token_ids) == 3
        assert not stack.scheduler.failed.is_set()


async def test_a_scheduler_that_is_never_registered_fails_instead_of_waiting(run_stack: StackFactory) -> None:
    executor = FakeExecutor()
    manager = RealManager(executor)
    manager.refuses_schedulers = True
    async with asyncio.timeout(patience(20)):
        async with run_stack(executor=executor, manager=manager) as stack:
            assert stack.scheduler.failed.is_set()
            assert stack.scheduler.service.obstacle


async def test_a_registration_that_fails_in_the_cache_manager_is_repeated(run_stack: StackFactory) -> None:
    executor = FakeExecutor()
    manager = RealManager(executor)
    manager.failing_registrations = 2
    async with run_stack(executor=executor, manager=manager) as stack:
        assert not stack.scheduler.failed.is_set()
        assert manager.failing_registrations == 0
        assert len((await generate(stack.stub, request([1, 2], 3), patience(30))).token_ids) == 3
