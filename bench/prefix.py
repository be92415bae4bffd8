"""What prefix reuse gains: requests that share a long prefix, with and without reuse.

Run it with `make bench-prefix`. All requests arrive at once on an empty cache; each repeat uses another prefix.
"""

import argparse
import asyncio
import statistics
import time
from pathlib import Path

from tokenizers import Tokenizer

from executor.models.files import resolve
from tests.stack import Stack
from tests.support.generation import Output, generate_all, greedy_request
from tests.support.prompts import shared_prefix_prompts

OUTPUT_TOKENS = 32


def describe(name: str, outputs: list[Output], seconds: float) -> float:
    """Prints one row and returns output tokens per second."""
    rate = sum(len(output.token_ids) for output in outputs) / seconds
    cached = [output.usage.cached_tokens for output in outputs]
    first = statistics.mean(output.token_times[0] - output.started for output in outputs)
    print(
        f"{name:>14}: {rate:7.1f} output tokens/s, {seconds:6.1f} s, time to first token {first:5.2f} s, "
        f"cached tokens per request {min(cached)}..{max(cached)}, {sum(cached)} in all",
        flush=True,
    )
    return rate


async def measure(stack: Stack, inputs: list[list[int]], *, reuse: bool) -> tuple[list[Output], float]:
    """All requests at once."""
    requests = [greedy_request(prompt, OUTPUT_TOKENS, reuse=reuse) for prompt in inputs]
    begin = time.monotonic()
    outputs = await generate_all(stack.scheduler, requests, concurrency=len(requests))
    return outputs, time.monotonic() - begin


async def run(stack: Stack, encode: object, count: int, repeats: int) -> None:
    """Repeats the pair and prints the ratio of the medians."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(repeats):
        inputs = shared_prefix_prompts(count, encode, variant=repeat)  # type: ignore[arg-type]
        for reuse in (True, False):
            outputs, seconds = await measure(stack, inputs, reuse=reuse)
            rates[reuse].append(describe("with reuse" if reuse else "without reuse", outputs, seconds))
    ratio = statistics.median(rates[True]) / statistics.median(rates[False])
    print(f"{count} requests, common prefix 1024 tokens: {ratio:.1f} times faster with reuse (medians of {repeats})")


def main() -> None:
    """Starts a stack of its own and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(Path(resolve("")) / "tokenizer.json"))
    with Stack() as stack:
        asyncio.run(
            run(
                stack,
                lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
                arguments.requests,
                arguments.repeats,
            )
        )


if __name__ == "__main__":
    main()
