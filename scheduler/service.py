"""GenerationService: parse, ask the engine, convert."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

import grpc
import structlog

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from scheduler.engine import Engine
from scheduler.errors import DeadlineError, NotReadyError
from scheduler.generation import Chunk, Generation, Stream
from scheduler.intake import Intake

SERVICE = "generation.v1.GenerationService"

log = structlog.get_logger()

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class GenerationService(rpc.GenerationServiceServicer):
    """Served from the start; until `attach` every call is answered with UNAVAILABLE."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._intake: Intake | None = None

    def attach(self, engine: Engine, intake: Intake) -> None:
        """The stack is there."""
        self._engine, self._intake = engine, intake

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server."""
        rpc.add_GenerationServiceServicer_to_server(self, server)

    async def StreamGenerate(  # type: ignore[override]  # noqa: N802
        self, request: pb.StreamGenerateRequest, context: Context
    ) -> None:
        """Writes to the context instead of yielding: cancellation then always arrives inside this function."""
        engine, intake = self._ready()
        try:
            async with asyncio.timeout(context.time_remaining()):
                with engine.arriving(request.request_id):
                    samples = await intake.accept(request)
                with engine.submit(samples) as stream, _told(stream):
                    news = await stream.next()
                    while not stream.finished:
                        for generation, chunk in news:
                            await context.write(_response(generation, chunk))
                        news = await stream.next()
                for generation, chunk in news:
                    await context.write(_response(generation, chunk))
        except TimeoutError:
            raise DeadlineError("the call's deadline passed before the output ended") from None

    async def GetModel(  # noqa: N802
        self, _request: pb.GetModelRequest, _context: Context
    ) -> pb.GetModelResponse:
        """The served model."""
        model = self._ready()[0].model
        return pb.GetModelResponse(
            model=model.name, max_model_tokens=model.max_tokens, vocab_size=model.vocab_size, dtype=model.dtype
        )

    async def GetLoads(  # noqa: N802
        self, _request: pb.GetLoadsRequest, _context: Context
    ) -> pb.GetLoadsResponse:
        """The load."""
        engine = self._ready()[0]
        return pb.GetLoadsResponse(
            running_requests=engine.num_running,
            waiting_requests=engine.num_waiting,
            max_waiting_requests=engine.max_waiting,
            steps=engine.steps,
            preemptions=engine.preemptions,
        )

    def _ready(self) -> tuple[Engine, Intake]:
        if self._engine is None or self._intake is None:
            raise NotReadyError("the scheduler still waits for the executor and the cache manager", retry_after=1.0)
        return self._engine, self._intake


@contextlib.contextmanager
def _told(stream: Stream) -> Iterator[None]:
    """A line in the log for a request that has ended, however it did; nothing of what was said."""
    try:
        yield
    finally:
        request = stream.generations[0].request
        usages = [generation.usage() for generation in stream.generations]
        log.info(
            "request ended",
            generation=request.request_id,
            samples=len(usages),
            finished=stream.finished,
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
            output_tokens=sum(usage.output_tokens for usage in usages),
            preemptions=sum(usage.preemptions for usage in usages),
            seconds=round(time.monotonic() - request.arrived_at, 3),
        )


def _response(generation: Generation, chunk: Chunk) -> pb.StreamGenerateResponse:
    response = pb.StreamGenerateResponse(
        request_id=generation.request.request_id,
        sample_index=generation.request.sample_index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        finish_reason=chunk.finish,
    )
    for logprobs in chunk.logprobs:
        top = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        response.logprobs.add(
            logprob=logprobs.logprob, top=[pb.TokenLogprob(token_id=token, logprob=value) for token, value in top]
        )
    if chunk.finish:
        response.usage.CopyFrom(generation.usage())
    return response
