"""Turns HTTP's Authorization header into an identity, and checks its role."""

import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from protos.rpc.guard import Guard
from protos.rpc.http_server import peer_of
from protos.rpc.identity import Identity, PermissionDeniedError, UnauthenticatedError, assume
from scheduler.frontend.openai.bodies import BodyLimits


class Caller:
    """A caller that may call a method, for as long as the request runs."""

    def __init__(self, guard: Guard, method: str, authorization: str, peer: str) -> None:
        """Raises UnauthenticatedError and PermissionDeniedError, which the audit log gets."""
        self._guard = guard
        self._method = method
        self._authorization = authorization
        self._peer = peer
        self._identity: Identity | None = None
        with self._audited():
            self._identity = guard.identify(authorization)
            # Before the check: the access log names a refused caller, too.
            assume(self._identity)
            guard.allow(self._identity, method)

    @contextlib.contextmanager
    def authorized(self) -> Iterator[None]:
        """Around the work, which ends with UnauthenticatedError when the token is revoked. Audits refusals."""
        with self._audited(), self._guard.holding(self._authorization, self._identity):
            yield

    @contextlib.contextmanager
    def _audited(self) -> Iterator[None]:
        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError) as error:
            self._guard.audit.refused(self._identity, self._method, self._peer, error.code.name)
            raise


def route_class(guard: Guard, method: str, bodies: BodyLimits) -> type[APIRoute]:
    """Routes for a gRPC method, by its full name. A caller is checked before the body is read.

    A dependency would be too late: the framework reads the body before it resolves them.
    """

    class Guarded(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def answer(request: Request) -> Response:
                caller = Caller(guard, method, request.headers.get("authorization", ""), peer_of(request))
                with bodies.limiting(request) as receive:
                    # A new request: the other one would keep the body for as long as the response takes.
                    own = Request(request.scope, receive)
                    own.state.caller = caller
                    return await handle(own)

            return answer

    return Guarded


async def caller_of(request: Request) -> Caller:
    """The caller of a guarded route, as a dependency."""
    caller: Caller = request.state.caller
    return caller
