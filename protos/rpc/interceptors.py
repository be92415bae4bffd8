"""The interceptor of every call: roles, strict parsing, errors to statuses, metrics, and logs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from protos.errors import ServiceError
from protos.rpc import metrics, tracing
from protos.rpc.connections import Connections
from protos.rpc.errors import MalformedMessageError, UnexpectedError, status_code, to_status
from protos.rpc.guard import Guard, header
from protos.rpc.identity import Identity, assume, current
from protos.rpc.roles import is_open, is_reading

REQUEST_ID_KEY = "x-request-id"
_MAX_REQUEST_ID = 128
# Names the viewer for whom a console calls. An open page reads every second; such reads leave one line per minute.
FORWARDED_KEY = "x-forwarded-for"
_MAX_FORWARDED = 64
_REFUSALS = (grpc.StatusCode.PERMISSION_DENIED.name, grpc.StatusCode.UNAUTHENTICATED.name)
_END = object()
# Streams that last as long as their callers like; streams that need no token end after OPEN_WATCH_SECONDS.
_WATCHES = (
    "grpc.",
    "kvcache.v1.CacheEventService/",
    "kvcache.v1.CacheAdminService/",
    "vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
)
OPEN_WATCH_SECONDS = 3600.0

log = structlog.get_logger()


# A servicer's method: takes a request (or an iterator) and a context; returns an awaitable or an async generator.
Behavior = Callable[[Any, Any], Any]
# Takes "package.Service/Method" and its request; raises if this caller may not make the request.
Check = Callable[[str, Any], None]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class TooManyWatchesError(ServiceError):
    """Too many streams of this method are open."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "TOO_MANY_WATCHES"


class WatchEndedError(ServiceError):
    """A stream that needs no token has reached its time limit; its caller may open a new stream."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "WATCH_ENDED"


class ServiceInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server, unary or streaming on either side.

    A call that ends with a status raises an error that gRPC keeps as long as the call's context lives. The error's
    frames must not hold the context, or only a garbage collection frees the context and the request.
    """

    def __init__(self, guard: Guard, connections: Connections, check: Check | None = None, *, max_watches: int) -> None:
        """max_watches: the limit on open streams per method, for methods that wait for events."""
        self._guard = guard
        self._connections = connections
        self._max_watches = max_watches
        self._watches: Counter[str] = Counter()
        self._check = check
        self._wrapped: dict[str, Handler] = {}
        self._without_deadline: set[str] = set()
        # Methods that stream in both directions, and stay open as long as both sides live.
        self._sessions: set[str] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Returns the wrapped handler, or a handler that refuses the call; None for a method that does not exist."""
        method = handler_call_details.method.lstrip("/")
        if method not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is not None and handler.request_streaming and handler.response_streaming:
                self._sessions.add(method)
            if handler is None:
                return None
            self._wrapped[method] = self._wrap(handler, method)
        identity: Identity | None = None
        try:
            if not is_open(method):
                identity = self._guard.identify(header(handler_call_details.invocation_metadata or ()))
                self._guard.allow(identity, method)
        except ServiceError as error:
            return self._refusal(identity, method, error)
        # Applies to the rest of the call's task.
        assume(identity)
        return self._wrapped[method]

    def _refusal(self, identity: Identity | None, method: str, error: ServiceError) -> Handler:
        """Makes a handler that answers without reading the request, which may have any size."""

        async def refuse(_requests: Any, context: Any) -> None:
            self._begin(context, method)
            self._guard.audit.refused(identity, method, context.peer(), status_code(error).name)
            with contextlib.suppress(ServiceError), _observed(method):
                raise error
            error.__traceback__ = None
            try:
                await context.abort_with_status(rpc_status.to_status(to_status(error)))
            finally:
                del context

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _wrap(self, handler: Any, method: str) -> Handler:
        if handler.request_streaming:
            deserializer = _raising(handler.request_deserializer)
        else:
            deserializer = _returning(handler.request_deserializer)
        behavior, build = _parts(handler)
        # A coroutine that streams by writing to its context is awaited like a unary coroutine.
        wrap = self._generator if inspect.isasyncgenfunction(behavior) else self._unary
        return build(wrap(behavior, method), deserializer, handler.response_serializer)

    def _unary(self, behavior: Behavior, method: str) -> Behavior:
        async def call(request: Any, context: Any) -> Any:
            self._begin(context, method)
            try:
                with (
                    self._connections.calling(context.peer()),
                    _observed(method, context, self._recorder(method, context, request)),
                    self._cancel_if_revoked(context)(),
                ):
                    return await behavior(self._checked(method, request), context)
            except ServiceError as error:
                status = rpc_status.to_status(to_status(error))
            try:
                await context.abort_with_status(status)
            finally:
                del context, request

        return call

    def _generator(self, behavior: Behavior, method: str) -> Behavior:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            self._begin(context, method)
            record = self._recorder(method, context, request)
            until = time.monotonic() + OPEN_WATCH_SECONDS if is_open(method) else None
            try:
                if self._guard.audits(method):
                    record("STARTED")
                with (
                    self._connections.calling(context.peer()),
                    _observed(method, context, record),
                    self._watching(method),
                ):
                    cancel_if_revoked = self._cancel_if_revoked(context)
                    async with contextlib.aclosing(behavior(self._checked(method, request), context)) as responses:
                        while True:
                            # Not around the yield, where the task waits for the caller in gRPC's own code.
                            with cancel_if_revoked():
                                response = await _next(responses, until)
                            if response is _END:
                                return
                            yield response
            except ServiceError as error:
                status = rpc_status.to_status(to_status(error))
            try:
                await context.abort_with_status(status)
            finally:
                del context, request, record

        return call

    @contextlib.contextmanager
    def _watching(self, method: str) -> Iterator[None]:
        """Counts a stream. Raises TooManyWatchesError."""
        if not method.startswith(_WATCHES):
            yield
            return
        if self._watches[method] >= self._max_watches:
            said = f"{method} has {self._max_watches} streams open on this address, and may not have more"
            raise TooManyWatchesError(said, retry_after=1.0)
        self._watches[method] += 1
        try:
            yield
        finally:
            self._watches[method] -= 1

    def _recorder(self, method: str, context: Any, request: Any) -> Callable[[str], None]:
        """Makes a function that writes a call's end to the audit log: operators' calls, and the service's refusals."""
        identity, audit, peer = current(), self._guard.audit, context.peer()
        if viewer := _text(context, FORWARDED_KEY)[:_MAX_FORWARDED]:
            peer = f"{peer} for {viewer}"
        # A console never asks for prompts; every call that does has a line.
        polled = viewer and is_reading(method) and not getattr(request, "include_token_ids", False)
        if self._guard.audits(method) and not (polled and not audit.note_read(identity, method)):
            return functools.partial(audit.called, identity, method, peer, request)

        def refused(outcome: str) -> None:
            if outcome in _REFUSALS:
                audit.refused(identity, method, peer, outcome)

        return refused

    def _cancel_if_revoked(self, context: Any) -> Callable[[], AbstractContextManager[None]]:
        """Returns a function whose context managers raise UnauthenticatedError once the call's token is revoked."""
        authorization = header(context.invocation_metadata() or ())
        return functools.partial(self._guard.cancel_if_revoked, authorization, current())

    def _checked(self, method: str, request: Any) -> Any:
        if isinstance(request, MalformedMessageError):
            raise request
        if self._check is not None and not is_open(method):
            self._check(method, request)
        return request

    def _begin(self, context: Any, method: str) -> None:
        # Each call runs in a separate task, so nothing needs to be unbound afterwards.
        structlog.contextvars.bind_contextvars(request_id=_request_id(context), method=method)
        tracing.receive(_text(context, tracing.TRACEPARENT))
        expected = method.startswith("grpc.") or method in self._sessions
        if context.time_remaining() is None and not expected and method not in self._without_deadline:
            self._without_deadline.add(method)
            log.info("call without deadline", hint="logged once per method")


@contextlib.contextmanager
def _observed(method: str, context: Any = None, record: Callable[[str], None] | None = None) -> Iterator[None]:
    """Counts a call and turns unexpected exceptions into UnexpectedError, with their traceback in the log."""
    code = grpc.StatusCode.OK
    started = time.monotonic()
    in_flight = metrics.IN_FLIGHT.labels(method)
    in_flight.inc()
    try:
        yield
    except ServiceError as error:
        code = status_code(error)
        # No servicer sees a malformed message, so only this line describes it.
        tell = log.info if isinstance(error, MalformedMessageError) else log.debug
        tell("call refused", code=code.name, reason=error.reason, peer="" if context is None else context.peer())
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
        if record is not None:
            record(code.name)


async def _next(responses: AsyncIterator[Any], until: float | None) -> Any:
    """The next response, or _END. until: a time of the monotonic clock. Raises WatchEndedError."""
    if until is None:
        return await anext(responses, _END)
    limit = asyncio.timeout(max(until - time.monotonic(), 0))
    try:
        async with limit:
            return await anext(responses, _END)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise WatchEndedError(f"the stream has been open for {OPEN_WATCH_SECONDS:g} seconds") from error


def _request_id(context: Any) -> str:
    return _text(context, REQUEST_ID_KEY)[:_MAX_REQUEST_ID] or secrets.token_hex(8)


def _text(context: Any, wanted: str) -> str:
    """The text under a key in the caller's metadata; empty for none."""
    for key, value in context.invocation_metadata() or ():
        if key == wanted and isinstance(value, str) and value.isprintable():
            return value
    return ""


def _parse(from_string: Callable[[bytes], Any], data: bytes) -> Any:
    """Parses a message. Raises MalformedMessageError."""
    try:
        return from_string(data)
    except DecodeError as error:
        raise MalformedMessageError(
            "the request is no message of its type, or text in it is not valid UTF-8"
        ) from error


def _raising(from_string: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Makes a parser for streams: gRPC parses inside the handler's read, so the error surfaces there."""
    return from_string and (lambda data: _parse(from_string, data))


def _returning(from_string: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Makes a parser for single requests: gRPC parses them before the handler, and answers exceptions with INTERNAL."""
    if from_string is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return _parse(from_string, data)
        except MalformedMessageError as error:
            return error

    return parse


def _parts(handler: Any) -> tuple[Behavior, Callable[..., Handler]]:
    """The function that serves the call, and the function that builds a handler of its kind."""
    if handler.request_streaming and handler.response_streaming:
        return handler.stream_stream, grpc.stream_stream_rpc_method_handler
    if handler.request_streaming:
        return handler.stream_unary, grpc.stream_unary_rpc_method_handler
    if handler.response_streaming:
        return handler.unary_stream, grpc.unary_stream_rpc_method_handler
    return handler.unary_unary, grpc.unary_unary_rpc_method_handler
