"""The cache manager dies while requests run; nobody notices but the log."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from tests.e2e.test_no_leak import settle
from tests.stack import Stack
from tests.support.generation import Output, generate_all, greedy_request

REQUESTS = 6
PROMPT_TOKENS = 96
OUTPUT_TOKENS = 160


@pytest.mark.model
async def test_killed_under_load_it_costs_no_request_no_token_and_not_the_cache(
    start_stack: Callable[..., Stack],
) -> None:
    stack = start_stack()
    rng = random.Random(3)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)]

    async def run(*, reuse: bool) -> list[Output]:
        requests = [greedy_request(prompt, OUTPUT_TOKENS, reuse=reuse) for prompt in prompts]
        return await generate_all(stack.scheduler, requests, concurrency=REQUESTS, seconds=120)

    clock = asyncio.get_running_loop().time
    begin = clock()
    expected = [output.token_ids for output in await run(reuse=False)]
    taken = clock() - begin
    running = asyncio.create_task(run(reuse=True))
    # In the middle, whatever the machine's speed.
    await asyncio.sleep(taken / 2)
    assert not running.done()
    stack.kill("cachemgr")
    stack.start("cachemgr")

    assert [output.token_ids for output in await running] == expected
    again = await run(reuse=True)
    assert [output.token_ids for output in again] == expected
    assert all(output.usage.cached_tokens >= PROMPT_TOKENS - 16 for output in again)
    assert not (await settle(stack.admin)).violations
