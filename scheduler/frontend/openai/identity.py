"""Who calls, and whether the role may: the one place where HTTP's Authorization header becomes an identity."""

import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from protos.rpc.guard import Guard
from protos.rpc.http_server import peer_of
from protos.rpc.identity import Identity, PermissionDeniedError, UnauthenticatedError, assume
from scheduler.frontend.grpc_service import SERVICE
from scheduler.frontend.openai.bodies import BodyLimits


class Caller:
    """Somebody who may call a method, for as long as the request goes on."""

    def __init__(self, guard: Guard, method: str, authorization: str, peer: str) -> None:
        """Raises UnauthenticatedError and PermissionDeniedError, which are written down."""
        self._guard = guard
        self._method = method
        self._authorization = authorization
        self._peer = peer
        self._identity: Identity | None = None
        with self._telling():
            self._identity = guard.identify(authorization)
            # Also of one that may not: the access log tells who it was.
            assume(self._identity)
            guard.allow(self._identity, method)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Around the work: it ends with UnauthenticatedError when the token does. Refusals are written down."""
        with self._telling(), self._guard.holding(self._authorization, self._identity):
            yield

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError) as error:
            self._guard.audit.refused(self._identity, self._method, self._peer, error.code.name)
            raise


def route_class(guard: Guard, method: str, bodies: BodyLimits) -> type[APIRoute]:
    """Routes that do what this method of the gRPC service does. Who may not call it is told so before the body is read.

    In dependencies it would be too late: the framework reads the body before it looks at them.
    """
    full_name = f"{SERVICE}/{method}"

    class Guarded(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def answer(request: Request) -> Response:
                caller = Caller(guard, full_name, request.headers.get("authorization", ""), peer_of(request))
                with bodies.taking(request) as receive:
                    # Of its own: the other one stays for as long as the answer takes, and the body with it.
                    own = Request(request.scope, receive)
                    own.state.caller = caller
                    return await handle(own)

            return answer

    return Guarded


async def caller_of(request: Request) -> Caller:
    """A dependency of such routes."""
    caller: Caller = request.state.caller
    return caller
