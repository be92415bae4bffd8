"""Gives every HTTP request its name, metrics, and a line in the access log."""

import secrets
import time
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI
from prometheus_client import Counter, Gauge, Histogram
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protos.rpc import tracing
from protos.rpc.http_server import peer_of
from protos.rpc.interceptors import REQUEST_ID_KEY
from scheduler.frontend.access_log import ABORTED, AccessLog, LogLine
from scheduler.frontend.openai.origins import Origins

REQUESTS = Counter("kvkeep_http_requests", "HTTP requests that ended, by route and status.", ["route", "code"])
SECONDS = Histogram(
    "kvkeep_http_seconds",
    "Time from the headers of an HTTP request to the end of its answer.",
    ["route"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 120),
)
IN_FLIGHT = Gauge("kvkeep_http_in_flight", "HTTP requests being served.", multiprocess_mode="livesum")

# Key in the scope: the status of an error after another status was sent.
FAILED = "kvkeep.failed"
# Stands for every unknown path in metrics and logs: callers could choose any number of paths.
NO_ROUTE = "other"
# As in nginx: the caller left before the whole answer was sent.
LEFT = 499
INTERNAL = 500
# Probes arrive all the time and get no lines.
PROBES = ("/health", "/load", "/metrics", "/ping", "/version")
GENERATION_ROUTES = ("/v1/chat/completions", "/v1/completions")
_MAX_REQUEST_ID = 128

_internal_request_id: ContextVar[str] = ContextVar("internal_request_id")


def internal_request_id() -> str:
    """Returns a unique name of the request that is being served; its X-Request-Id may be reused."""
    return _internal_request_id.get()


class ObservedApp(FastAPI):
    """An app whose AccessLogMiddleware also surrounds FastAPI's own middleware, which answers unexpected errors."""

    def __init__(self, access_log: AccessLog, origins: Origins, **options: Any) -> None:
        super().__init__(**options)
        self._access_log = access_log
        self._origins = origins

    def build_middleware_stack(self) -> ASGIApp:
        return AccessLogMiddleware(self._origins.around(super().build_middleware_stack()), self._access_log)


class AccessLogMiddleware:
    """ASGI middleware that puts the caller's X-Request-Id, or a random one, into the answer and the log."""

    def __init__(self, app: ASGIApp, access_log: AccessLog) -> None:
        self._app = app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        internal, name = secrets.token_hex(8), headers.get(REQUEST_ID_KEY, "")
        name = name[:_MAX_REQUEST_ID] if name.isascii() and name.isprintable() and name else internal
        # Each request runs in a separate task, so that nothing needs to be unbound afterwards.
        _internal_request_id.set(internal)
        # As it was sent: a decoded path may hold any character.
        path = scope["raw_path"].decode("ascii", "backslashreplace")
        structlog.contextvars.bind_contextvars(request_id=name, method=f"{scope['method']} {path}"[:128])
        tracing.receive(headers.get(tracing.TRACEPARENT, ""))
        status, is_whole = 0, False

        async def send_named(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID_KEY.encode(), name.encode())]
            elif message["type"] == "http.response.body":
                is_whole = not message.get("more_body", False)
            await send(message)

        with IN_FLIGHT.track_inprogress(), self._access_log.call(peer_of(Request(scope))) as line:
            try:
                await self._app(scope, receive, send_named)
            except Exception:
                scope[FAILED] = INTERNAL
                raise
            finally:
                _end(line, scope, scope.get(FAILED) or (status if is_whole else LEFT))


def _end(line: LogLine, scope: Scope, status: int) -> None:
    """Ends a line. status: of the answer, or of the error that cut it off, or LEFT."""
    route = getattr(scope.get("route"), "path_format", NO_ROUTE)
    REQUESTS.labels(route, str(status)).inc()
    SECONDS.labels(route).observe(time.monotonic() - line.started)
    line.generating, line.is_quiet = route in GENERATION_ROUTES, route in PROBES
    line.fields |= {"route": route, "status": status}
    # The line of an accepted request already says why it broke off.
    if status >= HTTPStatus.BAD_REQUEST and "finish_reason" not in line.fields:
        line.fields.setdefault("error", ABORTED if status == LEFT else HTTPStatus(status).name)
