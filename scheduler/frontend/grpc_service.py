"""The gRPC services: they convert messages and ask the request table. HTTP requests go the same way."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc
import structlog

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.identity import PermissionDeniedError, current
from scheduler.errors import DeadlineError, NotReadyError
from scheduler.frontend.access_log import AccessLog
from scheduler.frontend.model_info import ModelInfo
from scheduler.frontend.output import Generation, Stream
from scheduler.frontend.requests import RequestTableSource
from scheduler.frontend.tenancy import bind

SERVICE = "generation.v1.GenerationService"
ADMIN_SERVICE = "generation.v1.SchedulerAdminService"

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

log = structlog.get_logger()


class GenerationService(rpc.GenerationServiceServicer):
    """Served from the start; every call is answered with UNAVAILABLE while there is no request table."""

    def __init__(self, source: RequestTableSource, access_log: AccessLog) -> None:
        self.access_log = access_log
        self._source = source

    async def StreamGenerate(  # type: ignore[override]  # noqa: N802
        self, request: pb.StreamGenerateRequest, context: Context
    ) -> None:
        """Writes to the context instead of yielding: a cancellation then always arrives inside this function."""
        with self.access_log.call(context.peer(), generating=True):
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
        """Runs a request of gRPC or HTTP; its cancellation frees everything that the request held.

        usage: whether each chunk has the sample's usage so far, not only the last one.
        """

        async def send(output: Sequence[tuple[Generation, pb.StreamGenerateResponse]]) -> None:
            for generation, chunk in output:
                if chunk.finish_reason or usage:
                    chunk.usage.CopyFrom(generation.usage())
                await write(chunk)

        requests = self._source.requests
        with self.access_log.generation(request, requests.model.name) as record:
            tenant = bind(current(), request.cache)
            with requests.arriving(request.request_id, tenant):
                samples = await requests.validator.validate(request)
            stream = Stream(samples, requests.model)
            with requests.submit(stream):
                record.stream = stream
                output = await stream.next()
                while not stream.finished:
                    await send(output)
                    output = await stream.next()
            await send(output)

    async def tokenize(self, request: pb.StreamGenerateRequest) -> array[int]:
        """Ids of a request's prompt, also of one that is longer than the model takes."""
        requests = self._source.requests
        tenant = bind(current(), request.cache)
        with requests.arriving(request.request_id, tenant):
            return await requests.validator.encode(request)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        return await self._source.requests.validator.decode(model, token_ids)

    def model(self, name: str = "") -> ModelInfo:
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
        text = request.text if request.WhichOneof("input") == "text" else None
        chat = request.chat if request.WhichOneof("input") == "chat" else None
        with self.access_log.call(context.peer()):
            token_ids = await self.tokenize(pb.StreamGenerateRequest(text=text, chat=chat))
        return pb.TokenizePromptResponse(token_ids=token_ids)

    async def GetModel(  # noqa: N802
        self, _request: pb.GetModelRequest, _context: Context
    ) -> pb.GetModelResponse:
        model = self.model()
        return pb.GetModelResponse(
            model=model.name, max_model_tokens=model.max_tokens, vocab_size=model.vocab_size, dtype=model.dtype
        )

    async def GetLoads(  # noqa: N802
        self, _request: pb.GetLoadsRequest, _context: Context
    ) -> pb.GetLoadsResponse:
        return self._source.requests.loads()


class SchedulerAdminService(rpc.SchedulerAdminServiceServicer):
    def __init__(self, source: RequestTableSource) -> None:
        self._source = source

    async def SetDraining(  # noqa: N802
        self, request: pb.SetDrainingRequest, _context: Context
    ) -> pb.SetDrainingResponse:
        """Takes no more requests, or takes them again."""
        identity = current()
        if identity is not None and identity.tenant:
            raise PermissionDeniedError("this method is about all tenants, and the token about one")
        requests = self._source.requests
        if not request.validate_only and requests.set_draining(request.draining):
            log.info("drained by an operator" if request.draining else "draining ended by an operator")
        return pb.SetDrainingResponse(running_requests=requests.num_running, waiting_requests=requests.num_waiting)
