"""Inter-token latency of running streams before, during and after a long prompt.

Run it with `make bench-fairness`. Streams decode, a prompt arrives and ends, and the streams go on undisturbed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from bench.result import Result, add_json_argument, percentile
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from tests.stack import Stack
from tests.support.generation import generate, greedy_request

STREAM_PROMPT = 256
# Tokens that every stream generates undisturbed, before the prompt and again after it.
QUIET_TOKENS = 100
# A target so long that every step takes as many prompt tokens as fit.
NO_TARGET = 1_000


@dataclass
class Turn:
    """Seconds between tokens, of all streams together. first: the prompt's time to first token."""

    quiet: list[float] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)
    first: float = 0.0


async def follow(stub: rpc.GenerationServiceAsyncStub, request: pb.StreamGenerateRequest, times: list[float]) -> None:
    """Records when each token of a stream arrives."""
    loop = asyncio.get_running_loop()
    async for message in stub.StreamGenerate(request, timeout=3600):
        times += [loop.time()] * len(message.token_ids)


async def reach(streams: Sequence[list[float]], more: int) -> None:
    """Waits until every stream has received `more` further tokens."""
    goals = [len(times) + more for times in streams]
    while any(len(times) < goal for times, goal in zip(streams, goals, strict=True)):
        await asyncio.sleep(0.05)


async def turn(
    stub: rpc.GenerationServiceAsyncStub, rng: random.Random, vocabulary: int, streams: int, tokens: int
) -> Turn:
    """Runs new streams and one prompt."""

    def request(length: int, output: int) -> pb.StreamGenerateRequest:
        prompt = [rng.randrange(vocabulary) for _ in range(length)]
        return greedy_request(prompt, output, reuse=False, request_id=f"{rng.getrandbits(64):x}")

    loop = asyncio.get_running_loop()
    times: list[list[float]] = [[] for _ in range(streams)]
    running = [asyncio.create_task(follow(stub, request(STREAM_PROMPT, 7_000), one)) for one in times]
    # The first tokens come while prompts of the other streams are computed.
    await reach(times, 8)
    begin = loop.time()
    await reach(times, QUIET_TOKENS)
    sent = loop.time()
    output = await generate(stub, request(tokens, 1))
    done = loop.time()
    await reach(times, QUIET_TOKENS)
    end = loop.time()
    for task in running:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    result = Turn(first=output.token_times[0] - output.started)
    for one in times:
        for before, after in itertools.pairwise(one):
            if sent < after <= done:
                result.disturbed.append(after - before)
            elif begin < before and after <= end and (after <= sent or before > done):
                result.quiet.append(after - before)
    return result


def report(name: str, turns: Sequence[Turn]) -> dict[str, Any]:
    """Prints one row of medians over the turns; returns the values of all turns."""
    columns = []
    figures: dict[str, Any] = {"name": name, "prompt_ttft_s": [one.first for one in turns]}
    for share in (0.5, 0.99):
        quiet = [percentile(one.quiet, share) * 1e3 for one in turns]
        disturbed = [percentile(one.disturbed, share) * 1e3 for one in turns]
        figures[f"p{share * 100:.0f}_ms"] = {"quiet": quiet, "disturbed": disturbed}
        ratio = statistics.median(b / a for a, b in zip(quiet, disturbed, strict=True))
        columns.append(f"{statistics.median(quiet):9.1f}{statistics.median(disturbed):10.1f}{ratio:8.2f}")
    first = statistics.median(one.first for one in turns)
    print(f"{name:<22}{columns[0]}   {columns[1]}{first:12.2f}", flush=True)
    return figures


async def measure(stack: Stack, name: str, streams: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Runs several turns on one stack, after a warm-up turn."""
    rng = random.Random(7)
    async with grpc.aio.insecure_channel(stack.scheduler) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        vocabulary = (await stub.GetModel(pb.GetModelRequest(), timeout=10)).vocab_size
        await turn(stub, rng, vocabulary, 1, 64)
        return report(name, [await turn(stub, rng, vocabulary, streams, tokens) for _ in range(repeats)])


def main() -> None:
    """Starts stacks and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=4_096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--targets", type=float, nargs="+", default=[0, NO_TARGET], help="seconds; 0 for the scheduler's default"
    )
    add_json_argument(parser)
    arguments = parser.parse_args()
    print(f"{arguments.streams} streams, a prompt of {arguments.prompt_tokens} tokens, {arguments.dtype}")
    columns = "   ".join(f"{name:>9}{'beside it':>10}{'ratio':>8}" for name in ("p50 ms", "p99 ms"))
    print(f"{'time between tokens':<22}{columns}{'prompt s':>12}")
    rows: list[dict[str, Any]] = []
    for target in arguments.targets:
        name = {0: "default", NO_TARGET: "whole budget"}.get(target, f"target {target * 1e3:g} ms")
        with Stack(executor_dtype=arguments.dtype, scheduler_target_itl_seconds=target) as stack:
            row = asyncio.run(measure(stack, name, arguments.streams, arguments.prompt_tokens, arguments.repeats))
        rows.append({"target_s": target} | row)
    asked = {name: value for name, value in vars(arguments).items() if name != "json"}
    Result("fairness", {"targets": rows}, asked).write(arguments.json)


if __name__ == "__main__":
    main()
