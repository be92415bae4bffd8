"""Greedy output of the whole stack against transformers' generate(), with several settings.

Run it with `make exactness`. Prints one line per combination. Exits with 1 when a token differs without a tie, or when
no request is preempted in the tight pool.
"""

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

import grpc
from tokenizers import Tokenizer

from bench.result import Result, add_json_argument
from executor.models.files import resolve
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from tests.stack import Stack, model_cache
from tests.support.generation import Output, generate_all, greedy_request
from tests.support.prompts import prompts
from tests.support.reference import Reference, first_mismatch, references

COUNT = 32
OUTPUT_TOKENS = 32
BATCHES = (1, 8, 32)
# Settings of the stack. In the tight pool the longest prompt with its output just fits, and no sequence gets blocks
# before it needs them: when several requests run, some of them are preempted.
POOLS: dict[str, dict[str, object]] = {
    "roomy": {"executor_max_tokens": 65_536},
    "tight": {"executor_max_tokens": 1_552, "cachemgr_capacity_ahead_tokens": 0},
}


async def purge(admin: str) -> None:
    """Empties the cache."""
    async with grpc.aio.insecure_channel(admin) as channel:
        stub: kvcache_rpc.CacheAdminServiceAsyncStub = kvcache_rpc.CacheAdminServiceStub(channel)
        await stub.PurgeBlocks(kv.PurgeBlocksRequest(), timeout=30)


def compare(expected: Sequence[Reference], outputs: Sequence[Output], label: str) -> tuple[int, int]:
    """Counts (ties, errors) and prints each position."""
    ties = errors = 0
    for index, (reference, output) in enumerate(zip(expected, outputs, strict=True)):
        mismatch = first_mismatch(reference, output.token_ids)
        if mismatch is None:
            continue
        kind = "tie" if mismatch.is_tie else "DIFFERENT"
        print(f"  {kind}: {label}, prompt {index}, output position {mismatch.position}, margin {mismatch.margin:.2e}")
        ties += mismatch.is_tie
        errors += not mismatch.is_tie
    return ties, errors


async def one_stack(
    stack: Stack, label: str, inputs: list[list[int]], expected: list[Reference]
) -> list[dict[str, Any]]:
    """Runs all batch sizes and kinds of reuse on one running stack; returns a row for each combination."""
    rows: list[dict[str, Any]] = []
    for batch, reuse in itertools.product(BATCHES, ("off", "on", "second time")):
        if reuse == "on":
            await purge(stack.admin)
        requests = [greedy_request(prompt, OUTPUT_TOKENS, reuse=reuse != "off") for prompt in inputs]
        begin = time.monotonic()
        outputs = await generate_all(stack.scheduler, requests, concurrency=batch)
        seconds = time.monotonic() - begin
        name = f"{label}, batch {batch}, reuse {reuse}"
        counts = compare(expected, outputs, name)
        cached = sum(output.usage.cached_tokens for output in outputs)
        preemptions = sum(output.usage.preemptions for output in outputs)
        print(
            f"{name}: {len(outputs) - sum(counts)} of {len(outputs)} equal, {counts[0]} ties, {counts[1]} different; "
            f"{cached} cached tokens, {preemptions} preemptions, {seconds:.1f} s",
            flush=True,
        )
        rows.append(
            {
                "settings": label,
                "batch": batch,
                "reuse": reuse,
                "outputs": len(outputs),
                "ties": counts[0],
                "errors": counts[1],
                "cached_tokens": cached,
                "preemptions": preemptions,
                "seconds": seconds,
            }
        )
    return rows


def main() -> int:
    """Runs the matrix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pools", nargs="+", choices=POOLS, default=[*POOLS])
    parser.add_argument("--chunk-budgets", nargs="+", type=int, default=[64, 512])
    parser.add_argument("--drafts", nargs="+", type=int, default=[0, 8], help="most drafted tokens (%(default)s)")
    add_json_argument(parser)
    arguments = parser.parse_args()
    model = resolve("")
    encode = Tokenizer.from_file(str(model / "tokenizer.json")).encode
    inputs = prompts(COUNT, lambda text: encode(text, add_special_tokens=False).ids)
    print(f"{COUNT} prompts, {min(map(len, inputs))} to {max(map(len, inputs))} tokens, {sum(map(len, inputs))} in all")
    expected = references(model, inputs, OUTPUT_TOKENS, model_cache(), print)
    rows: list[dict[str, Any]] = []
    too_roomy = 0
    for pool, budget, drafts in itertools.product(arguments.pools, arguments.chunk_budgets, arguments.drafts):
        with Stack(scheduler_max_batched_tokens=budget, executor_max_drafts=drafts, **POOLS[pool]) as stack:
            label = f"{pool} pool, chunk budget {budget}, {drafts or 'no'} drafts"
            found = asyncio.run(one_stack(stack, label, inputs, expected))
        if pool == "tight" and not any(row["preemptions"] for row in found):
            print("the tight pool was not tight enough: no request was preempted")
            too_roomy += 1
        rows += found
    total = {name: sum(row[name] for row in rows) for name in ("outputs", "ties", "errors", "preemptions")}
    print(
        f"in all: {total['outputs']} outputs, {total['ties']} ties, {total['errors']} different, "
        f"{total['preemptions']} preemptions"
    )
    asked = {"pools": arguments.pools, "chunk_budgets": arguments.chunk_budgets, "drafts": arguments.drafts}
    Result("exactness", {"combinations": rows, "total": total}, asked).write(arguments.json)
    return 1 if total["errors"] or too_roomy else 0


if __name__ == "__main__":
    sys.exit(main())
