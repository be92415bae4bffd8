"""`kvctl limits` on a real stack with a tiny pool: exhausted without eviction, out of time with it."""

from __future__ import annotations

import asyncio
import csv
import json
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from protos.rpc.channel import open_channel
from tests.stack import Stack
from tests.support.generation import generate
from tests.support.idle import until_idle
from tests.support.kvctl import ctrl_c_is_heard
from tests.support.patience import patience
from tests.support.ports import free_address

# 8 blocks.
POOL = 128
PROMPT = 32


@pytest.fixture(scope="module")
def tiny() -> Iterator[Stack]:
    with Stack(executor_max_tokens=POOL, executor_metrics_address=free_address()) as stack:
        yield stack


async def kvctl(stack: Stack, folder: Path, *options: str) -> tuple[int, str, list[dict[str, str]]]:
    """Status, everything it printed, and the lines of its file."""
    target = folder / "limits.csv"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvctl", "limits", "--scheduler", stack.scheduler, "--server", stack.admin,
        "--prompt-tokens", str(PROMPT), "--csv", str(target), "--yes", *options, stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    lines = target.read_text().splitlines() if target.exists() else []
    return process.returncode, (out + err).decode(), list(csv.DictReader(lines))


async def cached(stack: Stack) -> int:
    """Blocks that are cached."""
    async with open_channel(stack.admin) as channel:
        admin: kvcache_pb2_grpc.CacheAdminServiceAsyncStub = kvcache_pb2_grpc.CacheAdminServiceStub(channel)
        [pool] = (await admin.ListPools(kvcache_pb2.ListPoolsRequest(), timeout=patience(10))).pools
    return pool.cached_blocks


@pytest.mark.model
async def test_without_eviction_the_longest_output_is_what_the_cache_holds(tiny: Stack, tmp_path: Path) -> None:
    status, said, rows = await kvctl(
        tiny, tmp_path, "--mode", "gen_length", "--executor-metrics", tiny.executor_metrics
    )
    assert status == 0, said
    assert [int(row["tokens"]) for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert [row["ending"] for row in rows] == ["done"] * 7 + ["cache exhausted"]
    assert "longest output: 64 tokens; 128: cache exhausted" in said
    # The prompt and 63 tokens more, in whole blocks; capacity comes a little ahead.
    assert (PROMPT + 63) / POOL <= float(rows[-2]["cache_most"]) <= 1
    assert int(rows[-2]["executor_resident_bytes"]) > 100e6
    assert "resident memory: executor" in said


@pytest.mark.model
async def test_with_eviction_it_ends_by_time(tiny: Stack, tmp_path: Path) -> None:
    policy = ("--policy", "norm_sum", "--start", "16", "--recent", "32", "--budget", "64")
    # A busy machine needs more time to come beyond the pool.
    for seconds in ("6", "60"):
        (tmp_path / "limits.csv").unlink(missing_ok=True)
        status, said, rows = await kvctl(tiny, tmp_path, "--mode", "gen_length", "--round-seconds", seconds, *policy)
        assert status == 0, said
        assert [row["ending"] for row in rows] == ["done"] * (len(rows) - 1) + ["time-out"]
        if int(rows[-2]["tokens"]) > POOL - PROMPT:
            break
    assert int(rows[-2]["tokens"]) > POOL - PROMPT
    # 5 blocks of the 8.
    assert max(float(row["cache_most"]) for row in rows) < 0.65


@pytest.mark.model
async def test_the_most_prompts_at_once_are_found_by_bisecting(tiny: Stack, tmp_path: Path) -> None:
    status, said, rows = await kvctl(tiny, tmp_path, "--mode", "gen_throughput", "--output-tokens", "16")
    assert status == 0, said
    # 32 + 15 tokens take 3 blocks.
    assert [(int(row["prompts"]), row["ending"]) for row in rows] == [
        (1, "done"), (2, "done"), (4, "cache exhausted"), (3, "cache exhausted"),
    ]  # fmt: skip
    assert "most prompts at once: 2 prompts; 3: cache exhausted" in said


@pytest.mark.model
async def test_cached_blocks_are_evicted_and_a_dry_run_says_so(tiny: Stack, tmp_path: Path) -> None:
    async with open_channel(tiny.scheduler) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        await generate(stub, pb.StreamGenerateRequest(token_ids=pb.TokenIds(token_ids=range(1, 65)), max_tokens=1))
    # Blocks are released after the last answer.
    await until_idle(tiny.admin)
    assert await cached(tiny) == POOL // 2 // 16
    status, said, rows = await kvctl(tiny, tmp_path, "--mode", "gen_throughput", "--dry-run")
    assert (status, rows) == (0, [])
    assert "would load the stack to its limits: other requests wait, and up to 4 blocks are evicted" in said
    assert await cached(tiny) == 4
    assert (await kvctl(tiny, tmp_path, "--mode", "gen_throughput", "--output-tokens", "16"))[0] == 0
    assert await cached(tiny) < 4


async def test_a_file_with_something_in_it_is_not_written_over(tmp_path: Path) -> None:
    target = tmp_path / "limits.csv"
    target.write_text("mode\n")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvctl", "limits", "--mode", "gen_length", "--csv", str(target), "--yes", stderr=PIPE
    )
    _, err = await process.communicate()
    assert process.returncode == 2
    assert "--csv" in err.decode()
    assert target.read_text() == "mode\n"


@pytest.mark.model
async def test_programs_get_all_rounds_in_one_answer(tiny: Stack) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvctl", "limits", "--scheduler", tiny.scheduler, "--server", tiny.admin,
        "--mode", "gen_length", "--prompt-tokens", str(PROMPT), "--csv", "/dev/null", "--yes", "-o", "json",
        stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    answer = json.loads(out)
    assert (answer["mode"], answer["best"]) == ("gen_length", 64)
    assert [(one["tokens"], one["ending"]) for one in answer["rounds"][-2:]] == [(64, "done"), (128, "cache exhausted")]
    assert len(err.decode().splitlines()) == len(answer["rounds"])


@pytest.mark.model
async def test_ctrl_c_ends_it_and_keeps_the_rounds_so_far(tiny: Stack, tmp_path: Path) -> None:
    target = tmp_path / "limits.csv"
    with ctrl_c_is_heard():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvctl", "limits", "--mode", "gen_length", "--scheduler", tiny.scheduler,
            "--server", tiny.admin, "--prompt-tokens", str(PROMPT), "--csv", str(target), "--yes",
            "--policy", "sliding_window", "--recent", "64", "--period", "1", "--compacted",
            stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
    assert process.stdout is not None
    for _ in range(3):
        await process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 130
    assert err == b""
    assert len(target.read_text().splitlines()) >= 4


@pytest.mark.model
@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (("--policy", "norm_sum", "--budget", "100"), 2, "error: eviction_policy.max_cache_tokens must be a multiple"),
        (("--prompt-tokens", "400"), 2, "error: token_ids.token_ids has 400 tokens"),
        (("--server", "unix:/nowhere"), 3, "error: no answer at "),
        (("--executor-metrics", free_address()), 4, "error: no metrics at "),
    ],
)
async def test_an_error_is_one_line(
    tiny: Stack, tmp_path: Path, options: tuple[str, ...], status: int, said: str
) -> None:
    ended, printed, rows = await kvctl(tiny, tmp_path, "--mode", "gen_length", *options)
    assert ended == status
    assert printed.startswith(said)
    assert printed.count("\n") == 1
    assert rows == []


@pytest.mark.parametrize("options", [("--policy", "best"), ("--budget", "64")])
async def test_a_policy_that_does_not_exist_or_is_not_named_is_refused(options: tuple[str, ...]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvctl", "limits", "--mode", "gen_length", *options, stdout=PIPE, stderr=PIPE
    )
    _, err = await process.communicate()
    assert process.returncode == 2
    assert "--policy" in err.decode()
