"""The gRPC services: they convert messages and ask the request table. HTTP requests go the same way."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import grpc
import structlog

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.errors import InvalidField
from protos.rpc.identity import PermissionDeniedError, current
from scheduler.errors import DeadlineError, NotReadyError, UnknownRequestError
from scheduler.frontend.access_log import AccessLog
from scheduler.frontend.model_info import ModelInfo
from scheduler.frontend.output import Generation, Stream
from scheduler.frontend.requests import RequestTable, RequestTableSource
from scheduler.frontend.tenancy import bind, check_tenant
from scheduler.request import Request

SERVICE = "generation.v1.GenerationService"
ADMIN_SERVICE = "generation.v1.SchedulerAdminService"

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

# Ends requests, or only counts them with validate_only; returns their number.
Abort: TypeAlias = Callable[[pb.AbortRequestsRequest], Awaitable[int]]

log = structlog.get_logger()


class GenerationService(rpc.GenerationServiceServicer):
    """Served from the start; every call is answered with UNAVAILABLE while there is no request table."""

    def __init__(self, source: RequestTableSource, access_log: AccessLog, abort: Abort | None = None) -> None:
        """abort: ends requests, also those of other processes; None ends only requests of this process."""
        self.access_log = access_log
        self._source = source
        self._abort = abort or self._abort_here
        self.admin = SchedulerAdminService(source, self._abort)

    async def StreamGenerate(  # type: ignore[override]  # noqa: N802
        self, request: pb.StreamGenerateRequest, context: Context
    ) -> None:
        """Writes to the context instead of yielding: a cancellation then always arrives inside this function."""
        async with self.call(context):
            await self.generate(request, context.write)

    @contextlib.asynccontextmanager
    async def call(self, context: Context) -> AsyncIterator[None]:
        """Surrounds a call for output with its line in the access log and its deadline."""
        with self.access_log.call(context.peer(), generating=True):
            try:
                async with asyncio.timeout(context.time_remaining()):
                    yield
            except TimeoutError:
                raise DeadlineError("the call's deadline passed before the output ended") from None

    async def generate(
        self,
        request: pb.StreamGenerateRequest,
        write: Callable[[pb.StreamGenerateResponse], Awaitable[object]],
        *,
        usage: bool = False,
        part_of: str = "",
        accept: Callable[[Sequence[Request]], None] | None = None,
    ) -> None:
        """Runs a request of gRPC or HTTP; its cancellation frees everything that the request held.

        usage: whether each chunk, not only the last, has the sample's usage so far. part_of: id of the request with
        several prompts to which this one belongs. accept: called with the samples before any of them runs.
        """

        async def send(output: Sequence[tuple[Generation, pb.StreamGenerateResponse]]) -> None:
            for generation, chunk in output:
                if chunk.finish_reason or usage:
                    chunk.usage.CopyFrom(generation.usage())
                await write(chunk)

        requests = self._source.requests
        with self.access_log.generation(request, self._served_name(requests, request.model)) as record:
            tenant = bind(current(), request.cache)
            with requests.arriving(request.request_id, tenant, request.n):
                validated = await requests.validator.validate(request)
            samples = [replace(sample, part_of=part_of) for sample in validated] if part_of else validated
            if accept is not None:
                accept(samples)
            stream = Stream(samples, requests.model)
            with requests.submit(stream):
                record.stream = stream
                output = await stream.next()
                while not stream.finished:
                    await send(output)
                    output = await stream.next()
            await send(output)

    async def tokenize(self, request: pb.StreamGenerateRequest, *, add_special: bool = True) -> array[int]:
        """Returns the ids of a request's prompt, even if the prompt is too long for the model.

        add_special: whether a text gets the special tokens that the tokenizer adds.
        """
        requests = self._source.requests
        tenant = bind(current(), request.cache)
        with requests.arriving(request.request_id, tenant):
            return await requests.validator.encode(request, add_special=add_special)

    async def detokenize(self, model: str, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        return await self._source.requests.validator.decode(model, token_ids, skip_special=skip_special)

    def check_samples(self, prompts: int, samples: int) -> None:
        """Raises InvalidField for "prompt" if a call with several prompts asks for more samples than may ever wait."""
        self._source.requests.check_samples(prompts, samples)

    def model(self, name: str = "") -> ModelInfo:
        """Returns the served model, or the model with the adapter of this name. Raises ModelNotFoundError."""
        requests = self._source.requests
        adapter = requests.validator.check_model(name)
        return requests.model if adapter is None else requests.model.called(adapter.name)

    def loads(self) -> pb.GetLoadsResponse:
        """Returns the load of the engine, or of the router's engines."""
        return self._source.requests.loads()

    @property
    def adapters(self) -> list[str]:
        """Returns the names of the adapters that requests may name as their model."""
        return self._source.requests.adapters.names

    @staticmethod
    def _served_name(requests: RequestTable, name: str) -> str:
        """Returns the model's name for logs and traces, which must contain only served names."""
        return requests.model.name if requests.adapters.find(name) is None else name

    @property
    def obstacle(self) -> str:
        """Why requests are not served now, apart from a full queue or a busy tenant; empty if they are served."""
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
            model=model.name,
            max_model_tokens=model.max_tokens,
            vocab_size=model.vocab_size,
            dtype=model.dtype,
            kv_cache_dtype=model.kv_cache_dtype,
            adapters=self.adapters,
        )

    async def GetLoads(  # noqa: N802
        self, _request: pb.GetLoadsRequest, _context: Context
    ) -> pb.GetLoadsResponse:
        return self.loads()

    async def abort(self, request_id: str, tenant_id: str | None = None) -> None:
        """Ends a request of the caller's tenant. Raises UnknownRequestError, InvalidField and PermissionDeniedError."""
        tenant = check_tenant(current(), tenant_id, "tenant_id")
        if not request_id:
            raise InvalidField("request_id", "must not be empty")
        if not await self._abort(pb.AbortRequestsRequest(request_id=request_id, tenant_id=tenant)):
            raise _unknown_request()

    async def _abort_here(self, message: pb.AbortRequestsRequest) -> int:
        return self._source.requests.abort(message)

    async def AbortRequest(  # noqa: N802
        self, request: pb.AbortRequestRequest, context: Context
    ) -> pb.AbortRequestResponse:
        with self.access_log.call(context.peer()):
            await self.abort(request.request_id, request.tenant_id if request.HasField("tenant_id") else None)
        return pb.AbortRequestResponse()


class SchedulerAdminService(rpc.SchedulerAdminServiceServicer):
    def __init__(self, source: RequestTableSource, abort: Abort) -> None:
        self._source = source
        self._abort = abort

    async def SetDraining(  # noqa: N802
        self, request: pb.SetDrainingRequest, _context: Context
    ) -> pb.SetDrainingResponse:
        """Takes no more requests, or takes them again; with validate_only, only returns the numbers of samples."""
        _check_whole()
        requests = self._source.requests
        if not request.validate_only and requests.set_draining(request.draining):
            log.info("draining begun by an operator" if request.draining else "draining ended by an operator")
        return pb.SetDrainingResponse(running_requests=requests.num_running, waiting_requests=requests.num_waiting)

    async def ListAdapters(  # noqa: N802
        self, _request: pb.ListAdaptersRequest, _context: Context
    ) -> pb.ListAdaptersResponse:
        _check_whole()
        table = self._source.requests.adapters
        return pb.ListAdaptersResponse(
            adapters=[
                pb.ServedAdapter(
                    adapter=adapter.message(),
                    running_requests=table.uses(adapter),
                    leaving=table.is_leaving(adapter),
                )
                for adapter in table.all
            ],
            max_adapters=table.most,
        )

    async def LoadAdapter(  # noqa: N802
        self, request: pb.LoadAdapterRequest, _context: Context | None = None
    ) -> pb.LoadAdapterResponse:
        _check_whole()
        adapter = await self._source.requests.loader.load(request.name, request.path)
        log.info("adapter loaded by an operator", name=adapter.name)
        return pb.LoadAdapterResponse(adapter=adapter.message())

    async def UnloadAdapter(  # noqa: N802
        self, request: pb.UnloadAdapterRequest, _context: Context | None = None
    ) -> pb.UnloadAdapterResponse:
        _check_whole()
        requests = self._source.requests
        if request.validate_only:
            return pb.UnloadAdapterResponse(
                running_requests=requests.adapters.uses(requests.adapters.get(request.name))
            )
        running = await requests.loader.unload(request.name)
        log.info("adapter unloaded by an operator", name=request.name, running_requests=running)
        return pb.UnloadAdapterResponse(running_requests=running)

    async def UpdateWeights(  # noqa: N802
        self, request: pb.UpdateWeightsRequest, _context: Context | None = None
    ) -> pb.UpdateWeightsResponse:
        _check_whole()
        others = await self._source.requests.loader.update_weights(request.weight_version, request.path)
        log.info("weights updated by an operator", weight_version=request.weight_version, other_blocks=others)
        return pb.UpdateWeightsResponse(other_blocks=others)

    async def AbortRequests(  # noqa: N802
        self, request: pb.AbortRequestsRequest, _context: Context | None = None
    ) -> pb.AbortRequestsResponse:
        _check_whole()
        if bool(request.request_id) == request.all:
            raise InvalidField("request_id", "or all must be given, and not both")
        aborted = await self._abort(request)
        if not aborted and not request.all:
            raise _unknown_request()
        if not request.validate_only:
            log.info("requests aborted by an operator", requests=aborted)
        return pb.AbortRequestsResponse(aborted_requests=aborted)


def _unknown_request() -> UnknownRequestError:
    return UnknownRequestError("no live request has this id", fields={"request_id": "names no live request"})


def _check_whole() -> None:
    """Raises PermissionDeniedError for a token of one tenant."""
    identity = current()
    if identity is not None and identity.tenant:
        raise PermissionDeniedError("this method concerns all tenants, but the token belongs to one tenant")
