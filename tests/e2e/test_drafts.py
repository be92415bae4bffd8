"""Drafts on the real stack: whatever happens, output equals that of a stack without drafts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import grpc
import pytest

from executor.models.files import resolve
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.stack import Stack, metrics, model_cache
from tests.support.generation import Output, generate, generate_all, generate_samples, greedy_request
from tests.support.idle import until_idle
from tests.support.patience import patience
from tests.support.ports import free_address
from tests.support.tier_files import BLOCK_BYTES

pytestmark = pytest.mark.model

OUTPUT = 96
# Each token is computed alike in every batch, so that not even rounding differs.
SETTINGS = {"executor_batch_invariant": 1}
DRAFTS = {"executor_max_drafts": 10}
SAMPLINGS = {
    "greedy": pb.SamplingParams(temperature=0),
    "cold": pb.SamplingParams(temperature=0.4, seed=3),
    "penalties": pb.SamplingParams(
        temperature=0.9, top_k=40, top_p=0.95, min_p=0.02, repetition_penalty=1.05, frequency_penalty=0.1, seed=11
    ),
}


@pytest.fixture(scope="module")
def plain() -> Iterator[Stack]:
    """A stack without drafts."""
    with Stack(**SETTINGS) as stack:
        yield stack


@pytest.fixture(scope="module", params=["", "of a model"])
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with drafts, a host tier, and a pool that four requests do not fit into."""
    folder = tmp_path_factory.mktemp("tiers")
    # The draft model is the model itself: it is right wherever it has its keys and values.
    ahead = {"executor_draft_model": resolve("", model_cache())} if request.param else {}
    tier = {"executor_host_cache_size": 64 * BLOCK_BYTES, "executor_host_cache_dir": folder}
    pool = {"executor_max_tokens": 512, "executor_metrics_address": free_address()}
    with Stack(**SETTINGS, **DRAFTS, **ahead, **tier, **pool) as stack:
        yield stack


def prompt_of(seed: int, length: int = 36) -> list[int]:
    """Random ids twice over, and the first of them again: the model goes on with them, more or less."""
    rng = random.Random(seed)
    ids = [rng.randrange(1000, 40_000) for _ in range(length)]
    return [*ids, *ids, *ids[:8]]


def request_of(seed: int, sampling: str = "greedy", **fields: object) -> pb.StreamGenerateRequest:
    return greedy_request(prompt_of(seed), OUTPUT, sampling=SAMPLINGS[sampling], **fields)


def accepted(stack: Stack) -> float:
    """Drafts that the executor has accepted so far."""
    name = "kvkeep_executor_accepted_drafts_total"
    return sum(value for other, _, value in metrics(stack.executor_metrics) if other == name)


async def run(stack: Stack, *requests: pb.StreamGenerateRequest) -> list[Output]:
    """All at once."""
    return await generate_all(stack.scheduler, requests, concurrency=len(requests), seconds=patience(60))


async def samples(stack: Stack, request: pb.StreamGenerateRequest) -> list[Output]:
    """The samples of one request."""
    async with grpc.aio.insecure_channel(stack.scheduler) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        return await generate_samples(stub, request, patience(60))


def ids_of(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_output_is_the_same(plain: Stack, drafting: Stack, sampling: str) -> None:
    requests = [request_of(seed, sampling) for seed in range(4)]
    expected, before = await run(plain, *requests), accepted(drafting)
    # The second time, the cached tokens after the prompt are drafted.
    again = [await run(drafting, request) for _ in range(2) for request in requests]
    assert [ids_of(output) for output in again] == [[output.token_ids] for output in expected] * 2
    # The pool does not hold all of them. Whether one is preempted or waits for its admission depends on their arrival.
    for _ in range(10):
        together = await run(drafting, *requests)
        assert ids_of(together) == ids_of(expected)
        if any(output.usage.preemptions for output in together):
            break
    else:
        pytest.fail("no sequence was preempted")
    assert accepted(drafting) > before
    assert not (await until_idle(drafting.admin)).violations


async def test_samples_stop_strings_and_log_probabilities_are_the_same(plain: Stack, drafting: Stack) -> None:
    several = request_of(5, "cold", n=3)
    assert ids_of(await samples(drafting, several)) == ids_of(await samples(plain, several))
    [whole] = await run(plain, request_of(6))
    stopping = request_of(6, stop=[whole.text[len(whole.text) // 2 :][:6]])
    [cut], [same] = await run(plain, stopping), await run(drafting, stopping)
    assert (same.text, same.finish_reason) == (cut.text, cut.finish_reason)
    at = next(index for index in range(20, OUTPUT) if whole.token_ids[index] not in whole.token_ids[:index])
    ending = request_of(6, stop_token_ids=[whole.token_ids[at]])
    [ended] = await run(drafting, ending)
    assert ended.token_ids == whole.token_ids[: at + 1]
    assert ended.usage.output_tokens == at + 1
    asking = request_of(6)
    asking.sampling.num_logprobs = 2
    found = []
    for stack in (plain, drafting):
        async with grpc.aio.insecure_channel(stack.scheduler) as channel:
            stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
            chunks = [chunk async for chunk in stub.StreamGenerate(asking, timeout=patience(60))]
        found.append([str(logprob) for chunk in chunks for logprob in chunk.logprobs])
    assert len(found[0]) == OUTPUT
    assert found[0] == found[1]


async def test_a_request_with_a_policy_evicts_as_without_drafts(plain: Stack, drafting: Stack) -> None:
    window = common.EvictionPolicy(kind="EVICTION_KIND_SLIDING_WINDOW", recent_tokens=64)
    request = request_of(7, eviction_policy=window)
    [expected], [output] = await run(plain, request), await run(drafting, request)
    assert output.token_ids == expected.token_ids
    assert output.usage.eviction == expected.usage.eviction


@pytest.mark.parametrize("name", ["executor", "cachemgr"])
async def test_streams_go_on_with_the_same_tokens_when_a_process_dies(plain: Stack, drafting: Stack, name: str) -> None:
    requests = [request_of(seed) for seed in (8, 9)]
    expected = ids_of(await run(plain, *requests))
    async with grpc.aio.insecure_channel(drafting.scheduler) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        begun = [asyncio.Event() for _ in requests]
        running = [
            asyncio.create_task(generate(stub, request, patience(60), event))
            for request, event in zip(requests, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        assert not any(task.done() for task in running)
        # In this thread: a process ends with the thread that has started it.
        drafting.kill(name)
        drafting.start(name)
        assert ids_of(await asyncio.gather(*running)) == expected
    # The streams do not wait for it.
    await asyncio.to_thread(drafting.wait_until_serving, name)
    assert not (await until_idle(drafting.admin)).violations


async def test_another_scheduler_goes_on_where_one_has_died(plain: Stack, drafting: Stack) -> None:
    [expected] = await run(plain, request_of(8))
    drafting.kill("scheduler")
    drafting.start("scheduler")
    await asyncio.to_thread(drafting.wait_until_serving, "scheduler")
    assert ids_of(await run(drafting, request_of(8))) == [expected.token_ids]
