"""What happens around every call: strict parsing, errors to statuses, metrics, and a request id in the logs."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeAlias

import grpc
import structlog
from grpc_status import rpc_status

from protos.rpc import metrics
from protos.rpc.errors import MalformedMessageError, ServiceError, UnexpectedError, to_status
from protos.rpc.wire import parse_strictly

REQUEST_ID_KEY = "x-request-id"
_MAX_REQUEST_ID = 128

log = structlog.get_logger()


# A servicer's method: request (or iterator of requests) and context in; an awaitable or an async generator out.
Behavior = Callable[[Any, Any], Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class ServiceInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server, unary or streaming on either side."""

    def __init__(self) -> None:
        self._wrapped: dict[str, Handler] = {}
        self._without_deadline: set[str] = set()
        # Streams in both directions, which stay open as long as both sides live.
        self._sessions: set[str] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler with everything around it; None, as from gRPC itself, for a method that does not exist."""
        method = handler_call_details.method.lstrip("/")
        if method not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is not None and handler.request_streaming and handler.response_streaming:
                self._sessions.add(method)
            if handler is None:
                return None
            self._wrapped[method] = self._wrap(handler, method)
        return self._wrapped[method]

    def _wrap(self, handler: Any, method: str) -> Handler:
        if handler.request_streaming:
            deserializer = _raising(handler.request_deserializer)
        else:
            deserializer = _returning(handler.request_deserializer)
        behavior, build = _parts(handler)
        # A coroutine that streams by writing to its context is awaited just as a unary one.
        wrap = self._generator if inspect.isasyncgenfunction(behavior) else self._unary
        return build(wrap(behavior, method), deserializer, handler.response_serializer)

    def _unary(self, behavior: Behavior, method: str) -> Behavior:
        async def call(request: Any, context: Any) -> Any:
            self._begin(context, method)
            try:
                with _observed(method, context):
                    return await behavior(_checked(request), context)
            except ServiceError as error:
                await context.abort_with_status(rpc_status.to_status(to_status(error)))

        return call

    def _generator(self, behavior: Behavior, method: str) -> Behavior:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            self._begin(context, method)
            try:
                with _observed(method, context):
                    async with contextlib.aclosing(behavior(_checked(request), context)) as responses:
                        async for response in responses:
                            yield response
            except ServiceError as error:
                await context.abort_with_status(rpc_status.to_status(to_status(error)))

        return call

    def _begin(self, context: Any, method: str) -> None:
        # Each call runs in a task of its own, so that nothing needs to be unbound afterwards.
        structlog.contextvars.bind_contextvars(request_id=_request_id(context), method=method)
        expected = method.startswith("grpc.") or method in self._sessions
        if context.time_remaining() is None and not expected and method not in self._without_deadline:
            self._without_deadline.add(method)
            log.info("call without deadline", hint="logged once per method")


@contextlib.contextmanager
def _observed(method: str, context: Any) -> Iterator[None]:
    """Counts a call and turns what nobody expected into UnexpectedError, with its traceback in the log."""
    code = grpc.StatusCode.OK
    started = time.monotonic()
    in_flight = metrics.IN_FLIGHT.labels(method)
    in_flight.inc()
    try:
        yield
    except ServiceError as error:
        code = error.code
        log.debug("call refused", code=code.name, reason=error.reason)
        raise
    except grpc.aio.AbortError:
        code = context.code() or grpc.StatusCode.UNKNOWN
        raise
    except (asyncio.CancelledError, GeneratorExit):
        code = grpc.StatusCode.CANCELLED
        raise
    except Exception as error:
        code = grpc.StatusCode.INTERNAL
        log.exception("call failed")
        raise UnexpectedError("the server met an error of its own; its log says which") from error
    finally:
        in_flight.dec()
        metrics.SECONDS.labels(method).observe(time.monotonic() - started)
        metrics.HANDLED.labels(method, code.name).inc()


def _request_id(context: Any) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and value.isprintable():
            return value[:_MAX_REQUEST_ID]
    return secrets.token_hex(8)


def _checked(request: Any) -> Any:
    if isinstance(request, MalformedMessageError):
        raise request
    return request


def _raising(from_string: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """For streams: gRPC parses inside the handler's read, so that the error surfaces there."""
    return from_string and (lambda data: parse_strictly(from_string, data))


def _returning(from_string: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """For single requests: gRPC parses before it calls the handler and would answer INTERNAL to an exception."""
    if from_string is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return parse_strictly(from_string, data)
        except MalformedMessageError as error:
            return error

    return parse


def _parts(handler: Any) -> tuple[Behavior, Callable[..., Handler]]:
    """The function that serves the call, and what builds a handler of its kind."""
    if handler.request_streaming and handler.response_streaming:
        return handler.stream_stream, grpc.stream_stream_rpc_method_handler
    if handler.request_streaming:
        return handler.stream_unary, grpc.stream_unary_rpc_method_handler
    if handler.response_streaming:
        return handler.unary_stream, grpc.unary_stream_rpc_method_handler
    return handler.unary_unary, grpc.unary_unary_rpc_method_handler
