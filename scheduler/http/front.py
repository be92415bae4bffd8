"""Around everything that HTTP serves, so that nothing is answered past it: names for the logs, and numbers."""

import secrets
import time

import structlog
from fastapi import FastAPI
from prometheus_client import Counter, Gauge, Histogram
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protos.rpc import tracing
from protos.rpc.interceptors import REQUEST_ID_KEY

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
_MAX_REQUEST_ID = 128


class Api(FastAPI):
    """With Front around what FastAPI puts around the routes, too: it answers what nobody expected."""

    def build_middleware_stack(self) -> ASGIApp:
        """All that a request passes."""
        return Front(super().build_middleware_stack())


class Front:
    """ASGI. The caller's X-Request-Id, or one that is drawn, is in the answer and in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        name = headers.get(REQUEST_ID_KEY, "")
        name = name[:_MAX_REQUEST_ID] if name.isascii() and name.isprintable() and name else secrets.token_hex(8)
        # Each request runs in a task of its own, so that nothing needs to be unbound afterwards.
        structlog.contextvars.bind_contextvars(request_id=name, method=f"{scope['method']} {scope['path']}"[:128])
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

        started = time.monotonic()
        try:
            with IN_FLIGHT.track_inprogress():
                await self._app(scope, receive, send_named)
        except Exception:
            scope[FAILED] = INTERNAL
            raise
        finally:
            route = getattr(scope.get("route"), "path_format", NO_ROUTE)
            REQUESTS.labels(route, str(scope.get(FAILED) or (status if is_whole else LEFT))).inc()
            SECONDS.labels(route).observe(time.monotonic() - started)
