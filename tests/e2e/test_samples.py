"""Samples of one prompt on the real stack: equal when greedy, their own with a seed, and one prompt in memory."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as generation_rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from tests.stack import Stack
from tests.support.generation import generate_samples, greedy_request
from tests.support.idle import until_idle
from tests.support.patience import patience

SAMPLES = 4
BLOCK = 16
# Full blocks of the prompt; a few tokens more lie in a block that is copied.
FULL_BLOCKS = 8
OUTPUT_TOKENS = 24


def prompt_of(seed: int) -> list[int]:
    """Random ids."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(FULL_BLOCKS * BLOCK + 7)]


def drawn(prompt: list[int], *, reuse: bool = True) -> pb.StreamGenerateRequest:
    """Samples with a seed, cold enough that the rounding of another batch changes no draw."""
    sampling = pb.SamplingParams(temperature=0.3, seed=5)
    return greedy_request(prompt, OUTPUT_TOKENS, n=SAMPLES, reuse=reuse, sampling=sampling)


async def run(stack: Stack, request: pb.StreamGenerateRequest) -> list[list[int]]:
    """The tokens of each sample."""
    async with grpc.aio.insecure_channel(stack.scheduler) as channel:
        stub: generation_rpc.GenerationServiceAsyncStub = generation_rpc.GenerationServiceStub(channel)
        return [output.token_ids for output in await generate_samples(stub, request, patience(60))]


async def check(stack: Stack) -> None:
    """Every block is free or cached, and the manager's count is right."""
    report = await until_idle(stack.admin)
    assert not report.violations
    assert [pool.used_blocks for pool in report.pools] == [0]


@pytest.mark.model
async def test_greedy_samples_equal_a_single_greedy_output(stack: Stack) -> None:
    prompt = prompt_of(1)
    [alone] = await run(stack, greedy_request(prompt, OUTPUT_TOKENS, reuse=False))
    for reuse in (False, True, True):
        assert await run(stack, greedy_request(prompt, OUTPUT_TOKENS, n=SAMPLES, reuse=reuse)) == [alone] * SAMPLES
    await check(stack)


@pytest.mark.model
async def test_samples_with_a_seed_differ_and_repeat(stack: Stack) -> None:
    prompt = prompt_of(2)
    first = await run(stack, drawn(prompt))
    assert len({tuple(output) for output in first}) == SAMPLES
    assert await run(stack, drawn(prompt)) == first
    assert await run(stack, drawn(prompt, reuse=False)) == first
    await check(stack)


@pytest.mark.model
@pytest.mark.parametrize("reuse", [True, False])
async def test_the_prompts_blocks_are_there_once_while_samples_run(stack: Stack, reuse: bool) -> None:
    async with grpc.aio.insecure_channel(stack.admin) as channel:
        admin: kvcache_rpc.CacheAdminServiceAsyncStub = kvcache_rpc.CacheAdminServiceStub(channel)
        running = asyncio.create_task(run(stack, drawn(prompt_of(3), reuse=reuse)))
        shared = 0
        while not running.done():
            live = (await admin.ListSequences(kv.ListSequencesRequest(), timeout=patience(5))).sequences
            [pool] = (await admin.ListPools(kv.ListPoolsRequest(), timeout=patience(5))).pools
            if len(live) == SAMPLES:
                shared = max(shared, sum(sequence.num_blocks for sequence in live) - pool.used_blocks)
            await asyncio.sleep(0.02)
        await running
    # Blocks may have been given between the two questions.
    assert (SAMPLES - 1) * FULL_BLOCKS - SAMPLES <= shared <= (SAMPLES - 1) * FULL_BLOCKS + SAMPLES
    await check(stack)
