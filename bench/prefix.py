"""Gain of prefix reuse: requests that share a long prefix, with reuse and without.

Run it with `make bench-prefix`. All requests arrive at once on an empty cache; each repeat uses a different prefix.
"""

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.result import Result, add_json_argument
from executor.models.files import resolve
from tests.stack import Stack
from tests.support.generation import Output, generate_all, greedy_request
from tests.support.prompts import shared_prefix_prompts

OUTPUT_TOKENS = 32


def describe(outputs: list[Output], seconds: float, *, reuse: bool) -> dict[str, Any]:
    """Prints one row and returns its figures."""
    name = "with reuse" if reuse else "without reuse"
    rate = sum(len(output.token_ids) for output in outputs) / seconds
    cached = [output.usage.cached_tokens for output in outputs]
    first = statistics.mean(output.token_times[0] - output.started for output in outputs)
    print(
        f"{name:>14}: {rate:7.1f} output tokens/s, {seconds:6.1f} s, time to first token {first:5.2f} s, "
        f"cached tokens per request {min(cached)}..{max(cached)}, {sum(cached)} in all",
        flush=True,
    )
    return {
        "reuse": reuse,
        "output_tokens_per_s": rate,
        "seconds": seconds,
        "ttft_mean_s": first,
        "cached_tokens": cached,
    }


async def measure(stack: Stack, inputs: list[list[int]], *, reuse: bool) -> tuple[list[Output], float]:
    """Runs all requests at once."""
    requests = [greedy_request(prompt, OUTPUT_TOKENS, reuse=reuse) for prompt in inputs]
    begin = time.monotonic()
    outputs = await generate_all(stack.scheduler, requests, concurrency=len(requests))
    return outputs, time.monotonic() - begin


async def run(stack: Stack, encode: object, count: int, repeats: int) -> dict[str, Any]:
    """Repeats both runs; prints and returns the ratio of their medians."""
    runs: list[dict[str, Any]] = []
    for repeat in range(repeats):
        inputs = shared_prefix_prompts(count, encode, variant=repeat)  # type: ignore[arg-type]
        for reuse in (True, False):
            outputs, seconds = await measure(stack, inputs, reuse=reuse)
            runs.append(describe(outputs, seconds, reuse=reuse))
    rates = {reuse: [one["output_tokens_per_s"] for one in runs if one["reuse"] is reuse] for reuse in (True, False)}
    ratio = statistics.median(rates[True]) / statistics.median(rates[False])
    print(f"{count} requests, common prefix 1024 tokens: {ratio:.1f} times faster with reuse (medians of {repeats})")
    return {"runs": runs, "ratio": ratio}


def main() -> None:
    """Starts a stack and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    add_json_argument(parser)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(Path(resolve("")) / "tokenizer.json"))
    with Stack() as stack:
        figures = asyncio.run(
            run(
                stack,
                lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
                arguments.requests,
                arguments.repeats,
            )
        )
    asked = {"requests": arguments.requests, "repeats": arguments.repeats}
    Result("prefix", figures, asked).write(arguments.json)


if __name__ == "__main__":
    main()
