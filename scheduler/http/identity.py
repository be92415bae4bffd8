"""Who calls, and whether the role may: the one place where HTTP's Authorization header becomes an identity."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Header
from starlette.requests import Request

from protos.rpc.errors import ServiceError
from protos.rpc.guard import Guard
from protos.rpc.identity import assume
from scheduler.service import SERVICE

Check = Callable[..., Awaitable[None]]


def may_call(guard: Guard, method: str) -> Check:
    """A dependency of the routes that do what this method of the gRPC service does.

    It raises UnauthenticatedError and PermissionDeniedError, which are written down.
    """
    full_name = f"{SERVICE}/{method}"

    async def check(
        request: Request, authorization: Annotated[str | None, Header(include_in_schema=False)] = None
    ) -> None:
        identity = None
        try:
            identity = guard.identify(authorization or "")
            guard.allow(identity, full_name)
        except ServiceError as error:
            peer = "" if request.client is None else f"{request.client.host}:{request.client.port}"
            guard.audit.refused(identity, full_name, peer, error.code.name)
            raise
        assume(identity)

    return check
