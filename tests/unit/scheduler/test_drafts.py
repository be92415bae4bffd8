"""Drafts at the scheduler: lengths are upper bounds while they are in flight, and exact once they are answered."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.generation.v1 import generation_pb2 as pb
from scheduler.core.planner import plan_step
from scheduler.core.prefill_budget import PrefillBudget
from scheduler.core.step_message import build_step
from scheduler.errors import ExecutorLostError
from scheduler.sequence import Sequence
from tests.support.generation import generate_samples
from tests.support.generation import greedy_request as request
from tests.support.patience import patience
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.sequences import Pipeline, answer, batch_of, depths, result_of, sequence, traffic, updates
from tests.support.scheduler.stack import Stack, StackFactory, prompt_of, run


def drafting(executor: FakeExecutor, seed: int = 1, most: int = 9) -> None:
    """Sequences want any number of drafts, and any number of the allowed drafts is accepted."""
    luck = random.Random(seed)
    executor.wanted_drafts = lambda: luck.randint(0, most)
    executor.accepted_drafts = lambda allowed: luck.randint(0, allowed)


@given(traffic(longest=40), st.integers(1, 64), depths, st.randoms(use_true_random=False))
def test_lengths_are_bounds_in_flight_and_exact_when_answered(
    sequences: list[Sequence], budget: int, depth: int, luck: random.Random
) -> None:
    batch = batch_of(*sequences)
    pipeline = Pipeline(batch, depth)
    while len(batch):
        plan = plan_step(batch.ranked, budget)
        assert plan.num_tokens <= budget
        assert not plan.out_of_blocks
        step = pipeline.turn(plan)
        assert step or plan.compute, "nothing to run though sequences are live"
        if step:
            result = result_of(step, accept=lambda allowed: luck.randint(0, allowed))
            wanted = {handle: luck.randint(1, 9) for handle in result.sequences if luck.random() < 0.7}
            result.draft_sequences.extend(wanted.keys())
            result.draft_tokens.extend(wanted.values())
            batch.apply_result(step, result)
        for item in batch.ranked:
            assert item.computed <= item.planned <= item.capacity
            assert item.computed < len(item.token_ids) or item.computed < len(item.request.prompt_ids)
            assert len(item.token_ids) <= item.known <= item.limit
            left = [ends for step in pipeline.in_flight for other, _, ends in step.compute if other is item]
            if not left:
                assert item.planned == item.computed
                assert item.known == len(item.token_ids)
            if item.known == item.limit:
                # Only what is really known keeps a sequence from another step.
                assert item.known == len(item.token_ids) + sum(left)
    tokens, update = updates(batch)
    assert sorted(update.released) == sorted(item.handle for item in sequences)
    assert all(len(item.token_ids) == item.limit for item in sequences)
    assert len(tokens.outputs) == sum(item.request.max_tokens for item in sequences)
    assert tokens.accepted <= tokens.drafted


def decoding(drafts: int, **fields: int) -> Sequence:
    """A sequence that has sampled its first token and wants N = `drafts` drafts."""
    item = sequence(1, 8, **fields)
    answer(batch_of(item), build_step(1, plan_step([item], 64), [])[1])
    item.drafts = drafts
    return item


def test_drafts_leave_slots_and_tokens_to_the_steps_behind() -> None:
    for max_tokens, blocks, expected in ((50, 20, 9), (50, 5, 8), (50, 4, 4), (50, 3, 0), (12, 20, 7), (5, 20, 0)):
        item = decoding(9, max_tokens=max_tokens, blocks=blocks)
        plan = plan_step([item], 64)
        assert sum(count for _, count in plan.drafts) == expected
        assert plan.decodes == [item]


def test_there_are_no_drafts_while_a_prompt_waits() -> None:
    item, prompt = decoding(9, max_tokens=50, blocks=20), sequence(2, 30)
    plan = plan_step([item, prompt], 64)
    assert (plan.num_tokens, plan.drafts) == (31, [])


async def test_steps_with_drafts_do_not_count_as_decodes(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    drafting(stack.executor)
    stack.executor.token_seconds = 0.001
    observe, times = PrefillBudget.observe, list[float]()

    def and_note_it(self: PrefillBudget, decodes: int, prompt_tokens: int, seconds: float) -> None:
        times.append(seconds)
        observe(self, decodes, prompt_tokens, seconds)

    monkeypatch.setattr(PrefillBudget, "observe", and_note_it)
    await run(stack, request(prompt_of(5), 60))
    assert stack.metric("draft_tokens_total") > 0
    assert len(times) > 2
    assert times == [0.005, *[0.001] * (len(times) - 1)]


def test_no_drafts_while_blocks_are_missing() -> None:
    item = decoding(9, max_tokens=50, blocks=20)
    batch = batch_of(item)
    batch.missing_blocks = 1
    assert batch.plan(64).drafts == []


@pytest.mark.parametrize("sequences", [[1, 1, 1, 1], [1, 1, 2], []], ids=["too many", "another", "none"])
def test_an_answer_with_other_tokens_than_allowed_loses_the_executor(sequences: list[int]) -> None:
    item = decoding(2, max_tokens=50, blocks=20)
    batch = batch_of(item)
    _, step = build_step(2, batch.plan(64), [])
    result = result_of(step)
    del result.sequences[:], result.token_ids[:], result.stopped[:]
    result.sequences.extend(sequences)
    result.token_ids.extend([1] * len(sequences))
    result.stopped.extend([False] * len(sequences))
    with pytest.raises(ExecutorLostError):
        batch.apply_result(step, result)


async def test_output_and_usage_are_those_without_drafts(stack: Stack) -> None:
    drafting(stack.executor)
    prompts = [prompt_of(5 + seed, seed) for seed in range(12)]
    outputs = await run(stack, *[request(prompt, 1 + 5 * seed) for seed, prompt in enumerate(prompts)])
    for seed, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert output.token_ids == stack.executor.expected(prompt, 1 + 5 * seed)
        assert output.usage.output_tokens == 1 + 5 * seed
        assert output.finish_reason == pb.FINISH_REASON_LENGTH
    assert 0 < stack.metric("accepted_draft_tokens_total") < stack.metric("draft_tokens_total")
    assert stack.metric("output_tokens_total") == sum(1 + 5 * seed for seed in range(12))


async def test_stop_strings_and_samples_end_where_they_would_without_drafts(stack: Stack) -> None:
    [whole] = await run(stack, request(prompt_of(30), 60))
    drafting(stack.executor)
    stop = whole.text[20:23]
    [cut] = await run(stack, request(prompt_of(30), 60, stop=[stop]))
    assert cut.text == whole.text[: whole.text.index(stop)]
    samples = await generate_samples(stack.stub, request(prompt_of(30), 60, n=3), patience(30))
    assert [output.token_ids for output in samples] == [whole.token_ids] * 3


async def test_where_blocks_are_few_sequences_are_preempted_and_go_on_the_same(run_stack: StackFactory) -> None:
    for seed in range(3):
        async with run_stack(executor=FakeExecutor(max_tokens=160)) as stack:
            drafting(stack.executor, seed)
            prompts = [prompt_of(20, seed=i) for i in range(6)]
            outputs = await run(stack, *[request(prompt, 60) for prompt in prompts])
            for prompt, output in zip(prompts, outputs, strict=True):
                assert output.token_ids == stack.executor.expected(prompt, 60)
            assert sum(output.usage.preemptions for output in outputs)


async def test_the_executor_may_start_again_and_callers_may_leave(stack: Stack) -> None:
    drafting(stack.executor)
    prompts = [prompt_of(15, seed=i) for i in range(6)]
    running = asyncio.create_task(run(stack, *[request(prompt, 80) for prompt in prompts]))
    leaving = stack.stub.StreamGenerate(request(prompt_of(9, seed=99), 200), timeout=patience(30))
    await stack.executor.stepped(12)
    leaving.cancel()
    await stack.executor.stepped(20)
    stack.executor.break_session()
    for prompt, output in zip(prompts, await running, strict=True):
        assert output.token_ids == stack.executor.expected(prompt, 80)


async def test_log_probabilities_come_with_every_token(stack: Stack) -> None:
    drafting(stack.executor)
    message = request(prompt_of(20), 50)
    message.sampling.num_logprobs = 2
    count = 0
    async for chunk in stack.stub.StreamGenerate(message, timeout=patience(30)):
        assert len(chunk.logprobs) == len(chunk.token_ids)
        count += len(chunk.logprobs)
    assert count == 50


async def test_computed_tokens_are_found_by_the_next_request(stack: Stack) -> None:
    drafting(stack.executor)
    [output] = await run(stack, request(prompt_of(20), 40))
    [again] = await run(stack, request([*prompt_of(20), *output.token_ids], 5))
    assert again.usage.cached_tokens == 59
    assert again.token_ids == stack.executor.expected([*prompt_of(20), *output.token_ids], 5)


async def test_what_is_cached_behind_a_prompt_goes_to_an_executor_that_drafts(run_stack: StackFactory) -> None:
    executor, prompt = FakeExecutor(), prompt_of(20)
    executor.drafts = True
    async with run_stack(executor=executor) as stack:
        [output] = await run(stack, request(prompt, 30))
        # The last token was sampled and not computed.
        await run(stack, request(prompt, 40), request(prompt, 9))
        await run(stack, request(prompt, 9, reuse=False), request(prompt_of(20, seed=2), 9))
        known = output.token_ids[:29]
        assert sorted(executor.continuations, key=len) == [[], [], [], known[:9], known]


async def test_other_executors_get_no_continuation(stack: Stack) -> None:
    for _ in range(2):
        await run(stack, request(prompt_of(20), 30))
    assert stack.executor.continuations == [[], []]
