"""SchedulerAdminService: the operator's hand on the scheduler."""

from typing import Any

import grpc
import structlog

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.identity import PermissionDeniedError, current
from scheduler.frontend.requests import RequestTableSource

SERVICE = "generation.v1.SchedulerAdminService"

log = structlog.get_logger()


class SchedulerAdminService(rpc.SchedulerAdminServiceServicer):
    """Served from the start; every call is answered with UNAVAILABLE while there is no request table."""

    def __init__(self, source: RequestTableSource) -> None:
        self._source = source

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server."""
        rpc.add_SchedulerAdminServiceServicer_to_server(self, server)

    async def SetDraining(  # noqa: N802
        self, request: pb.SetDrainingRequest, _context: Any
    ) -> pb.SetDrainingResponse:
        """Takes no more requests, or takes them again."""
        identity = current()
        if identity is not None and identity.tenant:
            raise PermissionDeniedError("this method is about all tenants, and the token about one")
        requests = self._source.requests
        if not request.validate_only and requests.set_draining(request.draining):
            log.info("drained by an operator" if request.draining else "taken back by an operator")
        return pb.SetDrainingResponse(running_requests=requests.num_running, waiting_requests=requests.num_waiting)
