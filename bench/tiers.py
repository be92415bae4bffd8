"""Gain of the host and disk tiers for prompts that return after their blocks were evicted.

Run it with `make bench-tiers`. Each round requests the same prompts, four times as many as fit into the device's pool,
one at a time: without lower tiers no prompt is ever found. Outputs must equal those of the first round, and onloaded
blocks must agree with their checksums. Before each round the disk tier's file leaves the system's page cache.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from bench.result import Result, add_json_argument, percentile
from bench.tables import table
from executor.metrics import CHECKSUM_MISMATCHES
from tests.stack import Stack, metrics
from tests.support.generation import Output, generate_all, greedy_request
from tests.support.ports import free_address

PROMPT, OUTPUT_TOKENS = 1024, 8
# Prompts that fit on the device, and the number of prompts as a multiple of these.
FITTING, TIMES = 6, 4
# Tokens that a request needs in addition to its prompt.
SPARE = 256
# A token of the default model takes 46 kB in float32.
TIER_BYTES = FITTING * TIMES * (PROMPT + SPARE) * 46_080
# Targets, as shares of the time without tiers.
ASKED = {"host": 0.4, "disk": 0.7}


@dataclass
class Figures:
    """Results of one stack: seconds to the first token of every prompt after the first round, and tokens by tier."""

    seconds: list[float] = field(default_factory=list)
    from_host: int = 0
    from_disk: int = 0
    prompt_tokens: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def settings(name: str, folder: Path, dtype: str) -> dict[str, object]:
    """Settings of a stack with this tier, or without lower tiers."""
    return {
        "executor_max_tokens": FITTING * (PROMPT + SPARE),
        "executor_dtype": dtype,
        "executor_metrics_address": free_address(),
        "executor_host_cache_dir": folder / "host",
        "executor_disk_cache_dir": folder / "disk",
        "executor_host_cache_size": TIER_BYTES if name == "host" else 0,
        "executor_disk_cache_size": TIER_BYTES if name == "disk" else 0,
    }


def forget_files(folder: Path) -> None:
    """Drops the files from the page cache: reading them needs the disk again."""
    for path in folder.glob("disk/*"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def mismatches(stack: Stack) -> float:
    """Onloaded blocks that did not agree with their checksums."""
    (counter,) = CHECKSUM_MISMATCHES.describe()
    return sum(value for name, _, value in metrics(stack.executor_metrics) if name == f"{counter.name}_total")


async def ask(stack: Stack, prompt: list[int]) -> Output:
    """Sends one prompt by itself."""
    [output] = await generate_all(stack.scheduler, [greedy_request(prompt, OUTPUT_TOKENS)], concurrency=1)
    return output


async def measure(stack: Stack, folder: Path, prompts: list[list[int]], rounds: int) -> Figures:
    """Sends the prompts round after round. Raises when an output differs from the first round.

    The last token may round differently after a cached prompt than when computed with the prompt: both are right.
    """
    figures = Figures()
    known = [[(await ask(stack, prompt)).token_ids for _ in range(2)] for prompt in prompts]
    for _ in range(rounds):
        forget_files(folder)
        for prompt, right in zip(prompts, known, strict=True):
            output = await ask(stack, prompt)
            if output.token_ids not in right:
                raise AssertionError("an output differs from that of the first round")
            figures.seconds.append(output.token_times[0] - output.started)
            figures.from_host += output.usage.host_tokens
            figures.from_disk += output.usage.disk_tokens
            figures.prompt_tokens += output.usage.prompt_tokens
    if count := mismatches(stack):
        raise AssertionError(f"{count:.0f} blocks did not agree with their checksums")
    return figures


def main() -> int:
    """Measures stacks without and with each tier; status 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="rounds after the first, which are measured")
    parser.add_argument("--dtype", nargs="+", default=["auto"], help="of weights and cache, as the executor's setting")
    add_json_argument(parser)
    given = parser.parse_args()
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(PROMPT)] for _ in range(FITTING * TIMES)]
    results, missed = {}, False
    for dtype in given.dtype:
        rows = []
        found: dict[str, Figures] = {}
        for name in ("none", "host", "disk"):
            with tempfile.TemporaryDirectory(prefix="kvkeep-bench-") as folder:
                place = Path("/dev/shm" if name == "host" else folder) / Path(folder).name
                with Stack(**settings(name, place, dtype)) as stack:
                    figures = found[name] = asyncio.run(measure(stack, place, prompts, given.rounds))
            share = figures.median / found["none"].median
            missed |= share > ASKED.get(name, 1.0)
            up = max(figures.from_host, figures.from_disk) / figures.prompt_tokens
            asked = f"{ASKED[name]:.1f}" if name in ASKED else ""
            late = percentile(figures.seconds, 0.9)
            times = f"{figures.median * 1e3:.0f}", f"{late * 1e3:.0f}"
            rows.append([name, *times, f"{share:.3f}", asked, f"{up:.2f}"])
            results[f"{dtype} {name}"] = {"seconds": figures.median, "p90_s": late, "share": share, "onloaded": up}
        print(f"{dtype}: {len(prompts)} prompts of {PROMPT} tokens, of which {FITTING} fit on the device")
        header = ["lower tier", "first token\nmedian ms", "90 % ms", "of without", "asked for", "came up\nof prompts"]
        print(table(header, rows), flush=True)
    Result("tiers", results, {"rounds": given.rounds, "dtype": given.dtype}).write(given.json)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
