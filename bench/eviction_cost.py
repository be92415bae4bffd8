"""Speed of token eviction: the same requests with policies and without, in turns.

Run it with `make bench-eviction-cost`. "scores alone" measures attention in every step and never evicts: its budget
is larger than any sequence. Prompts are computed one after the other, with one output token each, with and
without a policy.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from bench.result import Result, add_json_argument, middle
from bench.runs import Others, processes, watched
from bench.tables import table
from bench.workloads import CASES, Case, Corpus
from executor.models.files import find
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.stack import Stack, model_cache
from tests.support.generation import generate, generate_all, greedy_request

AREAS = {"start_tokens": 32, "recent_tokens": 32, "max_cache_tokens": 128}
ROOMY = {"start_tokens": 32, "recent_tokens": 32, "max_cache_tokens": 4096}
POLICIES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "scores alone": {"kind": "EVICTION_KIND_NORM_SUM", **ROOMY},
    "norm sum 32/32/128": {"kind": "EVICTION_KIND_NORM_SUM", **AREAS},
    "norm sum, prompts cached": {"kind": "EVICTION_KIND_NORM_SUM", **AREAS},
    "sum 32/32/128": {"kind": "EVICTION_KIND_SUM", **AREAS},
    "adaptive rkv 32/32/128": {"kind": "EVICTION_KIND_ADAPTIVE_RKV", **AREAS},
    "window 4 + 124": {"kind": "EVICTION_KIND_SLIDING_WINDOW", "start_tokens": 4, "recent_tokens": 124},
    "h2o 128": {"kind": "EVICTION_KIND_H2O", "max_cache_tokens": 128},
    "tova 128": {"kind": "EVICTION_KIND_TOVA", "max_cache_tokens": 128},
    "h2o and tova 128": {"kind": "EVICTION_KIND_H2O_TOVA", "max_cache_tokens": 128},
    "snapkv 128": {"kind": "EVICTION_KIND_SNAPKV", "max_cache_tokens": 128},
    "batch-max 128": {"kind": "EVICTION_KIND_AVERAGE", "max_cache_tokens": 128, "during_prefill": True},
    "key difference 128": {"kind": "EVICTION_KIND_KEYDIFF", "max_cache_tokens": 128},
    "key norm 128": {"kind": "EVICTION_KIND_KNORM", "max_cache_tokens": 128},
}
# The only policy here whose prompts are cached: a sequence moves to private blocks before it evicts.
CACHED = "norm sum, prompts cached"
DECODE = next(case for case in CASES if case.name == "W3")
PROMPTS = Case("prompts", "prompts alone", (2048,) * 6, 1)


def _requests(case: Case, corpus: Corpus, variant: int, name: str) -> list[pb.StreamGenerateRequest]:
    """The requests of a case under one policy."""
    requests = [greedy_request(prompt, case.output_tokens, reuse=False) for prompt in corpus.prompts(case, variant)]
    fields = POLICIES[name]
    for request in requests:
        request.cache.no_store = name != CACHED
        if fields is not None:
            request.eviction_policy.CopyFrom(common.EvictionPolicy(**fields))
    return requests


async def _decode(stack: Stack, requests: list[pb.StreamGenerateRequest]) -> dict[str, float]:
    """Runs all requests at once; returns the rate after all first tokens, the most blocks, and the evicted tokens."""
    async with watched(stack) as usage:
        outputs = await generate_all(stack.scheduler, requests, concurrency=len(requests))
    begin, end = max(one.token_times[0] for one in outputs), max(one.token_times[-1] for one in outputs)
    count = sum(sum(time > begin for time in one.token_times) for one in outputs)
    return {
        "tokens_per_s": count / (end - begin),
        "blocks": float(usage.kv_blocks),
        "evicted": float(sum(one.usage.eviction.evicted_tokens for one in outputs)),
    }


async def _prefill(stack: Stack, corpus: Corpus, variant: int, name: str) -> dict[str, float]:
    """Returns the prompt rate, and its ratio to the rate without a policy. Each prompt runs in both ways, in turns."""
    seconds = {True: 0.0, False: 0.0}
    pairs = zip(_requests(PROMPTS, corpus, variant, name), _requests(PROMPTS, corpus, variant, "none"), strict=True)
    async with grpc.aio.insecure_channel(stack.scheduler) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        for turn, pair in enumerate(pairs):
            for with_policy in (True, False) if turn % 2 else (False, True):
                output = await generate(stub, pair[0 if with_policy else 1])
                seconds[with_policy] += output.token_times[0] - output.started
    tokens = sum(PROMPTS.prompt_tokens)
    return {"prompt_tokens_per_s": tokens / seconds[True], "prompt_ratio": seconds[False] / seconds[True]}


async def measure(stack: Stack, corpus: Corpus, names: list[str], repeats: int) -> dict[str, list[dict[str, float]]]:
    """Returns the figures of each policy in each repeat. Short outputs warm up the stack beforehand."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    others = Others(processes(stack).values())
    short = replace(DECODE, output_tokens=64)
    for name in names:
        await _decode(stack, _requests(short, corpus, 0, name))
    for repeat in range(1, repeats + 1):
        order = names[repeat % len(names) :] + names[: repeat % len(names)]
        for name in order:
            decode = await _decode(stack, _requests(DECODE, corpus, repeat, name))
            found[name].append(decode | await _prefill(stack, corpus, repeat, name))
            print(f"{name}, repeat {repeat}: {decode['tokens_per_s']:.1f} tokens/s", file=sys.stderr, flush=True)
    print(f"other processes took {others.share():.0%} of the cores", file=sys.stderr)
    return found


def summary(found: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Medians, also of the ratios to "none" in the same repeat."""
    return [
        {
            "policy": name,
            **middle(repeats),
            **{
                f"{key}_ratio": statistics.median(
                    one[key] / other[key] for one, other in zip(repeats, found["none"], strict=True)
                )
                for key in ("tokens_per_s", "blocks")
            },
        }
        for name, repeats in found.items()
    ]


def report(rows: list[dict[str, Any]]) -> str:
    """The table."""
    of = "ratio\nto none"
    speeds = ["decoding\ntokens/s", of, "prompts\ntokens/s", of]
    return table(
        ["", *speeds, "most\nblocks", of, "tokens\nevicted"],
        [
            [
                row["policy"],
                f"{row['tokens_per_s']:.1f}",
                f"{row['tokens_per_s_ratio']:.3f}",
                f"{row['prompt_tokens_per_s']:.0f}",
                f"{row['prompt_ratio']:.3f}",
                f"{row['blocks']:.0f}",
                f"{row['blocks_ratio']:.2f}",
                f"{row['evicted']:.0f}",
            ]
            for row in rows
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    add_json_argument(parser)
    arguments = parser.parse_args()
    names = list(dict.fromkeys(["none", *arguments.policies]))
    corpus = Corpus.of(Path(find("", model_cache()).source))
    with Stack(executor_dtype=arguments.dtype) as stack:
        rows = summary(asyncio.run(measure(stack, corpus, names, arguments.repeats)))
    print(f"{arguments.dtype}, medians of {arguments.repeats}: long decode (W3), and prompts of 2,048 tokens")
    print(report(rows))
    Result("eviction_cost", {"policies": rows}, {"dtype": arguments.dtype, "repeats": arguments.repeats}).write(
        arguments.json
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
