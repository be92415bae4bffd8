"""Services end while requests run, asked to or not, and start again; only the log notices."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from typing import NamedTuple

import grpc
import pytest

from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from tests.stack import Stack
from tests.support.generation import Output, generate_all, greedy_request
from tests.support.idle import until_idle
from tests.support.patience import patience

REQUESTS = 4
PROMPT_TOKENS = 96
OUTPUT_TOKENS = 100
RNG = random.Random(7)
PROMPTS = [[RNG.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)]


async def run(stack: Stack, salt: str, *, reuse: bool = True) -> list[Output]:
    """All prompts at once."""
    requests = [greedy_request(prompt, OUTPUT_TOKENS, reuse=reuse) for prompt in PROMPTS]
    for request in requests:
        request.cache.salt = salt
    return await generate_all(stack.scheduler, requests, concurrency=REQUESTS, seconds=patience(60))


async def until_under_way(stack: Stack) -> None:
    """Until all have a good part of their output, and most of it before them."""
    async with grpc.aio.insecure_channel(stack.admin) as channel, asyncio.timeout(patience(60)):
        admin: kvcache_rpc.CacheAdminServiceAsyncStub = kvcache_rpc.CacheAdminServiceStub(channel)
        while True:
            sequences = (await admin.ListSequences(kv.ListSequencesRequest(), timeout=patience(5))).sequences
            if sum(one.computed_tokens > PROMPT_TOKENS + OUTPUT_TOKENS // 4 for one in sequences) == REQUESTS:
                return
            await asyncio.sleep(0.02)


class Undisturbed(NamedTuple):
    """What the prompts come to when nothing happens."""

    stack: Stack
    tokens: list[list[int]]


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Undisturbed]:
    with Stack() as stack:
        outputs = asyncio.run(run(stack, "undisturbed", reuse=False))
        yield Undisturbed(stack, [output.token_ids for output in outputs])


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "number"),
    [("executor", signal.SIGTERM), ("cachemgr", signal.SIGTERM), ("cachemgr", signal.SIGKILL)],
    ids=["executor stopped", "cachemgr stopped", "cachemgr killed"],
)
async def test_the_end_of_a_service_loses_no_request_and_no_token(
    undisturbed: Undisturbed, name: str, number: signal.Signals
) -> None:
    stack, expected = undisturbed
    salt = f"{name} {number.name}"
    running = asyncio.create_task(run(stack, salt))
    await until_under_way(stack)
    # Its requests are another process's matter: it ends before they do.
    await asyncio.to_thread(stack.kill, name, number)
    assert not running.done()
    stack.start(name)

    assert [output.token_ids for output in await running] == expected
    await asyncio.to_thread(stack.wait_until_serving, name)
    again = await run(stack, salt)
    assert [output.token_ids for output in again] == expected
    if name == "cachemgr":
        assert all(output.usage.cached_tokens >= PROMPT_TOKENS - 16 for output in again)
    assert not (await until_idle(stack.admin)).violations
