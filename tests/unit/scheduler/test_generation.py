"""A request's life between two fakes."""

import asyncio

import pytest

from protos.generation.v1 import generation_pb2 as pb
from scheduler.frontend import output
from tests.support.generation import generate
from tests.support.generation import greedy_request as request
from tests.support.patience import patience
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.stack import Stack, StackFactory, prompt_of, run, waiting


async def test_a_request_gets_the_models_tokens_and_its_usage(stack: Stack) -> None:
    prompt = prompt_of(30)
    [output] = await run(stack, request(prompt, 12))
    assert output.token_ids == stack.executor.expected(prompt, 12)
    whole = stack.executor.tokenizer.decode(prompt + output.token_ids)
    assert whole.endswith(output.text.lstrip("\N{REPLACEMENT CHARACTER}"))
    assert output.finish_reason == pb.FINISH_REASON_LENGTH
    assert (output.usage.prompt_tokens, output.usage.cached_tokens, output.usage.output_tokens) == (30, 0, 12)
    assert output.usage.queue_time.ToNanoseconds() > 0
    assert output.usage.time_to_first_token.ToNanoseconds() > output.usage.queue_time.ToNanoseconds()
    assert output.usage.total_time.ToNanoseconds() >= output.usage.time_to_first_token.ToNanoseconds()


async def test_text_that_was_held_back_for_a_stop_string_follows_when_the_output_ends(stack: Stack) -> None:
    [whole] = await run(stack, request(prompt_of(30), 12))
    [output] = await run(stack, request(prompt_of(30), 12, stop=[f"{whole.text[-1]}, which never comes"]))
    assert output.finish_reason == pb.FINISH_REASON_LENGTH
    assert output.text == whole.text


async def test_many_requests_at_once_share_steps_within_the_budget(run_stack: StackFactory) -> None:
    async with run_stack(max_batched_tokens=16) as stack:
        prompts = [prompt_of(5 + i % 7, seed=i) for i in range(20)]
        stack.executor.gate.clear()
        running = asyncio.create_task(run(stack, *[request(prompt, 8) for prompt in prompts]))
        await stack.manager.admitted(20)
        stack.executor.gate.set()
        outputs = await running
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == stack.executor.expected(prompt, 8)
        assert max(step.tokens for step in stack.executor.steps) <= 16
        assert max(len(step.sequences) for step in stack.executor.steps) > 4


async def test_a_prompt_seen_before_is_not_computed_again(stack: Stack) -> None:
    prompt = prompt_of(41)
    await run(stack, request(prompt, 2))
    [output] = await run(stack, request(prompt, 2))
    assert output.usage.cached_tokens == 40
    assert output.token_ids == stack.executor.expected(prompt, 2)


async def test_equal_prompts_at_once_are_computed_once(run_stack: StackFactory) -> None:
    async with run_stack(max_batched_tokens=16) as stack:
        prompt = prompt_of(80)
        messages = [request([*prompt, 1 + i], 3) for i in range(6)]
        outputs = await run(stack, *messages)
        for i, output in enumerate(outputs):
            assert output.token_ids == stack.executor.expected([*prompt, 1 + i], 3)
        assert sorted(output.usage.cached_tokens for output in outputs) == [0, 80, 80, 80, 80, 80]
        assert sum(step.tokens for step in stack.executor.steps) < 2 * len(prompt)


async def test_a_follower_whose_writer_is_cancelled_computes_the_prefix_itself(run_stack: StackFactory) -> None:
    async with run_stack(max_batched_tokens=8) as stack:
        stack.executor.gate.clear()
        prompt = prompt_of(80)
        writer = stack.stub.StreamGenerate(request(prompt, 3), timeout=patience(30))
        follower = asyncio.create_task(generate(stack.stub, request(prompt, 3), patience(30)))
        await stack.manager.admitted(2)
        writer.cancel()
        stack.executor.gate.set()
        assert (await follower).token_ids == stack.executor.expected(prompt, 3)


async def test_very_many_streams_get_several_tokens_in_a_message(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MESSAGE_SECONDS", 5.0)
    messages: list[list[list[int]]] = [[] for _ in range(5)]

    async def read(stack: Stack, at: int) -> None:
        call = stack.stub.StreamGenerate(request(prompt_of(9, seed=at), 60), timeout=patience(30))
        messages[at] = [list(answer.token_ids) async for answer in call]

    await asyncio.gather(*[read(stack, at) for at in range(5)])
    for at, parts in enumerate(messages):
        whole = [token for part in parts for token in part]
        assert whole == stack.executor.expected(prompt_of(9, seed=at), 60)
        assert 2 <= len(parts) < 60


async def test_a_request_that_waits_for_blocks_takes_no_turn(
    run_stack: StackFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MESSAGE_SECONDS", 0.02)
    async with run_stack(max_running=1) as stack:
        stack.executor.step_seconds = 0.005
        call = stack.stub.StreamGenerate(request(prompt_of(9), 100), timeout=patience(30))
        parts = [list((await anext(aiter(call))).token_ids)]
        others = [
            stack.stub.StreamGenerate(request(prompt_of(9, seed=seed), 3), timeout=patience(30)) for seed in range(40)
        ]
        await waiting(stack, len(others))
        while sum(map(len, parts)) < 100:
            parts.append(list((await anext(aiter(call))).token_ids))
        assert len(parts) > 5
        for other in others:
            other.cancel()


async def test_a_follower_whose_writer_leaves_during_the_admission_computes_the_prefix_itself(stack: Stack) -> None:
    stack.executor.gate.clear()
    stack.manager.gate.clear()
    first = asyncio.create_task(generate(stack.stub, request([1], 2), patience(30)))
    await stack.manager.asked(1)
    prompt = prompt_of(80)
    writer = stack.stub.StreamGenerate(request(prompt, 3), timeout=patience(30))
    await waiting(stack, 2)
    follower = asyncio.create_task(generate(stack.stub, request(prompt, 3), patience(30)))
    await waiting(stack, 3)
    stack.manager.gate.set()
    await stack.manager.admitted(1)
    stack.manager.gate.clear()
    await stack.manager.asked(2)
    writer.cancel()
    await waiting(stack, 1)
    stack.manager.gate.set()
    stack.executor.gate.set()
    assert (await follower).token_ids == stack.executor.expected(prompt, 3)
    await first


async def test_a_sequence_that_the_manager_voids_starts_again(stack: Stack) -> None:
    task = asyncio.create_task(generate(stack.stub, request(prompt_of(20), 50), patience(30)))
    await stack.manager.admitted(1)
    stack.manager.void_next = set(stack.manager.live)
    assert (await task).token_ids == stack.executor.expected(prompt_of(20), 50)
    assert len(stack.manager.admitted_ids) == 2


@pytest.mark.parametrize("reuse", [True, False])
async def test_preemption_does_not_change_the_output(run_stack: StackFactory, reuse: bool) -> None:
    executor = FakeExecutor(max_tokens=120)
    async with run_stack(executor=executor) as stack:
        prompts = [prompt_of(12, seed=i) for i in range(8)]
        outputs = await run(stack, *[request(prompt, 60, reuse=reuse) for prompt in prompts])
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == executor.expected(prompt, 60)
        assert sum(output.usage.preemptions for output in outputs) > 0
        assert min(output.usage.preemptions for output in outputs) == 0
        loads = await stack.stub.GetLoads(pb.GetLoadsRequest())
        assert loads.preemptions == sum(output.usage.preemptions for output in outputs)


async def test_a_request_may_have_the_whole_pool(run_stack: StackFactory) -> None:
    async with run_stack(executor=FakeExecutor(max_tokens=80)) as stack:
        [output] = await run(stack, pb.StreamGenerateRequest(token_ids=pb.TokenIds(token_ids=[5]), ignore_eos=True))
        assert output.usage.output_tokens == 79


async def test_a_higher_priority_is_admitted_first(run_stack: StackFactory) -> None:
    async with run_stack(max_running=1) as stack:
        stack.executor.gate.clear()
        first = asyncio.create_task(generate(stack.stub, request([1], 2, request_id="first"), patience(30)))
        await stack.manager.admitted(1)
        low = asyncio.create_task(generate(stack.stub, request([2], 2, request_id="low"), patience(30)))
        await waiting(stack, 1)
        high = asyncio.create_task(generate(stack.stub, request([3], 2, request_id="high", priority=1), patience(30)))
        await waiting(stack, 2)
        stack.executor.gate.set()
        await asyncio.gather(first, low, high)
        names = [admitted.partition("#")[0] for admitted in stack.manager.admitted_ids]
        assert names == ["first", "high", "low"]


async def test_every_token_has_its_log_probability(stack: Stack) -> None:
    message = request([4, 4], 5)
    message.sampling.num_logprobs = 3
    logprobs = [
        entry async for part in stack.stub.StreamGenerate(message, timeout=patience(30)) for entry in part.logprobs
    ]
    assert [len(entry.top) for entry in logprobs] == [3] * 5


async def test_a_conversation_is_rendered_with_the_models_template(stack: Stack) -> None:
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="the cat <b>")])
    asked = pb.StreamGenerateRequest(chat=chat, max_tokens=4, ignore_eos=True, sampling=pb.SamplingParams(seed=0))
    [output] = await run(stack, asked)
    prompt = stack.executor.tokenizer.encode("<user>the cat <b><eos>\n<assistant>", add_special_tokens=False).ids
    assert output.token_ids == stack.executor.expected(prompt, 4)
    tokenized = await stack.stub.TokenizePrompt(pb.TokenizePromptRequest(chat=chat), timeout=patience(5))
    assert list(tokenized.token_ids) == prompt


async def test_the_loop_never_waits_for_the_manager_while_there_is_capacity(run_stack: StackFactory) -> None:
    async with run_stack(executor=FakeExecutor(block_size=32)) as stack:
        running = asyncio.create_task(run(stack, *[request(prompt_of(10, seed=i), 20) for i in range(4)]))
        await stack.manager.admitted(4)
        stack.manager.gate.clear()
        await running
        stack.manager.gate.set()
        times = stack.scheduler.times
        assert times.steps == len(times.last) >= 20
        assert sum(timing.waiting_for_executor for timing in times.last) > 0
        assert sum(timing.planning for timing in times.last) > 0
        assert sum(timing.waiting_for_cachemgr for timing in times.last) == 0
