"""The console over HTTP: its own files, and the data that it shows as JSON. It changes nothing."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

import grpc
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from kvctl.console.data import Cache, Json, Options, Query, Read
from kvctl.console.fleet import Fleet
from kvctl.console.monitor import Monitor
from kvctl.console.settings import ConsoleSettings
from kvctl.display.output import Format
from kvctl.session import Session
from protos.rpc.errors import InvalidField, RemoteError, from_rpc_error, status_code
from protos.rpc.http_server import HttpServer, peer_of
from protos.rpc.identity import AUTHORIZATION_KEY
from protos.rpc.interceptors import FORWARDED_KEY
from protos.rpc.settings import variable

# The page loads from its own server only, and no other page may show it in a frame.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
CALL_SECONDS = 10.0
# Time limit of a call for a look; it is short, because a service that hangs delays the look at all other services.
LOOK_CALL_SECONDS = 1.0
# How long a viewer of all tenants still sees the console's own figures while no cache manager answers.
ALLOWED_SECONDS = 600.0
MAX_ALLOWED = 64
_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


def create_app(fleet: Fleet, monitor: Monitor) -> Starlette:
    """The page and its data."""
    allowed = Allowed()
    reads: dict[str, Callable[[Cache], Read]] = {
        "pools": lambda cache: cache.pools,
        "blocks": lambda cache: cache.blocks,
        "sequences": lambda cache: cache.sequences,
        "leases": lambda cache: cache.leases,
        "holds": lambda cache: cache.holds,
        "tenants": lambda cache: cache.tenants,
        "events": lambda cache: cache.events,
        "ghosts": lambda cache: cache.ghosts,
    }

    def of_shard(read: Callable[[Cache], Read]) -> Read:
        async def answer(query: Query, options: Options) -> Json:
            return await read(await fleet.cache(query, options))(query, options)

        return answer

    async def stack(query: Query, options: Options) -> Json:
        await allowed.check(fleet, query, options)
        return monitor.data(query.get("shard", ""), query.get("pool", ""))

    routes = [
        Route("/api/stack", _endpoint(stack), methods=["GET"]),
        Route("/api/fleet", _endpoint(fleet.read), methods=["GET"]),
        *(Route(f"/api/{name}", _endpoint(of_shard(read)), methods=["GET"]) for name, read in reads.items()),
        Mount("/", StaticFiles(directory=Path(__file__).parent / "static", html=True)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=_with_headers)])


class Allowed:
    """Viewers who may see all tenants, according to a cache manager.

    While the cache manager is away and cannot be asked, the console still shows these viewers the other services.
    """

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}

    async def check(self, fleet: Fleet, query: Query, options: Options) -> None:
        """Raises AioRpcError for a viewer who may not see all tenants, and InvalidField."""
        now = time.monotonic()
        viewer = sha256(dict(options["metadata"]).get(AUTHORIZATION_KEY, "").encode()).digest()
        try:
            await (await fleet.cache(query, options)).check_sees_all(query, options)
        except grpc.aio.AioRpcError as error:
            is_away = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            if is_away and now < self._until.get(viewer, 0.0):
                return
            if not is_away:
                self._until.pop(viewer, None)
            raise
        self._until.pop(viewer, None)
        self._until[viewer] = now + ALLOWED_SECONDS
        while len(self._until) > MAX_ALLOWED:
            del self._until[next(iter(self._until))]


async def serve(
    settings: ConsoleSettings,
    shards: Sequence[str],
    router: str = "",
    metrics: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Serves until SIGTERM or SIGINT. shards, router: of the shown fleet. Raises AddressError.

    metrics: addresses by process, empty for none.
    """
    security = settings.security
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    scheduler, executor = ("", "") if router else (settings.scheduler_address, settings.executor_address)
    async with Fleet(shards, router, security) as fleet:
        session = Session(",".join(shards), router, scheduler, LOOK_CALL_SECONDS, Format.JSON)
        monitor = Monitor(session, metrics, executor)
        server = HttpServer(
            create_app(fleet, monitor),
            settings.address,
            name="console",
            security=security,
            setting=variable(ConsoleSettings, "address"),
            # Also if other machines may connect: their browsers can use an IP address instead of a name.
            own_names=settings.serves_anybody,
        )
        with monitor:
            await server.start()
            await stopping.wait()
            await server.stop()


def _endpoint(read: Read) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        options = {"metadata": _metadata(request), "timeout": CALL_SECONDS}
        try:
            return JSONResponse(await read(request.query_params, options))
        except InvalidField as error:
            return _refusal(error)
        except grpc.aio.AioRpcError as error:
            return _refusal(from_rpc_error(error))

    return answer


def _metadata(request: Request) -> tuple[tuple[str, str], ...]:
    """The viewer's token and address, for the cache manager to check and to log."""
    authorization = request.headers.get("authorization", "")
    forwarded = ((FORWARDED_KEY, peer_of(request)),)
    # gRPC would not send other characters.
    if authorization.isascii() and authorization.isprintable() and authorization:
        return ((AUTHORIZATION_KEY, authorization), *forwarded)
    return forwarded


def _refusal(error: InvalidField | RemoteError) -> Response:
    body = {"reason": error.reason, "message": error.message, "fields": error.fields}
    code = error.code if isinstance(error, RemoteError) else status_code(error)
    return JSONResponse(body, _STATUSES.get(code, 502))


async def _with_headers(request: Request, call_next: RequestResponseEndpoint) -> Response:
    response = await call_next(request)
    response.headers.update(HEADERS)
    return response
