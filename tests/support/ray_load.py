"""Requests to a fleet on a Ray cluster while something happens to its processes, actors and nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import sub

import grpc

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from tests.support.exact_stub import expected_tokens
from tests.support.generation import Output, generate, greedy_request
from tests.support.patience import patience

STREAMS = 16
PROMPTS = [[1000 + 7 * number + step for step in range(40)] for number in range(20)]
# With steps of 20 ms a request takes two seconds.
TOKENS, STEP_MICROSECONDS = 100, 20_000
EXPECTED = [expected_tokens(prompt, TOKENS) for prompt in PROMPTS]
SECONDS = patience(60)


@dataclass
class Answers:
    """What the callers of a fleet got. pause: the longest time between two tokens of a stream, in seconds.

    wrong: prompts, by number, with other tokens than they should have. lost: errors of requests that were not answered.
    seconds: that the work took.
    """

    requests: int = 0
    pause: float = 0.0
    wrong: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, number: int, output: Output) -> None:
        """One whole answer to a prompt."""
        self.requests += 1
        self.pause = max(self.pause, *map(sub, output.token_times[1:], output.token_times))
        if output.token_ids != EXPECTED[number]:
            self.wrong.append(number)


def request(number: int) -> pb.StreamGenerateRequest:
    """Greedy, with a prompt by its number."""
    return greedy_request(PROMPTS[number], TOKENS, sampling=pb.SamplingParams(seed=STEP_MICROSECONDS))


def ask_while(router: str, work: Callable[[], None]) -> Answers:
    """Answers of 16 streams, one request after the other on each, that run from before some work until after it."""
    return asyncio.run(_ask_while(router, work))


async def _ask_while(router: str, work: Callable[[], None]) -> Answers:
    answers = Answers()
    begun, done = [asyncio.Event() for _ in range(STREAMS)], asyncio.Event()

    async def ask(stub: rpc.GenerationServiceAsyncStub, number: int) -> None:
        while not done.is_set():
            try:
                answers.add(number, await generate(stub, request(number), SECONDS, begun[number]))
            except grpc.aio.AioRpcError as error:
                answers.lost.append(f"{error.code().name}: {error.details()}")
                # The work begins all the same, and callers wait before they ask again.
                begun[number].set()
                await asyncio.sleep(0.5)

    async with grpc.aio.insecure_channel(router) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        tasks = [asyncio.create_task(ask(stub, number)) for number in range(STREAMS)]
        await asyncio.gather(*(event.wait() for event in begun))
        begin = time.monotonic()
        try:
            await asyncio.to_thread(work)
        finally:
            answers.seconds = time.monotonic() - begin
            done.set()
        await asyncio.gather(*tasks)
    return answers
