"""Turns what engines send into updates of the request table."""

from __future__ import annotations

import time
from collections.abc import Iterable

import grpc
import structlog
from google.rpc import status_pb2

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.errors import PassedOnError, from_status
from scheduler.bridge import RequestUpdates
from scheduler.errors import AdapterLostError, QueueFullError
from scheduler.frontend.adapters import AdapterTable
from scheduler.frontend.requests import RequestTable
from scheduler.request import MAX_FAILURES
from scheduler.router.engine_link import EngineLink
from scheduler.router.fleet import Fleet, Routed
from scheduler.router.metrics import RouterMetrics

log = structlog.get_logger()


class EngineReports:
    """Listens to engines, and reports to the request table."""

    def __init__(self, fleet: Fleet, requests: RequestTable, metrics: RouterMetrics, adapters: AdapterTable) -> None:
        """adapters: receives the adapters of all engines."""
        self._fleet = fleet
        self._adapters = adapters
        self._requests = requests
        self._metrics = metrics

    def received(self, link: EngineLink, response: pb.StreamRequestsResponse) -> None:
        """Takes the output, failures or load that an engine has sent."""
        updates = RequestUpdates(steps=int(bool(response.outputs)), at=time.monotonic())
        try:
            for chunk in response.outputs:
                if routed := self._fleet.find(chunk.request_id):
                    self._take(routed, chunk, updates)
            for failure in response.failures:
                if routed := self._fleet.find(failure.request_id):
                    self._fail(link, routed, failure, updates)
            # After the ends that the load no longer counts, and before anything is sent because of them.
            if response.HasField("loads"):
                adapters = link.adapters
                link.take_loads(response)
                # Looking at all engines for each report of each engine would be slow in a large fleet.
                if link.adapters != adapters:
                    self._take_adapters()
                if not link.obstacle:
                    self._fleet.start_waiting()
            self._leave(link, updates)
        finally:
            # Even on an error: samples continue elsewhere after the tokens that were received.
            self._requests.receive(updates)

    def lost(self, link: EngineLink, *, was_silent: bool) -> None:
        """Moves the samples of a lost engine elsewhere. If the engine was only silent, no sample is to blame."""
        updates = RequestUpdates(at=time.monotonic())
        running = self._fleet.on(link)
        log.warning("engine lost", address=link.address, executor=link.executor_id, requests=len(running))
        for routed in running:
            self._move(routed, updates, lost=not was_silent)
        self._requests.receive(updates)

    def _take_adapters(self) -> None:
        """Lets requests name the adapters that engines serve; ends requests whose adapter no engine has any more."""
        self._adapters.replace(self._fleet.adapters)
        for attempt in self._fleet.without_engine():
            self._requests.refused(attempt, AdapterLostError("no engine has the adapter of the request any more"))

    def look_at(self, links: Iterable[EngineLink]) -> None:
        """Moves the samples of silent engines, and refuses waiting samples if no engine has their adapter."""
        self._take_adapters()
        for link in links:
            updates = RequestUpdates(at=time.monotonic())
            self._leave(link, updates)
            self._requests.receive(updates)

    def _leave(self, link: EngineLink, updates: RequestUpdates) -> None:
        """Moves samples that make no progress because their engine, or a neighbour of it, is silent."""
        stranded = self._fleet.stranded(link)
        if stranded:
            cause = link.obstacle or ("it says nothing" if link.is_quiet else "a neighbour of it does not answer")
            log.warning("requests leave an engine", address=link.address, cause=cause, requests=len(stranded))
        for routed in stranded:
            link.cancel(routed.name)
            # Requests may be why an executor is silent, but never why a cache manager is.
            self._move(routed, updates, lost=link.executor_silent)

    def _move(self, routed: Routed, updates: RequestUpdates, *, lost: bool) -> None:
        attempt = self._fleet.next_attempt(routed, lost=lost)
        if attempt.failures < MAX_FAILURES:
            updates.retried.append(attempt)
        else:
            updates.given_up.append(routed.arrival)

    def _fail(self, link: EngineLink, routed: Routed, failure: pb.RequestFailure, updates: RequestUpdates) -> None:
        error = from_status(status_pb2.Status.FromString(failure.status))
        # A sample that comes from another engine was accepted once. An engine's report of its queue is a little old,
        # and other routers send to it too.
        if (
            error.code is grpc.StatusCode.UNAVAILABLE
            or (error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and routed.attempt.number)
            or (error.reason == QueueFullError.reason and self._fleet.has_room_beside(link, routed))
        ):
            link.avoid(time.monotonic())
            self._move(routed, updates, lost=False)
        else:
            self._fleet.end(routed)
            self._requests.refused(routed.attempt, PassedOnError(error), was_taken=not failure.is_refused)

    def _take(self, routed: Routed, chunk: pb.StreamGenerateResponse, updates: RequestUpdates) -> None:
        was_introduced = routed.introduced
        routed.heard_at = updates.at
        routed.take(chunk, updates, self._requests)
        if routed.introduced and not was_introduced:
            self._fleet.note_computed(routed, updates.at)
            self._metrics.regret_tokens.inc(max(0, routed.expected - chunk.usage.cached_tokens))
        if chunk.finish_reason:
            routed.link.ended(updates.at - routed.started_at)
            self._fleet.note_output(len(routed.token_ids) - len(routed.attempt.request.prompt_ids))
            self._fleet.end(routed)
