"""A small asynchronous client of GenerationService for tests and benchmarks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import grpc

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc


@dataclass
class Output:
    """The output of one sample; times in seconds of one monotonic clock."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    usage: pb.Usage = field(default_factory=pb.Usage)
    finish_reason: int = pb.FINISH_REASON_UNSPECIFIED
    started: float = 0.0
    token_times: list[float] = field(default_factory=list)


def greedy_request(
    prompt: Sequence[int], max_tokens: int, *, reuse: bool = True, **fields: object
) -> pb.StreamGenerateRequest:
    """A greedy request of exactly `max_tokens` tokens; without reuse it neither reads nor fills the cache."""
    return pb.StreamGenerateRequest(
        token_ids=pb.TokenIds(token_ids=prompt),
        max_tokens=max_tokens,
        ignore_eos=True,
        cache=pb.CacheOptions(no_read=not reuse, no_store=not reuse),
        **fields,  # type: ignore[arg-type]
    )


async def generate(
    stub: rpc.GenerationServiceAsyncStub,
    request: pb.StreamGenerateRequest,
    seconds: float = 600,
    begun: asyncio.Event | None = None,
) -> Output:
    """Runs a request of one sample to its end. begun: set with its first token."""
    [output] = await generate_samples(stub, request, seconds, begun)
    return output


async def generate_samples(
    stub: rpc.GenerationServiceAsyncStub,
    request: pb.StreamGenerateRequest,
    seconds: float = 600,
    begun: asyncio.Event | None = None,
) -> list[Output]:
    """Runs one request to its end; returns the outputs of its samples. begun: set with the first token."""
    started = time.monotonic()
    outputs = [Output(started=started) for _ in range(request.n or 1)]
    async for message in stub.StreamGenerate(request, timeout=seconds):
        output = outputs[message.sample_index]
        assert not output.finish_reason, "output after a sample's end"
        output.token_times += [time.monotonic()] * len(message.token_ids)
        output.token_ids += message.token_ids
        if begun is not None and message.token_ids:
            begun.set()
        output.text += message.text
        if message.finish_reason:
            output.finish_reason = message.finish_reason
            output.usage = message.usage
    return outputs


async def generate_all(
    address: str, requests: Iterable[pb.StreamGenerateRequest], *, concurrency: int, seconds: float = 600
) -> list[Output]:
    """Runs requests in order of the iterable, at most `concurrency` at once; answers in the same order."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(channel)
        free = asyncio.Semaphore(concurrency)

        async def one(request: pb.StreamGenerateRequest) -> Output:
            async with free:
                return await generate(stub, request, seconds)

        return await asyncio.gather(*[one(request) for request in requests])
