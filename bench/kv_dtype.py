"""Caches of 8 bits and of bfloat16: perplexity, equal greedy output, memory, and long decoding.

Run it with `python -m bench kv_dtype`. Perplexity is measured on Python's language reference, in windows that are
spread evenly over the text. Each window is computed in chunks that read earlier tokens from the cache, as prompts are.
Greedy output of the whole stack is compared with greedy output over a cache of the weights' type, up to the first
token that differs. The same type in different batches shows the effect of rounding alone. Ends with status 1 when
perplexity is above its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.prose import even_windows
from bench.result import Result, add_json_argument, middle
from bench.runs import run
from bench.tables import table
from bench.workloads import Corpus, chosen
from executor.batch import SequenceState, build_batch
from executor.cache.pool import KvPools
from executor.models.calibration import calibrate
from executor.models.files import find
from executor.models.forward import Model
from executor.models.load import choose_cache_dtype, load_model
from executor.models.tokenizer import load_tokenizer
from executor.step import NewSequence
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from tests.stack import Stack, model_cache
from tests.support.generation import generate_all, greedy_request
from tests.support.ports import free_address

DTYPES = ("auto", "int8", "fp8")
# Limits of the growth of perplexity, compared with a cache in the weights' type.
BOUNDS = {"int8": 0.005, "fp8": 0.01}
WINDOW, CHUNK, BLOCK = 1024, 256, 16
PROMPTS, OUTPUT = 100, 64
CONCURRENCY, OTHER_CONCURRENCY = 16, 4
POOL_TOKENS = 16_384
PARTS = ("perplexity", "agreement", "speed")


@torch.inference_mode()
def losses(model: Model, pools: KvPools, windows: Sequence[Sequence[int]]) -> Tensor:
    """Negative log-probability of each next token, [windows, WINDOW] float64, in nats.

    windows: WINDOW + 1 token ids each.
    """
    table_of_blocks = tuple(range(1, WINDOW // BLOCK + 1))
    last_tokens, found = torch.zeros(1, dtype=torch.int64), []
    for number, ids in enumerate(windows):
        new = NewSequence(0, tuple(ids[:-1]), WINDOW, 0, (table_of_blocks,) * len(pools.pools))
        sequence = SequenceState.of(new, 0)
        for first in range(0, WINDOW, CHUNK):
            batch = build_batch([sequence], [CHUNK], last_tokens, BLOCK, len(pools.pools))
            logits = model.forward.prepare(replace(batch, rows=np.arange(CHUNK)), pools)().logits.float()
            wanted = torch.tensor(ids[first + 1 : first + 1 + CHUNK])
            found.append(F.cross_entropy(logits, wanted, reduction="none").double())
            sequence.computed += CHUNK
            sequence.kept += CHUNK
        print(f"window {number + 1} of {len(windows)}", file=sys.stderr, flush=True)
    return torch.cat(found).view(len(windows), -1)


def perplexities(dtype: str, tokens: int, corpus: Sequence[int]) -> dict[str, Any]:
    """The perplexity of each cache, with its growth and the standard error of the growth over windows."""
    files = find("", model_cache())
    model = load_model(files, torch.device("cpu"), dtype, compiled_folder=model_cache() / "compiled")
    tokenizer = load_tokenizer(files)
    windows = even_windows(corpus, -(-tokens // WINDOW), WINDOW + 1)
    found: dict[str, Any] = {}
    base = torch.empty(0)
    for name in DTYPES:
        kept = choose_cache_dtype(name, model)
        pools = KvPools(model.groups, WINDOW // BLOCK, BLOCK, kept, model.device, calibrate(model, tokenizer, kept))
        each = losses(model, pools, windows)
        base = each if name == "auto" else base
        more = (each - base).mean(1)
        found[name] = {
            "perplexity": float(each.mean().exp()),
            "growth": float(more.mean().exp() - 1),
            "standard_error": float(more.std() / len(windows) ** 0.5),
            "tokens": each.numel(),
        }
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def prompts_of(corpus: Sequence[int]) -> list[list[int]]:
    """Prompts from the text, of 32 to 256 tokens."""
    rng = random.Random(8)
    lengths = [rng.randint(32, 256) for _ in range(PROMPTS)]
    return [list(corpus[(begin := rng.randrange(len(corpus) - length)) : begin + length]) for length in lengths]


def common(expected: Sequence[int], found: Sequence[int]) -> int:
    """The number of equal leading tokens."""
    return next((i for i, (one, other) in enumerate(zip(expected, found, strict=True)) if one != other), len(expected))


def agreement(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> dict[str, float]:
    """How far outputs agree with the expected outputs."""
    lengths = [common(one, other) for one, other in zip(expected, found, strict=True)]
    return {
        "equal_outputs": sum(length == OUTPUT for length in lengths),
        "tokens_before_the_first_difference": sum(lengths) / (OUTPUT * len(lengths)),
        "median_first_difference": statistics.median(lengths),
    }


async def pool_of(stack: Stack) -> kv.Pool:
    """The only pool of a stack."""
    async with grpc.aio.insecure_channel(stack.admin) as channel:
        stub: kvcache_rpc.CacheAdminServiceAsyncStub = kvcache_rpc.CacheAdminServiceStub(channel)
        [pool] = (await stub.ListPools(kv.ListPoolsRequest(), timeout=10)).pools
    return pool


def outputs_of(stack: Stack, prompts: Sequence[Sequence[int]], concurrency: int) -> list[list[int]]:
    """Outputs of greedy requests; no prompt finds the blocks of a different prompt."""
    requests = [greedy_request(prompt, OUTPUT, reuse=False) for prompt in prompts]
    made = asyncio.run(generate_all(stack.scheduler, requests, concurrency=concurrency, seconds=3600))
    return [output.token_ids for output in made]


def stack_of(dtype: str, name: str) -> Stack:
    """A stack with a cache of this setting."""
    settings = {"executor_dtype": dtype, "executor_kv_cache_dtype": name, "executor_max_tokens": POOL_TOKENS}
    return Stack(**settings, executor_metrics_address=free_address())


def agreements(dtype: str, text: Sequence[int]) -> dict[str, Any]:
    """Memory, and how far greedy output agrees with greedy output over a cache of the weights' type."""
    found: dict[str, Any] = {}
    expected: list[list[int]] = []
    for name in DTYPES:
        with stack_of(dtype, name) as stack:
            pool = asyncio.run(pool_of(stack))
            outputs = outputs_of(stack, prompts_of(text), CONCURRENCY)
            expected = expected or outputs
            found[name] = {
                "cache": pool.spec.dtype,
                "block_bytes": pool.spec.block_bytes,
                "pool_bytes": pool.spec.block_bytes * pool.total_blocks,
            } | agreement(expected, outputs)
            if name == "auto":
                found["auto, other batches"] = agreement(
                    expected, outputs_of(stack, prompts_of(text), OTHER_CONCURRENCY)
                )
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def speeds(dtype: str, repeats: int, corpus: Corpus) -> dict[str, Any]:
    """Medians of output tokens per second of long decoding and of attention's share of it; all caches in turns."""
    [case] = chosen(["W3"])
    found: dict[str, list[dict[str, float]]] = {name: [] for name in DTYPES}
    with contextlib.ExitStack() as opened:
        stacks = {name: opened.enter_context(stack_of(dtype, name)) for name in DTYPES}
        for repeat in range(repeats + 1):
            for name, stack in stacks.items():
                # The first repeat warms up.
                one = asyncio.run(run(stack, case, corpus.prompts(case, repeat), None if repeat else 64))
                if repeat:
                    kinds = one.usage.kind_seconds
                    found[name].append(
                        {
                            "tokens_per_s": one.times.output_rate,
                            "attention_share": kinds["attention"] / sum(kinds.values()),
                            "others_cpu": one.usage.others,
                        }
                    )
            print(f"round {repeat} of {repeats}", file=sys.stderr, flush=True)
    return {name: middle(figures) for name, figures in found.items()}


def main() -> int:
    """Measures and judges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", help="of the weights, and of the cache to compare with")
    parser.add_argument("--tokens", type=int, default=50_000, help="whose perplexity is measured")
    parser.add_argument("--repeats", type=int, default=3, help="of the speed")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    add_json_argument(parser)
    given = parser.parse_args()
    corpus = Corpus.of(Path(find("", model_cache()).source))
    figures: dict[str, Any] = {}
    if "perplexity" in given.parts:
        figures["perplexity"] = perplexities(given.dtype, given.tokens, corpus.tokens)
        rows = [
            [name, f"{one['perplexity']:.4f}", f"{one['growth']:+.2%}", f"{one['standard_error']:.2%}"]
            for name, one in figures["perplexity"].items()
        ]
        print(table(("cache", "perplexity", "more", "standard error"), rows))
    if "agreement" in given.parts:
        figures["agreement"] = agreements(given.dtype, corpus.tokens)
    if "speed" in given.parts:
        figures["speed"] = speeds(given.dtype, given.repeats, corpus)
    for part in ("agreement", "speed"):
        for name, one in figures.get(part, {}).items():
            print(f"{part}, {name}: {one}")
    Result("kv_dtype", figures, {name: value for name, value in vars(given).items() if name != "json"}).write(
        given.json
    )
    grown = {name: figures["perplexity"][name]["growth"] for name in BOUNDS} if "perplexity" in figures else {}
    missed = [name for name, growth in grown.items() if growth > BOUNDS[name]]
    for name in missed:
        print(f"{name}: perplexity grows by {grown[name]:.2%}, more than {BOUNDS[name]:.1%}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
