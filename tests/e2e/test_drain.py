"""Services are asked to stop while requests run, and come back; nobody notices but the log."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable

import pytest

from tests.e2e.test_no_leak import settle
from tests.stack import Stack
from tests.support.generation import Output, generate_all, greedy_request

REQUESTS = 4
PROMPT_TOKENS = 96
OUTPUT_TOKENS = 80


@pytest.mark.model
@pytest.mark.parametrize("name", ["executor", "cachemgr"])
async def test_stopped_and_started_under_load_it_costs_no_request_and_no_token(
    start_stack: Callable[..., Stack], name: str
) -> None:
    stack = start_stack()
    rng = random.Random(7)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)]

    async def run(*, reuse: bool) -> list[Output]:
        requests = [greedy_request(prompt, OUTPUT_TOKENS, reuse=reuse) for prompt in prompts]
        return await generate_all(stack.scheduler, requests, concurrency=REQUESTS, seconds=120)

    clock = asyncio.get_running_loop().time
    begin = clock()
    expected = [output.token_ids for output in await run(reuse=False)]
    taken = clock() - begin
    running = asyncio.create_task(run(reuse=True))
    await asyncio.sleep(taken / 2)
    assert not running.done()
    # Its requests are another process's matter: it ends long before they do.
    stopping = clock()
    await asyncio.to_thread(stack.kill, name, signal.SIGTERM)
    assert clock() - stopping < 10
    assert not running.done()
    stack.start(name)

    assert [output.token_ids for output in await running] == expected
    await asyncio.to_thread(stack.wait_until_serving, name)
    assert not (await settle(stack.admin)).violations
