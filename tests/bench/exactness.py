"""Greedy output of the whole stack against transformers' generate(), in every combination of settings.

Run it with `make exactness`. Prints one line per combination and exits with 1 when a token differs that is no tie.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from tokenizers import Tokenizer

from executor.model_files import resolve
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from tests.stack import Stack, model_cache
from tests.support.generation import Output, generate_all, greedy_request
from tests.support.prompts import prompts
from tests.support.reference import Reference, first_mismatch, references

COUNT = 32
OUTPUT_TOKENS = 32
BATCHES = (1, 8, 32)
CHUNK_BUDGETS = (64, 512)
# The longest prompt with its output fits, two of the longer ones do not.
POOLS = {"roomy": 65_536, "tight": 2_048}


async def purge(admin: str) -> None:
    """Empties the cache."""
    async with grpc.aio.insecure_channel(admin) as channel:
        stub: kvcache_rpc.CacheAdminServiceAsyncStub = kvcache_rpc.CacheAdminServiceStub(channel)
        await stub.PurgeBlocks(kv.PurgeBlocksRequest(), timeout=30)


def compare(expected: Sequence[Reference], outputs: Sequence[Output], label: str) -> tuple[int, int]:
    """Counts (ties, errors) and prints each place."""
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


async def one_stack(stack: Stack, label: str, inputs: list[list[int]], expected: list[Reference]) -> tuple[int, int]:
    """All batch sizes and ways of reuse on one running stack."""
    ties = errors = 0
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
        ties += counts[0]
        errors += counts[1]
    return ties, errors


def main() -> int:
    """Runs the matrix."""
    model = resolve("")
    encode = Tokenizer.from_file(str(Path(model) / "tokenizer.json")).encode
    inputs = prompts(COUNT, lambda text: encode(text, add_special_tokens=False).ids)
    print(f"{COUNT} prompts, {min(map(len, inputs))} to {max(map(len, inputs))} tokens, {sum(map(len, inputs))} in all")
    expected = references(Path(model), inputs, OUTPUT_TOKENS, model_cache(), print)
    ties = errors = 0
    for (pool, max_tokens), budget in itertools.product(POOLS.items(), CHUNK_BUDGETS):
        with Stack(executor_max_tokens=max_tokens, scheduler_max_batched_tokens=budget) as stack:
            counts = asyncio.run(one_stack(stack, f"{pool} pool, chunk budget {budget}", inputs, expected))
        ties += counts[0]
        errors += counts[1]
    print(f"in all: {ties} ties, {errors} different")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
