"""Limits of real stacks with a tiny pool: cache exhausted without eviction, out of time with eviction."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest

from bench.result import read
from tests.support.kvctl import ctrl_c_is_heard

# 8 blocks.
POOL = 128
PROMPT = 32
COMMAND = (sys.executable, "-m", "bench", "limit-search", "--prompt-tokens", str(PROMPT))
STACK = ("--set", f"executor_max_tokens={POOL}")


async def limits(folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """What the search printed, and its result."""
    target = folder / "limits.json"
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *STACK, "--json", str(target), *options, stdout=PIPE, stderr=PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode(), read(target)


@pytest.mark.model
async def test_without_eviction_the_longest_output_is_what_the_cache_holds(tmp_path: Path) -> None:
    said, found = await limits(tmp_path, "--mode", "length")
    assert "longest output: 64 tokens; 128: cache exhausted" in said
    assert found["best"] == 64
    assert [one["size"] for one in found["rounds"]] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert [one["ending"] for one in found["rounds"]] == ["done"] * 7 + ["cache exhausted"]
    # The prompt and 63 tokens more, in whole blocks; blocks are taken a little ahead.
    assert (PROMPT + 63) / POOL <= found["rounds"][-2]["cache_most"] <= 1


@pytest.mark.model
async def test_with_eviction_the_search_ends_by_time(tmp_path: Path) -> None:
    policy = {"kind": "EVICTION_KIND_NORM_SUM", "start_tokens": 16, "recent_tokens": 32, "max_cache_tokens": 64}
    # A busy machine needs more time to come beyond the pool.
    for seconds in ("6", "60"):
        options = ("--mode", "length", "--round-seconds", seconds, "--policy", json.dumps(policy))
        _, found = await limits(tmp_path, *options)
        rounds = found["rounds"]
        assert [one["ending"] for one in rounds] == ["done"] * (len(rounds) - 1) + ["time-out"]
        if found["best"] > POOL - PROMPT:
            break
    assert found["best"] > POOL - PROMPT
    # 5 blocks of the 8.
    assert max(one["cache_most"] for one in rounds) < 0.65


@pytest.mark.model
async def test_the_most_prompts_at_once_are_found_by_bisecting(tmp_path: Path) -> None:
    said, found = await limits(tmp_path, "--mode", "prompts", "--output-tokens", "16")
    # 32 + 15 tokens take 3 blocks.
    assert [(one["size"], one["ending"]) for one in found["rounds"]] == [
        (1, "done"), (2, "done"), (4, "cache exhausted"), (3, "cache exhausted"),
    ]  # fmt: skip
    assert "most prompts at once: 2; 3: cache exhausted" in said


@pytest.mark.model
async def test_ctrl_c_ends_the_search() -> None:
    policy = {"kind": "EVICTION_KIND_SLIDING_WINDOW", "recent_tokens": 64, "period_tokens": 1}
    with ctrl_c_is_heard():
        process = await asyncio.create_subprocess_exec(
            *COMMAND, *STACK, "--mode", "length", "--policy", json.dumps(policy), stdout=PIPE, stderr=PIPE
        )
    assert process.stderr is not None
    assert (await process.stderr.readline()).startswith(b"1: done")
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err


@pytest.mark.model
async def test_a_load_that_the_stack_refuses_is_one_line() -> None:
    policy = {"kind": "EVICTION_KIND_NORM_SUM", "max_cache_tokens": 100}
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *STACK, "--mode", "length", "--policy", json.dumps(policy), stdout=PIPE, stderr=PIPE
    )
    out, err = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert err.decode().startswith("error: eviction_policy.max_cache_tokens must be a multiple")
    assert err.count(b"\n") == 1


@pytest.mark.parametrize(
    "options", [("--policy", '{"kind": "best"}'), ("--set", "executor_max_tokens"), ("--prompt-tokens", "0")]
)
async def test_a_wrong_option_is_named(options: tuple[str, ...]) -> None:
    process = await asyncio.create_subprocess_exec(*COMMAND, "--mode", "length", *options, stdout=PIPE, stderr=PIPE)
    _, err = await process.communicate()
    assert process.returncode == 2
    assert options[0] in err.decode()
