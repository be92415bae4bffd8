"""Blocks in host memory and on disk through the whole stack: they are onloaded, also after a death, and never wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import Stack, metrics
from tests.support.generation import Output, generate_all, greedy_request
from tests.support.idle import until_idle
from tests.support.patience import patience
from tests.support.ports import free_address
from tests.support.tier_files import BLOCK_BYTES, flip_bytes, folder_in_memory, only_file

PROMPT, OUTPUT, PROMPTS = 161, 8, 5
# One prompt fits, and little more.
POOL = 256


def prompt_of(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(1000, 40_000) for _ in range(PROMPT)]


async def run(stack: Stack, number: int) -> Output:
    """One prompt by itself."""
    requests = [greedy_request(prompt_of(number), OUTPUT)]
    [output] = await generate_all(stack.scheduler, requests, concurrency=1, seconds=patience(60))
    return output


def moved(output: Output) -> int:
    """Tokens of the prompt that came up from lower tiers."""
    return output.usage.host_tokens + output.usage.disk_tokens


def tiers(folder: Path, *, host: int = 0, disk: int = 0) -> dict[str, object]:
    """Settings of a stack with at most N = `host` and `disk` blocks in the lower tiers."""
    return {
        "executor_max_tokens": POOL,
        "executor_host_cache_dir": folder / "host",
        "executor_disk_cache_dir": folder / "disk",
        "executor_host_cache_size": host * BLOCK_BYTES,
        "executor_disk_cache_size": disk * BLOCK_BYTES,
    }


@pytest.fixture(scope="module")
def tiered() -> Iterator[tuple[Stack, Path]]:
    """A stack with a little host memory and much of a disk, and the file of the first."""
    with (
        folder_in_memory() as folder,
        Stack(**tiers(folder, host=8, disk=128), executor_metrics_address=free_address()) as stack,
    ):
        yield stack, only_file(folder / "host")


@pytest.mark.model
async def test_offloaded_blocks_are_onloaded_unchanged(tiered: tuple[Stack, Path]) -> None:
    stack, _ = tiered
    first = [await run(stack, number) for number in range(PROMPTS)]
    for _ in range(3):
        second = [await run(stack, number) for number in range(PROMPTS)]
        assert [one.token_ids for one in second] == [one.token_ids for one in first]
        cached = [one.usage.cached_tokens for one in second]
        if cached == [PROMPT - 1] * PROMPTS:
            break
    else:
        # Once or twice a busy machine's disk may take so long that steps do not wait for it, which costs blocks.
        pytest.fail(f"of {PROMPTS} prompts only {cached} tokens were onloaded, three times")
    assert any(one.usage.disk_tokens for one in second)
    assert sum(map(moved, second)) > PROMPTS * PROMPT // 2
    assert not (await until_idle(stack.admin)).violations


@pytest.mark.model
async def test_lower_tiers_outlive_the_executor(tiered: tuple[Stack, Path]) -> None:
    stack, _ = tiered
    first = [await run(stack, number) for number in range(PROMPTS)]
    stack.kill("executor")
    stack.start("executor")
    stack.wait_until_serving("executor")
    second = [await run(stack, number) for number in range(PROMPTS)]
    assert [one.token_ids for one in second] == [one.token_ids for one in first]
    # But for the last two, of which the device may have held blocks that had no copy yet.
    assert all(moved(one) > PROMPT // 2 for one in second[: PROMPTS - 2])
    assert not (await until_idle(stack.admin)).violations


@pytest.mark.model
async def test_blocks_with_flipped_bytes_are_computed_again_and_counted(tiered: tuple[Stack, Path]) -> None:
    stack, file = tiered
    first = [await run(stack, number) for number in range(PROMPTS)]
    flip_bytes(file)
    second = [await run(stack, number) for number in range(PROMPTS)]
    assert [one.token_ids for one in second] == [one.token_ids for one in first]
    assert "copies failed" in stack.log_path("executor").read_text()
    counted = {name: value for name, _, value in metrics(stack.executor_metrics)}
    assert counted["kvkeep_executor_checksum_mismatches_total"] > 0
    assert not (await until_idle(stack.admin)).violations
