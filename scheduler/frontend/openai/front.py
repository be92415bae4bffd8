"""Around everything that HTTP serves, so that nothing is answered past it: names, numbers, and the access log."""

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
from scheduler.frontend.access_log import ABORTED, AccessLog, Line
from scheduler.frontend.openai.origins import Origins

REQUESTS = Counter("kvkeep_http_requests", "HTTP requests that ended, by route and status.", ["route", "code"])
SECONDS = Histogram(
    "kvkeep_http_seconds",
    "Time from the headers of an HTTP request to the end of its answer.",
    ["route"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 120),
)
IN_FLIGHT = Gauge("kvkeep_http_in_flight", "HTTP requests being served.")

# In the scope: the status of what went wrong when another one was sent already.
FAILED = "kvkeep.failed"
# Of all paths that are none: callers choose them.
NO_ROUTE = "other"
# As nginx has it: the caller left before the whole answer was sent.
LEFT = 499
INTERNAL = 500
# Asked for all the time by what watches the process, which leaves no lines.
WATCHING = ("/health", "/metrics", "/version")
GENERATING = ("/v1/chat/completions", "/v1/completions")
_MAX_REQUEST_ID = 128

_drawn: ContextVar[str] = ContextVar("drawn")


def drawn_name() -> str:
    """Of the request that is being served, and of no other: that of its caller may be used again."""
    return _drawn.get()


class Api(FastAPI):
    """With Front around what FastAPI puts around the routes, too: it answers what nobody expected."""

    def __init__(self, access_log: AccessLog, origins: Origins, **options: Any) -> None:
        """options: of FastAPI."""
        super().__init__(**options)
        self._access_log = access_log
        self._origins = origins

    def build_middleware_stack(self) -> ASGIApp:
        """All that a request passes."""
        return Front(self._origins.around(super().build_middleware_stack()), self._access_log)


class Front:
    """ASGI. The caller's X-Request-Id, or one that is drawn, is in the answer and in the log."""

    def __init__(self, app: ASGIApp, access_log: AccessLog) -> None:
        self._app = app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        drawn, name = secrets.token_hex(8), headers.get(REQUEST_ID_KEY, "")
        name = name[:_MAX_REQUEST_ID] if name.isascii() and name.isprintable() and name else drawn
        # Each request runs in a task of its own, so that nothing needs to be unbound afterwards.
        _drawn.set(drawn)
        # As it was sent: what is decoded may be anything.
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

        with IN_FLIGHT.track_inprogress(), self._access_log.telling(peer_of(Request(scope))) as line:
            try:
                await self._app(scope, receive, send_named)
            except Exception:
                scope[FAILED] = INTERNAL
                raise
            finally:
                _end(line, scope, scope.get(FAILED) or (status if is_whole else LEFT))


def _end(line: Line, scope: Scope, status: int) -> None:
    """status: that of the answer, or of what came in its place."""
    route = getattr(scope.get("route"), "path_format", NO_ROUTE)
    REQUESTS.labels(route, str(status)).inc()
    SECONDS.labels(route).observe(time.monotonic() - line.started)
    line.generating, line.is_quiet = route in GENERATING, route in WATCHING
    line.fields |= {"route": route, "status": status}
    # Those of requests that were taken say themselves why they broke off.
    if status >= HTTPStatus.BAD_REQUEST and "finish_reason" not in line.fields:
        line.fields.setdefault("error", ABORTED if status == LEFT else HTTPStatus(status).name)
