"""Memory that blocks, windows, 8 bits and eviction save beside contiguous memory, on the same requests.

Run it with `python -m bench memory-saved`. Conversations of many lengths arrive at once, half of them with a common
first message, and end where the model ends them or at their max_tokens. Meanwhile the cache manager is asked many times
a second for the tokens and blocks of each sequence. A contiguous allocation would hold prompt and max_tokens of a
request from its start to its end, or the model's longest sequence if the allocation does not look at max_tokens.

Then the same prompts run again with as many output tokens as before: with a sliding window, an adaptive window, an
eviction by scores, a cache in 8 bits, and the last two together.
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
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.stack import Stack
from tests.support.generation import Output, generate

BLOCK_SIZE = 16
LOOK_SECONDS = 0.02
# Seconds between two points of the course that are kept.
COURSE_SECONDS = 0.25
# Ranges of max_tokens and of the text in a message; most answers end before max_tokens.
MAX_TOKENS = (64, 128, 256, 512)
CHARACTERS = (40, 1600)
COMMON = "You are a patient teacher of programming. Answer in a few plain sentences, and give no code unless asked to. "
QUESTIONS = (
    "Say in one sentence what this is about: ",
    "Name the most important word of this: ",
    "Explain this to a child: ",
    "Answer yes or no: is this about numbers? ",
)
# The rows of the table of waste, in order.
FLAT_MODEL, FLAT_REQUEST, BLOCKS, NEEDED = (
    "contiguous, the model's longest sequence",
    "contiguous, prompt and max_tokens",
    "blocks, with those ahead of need",
    "blocks that tokens need",
)
# Policies under which a sequence keeps 128 tokens, or up to 256 with the adaptive window.
WINDOW = common.EvictionPolicy(kind=common.EVICTION_KIND_SLIDING_WINDOW, start_tokens=16, recent_tokens=112)
ADAPTIVE = common.EvictionPolicy(
    kind=common.EVICTION_KIND_ADAPTIVE_WINDOW, start_tokens=16, recent_tokens=48, max_cache_tokens=256
)
SCORES = common.EvictionPolicy(kind=common.EVICTION_KIND_TOVA, max_cache_tokens=128)
# The rows of the table of savings: by the type of the cache, each way and its policy.
SAVINGS: dict[str, dict[str, common.EvictionPolicy | None]] = {
    "auto": {"sliding window": WINDOW, "adaptive window": ADAPTIVE, "eviction by scores (tova)": SCORES},
    "int8": {"8 bits (int8)": None, "8 bits and eviction by scores": SCORES},
}


class NothingSeenError(Exception):
    """No look at the cache manager saw a sequence with computed tokens."""


def requests(count: int, seed: int = 7) -> list[pb.StreamGenerateRequest]:
    """Greedy conversations; a seed always makes the same conversations."""
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


def again(
    asked: Sequence[pb.StreamGenerateRequest],
    outputs: Sequence[Output],
    salt: str,
    policy: common.EvictionPolicy | None,
) -> list[pb.StreamGenerateRequest]:
    """The same prompts with outputs as long as before, under a different policy. They find no earlier blocks."""
    made = []
    for request, output in zip(asked, outputs, strict=True):
        cache = pb.CacheOptions(salt=salt)
        made.append(
            pb.StreamGenerateRequest(
                request_id=request.request_id,
                chat=request.chat,
                max_tokens=max(1, len(output.token_ids)),
                ignore_eos=True,
                cache=cache,
                eviction_policy=policy,
            )
        )
    return made


@dataclass
class Seen:
    """Tokens and blocks of live sequences, and blocks in use of the pool, at each look at the cache manager.

    block_bytes: bytes of one block. The default model has one pool.
    """

    # Seconds since the first look, sequences as (request, computed tokens, blocks), blocks of the pool in use.
    looks: list[tuple[float, list[tuple[str, int, int]], int]] = field(default_factory=list)
    block_bytes: int = 0


async def live_sequences(admin: kvcache_rpc.CacheAdminServiceAsyncStub) -> list[kv.Sequence]:
    """All live sequences, page by page."""
    found: list[kv.Sequence] = []
    token = ""
    while True:
        page = await admin.ListSequences(kv.ListSequencesRequest(page_size=1000, page_token=token), timeout=30)
        found += page.sequences
        token = page.next_page_token
        if not token:
            return found


@contextlib.asynccontextmanager
async def watched(stack: Stack) -> AsyncIterator[Seen]:
    """Asks the cache manager repeatedly until the with statement ends."""
    seen = Seen()
    async with grpc.aio.insecure_channel(stack.admin) as channel:
        admin: kvcache_rpc.CacheAdminServiceAsyncStub = kvcache_rpc.CacheAdminServiceStub(channel)

        async def look() -> None:
            begin = time.monotonic()
            while True:
                live = [
                    (one.sequence_id.partition("#")[0], one.computed_tokens, one.num_blocks)
                    for one in await live_sequences(admin)
                ]
                pools = (await admin.ListPools(kv.ListPoolsRequest(), timeout=30)).pools
                seen.looks.append((time.monotonic() - begin, live, sum(pool.used_blocks for pool in pools)))
                seen.block_bytes = pools[0].spec.block_bytes
                await asyncio.sleep(LOOK_SECONDS)

        async with in_background(look()):
            yield seen


async def load(
    stack: Stack, asked: Sequence[pb.StreamGenerateRequest], concurrency: int
) -> tuple[Seen, list[Output], int]:
    """Runs all requests, `concurrency` at once; also returns the model's longest sequence in tokens."""
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
    """Slots of the blocks that `tokens` tokens need."""
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


def flat_tokens(asked: Sequence[pb.StreamGenerateRequest], outputs: Sequence[Output]) -> dict[str, int]:
    """Tokens that a contiguous allocation holds for each request."""
    return {
        request.request_id: output.usage.prompt_tokens + request.max_tokens
        for request, output in zip(asked, outputs, strict=True)
    }


def figures(
    seen: Seen, asked: Sequence[pb.StreamGenerateRequest], outputs: Sequence[Output], longest: int
) -> dict[str, Any]:
    """The table of waste, each sequence's waste, and the course of all in tokens. Raises NothingSeenError."""
    flat = flat_tokens(asked, outputs)
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
    if not held:
        raise NothingSeenError
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
        "sequences": [
            {
                "request": name,
                "tokens": values[-1],
                "flat": flat[name],
                **{way: statistics.mean(waste[way][name]) for way in waste},
            }
            for name, values in held.items()
        ],
        "output_tokens": [len(output.token_ids) for output in outputs],
        "max_tokens": [request.max_tokens for request in asked],
        "course": thinned(course),
    }


def bytes_held(seen: Seen) -> dict[str, float]:
    """Bytes of the blocks that each sequence has, mean over its life. Raises NothingSeenError."""
    blocks: dict[str, list[int]] = defaultdict(list)
    for _, live, _ in seen.looks:
        for name, computed, count in live:
            if computed:
                blocks[name].append(count)
    if not blocks:
        raise NothingSeenError
    return {name: statistics.mean(counts) * seen.block_bytes for name, counts in blocks.items()}


def savings(runs: Mapping[str, Seen], flat: Mapping[str, int], longest: int) -> list[dict[str, Any]]:
    """The table of savings, in bytes, over the sequences that were seen in all runs. Raises NothingSeenError.

    runs: by way; the first has blocks and nothing else. flat: tokens of each request's contiguous allocation.
    """
    plain = next(iter(runs.values()))
    by_way = {way: bytes_held(seen) for way, seen in runs.items()}
    names = set.intersection(*(set(held) for held in by_way.values()))
    if not names:
        raise NothingSeenError
    token_bytes = plain.block_bytes / BLOCK_SIZE
    means = {
        FLAT_MODEL: longest * token_bytes,
        FLAT_REQUEST: statistics.mean(flat[name] for name in names) * token_bytes,
        **{way: statistics.mean(held[name] for name in names) for way, held in by_way.items()},
    }
    return [
        {
            "way": way,
            "block_bytes": runs[way].block_bytes if way in runs else None,
            "bytes": mean,
            "most_in_pool": max(pool for *_, pool in runs[way].looks) * runs[way].block_bytes if way in runs else None,
            "of_contiguous": mean / means[FLAT_REQUEST],
        }
        for way, mean in means.items()
    ]


def thinned(course: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """The points that the picture shows, at least COURSE_SECONDS apart."""
    kept = list(course[:1])
    for point in course:
        if point["at"] >= kept[-1]["at"] + COURSE_SECONDS:
            kept.append(point)
    return kept


def show(kept: Mapping[str, Any]) -> str:
    """The tables, and the text after them."""
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

In tokens. Waste: slots without a token, as a sequence's mean over its life. wasted: the share of all slots over time.
{len(kept["max_tokens"])} requests, at most {kept["most_at_once"]} at once with {kept["most_tokens"]:,} tokens; \
outputs had {100 * used:.0f} % of their max_tokens.
Sequences shared blocks: the pool had {kept["most_in_pool"]:,} tokens of blocks in use at most, over time \
{100 * kept["shared"]:.0f} % less than the sequences' tables together.

{table(*_savings_table(kept["savings"]))}

In MB; a sequence's mean over its life, and the mean of all sequences. A pool holds shared blocks once."""


def _savings_table(found: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["", "held per\nsequence", "by contiguous\n%", "most in the\npool at once", "bytes of\na block"]
    rows = [
        [
            row["way"],
            f"{row['bytes'] / 1e6:,.2f}",
            f"{100 * row['of_contiguous']:,.1f}",
            "" if row["most_in_pool"] is None else f"{row['most_in_pool'] / 1e6:,.1f}",
            "" if row["block_bytes"] is None else f"{row['block_bytes']:,}",
        ]
        for row in found
    ]
    return header, rows


def measure(asked: Sequence[pb.StreamGenerateRequest], concurrency: int) -> tuple[dict[str, Any], int]:
    """All figures, and the model's longest sequence in tokens. Raises NothingSeenError."""
    kept: dict[str, Any] = {}
    runs: dict[str, Seen] = {}
    outputs: list[Output] = []
    longest = 0
    for dtype, ways in SAVINGS.items():
        with Stack(executor_block_size=BLOCK_SIZE, executor_kv_cache_dtype=dtype) as stack:
            note(f"cache in {dtype}: warming up")
            asyncio.run(load(stack, requests(4, seed=1), 4))
            if not kept:
                note(f"{len(asked)} requests in blocks")
                runs[BLOCKS], outputs, longest = asyncio.run(load(stack, asked, concurrency))
                kept = figures(runs[BLOCKS], asked, outputs, longest)
            for way, policy in ways.items():
                note(way)
                runs[way], *_ = asyncio.run(load(stack, again(asked, outputs, way, policy), concurrency))
    return kept | {"savings": savings(runs, flat_tokens(asked, outputs), longest)}, longest


def main() -> int:
    """Measures and shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    add_json_argument(parser)
    given = parser.parse_args()
    if given.requests < 1 or given.concurrency < 1:
        parser.error("--requests and --concurrency must be at least 1")
    try:
        kept, longest = measure(requests(given.requests), given.concurrency)
    except KeyboardInterrupt:
        note("interrupted")
        return INTERRUPTED
    except NothingSeenError:
        note("no sequence was seen: the requests ended between two looks; give more --requests")
        return RED
    print(show(kept))
    settings = {"requests": given.requests, "concurrency": given.concurrency, "block_size": BLOCK_SIZE}
    # Only the picture has each sequence and point.
    figured = {name: value for name, value in kept.items() if name not in ("sequences", "course")}
    result = Result("memory_saved", figured, settings | {"longest": longest})
    keep(result, given.json, lambda _, picture: plots.memory_saved(kept, picture))
    # A sequence that has more tokens than a contiguous allocation for it was not measured right.
    wrong = any(each["tokens"] > each["flat"] for each in kept["sequences"])
    return RED if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
