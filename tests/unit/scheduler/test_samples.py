"""Several samples of one prompt: computed once, shared by forks, each with a separate life."""

import asyncio

import pytest

from protos.generation.v1 import generation_pb2 as pb
from scheduler.frontend.validation import sample_seed
from tests.support.generation import generate_samples
from tests.support.generation import greedy_request as request
from tests.support.patience import patience
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.stack import Stack, StackFactory, prompt_of, waiting

LENGTH, STOP = pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP
SEED = 77
# Output tokens: no sample ends before the last one is forked.
LONG = 60


def drawn(prompt: list[int], max_tokens: int, n: int, **fields: object) -> pb.StreamGenerateRequest:
    """Samples with a seed."""
    sampling = pb.SamplingParams(temperature=1, seed=SEED)
    message = request(prompt, max_tokens, n=n, sampling=sampling)
    message.MergeFrom(pb.StreamGenerateRequest(**fields))  # type: ignore[arg-type]
    return message


def expected(stack: Stack, prompt: list[int], count: int, n: int) -> list[list[int]]:
    """What `drawn` must answer."""
    seeds = [SEED, *(sample_seed(SEED, index) for index in range(1, n))]
    return [stack.executor.expected(prompt, count, seed) for seed in seeds]


async def run(stack: Stack, message: pb.StreamGenerateRequest) -> list[list[int]]:
    """The tokens of each sample."""
    return [output.token_ids for output in await generate_samples(stack.stub, message, patience(30))]


@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("length", [1, 4, 5, 21, 24])
async def test_the_prompt_is_computed_once_and_each_sample_draws_its_own_first_token(
    stack: Stack, length: int, is_cached: bool
) -> None:
    prompt = prompt_of(length)
    cache = pb.CacheOptions(no_read=not is_cached, no_store=not is_cached)
    outputs = await run(stack, drawn(prompt, LONG, n=4, cache=cache))
    assert outputs == expected(stack, prompt, LONG, n=4)
    assert len({output[0] for output in outputs}) > 1
    assert len({tuple(output) for output in outputs}) == 4
    assert len(stack.manager.admitted_ids) == 1
    assert len(stack.manager.forked_ids) == 3
    # The last token of the prompt is computed by each.
    assert sum(step.tokens for step in stack.executor.steps) == length + 3 + 4 * (LONG - 1)
    assert await run(stack, drawn(prompt, LONG, n=4)) == outputs
    assert await run(stack, drawn(prompt, LONG, n=1)) == outputs[:1]


async def test_samples_share_only_the_prompts_full_blocks(stack: Stack) -> None:
    call = stack.stub.StreamGenerate(drawn(prompt_of(22), 300, n=3), timeout=patience(30))
    await call.read()
    await stack.manager.admitted(3)
    stack.executor.gate.clear()
    first, *others = [stack.manager.tables[name] for name in stack.manager.live]
    for other in others:
        assert other[:5] == first[:5]
    assert not set.intersection(*(set(slots[5:]) for slots in (first, *others)))
    call.cancel()
    stack.executor.gate.set()


async def test_greedy_samples_are_equal(stack: Stack) -> None:
    outputs = await run(stack, request(prompt_of(20), 9, n=3))
    assert outputs == [stack.executor.expected(prompt_of(20), 9)] * 3


async def test_each_sample_has_a_usage_and_the_first_counts_the_prompt(stack: Stack) -> None:
    await run(stack, drawn(prompt_of(21), 2, n=1))
    outputs = await generate_samples(stack.stub, drawn(prompt_of(21), 7, n=3), patience(30))
    assert [output.usage.prompt_tokens for output in outputs] == [21, 0, 0]
    assert [output.usage.cached_tokens for output in outputs] == [20, 0, 0]
    assert [output.usage.output_tokens for output in outputs] == [7, 7, 7]
    assert all(output.usage.time_to_first_token.ToNanoseconds() > 0 for output in outputs)
    assert all(output.finish_reason == LENGTH for output in outputs)


async def test_each_sample_ends_at_its_own_stop_id(stack: Stack) -> None:
    prompt = prompt_of(10)
    whole = expected(stack, prompt, 20, n=3)
    stop = next(token for token in whole[1] if token not in whole[0] + whole[2])
    outputs = await generate_samples(stack.stub, drawn(prompt, 20, n=3, stop_token_ids=[stop]), patience(30))
    ended = whole[1][: whole[1].index(stop) + 1]
    assert [output.token_ids for output in outputs] == [whole[0], ended, whole[2]]
    assert [output.finish_reason for output in outputs] == [LENGTH, STOP, LENGTH]
    # The stop id is no part of the text.
    decode = stack.executor.tokenizer.decode
    assert decode(prompt) + outputs[1].text == decode([*prompt, *ended[:-1]])


async def test_each_sample_ends_at_its_own_stop_text(stack: Stack) -> None:
    prompt = prompt_of(10)
    first, second = await generate_samples(stack.stub, drawn(prompt, 60, n=2), patience(30))
    stop = next(first.text[at : at + 3] for at in range(57) if first.text[at : at + 3] not in second.text)
    ended = await generate_samples(stack.stub, drawn(prompt, 60, n=2, stop=["never there", stop]), patience(30))
    assert [output.finish_reason for output in ended] == [STOP, LENGTH]
    assert ended[0].text == first.text[: first.text.index(stop)]
    assert ended[1].text == second.text
    assert len(ended[0].token_ids) == ended[0].usage.output_tokens < 60


async def test_an_ended_sample_holds_no_blocks_while_others_run(stack: Stack) -> None:
    prompt = prompt_of(10)
    whole = expected(stack, prompt, 300, n=2)
    at = next(at for at in range(LONG, 300) if whole[0][at] not in whole[1] + whole[0][:at])
    call = stack.stub.StreamGenerate(drawn(prompt, 300, n=2, stop_token_ids=[whole[0][at]]), timeout=patience(30))
    while not (part := await anext(aiter(call))).finish_reason:
        pass
    assert part.sample_index == 0
    async with asyncio.timeout(patience(20)):
        while [name.partition(".")[2] for name in stack.manager.live] != ["2.0"]:
            await asyncio.sleep(0.001)
    call.cancel()


async def test_samples_of_a_single_token_use_the_cache(stack: Stack) -> None:
    prompt = prompt_of(21)
    assert await run(stack, drawn(prompt, 1, n=4)) == expected(stack, prompt, 1, n=4)
    assert stack.manager.forked_ids == []
    assert sum(step.tokens for step in stack.executor.steps) == 21 + 3


@pytest.mark.parametrize(("no_read", "no_store"), [(False, False), (True, False), (False, True), (True, True)])
async def test_a_prompt_that_cannot_be_shared_now_is_admitted_again(
    stack: Stack, no_read: bool, no_store: bool
) -> None:
    stack.manager.failing_forks = 2
    prompt, cache = prompt_of(21), pb.CacheOptions(no_read=no_read, no_store=no_store)
    assert await run(stack, drawn(prompt, 40, n=4, cache=cache)) == expected(stack, prompt, 40, n=4)
    assert (len(stack.manager.admitted_ids), len(stack.manager.forked_ids)) == (3, 1)


async def test_samples_wait_for_blocks_and_preemption_does_not_change_them(run_stack: StackFactory) -> None:
    executor = FakeExecutor(max_tokens=120)
    async with run_stack(executor=executor) as stack:
        prompt = prompt_of(23)
        outputs = await generate_samples(stack.stub, drawn(prompt, 60, n=16), patience(30))
        assert [output.token_ids for output in outputs] == expected(stack, prompt, 60, n=16)
        assert sum(output.usage.preemptions for output in outputs) > 0
        assert stack.manager.refusals > 0
        assert any(name.endswith(".1") for name in stack.manager.admitted_ids)


async def test_a_prompt_that_waits_counts_once_for_all_its_samples(run_stack: StackFactory) -> None:
    async with run_stack(max_running=1) as stack:
        stack.executor.gate.clear()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run(stack, drawn(prompt_of(9), 6, n=1)))
            await stack.manager.admitted(1)
            before = (await stack.stub.GetLoads(pb.GetLoadsRequest())).queued_prompt_tokens
            tasks.create_task(run(stack, drawn(prompt_of(30), 6, n=4)))
            await waiting(stack, 4)
            queued = (await stack.stub.GetLoads(pb.GetLoadsRequest())).queued_prompt_tokens
            stack.executor.gate.set()
    assert queued - before == 30


async def test_more_samples_than_may_run_wait(run_stack: StackFactory) -> None:
    async with run_stack(max_running=2) as stack:
        prompt = prompt_of(9)
        assert await run(stack, drawn(prompt, 6, n=7)) == expected(stack, prompt, 6, n=7)


async def test_cancelling_frees_all_samples(stack: Stack) -> None:
    call = stack.stub.StreamGenerate(drawn(prompt_of(21), 300, n=5), timeout=patience(30))
    await call.read()
    await stack.manager.admitted(5)
    call.cancel()
    await stack.manager.unused()
    await waiting(stack, 0)


async def test_cancelling_while_a_fork_is_answered_frees_it_and_its_copy(stack: Stack) -> None:
    manager = stack.manager
    manager.forks_end.clear()
    call = stack.stub.StreamGenerate(drawn(prompt_of(22), 300, n=3), timeout=patience(30))
    await manager.until(lambda: manager.forked_ids)
    call.cancel()
    await waiting(stack, 0)
    manager.forks_end.set()
    await manager.unused()
    assert len(manager.forked_ids) == 1
    assert stack.executor.copied_tickets == []


async def test_the_loop_steps_on_while_a_fork_is_answered(stack: Stack) -> None:
    manager = stack.manager
    manager.forks_end.clear()
    running = asyncio.create_task(run(stack, drawn(prompt_of(21), 30, n=2)))
    await manager.until(lambda: manager.forked_ids)
    # As far as the capacity that the first sample has already.
    await stack.executor.stepped(len(stack.executor.steps) + 2)
    manager.forks_end.set()
    assert await running == expected(stack, prompt_of(21), 30, n=2)


async def test_a_manager_that_starts_again_costs_no_sample(stack: Stack) -> None:
    prompts = [prompt_of(15, seed=seed) for seed in range(3)]
    tasks = [asyncio.create_task(run(stack, drawn(prompt, 70, n=n))) for n, prompt in enumerate(prompts, 1)]
    await stack.manager.admitted(5)
    stack.manager.restart()
    for n, (task, prompt) in enumerate(zip(tasks, prompts, strict=True), 1):
        assert await task == expected(stack, prompt, 70, n=n)
    # The executor knows from whom the blocks of its steps are.
    assert stack.manager.epoch == stack.executor.manager_epoch == 2
    assert stack.executor.sessions == 1
    assert any(name.endswith(".1") for name in stack.manager.admitted_ids)


@pytest.mark.parametrize("forked", [1, 4])
async def test_an_executor_that_starts_again_costs_no_sample(stack: Stack, forked: int) -> None:
    task = asyncio.create_task(run(stack, drawn(prompt_of(15), 70, n=4)))
    await stack.manager.admitted(forked)
    stack.executor.restart()
    stack.manager.register()
    assert await task == expected(stack, prompt_of(15), 70, n=4)
    assert stack.executor.sessions == 2


async def test_random_traffic_with_samples_leaves_nothing_behind(run_stack: StackFactory) -> None:
    async with run_stack(executor=FakeExecutor(max_tokens=160), max_running=12, max_batched_tokens=24) as stack:

        async def one(seed: int) -> None:
            prompt, n = prompt_of(5 + seed % 30, seed=seed % 7), 1 + seed % 5
            message = drawn(prompt, 1 + seed % 40, n=n, priority=seed % 3)
            message.cache.no_read, message.cache.no_store = seed % 6 == 1, seed % 6 == 2
            if seed % 4 == 0:
                message.max_tokens = 90
                call = stack.stub.StreamGenerate(message, timeout=patience(30))
                for _ in range(seed % 19):
                    await call.read()
                call.cancel()
                return
            assert await run(stack, message) == expected(stack, prompt, 1 + seed % 40, n=n)

        await asyncio.gather(*[one(seed) for seed in range(60)])
        await stack.manager.unused()
        assert stack.manager.forked_ids
