"""Events as a stream in Redis of a bounded length, for those who read Redis and do not call: routers, dashboards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis

from cachemgr.blocks.events import Event
from cachemgr.errors import EventsGoneError
from cachemgr.persistence.redis_client import operators_key
from cachemgr.types import RemovalCause

if TYPE_CHECKING:
    from cachemgr.manager import CacheManager

KEY = operators_key("events")
_CHUNK = 256


class EventStream:
    """Copies what comes behind the last event that was written.

    `length` is about how many the stream keeps. Events that are forgotten while Redis is away leave a gap in the
    numbers. After an answer that got lost some may be there twice.
    """

    def __init__(self, redis: Redis, length: int, manager: Callable[[], CacheManager]) -> None:
        self._redis = redis
        self._length = length
        self._manager = manager
        self._last = 0

    async def write(self) -> None:
        """Brings all events to Redis. Raises UNAVAILABLE; then the rest follows the next time."""
        while events := self._next():
            async with self._redis.pipeline(transaction=False) as pipeline:
                for event in events:
                    pipeline.xadd(KEY, self._fields(event), maxlen=self._length, approximate=True)
                await pipeline.execute()
            self._last = events[-1].number

    def _next(self) -> list[Event]:
        try:
            return self._manager().queries.events_after(self._last, _CHUNK)
        except EventsGoneError as error:
            return self._manager().queries.events_after(int(error.metadata["oldest"]) - 1, _CHUNK)

    def _fields(self, event: Event) -> dict[Any, Any]:
        block = event.block
        fields: dict[Any, Any] = {
            "manager": self._manager().epoch,
            "number": event.number,
            "kind": event.kind.name,
            "pool": block.pool_id,
        }
        if block.key:
            fields |= {
                "key": block.key.hex(),
                "parent": block.parent_key.hex(),
                "depth": block.depth,
                "tokens": block.num_tokens,
                "tier": block.tier.name,
                "slot": block.slot,
                "priority": block.priority,
            }
        if event.cause is not RemovalCause.NONE:
            fields["cause"] = event.cause.name
        return fields
