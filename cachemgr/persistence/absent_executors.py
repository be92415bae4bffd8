"""Whose copies in Redis nobody will take back any more: executors whose ids never come again."""

from collections.abc import Callable, Collection
from math import isfinite

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from cachemgr.persistence.lease_clock import StoreClocks
from cachemgr.persistence.loss_detection import OPERATORS
from cachemgr.persistence.redis_client import operators_key

# How long the copy of an absent executor is kept, while a manager runs.
KEPT_SECONDS = 24 * 3600.0
# How often it is noted who is here. A new manager gives everybody this time to register.
LOOK_SECONDS = 3600.0


class Absences:
    """Notes in Redis when each executor was last here, on the operators' clock, which goes on where it stopped.

    Names lie in a hash of their own: a manager that starts finds those that an earlier one knew.
    """

    def __init__(self, redis: Redis, clocks: StoreClocks, is_here: Callable[[str], bool]) -> None:
        """`is_here` says whether an executor is registered or about to be."""
        self._redis = redis
        self._clocks = clocks
        self.is_here = is_here
        self._came: set[str] = set()
        self._next_look = 0.0

    def came(self, executor_id: str) -> None:
        """An executor is here; it is noted with the next beat."""
        self._came.add(executor_id)

    async def begin(self) -> None:
        """Reads what time it was for the manager before, if that is not known yet. Raises UNAVAILABLE."""
        if OPERATORS in self._clocks:
            return
        time = _time(await self._redis.get(operators_key("time"))) or 0.0
        self._clocks.start(OPERATORS, time)
        self._next_look = time + LOOK_SECONDS

    @property
    def coming(self) -> list[str]:
        """Who is not noted yet."""
        return list(self._came)

    def noted(self, came: Collection[str]) -> None:
        """These have reached Redis, and nothing that was sent before can undo it."""
        self._came.difference_update(came)

    async def look(self) -> list[str]:
        """Notes who is here when that is due, and tells who has been away for too long. Raises UNAVAILABLE."""
        now = self._clocks.time(OPERATORS)
        if now < self._next_look:
            return []
        here = [one for one in self._clocks if one != OPERATORS and self.is_here(one)]
        gone = []
        async for field, value in self._redis.hscan_iter(operators_key("executors")):
            executor_id, time = field.decode(errors="replace"), _time(value)
            # A time that cannot be right begins anew.
            if self.is_here(executor_id) or time is None or time > now:
                here.append(executor_id)
            elif now - time > KEPT_SECONDS:
                gone.append(executor_id)
        async with self._redis.pipeline(transaction=False) as pipeline:
            self.note(pipeline, here)
            await pipeline.execute()
        self._next_look = now + LOOK_SECONDS
        return gone

    async def forget(self, executor_id: str) -> None:
        """Its copy is deleted; so is the note. Raises UNAVAILABLE."""
        await self._redis.hdel(operators_key("executors"), executor_id)

    def note(self, pipeline: Pipeline, executor_ids: Collection[str]) -> None:
        """Writes that these are here now."""
        if executor_ids:
            time = repr(self._clocks.time(OPERATORS))
            pipeline.hset(operators_key("executors"), mapping=dict.fromkeys(executor_ids, time))


def _time(value: bytes | str | None) -> float | None:
    """What a manager wrote, None when it cannot be a time."""
    try:
        time = float(value or b"")
    except ValueError:
        return None
    return time if isfinite(time) else None
