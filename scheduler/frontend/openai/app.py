"""The routes. Each translates its request, which is then handled as a gRPC request."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Annotated, Any

import prometheus_client
from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from prometheus_client import REGISTRY, CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.errors import ServiceError
from protos.rpc.guard import Guard
from protos.rpc.identity import PermissionDeniedError
from protos.rpc.version import program_version
from scheduler.errors import NotReadyError, UnknownRequestError
from scheduler.frontend.access_log import note
from scheduler.frontend.grpc_service import ADMIN_SERVICE, SERVICE, GenerationService, SchedulerAdminService
from scheduler.frontend.openai import errors, responses, translate
from scheduler.frontend.openai.bodies import BodyLimits
from scheduler.frontend.openai.generation_response import GenerationResponse
from scheduler.frontend.openai.identity import Caller, caller_of, route_class
from scheduler.frontend.openai.middleware import ObservedApp, internal_request_id
from scheduler.frontend.openai.origins import Origins
from scheduler.frontend.openai.requests import (
    AbortRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from scheduler.frontend.openai.response_builder import ChatResponseBuilder, CompletionResponseBuilder

# Escapes in JSON lengthen a text at most by this factor, except those of control characters and needless escapes. Other
# fields come on top.
BODY_FACTOR, BODY_BYTES = 3, 1 << 16

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": errors.ErrorAnswer, "description": "The request is invalid."},
    "5XX": {"model": errors.ErrorAnswer, "description": "The server failed or is not ready."},
}

NO_ORIGINS = Origins()
# Fields of adapters under their names over HTTP.
_ADAPTER_NAMES = (("name", "lora_name"), ("path", "lora_path"))

Called = Annotated[Caller, Depends(caller_of)]
BEARER = "A token of the server's tokens file. A server without a tokens file accepts any token."

# A plain answer. With a separate response class, the description would say that errors are plain text, too.
_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
# The schema of each event, as in OpenAPI 3.2.
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


def create_app(
    service: GenerationService,
    *,
    max_prompt_bytes: int,
    registry: CollectorRegistry = REGISTRY,
    metrics: Callable[[], Awaitable[bytes]] | None = None,
    guard: Guard | None = None,
    origins: Origins = NO_ORIGINS,
) -> FastAPI:
    """guard: checks callers; without a guard, every caller may do everything. origins: of web pages that may call.

    metrics: returns the text of all metrics, if the registry of this process does not have them.
    """
    # FastAPI's documentation pages would load scripts from other sites.
    app = ObservedApp(
        service.access_log,
        origins,
        title="kvkeep",
        version=program_version(),
        docs_url=None,
        redoc_url=None,
        responses=ERRORS,
    )
    guard = guard or Guard(None, None)
    bodies = BodyLimits(BODY_FACTOR * max_prompt_bytes + BODY_BYTES)
    routers = (
        _watching(service, metrics or _metrics_of(registry)),
        *_using(service, guard, bodies),
        *_describing(service, guard, bodies),
        *_managing(service.admin, guard, bodies),
        _aborting(service, guard, bodies),
    )
    for router in routers:
        app.include_router(router)
    _add_handlers(app, [route for router in routers for route in router.routes if isinstance(route, APIRoute)])
    return app


def _watching(service: GenerationService, collect: Callable[[], Awaitable[bytes]]) -> APIRouter:
    """Routes for probes."""
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_class=Response, responses={200: {"description": "Requests are served."}})
    @router.get("/ping", response_class=Response, responses={200: {"description": "Requests are served."}})
    @router.post("/ping", include_in_schema=False)
    async def health() -> Response:
        """200 while requests are served, otherwise 503."""
        if service.obstacle:
            raise NotReadyError(service.obstacle, retry_after=1.0)
        return Response()

    @router.get("/version")
    async def version() -> responses.Version:
        """The version of kvkeep."""
        return {"version": program_version()}

    @router.get("/metrics", response_class=Response, responses=_TEXT)
    async def metrics() -> Response:
        """Metrics of the server, including those of all its front ends, for Prometheus."""
        return Response(await collect(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    return router


def _metrics_of(registry: CollectorRegistry) -> Callable[[], Awaitable[bytes]]:
    async def collect() -> bytes:
        return prometheus_client.generate_latest(registry)

    return collect


def _using(service: GenerationService, guard: Guard, bodies: BodyLimits) -> Iterable[APIRouter]:
    generating, tokenizing = (
        _router(guard, f"{SERVICE}/{method}", bodies=bodies) for method in ("StreamGenerate", "TokenizePrompt")
    )

    @generating.post("/v1/chat/completions", responses=_generated(responses.ChatCompletion))
    async def chat_completions(request: ChatCompletionRequest, caller: Called) -> Response:
        """The next message of a conversation."""
        builder = ChatResponseBuilder(
            service.model(request.model),
            translate.request_id(request) or f"chatcmpl-{internal_request_id()}",
            logprobs=bool(request.logprobs),
            include_reasoning=request.include_reasoning is not False,
            comparisons=_comparisons(request),
            **_options(request),
        )
        messages, names = [translate.chat(request)], translate.names(request)
        return GenerationResponse(service, caller, messages, builder, names, stream=bool(request.stream))

    @generating.post("/v1/completions", responses=_generated(responses.Completion))
    async def completions(request: CompletionRequest, caller: Called) -> Response:
        """Continuations of one prompt or several: the choices of the first prompt have the first indices."""
        builder = CompletionResponseBuilder(
            service.model(request.model),
            translate.request_id(request) or f"cmpl-{internal_request_id()}",
            logprobs=request.logprobs is not None,
            echoed=request.prompt if request.echo else (),
            is_truncated=request.truncate_prompt_tokens is not None,
            comparisons=_comparisons(request),
            **_options(request),
        )
        messages, names = translate.completion(request), translate.names(request)
        return GenerationResponse(service, caller, messages, builder, names, stream=bool(request.stream))

    @tokenizing.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> responses.Tokens:
        """The ids of a text or a conversation."""
        try:
            message, special = translate.tokenize(request), request.add_special_tokens is not False
            token_ids = await service.tokenize(message, add_special=special)
        except ServiceError as error:
            raise errors.from_service(error, translate.names_to_tokenize(request)) from error
        model = service.model()
        answer: responses.Tokens = {
            "count": len(token_ids),
            "max_model_len": model.max_tokens,
            "tokens": token_ids.tolist(),
        }
        if request.return_token_strs:
            answer["token_strs"] = await asyncio.to_thread(model.vocabulary, token_ids)
        return answer

    @tokenizing.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> responses.Prompt:
        """The text of ids, with special tokens unless the request says otherwise."""
        request.check()
        text = await service.detokenize(request.model, request.tokens, skip_special=bool(request.skip_special_tokens))
        return {"prompt": text}

    @tokenizing.get("/tokenizer_info")
    async def tokenizer_info() -> responses.TokenizerInfo:
        """Special tokens and chat template, for clients that render conversations themselves."""
        return responses.tokenizer_info(service.model())

    return generating, tokenizing


def _describing(service: GenerationService, guard: Guard, bodies: BodyLimits) -> Iterable[APIRouter]:
    """Routes that describe the model, the server and its load."""
    created = responses.now()
    describing, counting = (_router(guard, f"{SERVICE}/{method}", bodies=bodies) for method in ("GetModel", "GetLoads"))

    @describing.head("/v1/models", include_in_schema=False)
    @describing.get("/v1/models")
    async def models() -> responses.ModelList:
        """The served model under all of its names, and its adapters."""
        model = service.model()
        cards = [responses.model_card(model.called(name), created) for name in model.names]
        adapters = [responses.model_card(model.called(name), created, model) for name in service.adapters]
        return {"object": "list", "data": [*cards, *adapters]}

    @describing.get("/v1/models/{model:path}")
    async def model(model: str) -> responses.ModelCard:
        """The served model or one of its adapters, by its name."""
        served, base = service.model(model), service.model()
        return responses.model_card(base.called(model), created, None if served is base else base)

    @describing.get("/get_model_info", include_in_schema=False)
    @describing.get("/model_info")
    async def model_info() -> responses.ModelPath:
        """The model under SGLang's names."""
        return responses.model_path(service.model())

    @counting.get("/load")
    async def load() -> responses.Load:
        """Samples that run and wait, under vLLM's name."""
        loads = service.loads()
        return {"server_load": loads.running_requests + loads.waiting_requests}

    @counting.get("/get_server_info", include_in_schema=False)
    @counting.get("/server_info")
    async def server_info() -> responses.ServerInfo:
        """The model, its limits and the load, under the names that SGLang and vLLM have for them."""
        return responses.server_info(service.model(), service.loads(), program_version())

    return describing, counting


def _managing(admin: SchedulerAdminService, guard: Guard, bodies: BodyLimits) -> Iterable[APIRouter]:
    """Routes for operators to manage adapters, with the bodies that other servers take."""
    loads, unloads = f"{ADMIN_SERVICE}/LoadAdapter", f"{ADMIN_SERVICE}/UnloadAdapter"
    loading, unloading = (_router(guard, method, bodies=bodies) for method in (loads, unloads))

    @loading.post("/v1/load_lora_adapter", response_class=Response, responses=_TEXT)
    async def load_lora_adapter(request: LoadAdapterRequest, caller: Called) -> Response:
        """Loads a LoRA adapter, where KVKEEP_EXECUTOR_ADAPTER_DIR allows that."""
        request.check()
        message = pb.LoadAdapterRequest(name=request.lora_name, path=request.lora_path)
        try:
            with caller.authorized(), caller.operating(loads, message):
                await admin.LoadAdapter(message)
        except ServiceError as error:
            raise errors.from_service(error, _ADAPTER_NAMES) from error
        return PlainTextResponse(f"Success: the adapter {request.lora_name!r} is loaded.")

    @unloading.post("/v1/unload_lora_adapter", response_class=Response, responses=_TEXT)
    async def unload_lora_adapter(request: UnloadAdapterRequest, caller: Called) -> Response:
        """Refuses new requests for an adapter; its memory is freed when running requests have ended."""
        request.check()
        message = pb.UnloadAdapterRequest(name=request.lora_name)
        try:
            with caller.authorized(), caller.operating(unloads, message):
                answer = await admin.UnloadAdapter(message)
        except ServiceError as error:
            raise errors.from_service(error, _ADAPTER_NAMES) from error
        left = f"; {answer.running_requests} running requests finish with it" if answer.running_requests else ""
        return PlainTextResponse(f"Success: the adapter {request.lora_name!r} takes no more requests{left}.")

    return loading, unloading


def _aborting(service: GenerationService, guard: Guard, bodies: BodyLimits) -> APIRouter:
    """Routes with which callers end requests of their own tenant, and operators any requests."""
    operators = f"{ADMIN_SERVICE}/AbortRequests"
    aborting = _router(guard, f"{SERVICE}/AbortRequest", operators, bodies=bodies)

    @aborting.post("/abort_requests", include_in_schema=False)
    @aborting.post("/abort_request")
    async def abort(request: AbortRequest, caller: Called) -> responses.Aborted:
        """Ends running requests: their answers have the output so far, and the finish reason "abort"."""
        request.check()

        async def operate(message: pb.AbortRequestsRequest) -> int:
            with caller.operating(operators, message):
                return (await service.admin.AbortRequests(message)).aborted_requests

        with caller.authorized():
            operates, aborted = caller.may(operators), 0
            if request.abort_all:
                if not operates:
                    raise PermissionDeniedError("only an operator may abort all requests")
                return {"aborted_requests": await operate(pb.AbortRequestsRequest(all=True))}
            ids = request.request_ids or [request.rid or ""]
            for request_id in ids:
                with contextlib.suppress(UnknownRequestError):
                    if operates:
                        aborted += await operate(pb.AbortRequestsRequest(request_id=request_id))
                    else:
                        await service.abort(request_id)
                        aborted += 1
            if not aborted:
                field = "request_ids" if request.request_ids else "rid"
                raise UnknownRequestError("no live request has this id", fields={field: "names no live request"})
        return {"aborted_requests": aborted}

    return aborting


def _router(guard: Guard, *methods: str, bodies: BodyLimits) -> APIRouter:
    """Returns a router for callers of one of these gRPC methods, given by full names."""
    # For the description only: the route class reads the header.
    bearer = Depends(HTTPBearer(scheme_name="bearer", description=BEARER, auto_error=False))
    return APIRouter(route_class=route_class(guard, methods, bodies), dependencies=[bearer])


def _generated(whole: type) -> dict[int | str, dict[str, Any]]:
    return {
        200: {
            "model": whole,
            "description": "The output; with stream, events that end with [DONE].",
            "content": {"text/event-stream": {"itemSchema": _EVENT}},
        }
    }


def _options(request: GenerationFields) -> dict[str, bool]:
    """Returns which events of a stream have the usage, and whether answers have token ids and prompt logprobs."""
    asked = request.stream_options
    return {
        "include_usage": bool(asked and asked.include_usage),
        "continuous_usage": bool(asked and asked.continuous_usage_stats),
        "token_ids": bool(request.return_token_ids),
        "prompt_logprobs": request.prompt_logprobs is not None,
    }


def _comparisons(request: GenerationFields) -> list[str]:
    """Returns the answer's fields for a comparison with an earlier response."""
    options = request.prompt_cache_options
    is_asked = {
        "prompt_cache_diagnostics": options is not None and options.comparison_response_id is not None,
        "diagnostics": request.diagnostics is not None,
    }
    return [name for name, asked in is_asked.items() if asked]


def _add_handlers(app: FastAPI, routes: Sequence[APIRoute]) -> None:
    """Turns every exception into an error in OpenAI's shape. routes: of the API."""

    def add(kind: type[Exception], convert: Callable[[Any, Request], errors.ApiError]) -> None:
        async def answer(request: Request, raised: Any) -> JSONResponse:
            error = convert(raised, request)
            note(error=error.reason)
            return error.response()

        app.add_exception_handler(kind, answer)

    add(errors.ApiError, lambda error, _: error)
    add(ServiceError, lambda error, _: errors.from_service(error, translate.NAMES))
    add(RequestValidationError, lambda error, _: errors.from_validation(error))
    add(HTTPException, lambda error, request: errors.from_http(error, request, routes))
    add(Exception, lambda *_: errors.unexpected())
