"""Limits of a real stack with a tiny pool: cache exhausted without eviction, out of time with eviction."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator

import pytest

from bench.limit_search import LENGTH, PROMPTS, Ending, Load, best, search, show
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import RemoteError
from tests.stack import Stack
from tests.support.kvctl import ctrl_c_is_heard

# 8 blocks.
POOL = 128
PROMPT = 32
COMMAND = (sys.executable, "-m", "bench", "limit-search", "--mode", "length")


@pytest.fixture(scope="module")
def tiny() -> Iterator[Stack]:
    with Stack(executor_max_tokens=POOL) as stack:
        yield stack


def norm_sum(most: int) -> common.EvictionPolicy:
    return common.EvictionPolicy(
        kind=common.EVICTION_KIND_NORM_SUM, start_tokens=16, recent_tokens=32, max_cache_tokens=most
    )


@pytest.mark.model
async def test_without_eviction_the_longest_output_is_what_the_cache_holds(tiny: Stack) -> None:
    rounds = await search(tiny, LENGTH, Load(PROMPT, 120), 0)
    assert [(one.size, one.ending) for one in rounds] == [
        *((size, Ending.DONE) for size in (1, 2, 4, 8, 16, 32, 64)), (128, Ending.EXHAUSTED),
    ]  # fmt: skip
    # The prompt and 63 tokens more, in whole blocks; blocks are taken a little ahead.
    assert (PROMPT + 63) / POOL <= rounds[-2].summary()["cache_most"] <= 1
    assert show(LENGTH, rounds).startswith("longest output: 64 tokens; 128: cache exhausted\n")


@pytest.mark.model
async def test_with_eviction_the_search_ends_by_time(tiny: Stack) -> None:
    # A busy machine needs more time to come beyond the pool.
    for seconds in (6, 60):
        rounds = await search(tiny, LENGTH, Load(PROMPT, seconds, norm_sum(64)), 0)
        assert [one.ending for one in rounds] == [*[Ending.DONE] * (len(rounds) - 1), Ending.TIMEOUT]
        if best(rounds) > POOL - PROMPT:
            break
    assert best(rounds) > POOL - PROMPT
    # 5 blocks of the 8.
    assert max(one.summary()["cache_most"] for one in rounds) < 0.65


@pytest.mark.model
async def test_the_most_prompts_at_once_are_found_by_bisecting(tiny: Stack) -> None:
    rounds = await search(tiny, PROMPTS, Load(PROMPT, 120), 16)
    # 32 + 15 tokens take 3 blocks.
    assert [(one.size, one.ending) for one in rounds] == [
        (1, Ending.DONE), (2, Ending.DONE), (4, Ending.EXHAUSTED), (3, Ending.EXHAUSTED),
    ]  # fmt: skip
    assert show(PROMPTS, rounds).startswith("most prompts at once: 2; 3: cache exhausted\n")


@pytest.mark.model
async def test_a_policy_that_the_stack_refuses_ends_the_search(tiny: Stack) -> None:
    with pytest.raises(RemoteError, match=r"eviction_policy\.max_cache_tokens must be a multiple"):
        await search(tiny, LENGTH, Load(PROMPT, 120, norm_sum(100)), 0)


@pytest.mark.model
async def test_ctrl_c_ends_the_command() -> None:
    policy = '{"kind": "EVICTION_KIND_SLIDING_WINDOW", "recent_tokens": 64, "period_tokens": 1}'
    with ctrl_c_is_heard():
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "--set", f"executor_max_tokens={POOL}", "--prompt-tokens", "32", "--policy", policy,
            stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
    assert process.stderr is not None
    assert (await process.stderr.readline()).startswith(b"1: done")
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    "options", [("--policy", '{"kind": "best"}'), ("--set", "executor_max_tokens"), ("--prompt-tokens", "0")]
)
async def test_a_wrong_option_is_named(options: tuple[str, ...]) -> None:
    process = await asyncio.create_subprocess_exec(*COMMAND, *options, stdout=PIPE, stderr=PIPE)
    _, err = await process.communicate()
    assert process.returncode == 2
    assert options[0] in err.decode().partition("error: ")[2]
