"""Turns the HTTP Authorization header into an identity, and checks its role."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from fastapi.routing import APIRoute
from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import Response

from protos.errors import ServiceError
from protos.rpc.errors import status_code
from protos.rpc.guard import Guard
from protos.rpc.http_server import peer_of
from protos.rpc.identity import Identity, PermissionDeniedError, UnauthenticatedError, assume
from scheduler.frontend.openai.bodies import BodyLimits


class Caller:
    """The caller of one request, who may call at least one of the given methods."""

    def __init__(self, guard: Guard, methods: Sequence[str], authorization: str, peer: str) -> None:
        """Raises UnauthenticatedError and PermissionDeniedError, which are audited under the first method."""
        self._guard = guard
        self._method = methods[0]
        self._authorization = authorization
        self._peer = peer
        self._identity: Identity | None = None
        with self._audited():
            self._identity = guard.identify(authorization)
            # Before the check, so that the access log also names a refused caller.
            assume(self._identity)
            guard.allow(self._identity, *methods)

    def may(self, method: str) -> bool:
        """Returns whether the caller may call a gRPC method, given by its full name."""
        try:
            self._guard.allow(self._identity, method)
        except PermissionDeniedError:
            return False
        return True

    @contextlib.contextmanager
    def authorized(self) -> Iterator[None]:
        """Surrounds the work, which ends with UnauthenticatedError if the token is revoked. Audits refusals."""
        with self._audited(), self._guard.cancel_if_revoked(self._authorization, self._identity):
            yield

    @contextlib.contextmanager
    def operating(self, method: str, request: Message) -> Iterator[None]:
        """Surrounds an operator's action, within `authorized`; writes the same audit line as the gRPC method."""
        outcome = "OK"
        try:
            yield
        except ServiceError as error:
            outcome = status_code(error).name
            raise
        except asyncio.CancelledError:
            outcome = "CANCELLED"
            raise
        except Exception:
            outcome = "INTERNAL"
            raise
        finally:
            if self._guard.audits(method):
                self._guard.audit.called(self._identity, method, self._peer, request, outcome)

    @contextlib.contextmanager
    def _audited(self) -> Iterator[None]:
        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError) as error:
            self._guard.audit.refused(self._identity, self._method, self._peer, error.code.name)
            raise


def route_class(guard: Guard, methods: Sequence[str], bodies: BodyLimits) -> type[APIRoute]:
    """Returns a route class for callers of one of these gRPC methods, which checks callers before reading the body.

    A dependency would be too late: the framework reads the body before it resolves dependencies. methods: full names.
    """

    class Guarded(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def answer(request: Request) -> Response:
                caller = Caller(guard, methods, request.headers.get("authorization", ""), peer_of(request))
                with bodies.limiting(request) as receive:
                    # A new request object: the original would keep the body for as long as the response takes.
                    own = Request(request.scope, receive)
                    own.state.caller = caller
                    return await handle(own)

            return answer

    return Guarded


async def caller_of(request: Request) -> Caller:
    """Returns the caller of a guarded route, as a dependency."""
    caller: Caller = request.state.caller
    return caller
