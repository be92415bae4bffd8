"""SchedulerAdminService: the operator's hand on the scheduler."""

from typing import Any

import grpc
import structlog

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.identity import PermissionDeniedError, current
from scheduler.errors import NotReadyError
from scheduler.frontend.requests import Engine

SERVICE = "generation.v1.SchedulerAdminService"

log = structlog.get_logger()


class SchedulerAdminService(rpc.SchedulerAdminServiceServicer):
    """Served from the start; until `attach` every call is answered with UNAVAILABLE."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def attach(self, engine: Engine) -> None:
        """The stack is there."""
        self._engine = engine

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server."""
        rpc.add_SchedulerAdminServiceServicer_to_server(self, server)

    async def SetDraining(  # noqa: N802
        self, request: pb.SetDrainingRequest, _context: Any
    ) -> pb.SetDrainingResponse:
        """Takes no more requests, or takes them again."""
        identity, engine = current(), self._engine
        if identity is not None and identity.tenant:
            raise PermissionDeniedError("this method is about all tenants, and the token about one")
        if engine is None:
            raise NotReadyError("the scheduler still waits for the executor and the cache manager", retry_after=1.0)
        if not request.validate_only and engine.set_draining(request.draining):
            log.info("drained by an operator" if request.draining else "taken back by an operator")
        return pb.SetDrainingResponse(running_requests=engine.num_running, waiting_requests=engine.num_waiting)
