"""The routes. Each translates its request, which is then handled as a gRPC request."""

import asyncio
import importlib.metadata
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import prometheus_client
from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPBearer
from prometheus_client import REGISTRY, CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request

from protos.rpc.errors import ServiceError
from protos.rpc.guard import Guard
from scheduler.errors import NotReadyError
from scheduler.frontend.access_log import note
from scheduler.frontend.grpc_service import SERVICE, GenerationService
from scheduler.frontend.openai import errors, responses, translate
from scheduler.frontend.openai.bodies import BodyLimits
from scheduler.frontend.openai.generation_response import GenerationResponse
from scheduler.frontend.openai.identity import Caller, caller_of, route_class
from scheduler.frontend.openai.middleware import ObservedApp, internal_request_id
from scheduler.frontend.openai.origins import Origins
from scheduler.frontend.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    TokenizeRequest,
)
from scheduler.frontend.openai.response_builder import ChatResponseBuilder, CompletionResponseBuilder

# JSON escapes make a text at most so many times as long; other fields come on top.
BODY_FACTOR, BODY_BYTES = 3, 1 << 16

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": errors.ErrorAnswer, "description": "The request is invalid."},
    "5XX": {"model": errors.ErrorAnswer, "description": "The server failed or is not ready."},
}

NO_ORIGINS = Origins()

Called = Annotated[Caller, Depends(caller_of)]
BEARER = "A token of the server's tokens file; any token without one."

# The schema of each event, as in OpenAPI 3.2.
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


def create_app(
    service: GenerationService,
    *,
    max_prompt_bytes: int,
    registry: CollectorRegistry = REGISTRY,
    guard: Guard | None = None,
    origins: Origins = NO_ORIGINS,
) -> FastAPI:
    """guard: checks callers; every caller may do everything without one. origins: of web pages that may call."""
    # FastAPI's documentation pages would load scripts from other sites.
    app = ObservedApp(
        service.access_log,
        origins,
        title="kvkeep",
        version=_version(),
        docs_url=None,
        redoc_url=None,
        responses=ERRORS,
    )
    _add_handlers(app)

    app.include_router(_watching(service, registry))
    for router in _using(service, guard or Guard(None, None), BodyLimits(BODY_FACTOR * max_prompt_bytes + BODY_BYTES)):
        app.include_router(router)
    return app


def _watching(service: GenerationService, registry: CollectorRegistry) -> APIRouter:
    """Probes."""
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_class=Response, responses={200: {"description": "Requests are served."}})
    async def health() -> Response:
        """200 while requests are served, 503 before and after."""
        if service.obstacle:
            raise NotReadyError(service.obstacle, retry_after=1.0)
        return Response()

    @router.get("/version")
    async def version() -> responses.Version:
        """The version of kvkeep."""
        return {"version": _version()}

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Metrics of the process, for Prometheus."""
        return Response(prometheus_client.generate_latest(registry), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    return router


def _using(service: GenerationService, guard: Guard, bodies: BodyLimits) -> Iterable[APIRouter]:
    created = responses.now()
    # For the description only: the route class reads the header.
    bearer = Depends(HTTPBearer(scheme_name="bearer", description=BEARER, auto_error=False))
    generating, describing, tokenizing = (
        APIRouter(route_class=route_class(guard, f"{SERVICE}/{method}", bodies), dependencies=[bearer])
        for method in ("StreamGenerate", "GetModel", "TokenizePrompt")
    )

    @generating.post("/v1/chat/completions", responses=_generated(responses.ChatCompletion))
    async def chat_completions(request: ChatCompletionRequest, caller: Called) -> Response:
        """The next message of a conversation."""
        builder = ChatResponseBuilder(
            service.model(request.model),
            request.request_id or f"chatcmpl-{internal_request_id()}",
            logprobs=bool(request.logprobs),
            **_usage(request),
        )
        messages, names = [translate.chat(request)], translate.names(request)
        return GenerationResponse(service, caller, messages, builder, names, stream=bool(request.stream))

    @generating.post("/v1/completions", responses=_generated(responses.Completion))
    async def completions(request: CompletionRequest, caller: Called) -> Response:
        """Continuations of one text or several: the choices of the first text come first."""
        builder = CompletionResponseBuilder(
            service.model(request.model),
            request.request_id or f"cmpl-{internal_request_id()}",
            logprobs=request.logprobs is not None,
            **_usage(request),
        )
        messages, names = translate.completion(request), translate.names(request)
        return GenerationResponse(service, caller, messages, builder, names, stream=bool(request.stream))

    @describing.head("/v1/models", include_in_schema=False)
    @describing.get("/v1/models")
    async def models() -> responses.ModelList:
        """The served model."""
        return {"object": "list", "data": [responses.model_card(service.model(), created)]}

    @describing.get("/v1/models/{model:path}")
    async def model(model: str) -> responses.ModelCard:
        """The served model, by its name."""
        return responses.model_card(service.model(model), created)

    @tokenizing.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> responses.Tokens:
        """The ids of a text or a conversation."""
        try:
            token_ids = await service.tokenize(translate.tokenize(request))
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
        """The text of ids, special tokens included."""
        request.check()
        return {"prompt": await service.detokenize(request.model, request.tokens)}

    return generating, describing, tokenizing


def _generated(whole: type) -> dict[int | str, dict[str, Any]]:
    return {
        200: {
            "model": whole,
            "description": "The output; with stream, events that end with [DONE].",
            "content": {"text/event-stream": {"itemSchema": _EVENT}},
        }
    }


def _usage(request: Generation) -> dict[str, bool]:
    """Which events of a stream have the usage."""
    asked = request.stream_options
    return {
        "include_usage": bool(asked and asked.include_usage),
        "continuous_usage": bool(asked and asked.continuous_usage_stats),
    }


def _add_handlers(app: FastAPI) -> None:
    """Every exception becomes an error in OpenAI's shape."""

    def add(kind: type[Exception], convert: Callable[[Any], errors.ApiError]) -> None:
        async def answer(_request: Request, raised: Any) -> JSONResponse:
            error = convert(raised)
            note(error=error.reason)
            return error.response()

        app.add_exception_handler(kind, answer)

    add(errors.ApiError, lambda error: error)
    add(ServiceError, lambda error: errors.from_service(error, translate.NAMES))
    add(RequestValidationError, errors.from_validation)
    add(HTTPException, errors.from_http)
    add(Exception, lambda _: errors.unexpected())


def _version() -> str:
    try:
        return importlib.metadata.version("kvkeep")
    except importlib.metadata.PackageNotFoundError:
        # Run from a checkout that is not installed.
        return "unknown"
