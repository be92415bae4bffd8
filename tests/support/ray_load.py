"""Requests to a fleet on a Ray cluster while something happens to its processes, actors and nodes."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import sub

import grpc

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from tests.support.exact_stub import expected_tokens
from tests.support.generation import Output, generate, greedy_request
from tests.support.patience import patience
from tests.support.ray_cluster import BLOCK_STUB, STEP_SECONDS, STUB, RayFleet
from tests.support.scheduler.fake_executor import continuation
from tests.support.scheduler.tokenizers import byte_level_tokenizer

STREAMS = 16
VOCABULARY = byte_level_tokenizer().get_vocab_size()
PROMPTS = [random.Random(number).choices(range(1, VOCABULARY), k=40) for number in range(20)]
# With steps of 20 ms a request takes two seconds.
TOKENS = 100
# The answers to the prompts, by the module of the stub.
EXPECTED = {
    STUB: [expected_tokens(prompt, TOKENS) for prompt in PROMPTS],
    BLOCK_STUB: [continuation(prompt, TOKENS, VOCABULARY) for prompt in PROMPTS],
}
SECONDS = patience(60)


@dataclass
class Answers:
    """What the callers of a fleet got. pause: the longest time without a token in an answered request, in seconds.

    wrong: prompts, by number, with other tokens than they should have. lost: errors of requests that were not answered.
    cut: requests that ended with their router and were sent again. seconds: that the work took.
    """

    requests: int = 0
    pause: float = 0.0
    wrong: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    cut: int = 0
    seconds: float = 0.0

    def add(self, number: int, output: Output, expected: Sequence[int]) -> None:
        """One whole answer to a prompt."""
        self.requests += 1
        times = [output.started, *output.token_times]
        self.pause = max(self.pause, *map(sub, times[1:], times))
        if output.token_ids != expected:
            self.wrong.append(number)


def request(number: int) -> pb.StreamGenerateRequest:
    """Greedy, with a prompt by its number."""
    # The first stub has the length of its steps from the seed.
    return greedy_request(PROMPTS[number], TOKENS, sampling=pb.SamplingParams(seed=round(STEP_SECONDS * 1e6)))


def ask_while(fleet: RayFleet, work: Callable[[], None], *, cuts: Collection[str] = ()) -> Answers:
    """Answers of 16 streams, one request after the other on each, that run from before some work until after it.

    cuts: names of routers that the work ends, and with them their streams. These requests are sent again until they
    are answered.
    """
    answers, under_way, done = Answers(), threading.Event(), threading.Event()
    # Processes that the work starts end with their thread, so the requests have another thread.
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(asyncio.run, _ask(fleet, answers, under_way, done, cuts))
        asking.add_done_callback(lambda _: under_way.set())
        try:
            under_way.wait()
            begin = time.monotonic()
            work()
            answers.seconds = time.monotonic() - begin
        finally:
            done.set()
        asking.result()
    return answers


async def _ask(
    fleet: RayFleet, answers: Answers, under_way: threading.Event, done: threading.Event, cuts: Collection[str]
) -> None:
    routers, expected = list(fleet.routers().items()), EXPECTED[fleet.stub]
    begun = [asyncio.Event() for _ in range(STREAMS)]

    async def ask(number: int) -> None:
        nonlocal routers
        was_cut = False
        while was_cut or not done.is_set():
            was_cut = False
            router, address = routers[number % len(routers)]
            try:
                async with grpc.aio.insecure_channel(address) as channel:
                    stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
                    output = await generate(stub, request(number), SECONDS, begun[number])
                answers.add(number, output, expected[number])
            except grpc.aio.AioRpcError as error:
                if router in cuts and error.code() is grpc.StatusCode.UNAVAILABLE:
                    answers.cut, was_cut = answers.cut + 1, True
                else:
                    answers.lost.append(f"{error.code().name}: {error.details()}")
                # The work begins all the same, and callers wait before they ask again.
                begun[number].set()
                await asyncio.sleep(0.5)
                routers = list((await asyncio.to_thread(fleet.routers)).items()) or routers

    tasks = [asyncio.create_task(ask(number)) for number in range(STREAMS)]
    await asyncio.gather(*(event.wait() for event in begun))
    under_way.set()
    await asyncio.to_thread(done.wait)
    async with asyncio.timeout(2 * SECONDS):
        await asyncio.gather(*tasks)
