"""Wakes the watchers of events after each call that may have caused events."""

import asyncio

import grpc

from cachemgr.queries import Queries
from protos.errors import ServiceError


class ShuttingDownError(ServiceError):
    """The process is about to stop; watch again after it has restarted."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "SHUTTING_DOWN"


class EventFeed:
    """The wake-ups that all servicers of one process share."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries
        self._announced = queries.last_event
        self._closed = False
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wakes the watchers if there are new events."""
        if self._queries.last_event != self._announced:
            self._wake()

    def close(self) -> None:
        """Ends every watch."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._announced = self._queries.last_event
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_events(self, after: int) -> None:
        """Returns once there is an event after this number. Raises ShuttingDownError."""
        while not self._closed and self._queries.last_event <= after:
            await self._changed.wait()
        if self._closed:
            raise ShuttingDownError("the cache manager is shutting down", retry_after=1.0)
