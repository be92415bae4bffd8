"""GenerationService: parse, ask the engine, convert. What HTTP serves goes the same way."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.identity import current
from scheduler.errors import DeadlineError, NotReadyError
from scheduler.frontend.access_log import AccessLog, watched
from scheduler.frontend.output import Chunk, Generation
from scheduler.frontend.requests import RequestTableSource
from scheduler.frontend.tenancy import bind
from scheduler.frontend.tokenizer import Model

SERVICE = "generation.v1.GenerationService"

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class GenerationService(rpc.GenerationServiceServicer):
    """Served from the start; every call is answered with UNAVAILABLE while there is no request table."""

    def __init__(self, source: RequestTableSource, access_log: AccessLog) -> None:
        self.access_log = access_log
        self._source = source

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server."""
        rpc.add_GenerationServiceServicer_to_server(self, server)

    async def StreamGenerate(  # type: ignore[override]  # noqa: N802
        self, request: pb.StreamGenerateRequest, context: Context
    ) -> None:
        """Writes to the context instead of yielding: cancellation then always arrives inside this function."""
        with self.access_log.telling(context.peer(), generating=True):
            try:
                async with asyncio.timeout(context.time_remaining()):
                    await self.generate(request, context.write)
            except TimeoutError:
                raise DeadlineError("the call's deadline passed before the output ended") from None

    async def generate(
        self,
        request: pb.StreamGenerateRequest,
        write: Callable[[pb.StreamGenerateResponse], Awaitable[object]],
        *,
        usage: bool = False,
    ) -> None:
        """Runs a request, whatever protocol it came by; cancelling this frees everything that it held.

        usage: whether each piece has the sample's so far, not only its last one.
        """
        requests = self._source.requests
        with watched(request, requests) as watch:
            tenant = bind(current(), request.cache)
            with requests.arriving(request.request_id, tenant):
                samples = await requests.validator.validate(request)
            with requests.submit(samples) as stream:
                watch.stream = stream
                news = await stream.next()
                while not stream.finished:
                    for generation, chunk in news:
                        await write(_response(generation, chunk, usage=usage))
                    news = await stream.next()
            for generation, chunk in news:
                await write(_response(generation, chunk, usage=usage))

    async def tokenize(self, request: pb.StreamGenerateRequest) -> Sequence[int]:
        """Ids of a request's prompt, also of one that is longer than the model takes."""
        requests = self._source.requests
        tenant = bind(current(), request.cache)
        with requests.arriving(request.request_id, tenant):
            return await requests.validator.encode(request)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return await self._source.requests.validator.decode(model, token_ids)

    def model(self, name: str = "") -> Model:
        """The served model. Raises ModelNotFoundError for another name."""
        requests = self._source.requests
        requests.validator.check_model(name)
        return requests.model

    @property
    def obstacle(self) -> str:
        """Why a request would not be served now, but for a full queue; empty when nothing is in its way."""
        try:
            return self._source.requests.obstacle
        except NotReadyError as error:
            return error.message

    async def TokenizePrompt(  # noqa: N802
        self, request: pb.TokenizePromptRequest, context: Context
    ) -> pb.TokenizePromptResponse:
        """What a prompt is to the model."""
        text = request.text if request.WhichOneof("input") == "text" else None
        chat = request.chat if request.WhichOneof("input") == "chat" else None
        with self.access_log.telling(context.peer()):
            token_ids = await self.tokenize(pb.StreamGenerateRequest(text=text, chat=chat))
        return pb.TokenizePromptResponse(token_ids=token_ids)

    async def GetModel(  # noqa: N802
        self, _request: pb.GetModelRequest, _context: Context
    ) -> pb.GetModelResponse:
        """The served model."""
        model = self.model()
        return pb.GetModelResponse(
            model=model.name, max_model_tokens=model.max_tokens, vocab_size=model.vocab_size, dtype=model.dtype
        )

    async def GetLoads(  # noqa: N802
        self, _request: pb.GetLoadsRequest, _context: Context
    ) -> pb.GetLoadsResponse:
        """The load."""
        requests = self._source.requests
        return pb.GetLoadsResponse(
            running_requests=requests.num_running,
            waiting_requests=requests.num_waiting,
            max_waiting_requests=requests.max_waiting,
            steps=requests.steps,
            preemptions=requests.preemptions,
        )


def _response(generation: Generation, chunk: Chunk, *, usage: bool) -> pb.StreamGenerateResponse:
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
    if chunk.finish or usage:
        response.usage.CopyFrom(generation.usage())
    return response
