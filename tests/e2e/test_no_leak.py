"""Whatever clients do, every block is released."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import grpc
import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as generation_rpc
from tests.stack import Stack
from tests.support.generation import greedy_request
from tests.support.idle import until_idle
from tests.support.patience import patience

REQUESTS = 300
VOCABULARY = 49_152
SHARED = [random.Random(1).randrange(1000, VOCABULARY) for _ in range(48)]

BAD_REQUESTS = (
    pb.StreamGenerateRequest(),
    pb.StreamGenerateRequest(text=""),
    pb.StreamGenerateRequest(text="x", max_tokens=0, n=2),
    pb.StreamGenerateRequest(text="x", model="no-such-model"),
    pb.StreamGenerateRequest(text="x", sampling=pb.SamplingParams(temperature=-1)),
    pb.StreamGenerateRequest(token_ids=pb.TokenIds(token_ids=[VOCABULARY])),
    pb.StreamGenerateRequest(text="x", cache=pb.CacheOptions(salt="")),
)


def random_request(rng: random.Random) -> pb.StreamGenerateRequest:
    """A prompt that shares nothing, a little or much with others, with any of the cache's options."""
    prompt = SHARED[: rng.randrange(len(SHARED) + 1)] + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 60))]
    request = greedy_request(prompt, rng.randrange(1, 12), priority=rng.randrange(-1, 2))
    request.cache.no_read = rng.random() < 0.1
    request.cache.no_store = rng.random() < 0.1
    if rng.random() < 0.3:
        request.cache.salt = rng.choice(["a", "b"])
    if rng.random() < 0.3:
        request.cache.retention_ranges.add(start=0, end=16, retention_priority=rng.randrange(101))
    if rng.random() < 0.5:
        request.sampling.temperature = 1.0
        request.sampling.seed = rng.randrange(1000)
    if rng.random() < 0.1:
        request.n = rng.randrange(2, 5)
    return request


async def misbehave(stub: generation_rpc.GenerationServiceAsyncStub, address: str, rng: random.Random) -> str:
    """Sends one request and treats it in one of the ways that clients do; says how it ended."""
    way = rng.choice(["finish"] * 4 + ["cancel", "deadline", "bad", "disconnect", "abandon"])
    request = rng.choice(BAD_REQUESTS) if way == "bad" else random_request(rng)
    try:
        if way == "disconnect":
            request.max_tokens = 200
            channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
            await generation_rpc.GenerationServiceStub(channel).StreamGenerate(request, timeout=patience(60)).read()
            await channel.close()
            return "disconnected"
        if way == "deadline":
            request.max_tokens = 200
        call = stub.StreamGenerate(request, timeout=rng.uniform(0.01, 0.5) if way == "deadline" else 120)
        if way == "abandon":
            await asyncio.sleep(0)
            call.cancel()
            return "abandoned"
        if way == "cancel":
            request.max_tokens = 200
            await call.read()
            call.cancel()
            return "cancelled"
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "finished"


@pytest.mark.model
@pytest.mark.timeout(300)
async def test_after_random_traffic_every_block_is_free_or_cached(stack: Stack) -> None:
    rng = random.Random(20)
    async with grpc.aio.insecure_channel(stack.scheduler) as channel:
        stub: generation_rpc.GenerationServiceAsyncStub = generation_rpc.GenerationServiceStub(channel)
        free = asyncio.Semaphore(32)

        async def one(seed: int) -> str:
            async with free:
                return await misbehave(stub, stack.scheduler, random.Random(seed))

        endings = Counter(await asyncio.gather(*[one(rng.randrange(2**32)) for _ in range(REQUESTS)]))
    print(dict(endings))
    assert endings["finished"] > REQUESTS / 4
    assert endings["INVALID_ARGUMENT"] > 0
    assert not set(endings) & {"INTERNAL", "UNKNOWN", "UNAVAILABLE"}

    report = await until_idle(stack.admin)

    assert not report.violations
    for pool in report.pools:
        assert pool.used_blocks == 0
        assert pool.free_blocks == pool.total_blocks
