"""The service for operators: the fleet as the router knows it."""

from __future__ import annotations

import time

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from scheduler.frontend.grpc_service import Context
from scheduler.router.engine_link import EngineLink
from scheduler.router.fleet import Fleet
from scheduler.router.view import CacheView

ROUTER_SERVICE = "generation.v1.RouterService"


class RouterService(rpc.RouterServiceServicer):
    """Served from the start; a router that has not found any engine yet lists no engine."""

    def __init__(self, fleet: Fleet, view: CacheView, policy: str) -> None:
        self._fleet = fleet
        self._view = view
        self._policy = policy

    async def ListEngines(  # noqa: N802
        self, _request: pb.ListEnginesRequest, _context: Context
    ) -> pb.ListEnginesResponse:
        now = time.monotonic()
        links = sorted(self._fleet.links.values(), key=lambda link: link.address)
        return pb.ListEnginesResponse(
            engines=[self._engine(link, now) for link in links],
            policy=self._policy,
            waiting_requests=self._fleet.loads.waiting,
        )

    def _engine(self, link: EngineLink, now: float) -> pb.RoutedEngine:
        obstacle = link.obstacle_at(now)
        message = pb.RoutedEngine(
            address=link.address,
            engine_id=link.engine.engine_id,
            executor_id=link.executor_id,
            cachemgr_admin_address=link.engine.cachemgr_admin_address,
            cachemgr_address=link.engine.cachemgr_address,
            executor_address=link.engine.executor_address,
            ready=not obstacle,
            obstacle=obstacle,
            loads=link.loads if link.is_open else None,
            routed_requests=link.routed_requests,
            routed_tokens=link.routed_tokens,
            expected_cached_tokens=link.expected_tokens,
            view_complete=self._view.find(link.owner) is not None,
            adapters=[adapter.message() for adapter in link.adapters.values()],
        )
        if (seconds := link.rates.request) is not None:
            message.request_time.FromNanoseconds(round(seconds * 1e9))
        return message
