"""Who calls, and whether the role may: the one place where HTTP's Authorization header becomes an identity."""

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated

from fastapi import Header
from starlette.requests import Request

from protos.rpc.guard import Guard
from protos.rpc.http_server import peer_of
from protos.rpc.identity import Identity, PermissionDeniedError, UnauthenticatedError, assume
from scheduler.service import SERVICE


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


def may_call(guard: Guard, method: str) -> Callable[..., Awaitable[Caller]]:
    """A dependency of the routes that do what this method of the gRPC service does."""
    full_name = f"{SERVICE}/{method}"

    async def check(
        request: Request, authorization: Annotated[str | None, Header(include_in_schema=False)] = None
    ) -> Caller:
        return Caller(guard, full_name, authorization or "", peer_of(request))

    return check
