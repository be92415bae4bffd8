"""Memory of a running stack in blocks, beside contiguous allocations for the longest output.

Run it with `python -m bench paging`. Conversations of many lengths arrive at once, half of them behind a common
message, and end where the model ends them or at their max_tokens. Meanwhile the cache manager is asked many times a
second which sequences have how many tokens and blocks. A contiguous allocation would hold prompt and max_tokens of a
request from its start to its end, or the model's longest sequence where it does not look at max_tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

import grpc

from bench import plots
from bench.result import Result, add_json_argument, percentile
from bench.runs import in_background
from bench.serving import INTERRUPTED, RED, keep, note
from bench.tables import table
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as generation_rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from tests.stack import Stack
from tests.support.generation import Output, generate

BLOCK_SIZE = 16
LOOK_SECONDS = 0.02
# Between two points of the course that are kept.
COURSE_SECONDS = 0.25
# What callers allow for, and what a message may have of the text; most answers end sooner.
MAX_TOKENS = (64, 128, 256, 512)
CHARACTERS = (40, 1600)
COMMON = "You are a patient teacher of programming. Answer in a few plain sentences, and give no code unless asked to. "
QUESTIONS = (
    "Say in one sentence what this is about: ",
    "Name the most important word of this: ",
    "Explain this to a child: ",
    "Answer yes or no: is this about numbers? ",
)
# Of the table, in its order.
FLAT_MODEL, FLAT_REQUEST, BLOCKS, NEEDED = (
    "contiguous, the model's longest sequence",
    "contiguous, prompt and max_tokens",
    "blocks, with those ahead of need",
    "blocks that tokens need",
)


def requests(count: int, seed: int = 7) -> list[pb.StreamGenerateRequest]:
    """Greedy conversations, the same for a seed."""
    rng = random.Random(seed)
    text = "\n\n".join(text for _, text in sorted(topics.items()))
    made = []
    for number in range(count):
        length = int(CHARACTERS[0] * (CHARACTERS[1] / CHARACTERS[0]) ** rng.random())
        begin = rng.randrange(len(text) - length)
        messages = [pb.ChatMessage(role="user", content=rng.choice(QUESTIONS) + text[begin : begin + length])]
        if number % 2:
            messages.insert(0, pb.ChatMessage(role="system", content=8 * COMMON))
        made.append(
            pb.StreamGenerateRequest(
                request_id=f"r{number}",
                chat=pb.ChatInput(messages=messages),
                max_tokens=rng.choice(MAX_TOKENS),
            )
        )
    return made


@dataclass
class Seen:
    """Tokens and blocks of live sequences, each time that the cache manager was asked. Blocks in use of the pool."""

    # Seconds since the first look, sequences as (request, computed tokens, blocks), blocks of the pool in use.
    looks: list[tuple[float, list[tuple[str, int, int]], int]] = field(default_factory=list)


@contextlib.asynccontextmanager
async def watched(stack: Stack) -> AsyncIterator[Seen]:
    """Asks the cache manager until the end."""
    seen = Seen()
    async with grpc.aio.insecure_channel(stack.admin) as channel:
        admin: kvcache_rpc.CacheAdminServiceAsyncStub = kvcache_rpc.CacheAdminServiceStub(channel)

        async def look() -> None:
            begin = time.monotonic()
            while True:
                found = await admin.ListSequences(kv.ListSequencesRequest(page_size=1000), timeout=30)
                pools = (await admin.ListPools(kv.ListPoolsRequest(), timeout=30)).pools
                live = [(s.sequence_id.partition("#")[0], s.computed_tokens, s.num_blocks) for s in found.sequences]
                seen.looks.append((time.monotonic() - begin, live, sum(pool.used_blocks for pool in pools)))
                await asyncio.sleep(LOOK_SECONDS)

        async with in_background(look()):
            yield seen


async def load(
    stack: Stack, asked: Sequence[pb.StreamGenerateRequest], concurrency: int
) -> tuple[Seen, list[Output], int]:
    """Runs all requests, so many at once; also returns the model's longest sequence in tokens."""
    free = asyncio.Semaphore(concurrency)
    async with grpc.aio.insecure_channel(stack.scheduler) as channel:
        stub: generation_rpc.GenerationServiceAsyncStub = generation_rpc.GenerationServiceStub(channel)
        model = await stub.GetModel(pb.GetModelRequest(), timeout=30)

        async def one(request: pb.StreamGenerateRequest) -> Output:
            async with free:
                return await generate(stub, request)

        async with watched(stack) as seen:
            outputs = await asyncio.gather(*map(one, asked))
    return seen, outputs, model.max_model_tokens


def needed(tokens: int) -> int:
    """Slots of the blocks that so many tokens need."""
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


def figures(
    seen: Seen, asked: Sequence[pb.StreamGenerateRequest], outputs: Sequence[Output], longest: int
) -> dict[str, Any]:
    """The table's rows, what each sequence wasted, and the course of all in tokens."""
    flat = {
        request.request_id: output.usage.prompt_tokens + request.max_tokens
        for request, output in zip(asked, outputs, strict=True)
    }
    held: dict[str, list[int]] = defaultdict(list)
    waste: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    course: list[dict[str, float]] = []
    for at, live, pool in seen.looks:
        begun = [(name, computed, blocks) for name, computed, blocks in live if computed]
        totals = {"tokens": 0, FLAT_MODEL: 0, FLAT_REQUEST: 0, BLOCKS: 0, NEEDED: 0}
        for name, computed, blocks in begun:
            slots = {
                FLAT_MODEL: longest,
                FLAT_REQUEST: flat[name],
                BLOCKS: blocks * BLOCK_SIZE,
                NEEDED: needed(computed),
            }
            totals["tokens"] += computed
            for way, count in slots.items():
                totals[way] += count
                waste[way][name].append(count - computed)
            held[name].append(computed)
        course.append({"at": round(at, 3), "sequences": len(begun), "pool": pool * BLOCK_SIZE, **totals})
    rows = []
    for way in (FLAT_MODEL, FLAT_REQUEST, BLOCKS, NEEDED):
        each = [statistics.mean(values) for values in waste[way].values()]
        tokens, total = (sum(point[key] for point in course) for key in ("tokens", way))
        rows.append(
            {
                "way": way,
                "most": max(point[way] for point in course),
                "waste_mean": statistics.mean(each),
                "waste_p50": percentile(each, 0.5),
                "waste_most": max(each),
                "wasted": 1 - tokens / total,
            }
        )
    used = sum(point["pool"] for point in course if point["sequences"])
    whole = sum(point[BLOCKS] for point in course if point["sequences"])
    return {
        "rows": rows,
        "shared": 1 - used / whole,
        "most_in_pool": max(point["pool"] for point in course),
        "most_tokens": max(point["tokens"] for point in course),
        "most_at_once": max(point["sequences"] for point in course),
        "looks": len(course),
        "sequences": {
            name: {
                "tokens": values[-1],
                "flat": flat[name],
                **{way: round(statistics.mean(waste[way][name]), 1) for way in waste},
            }
            for name, values in held.items()
        },
        "output_tokens": [len(output.token_ids) for output in outputs],
        "max_tokens": [request.max_tokens for request in asked],
        "course": thinned(course),
    }


def thinned(course: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Points as far apart as the picture shows."""
    kept = list(course[:1])
    for point in course:
        if point["at"] >= kept[-1]["at"] + COURSE_SECONDS:
            kept.append(point)
    return kept


def show(kept: Mapping[str, Any]) -> str:
    """The table, and what stands beside it."""
    rows = [
        [
            row["way"],
            f"{row['most']:,.0f}",
            f"{row['waste_mean']:,.1f}",
            f"{row['waste_p50']:,.1f}",
            f"{row['waste_most']:,.1f}",
            f"{100 * row['wasted']:.1f}",
        ]
        for row in kept["rows"]
    ]
    header = ["", "most held\nat once", "waste per\nsequence", "\nmedian", "\nmost", "wasted\n%"]
    used = sum(kept["output_tokens"]) / sum(kept["max_tokens"])
    return f"""{table(header, rows)}

In tokens; waste is what is held without a token: a sequence's mean over its life, and of all that is held over time.
{len(kept["max_tokens"])} requests, at most {kept["most_at_once"]} at once with {kept["most_tokens"]:,} tokens; \
outputs had {100 * used:.0f} % of their max_tokens.
Sequences shared blocks: the pool had {kept["most_in_pool"]:,} tokens of blocks in use at most, over time \
{100 * kept["shared"]:.0f} % less than the sequences' tables together."""


def main() -> int:
    """Measures and shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    add_json_argument(parser)
    given = parser.parse_args()
    if given.requests < 1 or given.concurrency < 1:
        parser.error("--requests and --concurrency must be at least 1")
    asked = requests(given.requests)
    try:
        with Stack(executor_block_size=BLOCK_SIZE) as stack:
            note("warming up")
            asyncio.run(load(stack, requests(4, seed=1), 4))
            note(f"{given.requests} requests")
            seen, outputs, longest = asyncio.run(load(stack, asked, given.concurrency))
    except KeyboardInterrupt:
        note("interrupted")
        return INTERRUPTED
    kept = figures(seen, asked, outputs, longest)
    print(show(kept))
    settings = {"requests": given.requests, "concurrency": given.concurrency, "block_size": BLOCK_SIZE}
    keep(Result("paging", kept, settings | {"longest": longest}), given.json, plots.paging)
    # A sequence that needs more than it has, or none at all, was not measured.
    wrong = not kept["rows"] or any(each["tokens"] > each["flat"] for each in kept["sequences"].values())
    return RED if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
