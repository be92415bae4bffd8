"""Where the time of a step goes: planning, serialising, waiting for the cache manager, waiting for the executor.

Run it with `make bench-overhead`. A real stack decodes with several numbers of concurrent sequences; the figures are
the differences of the scheduler's histograms around each run.
"""

import argparse
import asyncio
import random
import socket
from collections.abc import Sequence

import grpc

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from tests.stack import Stack, metrics
from tests.support.generation import generate_all, greedy_request

PREFIX = "kvkeep_scheduler_step_"
# Histogram of the scheduler to the words for it.
PARTS = {
    "planning": "planning",
    "sending": "serialising and sending",
    "cachemgr_wait": "waiting for cachemgr",
    "executor_wait": "waiting for executor",
    "executor_idle": "executor idle between steps",
}
PROMPT_TOKENS = 64

Histogram = dict[str, float]


def read(address: str) -> dict[str, Histogram]:
    """Sum, count and cumulative buckets of every step histogram."""
    result: dict[str, Histogram] = {}
    for name, labels, value in metrics(address):
        if not name.startswith(PREFIX):
            continue
        part, _, kind = name.removeprefix(PREFIX).partition("_seconds")
        if kind in ("_sum", "_count"):
            result.setdefault(part, {})[kind] = value
        elif kind == "_bucket":
            result.setdefault(part, {})[labels.removeprefix('le="').rstrip('"')] = value
    return result


def percentile(before: Histogram, after: Histogram, share: float) -> str:
    """Upper bound of the bucket that holds the percentile, in milliseconds."""
    count = after["_count"] - before["_count"]
    bounds = sorted((float(bound), bound) for bound in after if not bound.startswith("_"))
    for value, bound in bounds:
        if after[bound] - before[bound] >= share * count:
            return f"<= {value * 1e3:g}"
    return "> all"


def report(
    sequences: int, before: dict[str, Histogram], after: dict[str, Histogram], tokens: int, seconds: float
) -> None:
    """Prints one table."""
    steps = after["planning"]["_count"] - before["planning"]["_count"]
    rate, step = tokens / seconds, seconds / steps * 1e3
    print(f"\n{sequences} sequences: {steps:.0f} steps, {step:.2f} ms per step, {rate:.1f} tokens/s")
    print(f"  {'ms per step':<30}{'mean':>10}{'share':>9}{'p50':>12}{'p99':>12}")
    for part, words in PARTS.items():
        total = after[part]["_sum"] - before[part]["_sum"]
        middle, worst = (percentile(before[part], after[part], share) for share in (0.5, 0.99))
        print(f"  {words:<30}{total / steps * 1e3:>10.3f}{total / seconds:>9.2%}{middle:>12}{worst:>12}", flush=True)


async def measure(stack: Stack, address: str, counts: Sequence[int], output_tokens: int) -> None:
    """One run per number of sequences, after a warm-up."""
    rng = random.Random(7)
    async with grpc.aio.insecure_channel(stack.scheduler) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        vocabulary = (await stub.GetModel(pb.GetModelRequest(), timeout=10)).vocab_size
    for turn, count in enumerate([1, *counts]):
        prompts = [[rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
        requests = [greedy_request(prompt, output_tokens) for prompt in prompts]
        before = read(address)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        outputs = await generate_all(stack.scheduler, requests, concurrency=count)
        if turn:
            tokens = sum(len(output.token_ids) for output in outputs)
            report(count, before, read(address), tokens, loop.time() - begin)


def main() -> None:
    """Starts a stack of its own and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--output-tokens", type=int, default=128)
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with Stack(scheduler_metrics_address=address) as stack:
        asyncio.run(measure(stack, address, arguments.sequences, arguments.output_tokens))


if __name__ == "__main__":
    main()
