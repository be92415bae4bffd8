"""Gain of a sliding window over the full cache: memory, preemptions, agreement, capacity.

Run it with `make bench-window`. Prompts have 6 to 8 tokens. The models are the default model and a small GPT-2, which
is first trained on a novel, once. No request reads or stores cached blocks: a request keeps only its own blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from tokenizers import Tokenizer

from bench import plots
from bench.prose import NoTextError, pieces
from bench.research.small_gpt2 import small_gpt2
from bench.result import Result, add_json_argument
from bench.runs import in_background
from bench.serving import INTERRUPTED, RED, keep, note
from bench.tables import table
from bench.totals import Course, Kept, agreement, largest, totals
from executor.models.files import resolve
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as generation_rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from protos.kvcommon.eviction import Layout, parse
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.stack import Stack
from tests.support.generation import Output, generate_all, greedy_request

BLOCK_SIZE = 2
LOOK_SECONDS = 0.01
PROMPTS = (6, 8, 8, 7, 6, 8, 7, 6)
ROOMY = 4_096
# (requests, output tokens, window)
MEMORY = (3, 30, 20)
PREEMPTIONS = (5, 20, 12)
PRIORITIES = (0, 2, 1, 0, 2)
TIGHT_POOLS = (72, 50)
AGREEMENT = (5, 40)
WINDOWS = (8, 16, 32, 48)
CAPACITY = (8, 20, 16)
CAPACITY_POOL = 168


@dataclass
class Seen:
    """The largest numbers seen at once: blocks in use, and requests with blocks."""

    blocks: int = 0
    running: int = 0


@contextlib.asynccontextmanager
async def watched(stack: Stack) -> AsyncIterator[Seen]:
    """Looks at the cache manager's pool and the scheduler's loads many times a second."""
    seen = Seen()
    async with grpc.aio.insecure_channel(stack.admin) as one, grpc.aio.insecure_channel(stack.scheduler) as other:
        admin: kvcache_rpc.CacheAdminServiceAsyncStub = kvcache_rpc.CacheAdminServiceStub(one)
        loads: generation_rpc.GenerationServiceAsyncStub = generation_rpc.GenerationServiceStub(other)

        async def look() -> None:
            while True:
                pools = (await admin.ListPools(kv.ListPoolsRequest(), timeout=30)).pools
                seen.blocks = max(seen.blocks, sum(pool.used_blocks for pool in pools))
                running = (await loads.GetLoads(pb.GetLoadsRequest(), timeout=30)).running_requests
                seen.running = max(seen.running, running)
                await asyncio.sleep(LOOK_SECONDS)

        async with in_background(look()):
            yield seen


@dataclass(frozen=True)
class Run:
    """One run: the outputs, and the peaks during the run. window: None for the full cache."""

    window: int | None
    prompts: Sequence[Sequence[int]]
    outputs: Sequence[Output]
    seen: Seen

    @property
    def tokens(self) -> list[list[int]]:
        """Every request's output."""
        return [output.token_ids for output in self.outputs]

    @property
    def preemptions(self) -> int:
        """The preemptions of all requests."""
        return sum(output.usage.preemptions for output in self.outputs)

    @property
    def rate(self) -> float:
        """Output tokens per second, from the arrival of all requests to the last token."""
        begin = min(output.started for output in self.outputs)
        end = max(output.token_times[-1] for output in self.outputs)
        return sum(map(len, self.tokens)) / (end - begin)

    @property
    def courses(self) -> list[Course]:
        """When tokens came."""
        return [
            Course(len(prompt), output.token_times, output.usage.preemptions)
            for prompt, output in zip(self.prompts, self.outputs, strict=True)
        ]

    @property
    def peaks(self) -> list[int]:
        """The largest number of tokens that each request kept between two steps."""
        kept = kept_by(self.window)
        return [kept(len(prompt) + len(out) - 1) for prompt, out in zip(self.prompts, self.tokens, strict=True)]

    @property
    def slots(self) -> list[int]:
        """The most tokens that each request had at once, including the running step's token, as the scheduler says."""
        if self.window is None:
            return self.peaks
        return [output.usage.eviction.peak_cache_tokens for output in self.outputs]


def policy(window: int) -> common.EvictionPolicy:
    """A window that evicts before every step, also while a preempted request computes its tokens again."""
    return common.EvictionPolicy(
        kind=common.EVICTION_KIND_SLIDING_WINDOW, recent_tokens=window, period_tokens=1, during_prefill=True
    )


def kept_by(window: int | None) -> Kept:
    """The number of kept tokens of a sequence, by its length."""
    if window is None:
        return lambda total: total
    made = parse(policy(window), Layout(BLOCK_SIZE, (None,), plain_rotary=True))
    assert made is not None
    most = made.maximum
    return lambda total: min(total, most)


async def run(
    stack: Stack, prompts: Sequence[Sequence[int]], output: int, window: int | None, priorities: Sequence[int] = ()
) -> Run:
    """Runs all requests at once."""
    requests = [greedy_request(prompt, output, reuse=False) for prompt in prompts]
    for request, priority in zip(requests, priorities or [0] * len(requests), strict=True):
        request.priority = priority
        if window is not None:
            request.eviction_policy.CopyFrom(policy(window))
    async with watched(stack) as seen:
        outputs = await generate_all(stack.scheduler, requests, concurrency=len(requests))
    return Run(window, prompts, outputs, seen)


def describe(runs: Sequence[Run], expected: Sequence[Sequence[int]], **more: object) -> dict[str, Any]:
    """One row: medians over repeats, for figures that differ between repeats."""
    middle = runs[0]
    return {
        **more,
        "window": middle.window,
        "peak_mean": statistics.mean(middle.peaks),
        "slots_mean": statistics.mean(middle.slots),
        "largest_total": round(statistics.median(largest(one.courses, kept_by(one.window)) for one in runs)),
        "most_blocks": max(one.seen.blocks for one in runs),
        "most_running": max(one.seen.running for one in runs),
        "preemptions": round(statistics.median(one.preemptions for one in runs)),
        "tokens_per_s": statistics.median(one.rate for one in runs),
        "exact": sum(pair[0] == pair[1] for one in runs for pair in zip(one.tokens, expected, strict=False)),
        "outputs": sum(len(one.outputs) for one in runs),
    }


class Bench:
    """One model's tables."""

    def __init__(self, model: Path, repeats: int) -> None:
        self._model = model
        self._repeats = repeats
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._prompts = pieces(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, list(PROMPTS), 1)
        # The answers of requests that have the stack and all memory for themselves.
        self._alone: dict[tuple[int, int | None], list[list[int]]] = {}

    def measure(self) -> dict[str, Any]:
        """Measures all four tables."""
        kept: dict[str, Any] = {}
        with self._stack(ROOMY) as stack:
            for _, output, window in (MEMORY, PREEMPTIONS, CAPACITY):
                for one in {None, window} - {known for length, known in self._alone if length == output}:
                    self._alone[output, one] = self._answers(stack, len(PROMPTS), output, one)
            kept["memory"], kept["curves"] = self._memory(stack)
            kept["agreement"] = self._agreement(stack)
        kept["preemptions"] = [row for pool in TIGHT_POOLS for row in self._tight(pool, PREEMPTIONS, PRIORITIES)]
        kept["capacity"] = self._tight(CAPACITY_POOL, CAPACITY, ())
        return kept

    def _stack(self, pool: int) -> Stack:
        # Blocks that are allocated ahead of need would count as used.
        return Stack(
            executor_model=self._model,
            executor_block_size=BLOCK_SIZE,
            executor_max_tokens=pool,
            cachemgr_capacity_ahead_tokens=0,
        )

    def _answers(self, stack: Stack, requests: int, output: int, window: int | None) -> list[list[int]]:
        return [asyncio.run(run(stack, [prompt], output, window)).tokens[0] for prompt in self._prompts[:requests]]

    def _pairs(self, stack: Stack, of: tuple[int, int, int], priorities: Sequence[int]) -> dict[int | None, list[Run]]:
        """The full cache and the window in turns, after a pair of runs to warm up."""
        requests, output, window = of
        runs: dict[int | None, list[Run]] = {None: [], window: []}
        for repeat in range(self._repeats + 1):
            for one, group in runs.items():
                done = asyncio.run(run(stack, self._prompts[:requests], output, one, priorities))
                if repeat:
                    group.append(done)
        return runs

    def _memory(self, stack: Stack) -> tuple[list[dict[str, Any]], dict[str, list[tuple[float, int]]]]:
        runs = self._pairs(stack, MEMORY, ())
        curves = {}
        for window, group in runs.items():
            begin = min(output.started for output in group[0].outputs)
            points = totals(group[0].courses, kept_by(window))
            curves[name_of(window)] = [(round(time - begin, 4), total) for time, total in points]
        return [describe(group, self._alone[MEMORY[1], window]) for window, group in runs.items()], curves

    def _agreement(self, stack: Stack) -> list[dict[str, Any]]:
        requests, output = AGREEMENT
        whole = self._answers(stack, requests, output, None)
        return [
            {"window": window, "agreement": agreement(whole, self._answers(stack, requests, output, window))}
            for window in (*WINDOWS, None)
        ]

    def _tight(self, pool: int, of: tuple[int, int, int], priorities: Sequence[int]) -> list[dict[str, Any]]:
        with self._stack(pool) as stack:
            runs = self._pairs(stack, of, priorities)
        return [describe(group, self._alone[of[1], window], pool=pool) for window, group in runs.items()]


def name_of(window: int | None) -> str:
    """The name of a window in tables."""
    return "full cache" if window is None else f"W = {window}"


def show(model: str, kept: dict[str, Any]) -> str:
    """The four tables of a model."""
    columns = {
        "peak\nper request": lambda row: f"{row['peak_mean']:.1f}",
        "slots\nper request": lambda row: f"{row['slots_mean']:.1f}",
        "largest\ntotal": lambda row: str(row["largest_total"]),
        "most\nblocks": lambda row: str(row["most_blocks"]),
        "most\nat once": lambda row: str(row["most_running"]),
        "\npreemptions": lambda row: str(row["preemptions"]),
        "output\ntokens/s": lambda row: f"{row['tokens_per_s']:.0f}",
        "\nexact": lambda row: f"{row['exact']} of {row['outputs']}",
    }

    def rows(part: str) -> str:
        lines = [
            [
                (f"pool {row['pool']}, " if "pool" in row else "") + name_of(row["window"]),
                *(column(row) for column in columns.values()),
            ]
            for row in kept[part]
        ]
        return table(("", *columns), lines)

    requests, output = AGREEMENT
    shares = [[name_of(row["window"]), f"{row['agreement']:.1%}"] for row in kept["agreement"]]
    return "\n\n".join(
        [
            f"\n{model}",
            f"memory: {MEMORY[0]} requests, {MEMORY[1]} tokens each\n{rows('memory')}",
            f"preemptions: {PREEMPTIONS[0]} requests of mixed priorities, {PREEMPTIONS[1]} tokens each\n"
            f"{rows('preemptions')}",
            f"agreement with the full cache: {requests} requests, {output} tokens each\n"
            f"{table(('', 'same tokens'), shares)}",
            f"capacity: {CAPACITY[0]} requests, {CAPACITY[1]} tokens each\n{rows('capacity')}",
        ]
    )


NOTE = f"""
Peak and largest total count tokens kept between two steps: the prompt and all output tokens but the last, or at most
the window. The total adds up all requests at the times at which their tokens came. Slots per request are counted by
the scheduler, with the token of the running step. Blocks of {BLOCK_SIZE} tokens are those that the cache manager had
in use, sampled at most {1 / LOOK_SECONDS:.0f} times a second. Exact: the output equals the output of
the same request alone, in a large pool."""


def main() -> int:
    """Measures and shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    add_json_argument(parser)
    given = parser.parse_args()
    if given.repeats < 1:
        parser.error("--repeats must be at least 1")
    kept: dict[str, Any] = {"models": {}}
    wrong = False
    try:
        for name, folder in (("SmolLM2-135M", partial(resolve, "")), ("small GPT-2", small_gpt2)):
            note(name)
            tables = Bench(folder(), given.repeats).measure()
            kept["models"][name] = tables
            print(show(name, tables), flush=True)
            rows = tables["memory"] + tables["preemptions"] + tables["capacity"]
            wrong |= any(row["exact"] != row["outputs"] for row in rows)
    except NoTextError as error:
        print(error, file=sys.stderr)
        return RED
    except KeyboardInterrupt:
        note("interrupted")
        return INTERRUPTED
    print(NOTE)
    keep(Result("window", kept, {"repeats": given.repeats}), given.json, plots.window)
    return RED if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
