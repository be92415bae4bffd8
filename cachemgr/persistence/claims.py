"""Notes in Redis, beside the copy of the index: which cache manager writes, and which executors are present."""

from __future__ import annotations

from collections.abc import Callable, Collection

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError

from cachemgr.persistence.lease_clock import StoreClocks, parse_time
from cachemgr.persistence.redis_keys import OPERATORS, Keys

# How long the copy of an absent executor is kept while a manager runs.
KEPT_SECONDS = 24 * 3600.0
# How often present executors are noted. A new manager gives all of them this time to register.
LOOK_SECONDS = 3600.0


class SupersededError(RedisError):
    """A cache manager that started later keeps its records under the same names."""

    def __init__(self) -> None:
        super().__init__(
            "a cache manager that started later keeps its records under the same names: "
            "end one of them, or give each a name of its own with KVKEEP_CACHEMGR_SHARD"
        )


class Claim:
    """Of several managers with the same keys, only the manager that started last writes to Redis.

    Redis holds that manager's epoch. Each manager writes its epoch once, and again if Redis has lost it.
    """

    def __init__(self, redis: Redis, keys: Keys, epoch: int) -> None:
        self._redis = redis
        self._key = keys.operators("manager")
        self._epoch = epoch
        self._is_made = False

    async def check(self) -> None:
        """Raises SupersededError if a later manager has claimed the keys. Raises UNAVAILABLE."""
        value = await self._redis.get(self._key)
        found = int(value) if value is not None and value.isdigit() else 0
        # A starting manager takes over, even from a manager whose clock was ahead.
        if self._is_made and found > self._epoch:
            raise SupersededError
        if found != self._epoch:
            await self._redis.set(self._key, self._epoch)
        self._is_made = True


class Absences:
    """Notes in Redis when each executor was last present, on the operators' clock, which resumes where it stopped.

    One hash maps executors to these times, so that a new manager finds the previous manager's executors.
    """

    def __init__(self, redis: Redis, keys: Keys, clocks: StoreClocks, is_here: Callable[[str], bool]) -> None:
        """`is_here` says whether an executor is registered or about to be."""
        self._redis = redis
        self._keys = keys
        self._clocks = clocks
        self.is_here = is_here
        self._next_look = 0.0

    async def begin(self) -> None:
        """Reads the previous manager's time, if it is not known yet. Raises UNAVAILABLE."""
        if OPERATORS in self._clocks:
            return
        time = parse_time(await self._redis.get(self._keys.operators("time"))) or 0.0
        self._clocks.start(OPERATORS, time)
        self._next_look = time + LOOK_SECONDS

    async def look(self) -> list[str]:
        """Notes registered executors if due, and returns executors absent for too long. Raises UNAVAILABLE."""
        now = self._clocks.time(OPERATORS)
        if now < self._next_look:
            return []
        here = [one for one in self._clocks if one != OPERATORS and self.is_here(one)]
        gone = []
        async for field, value in self._redis.hscan_iter(self._keys.operators("executors")):
            executor_id, time = field.decode(errors="replace"), parse_time(value)
            # An impossible time is replaced by the present time.
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
        """Deletes the note about an executor whose copy is deleted. Raises UNAVAILABLE."""
        await self._redis.hdel(self._keys.operators("executors"), executor_id)

    def note(self, pipeline: Pipeline, executor_ids: Collection[str]) -> None:
        """Adds to the pipeline that these executors are registered now."""
        if executor_ids:
            time = repr(self._clocks.time(OPERATORS))
            pipeline.hset(self._keys.operators("executors"), mapping=dict.fromkeys(executor_ids, time))
