"""Log-probabilities of prompts: they come once, in order, with the first output, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from tests.support.patience import patience
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.fleet import run_fleet
from tests.support.scheduler.stack import Stack, StackFactory, prompt_of


def scored(prompt: list[int], count: int = 2, **fields: object) -> pb.StreamGenerateRequest:
    return pb.StreamGenerateRequest(
        token_ids=pb.TokenIds(token_ids=prompt),
        max_tokens=30,
        ignore_eos=True,
        sampling=pb.SamplingParams(num_prompt_logprobs=count),
        **fields,  # type: ignore[arg-type]
    )


async def check(stub: rpc.GenerationServiceAsyncStub, prompt: list[int], **fields: object) -> int:
    """Asks, and holds the answer against the prompt; returns how often the request was preempted."""
    messages = [message async for message in stub.StreamGenerate(scored(prompt, **fields), timeout=patience(30))]
    first = next(message for message in messages if not message.sample_index)
    assert [one.logprob for one in first.prompt_logprobs] == [-float(token) for token in prompt[1:]]
    assert [one.rank for one in first.prompt_logprobs] == list(range(1, len(prompt)))
    assert all([top.token_id for top in one.top] == [0, 1] for one in first.prompt_logprobs)
    assert not any(other.prompt_logprobs for other in messages if other is not first)
    usages = [message.usage for message in messages if message.finish_reason]
    assert sum(usage.cached_tokens for usage in usages) == 0
    return sum(usage.preemptions for usage in usages)


async def test_a_prompt_is_scored_whole_also_when_it_is_cached(stack: Stack) -> None:
    for _ in range(2):
        await check(stack.stub, prompt_of(150))
    await check(stack.stub, prompt_of(9), n=3)
    await check(stack.stub, [5])
    # The blocks are there for other requests.
    plain = pb.StreamGenerateRequest(token_ids=pb.TokenIds(token_ids=prompt_of(150)), max_tokens=1)
    [message] = [message async for message in stack.stub.StreamGenerate(plain, timeout=patience(30))]
    assert message.usage.cached_tokens > 100
    assert not message.prompt_logprobs


async def test_a_scored_prompt_is_computed_in_small_chunks(stack: Stack) -> None:
    await check(stack.stub, prompt_of(300))
    assert max(step.tokens for step in stack.executor.steps) <= 128


async def test_a_preempted_prompt_is_scored_once(run_stack: StackFactory) -> None:
    async with run_stack(executor=FakeExecutor(max_tokens=160)) as stack:
        prompts = [prompt_of(40, seed=i) for i in range(5)]
        assert sum(await asyncio.gather(*[check(stack.stub, prompt) for prompt in prompts]))


async def test_a_router_passes_the_scores_on(tmp_path: Path) -> None:
    async with run_fleet(tmp_path) as fleet:
        await check(fleet.stub, prompt_of(60))
