"""grpc.health.v1 for one listener: a status per service name, and "" for the process.

The servicer of grpc_health delays a change of a status until each watcher has read, and a stopping server waits for
its watchers; this servicer does neither.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.errors import ServiceError
from protos.rpc.version import VERSION_KEY, program_version

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class UnknownServiceError(ServiceError):
    """A caller asked for the health of a service that is not here."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_SERVICE"


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The health service. Statuses change synchronously: a process can say "not serving" before it awaits anything."""

    def __init__(self, services: Iterable[str]) -> None:
        self._statuses = dict.fromkeys(("", *services), NOT_SERVING)
        self._changed = asyncio.Event()
        self._closed = False
        self._version = program_version()

    def set(self, serving: bool, service: str | None = None) -> None:
        """Sets the status of one service or, for None, of all and the process. Ignores another listener's services."""
        names = list(self._statuses) if service is None else [service]
        for name in names:
            if name in self._statuses:
                self._statuses[name] = SERVING if serving else NOT_SERVING
        self._wake()

    @property
    def is_serving(self) -> bool:
        """Whether the process serves."""
        return bool(self._statuses[""] == SERVING)

    def close(self) -> None:
        """Ends every watch, so that the server need not wait for its watchers."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name in the protocol
        """Returns the status of one service, with the version of the program."""
        if request.service not in self._statuses:
            raise UnknownServiceError("no such service on this address", metadata={"service": request.service})
        context.set_trailing_metadata(((VERSION_KEY, self._version),))
        return health_pb2.HealthCheckResponse(status=self._statuses[request.service])

    async def List(self, _request: Any, _context: Any) -> Any:  # noqa: N802 - the name in the protocol
        """Returns the status of the process and of each service."""
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: Any, _context: Any) -> AsyncIterator[Any]:  # noqa: N802 - the name in the protocol
        """Streams the status of one service and its changes; a watcher that reads late gets only the newest status."""
        last = None
        while True:
            # Both are read before the status is sent, so that the next iteration sees a change during the sending.
            changed, closed = self._changed, self._closed
            status = self._statuses.get(request.service, SERVICE_UNKNOWN)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            if closed:
                return
            if changed is self._changed:
                await changed.wait()
