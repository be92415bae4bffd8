"""The console over HTTP: its own files, and what it shows as JSON. Nothing here changes anything."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cachemgr.console import data
from cachemgr.errors import InvalidField
from cachemgr.manager import CacheManager
from protos.rpc.errors import ServiceError
from protos.rpc.guard import Guard
from protos.rpc.http_server import peer_of
from protos.rpc.identity import Identity, PermissionDeniedError, UnauthenticatedError

# Only what this server itself has, and nobody may show the page within another one.
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
_LARGEST = 1 << 53
# A page that is open reads every second: of each kind of read, one in so many seconds is written down per viewer.
AUDIT_SECONDS = 60.0

Read = Callable[[CacheManager, Request], data.Json]

# By path: what it reads, and the method of the admin address that needs the same role.
_ADMIN, _EVENTS = "kvcache.v1.CacheAdminService/", "kvcache.v1.CacheEventService/"
READS: dict[str, tuple[str, Read]] = {
    "pools": (_ADMIN + "ListPools", lambda manager, _: data.pools(manager)),
    "blocks": (_ADMIN + "ListBlocks", lambda manager, to: data.blocks(manager, _pool(to), _number(to, "after"))),
    "block": (_ADMIN + "ListBlocks", lambda manager, to: data.block(manager, _pool(to), _number(to, "place"))),
    "tree": (_ADMIN + "ListPrefixes", lambda manager, to: data.tree(manager, _pool(to), _key(to))),
    "leases": (_ADMIN + "ListLeases", lambda manager, to: data.leases(manager, _pool(to), _number(to, "after"))),
    "holds": (_ADMIN + "ListHolds", lambda manager, _: data.holds(manager)),
    "tenants": (_ADMIN + "GetStats", lambda manager, to: data.tenants(manager, _pool(to))),
    "events": (_EVENTS + "WatchEvents", lambda manager, to: data.events(manager, _number(to, "after"))),
    "ghosts": (_ADMIN + "GetGhostCaches", lambda manager, to: data.ghosts(manager, _named(to, "executor"))),
}


def create_app(manager: CacheManager, guard: Guard) -> Starlette:
    """The page and its data."""
    static = StaticFiles(directory=Path(__file__).parent / "static", html=True)
    audit = _Audit(guard)
    routes = [
        *(
            Route(f"/api/{name}", _endpoint(manager, guard, audit, *read), methods=["GET"])
            for name, read in READS.items()
        ),
        Mount("/", static),
    ]
    return Starlette(routes=routes, middleware=[Middleware(_Headers)])


class _Audit:
    """Who looked at what, in lines."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._told: dict[tuple[Identity | None, str], float] = {}

    def looked(self, identity: Identity | None, method: str, peer: str, request: Request, outcome: str) -> None:
        """A read that the role may make has ended."""
        key, now = (identity, method), time.monotonic()
        if self._guard.audits(method) and now - self._told.get(key, -AUDIT_SECONDS) >= AUDIT_SECONDS:
            self._told[key] = now
            self._guard.audit.called(identity, method, peer, request.query_params, outcome)


def _endpoint(
    manager: CacheManager, guard: Guard, audit: _Audit, method: str, read: Read
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        peer, identity = peer_of(request), None
        try:
            identity = guard.identify(request.headers.get("authorization", ""))
            guard.allow(identity, method)
            if identity is not None and identity.tenant:
                raise PermissionDeniedError("the console shows all tenants, and the token is about one")
        except ServiceError as error:
            guard.audit.refused(identity, method, peer, error.code.name)
            return _refusal(error, 401 if isinstance(error, UnauthenticatedError) else 403)
        outcome = grpc.StatusCode.INTERNAL
        try:
            shown = JSONResponse(read(manager, request))
            outcome = grpc.StatusCode.OK
            return shown
        except ServiceError as error:
            outcome = error.code
            return _refusal(error, 400 if isinstance(error, InvalidField) else 404)
        finally:
            audit.looked(identity, method, peer, request, outcome.name)

    return answer


def _refusal(error: ServiceError, status: int) -> Response:
    return JSONResponse({"reason": error.reason, "message": error.message, "fields": error.fields}, status)


def _named(request: Request, field: str) -> str:
    value = request.query_params.get(field, "")
    if not value:
        raise InvalidField(field, "must be given")
    return value


def _pool(request: Request) -> str:
    return _named(request, "pool")


def _key(request: Request) -> str:
    return request.query_params.get("key", "")


def _number(request: Request, field: str) -> int:
    text = request.query_params.get(field, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 17 and int(text) < _LARGEST):
        raise InvalidField(field, f"must be a whole number from 0 to {_LARGEST - 1}")
    return int(text)


class _Headers:
    """Adds headers to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await self._app(scope, receive, with_headers)
