"""Turns HTTP's Authorization header into an identity, and checks its role."""

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
    """A caller that may call a method, or one of several, for as long as the request runs."""

    def __init__(self, guard: Guard, methods: Sequence[str], authorization: str, peer: str) -> None:
        """Raises UnauthenticatedError and PermissionDeniedError, which the audit log gets with the first method."""
        self._guard = guard
        self._method = methods[0]
        self._authorization = authorization
        self._peer = peer
        self._identity: Identity | None = None
        with self._audited():
            self._identity = guard.identify(authorization)
            # Before the check: the access log names a refused caller, too.
            assume(self._identity)
            guard.allow(self._identity, *methods)

    def may(self, method: str) -> bool:
        """Whether it may call a gRPC method, by its full name."""
        try:
            self._guard.allow(self._identity, method)
        except PermissionDeniedError:
            return False
        return True

    @contextlib.contextmanager
    def authorized(self) -> Iterator[None]:
        """Around the work, which ends with UnauthenticatedError when the token is revoked. Audits refusals."""
        with self._audited(), self._guard.cancel_if_revoked(self._authorization, self._identity):
            yield

    @contextlib.contextmanager
    def operating(self, method: str, request: Message) -> Iterator[None]:
        """Around what an operator does, within `authorized`: a line in the audit log, as the gRPC method has."""
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
    """Routes for callers of one of these gRPC methods, by full names. A caller is checked before the body is read.

    A dependency would be too late: the framework reads the body before it resolves them.
    """

    class Guarded(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def answer(request: Request) -> Response:
                caller = Caller(guard, methods, request.headers.get("authorization", ""), peer_of(request))
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
