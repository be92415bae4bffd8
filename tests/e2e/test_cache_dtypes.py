"""Caches of 8 bits through the whole stack: reuse, tiers, preemption and a restart change no token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator, Sequence

import grpc
import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from tests.stack import Stack
from tests.support.generation import Output, generate_all, greedy_request
from tests.support.idle import until_idle
from tests.support.patience import patience
from tests.support.tier_files import BLOCK_BYTES, folder_in_memory

# Two prompts fit, their outputs do not.
POOL, PROMPT, OUTPUT, PROMPTS = 400, 161, 48, 5
# Of a block: keys and values of 16 tokens in 30 layers with 3 heads of 64 bytes.
SIZE = 2 * 16 * 30 * 3 * 64
TYPES = {"int8": "int8", "fp8": "float8_e4m3fn"}


def prompt_of(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(1000, 40_000) for _ in range(PROMPT)]


async def run(
    stack: Stack, *, reuse: bool, concurrency: int = 1, numbers: Iterable[int] = range(PROMPTS)
) -> list[Output]:
    requests = [greedy_request(prompt_of(number), OUTPUT, reuse=reuse) for number in numbers]
    return await generate_all(stack.scheduler, requests, concurrency=concurrency, seconds=patience(60))


def tokens(outputs: Sequence[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module", params=TYPES)
def started(request: pytest.FixtureRequest) -> Iterator[tuple[Stack, str]]:
    """If rounding depends only on a token and the tokens before it, any difference is a fault."""
    with (
        folder_in_memory() as folder,
        Stack(
            executor_kv_cache_dtype=request.param,
            executor_batch_invariant=True,
            executor_max_tokens=POOL,
            executor_host_cache_dir=folder / "host",
            executor_disk_cache_dir=folder / "disk",
            executor_host_cache_size=4 * BLOCK_BYTES,
            executor_disk_cache_size=32 * BLOCK_BYTES,
            cachemgr_capacity_ahead_tokens=0,
        ) as running,
    ):
        yield running, TYPES[request.param]


@pytest.mark.model
async def test_reuse_tiers_preemption_and_a_restart_change_no_token(started: tuple[Stack, str]) -> None:
    stack, _ = started
    expected = tokens(await run(stack, reuse=False))
    assert tokens(await run(stack, reuse=True)) == expected
    again = await run(stack, reuse=True)
    assert tokens(again) == expected
    assert all(output.usage.cached_tokens > PROMPT // 2 for output in again)
    assert any(output.usage.disk_tokens for output in again)
    # The host has few blocks, of the prompts that left the device last.
    latest_first = await run(stack, reuse=True, numbers=reversed(range(PROMPTS)))
    assert tokens(latest_first) == expected[::-1]
    assert any(output.usage.host_tokens for output in latest_first)
    together = await run(stack, reuse=True, concurrency=PROMPTS)
    assert tokens(together) == expected
    assert any(output.usage.preemptions for output in together)
    stack.kill("executor")
    stack.start("executor")
    await asyncio.to_thread(stack.wait_until_serving, "executor")
    after = await run(stack, reuse=True)
    assert tokens(after) == expected
    assert any(output.usage.host_tokens + output.usage.disk_tokens for output in after), "the scales are the same"
    assert not (await until_idle(stack.admin)).violations


@pytest.mark.model
async def test_operators_see_the_type_and_the_smaller_blocks(started: tuple[Stack, str]) -> None:
    stack, dtype = started
    async with grpc.aio.insecure_channel(stack.scheduler) as channel:
        model = await rpc.GenerationServiceStub(channel).GetModel(pb.GetModelRequest(), timeout=patience(10))
    assert (model.dtype, model.kv_cache_dtype) == ("float32", dtype)
    async with grpc.aio.insecure_channel(stack.admin) as channel:
        pools = await kvcache_rpc.CacheAdminServiceStub(channel).ListPools(kv.ListPoolsRequest(), timeout=patience(10))
    assert [(pool.spec.dtype, pool.spec.block_bytes) for pool in pools.pools] == [(dtype, SIZE)]
