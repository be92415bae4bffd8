"""Writes that detect when Redis has lost acknowledged data.

Redis loses data when it restarts empty, from an older file, or as a replica that did not have everything yet.
"""

from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from cachemgr.persistence.lease_clock import StoreClocks
from cachemgr.persistence.redis_keys import Keys


class MarkedWrites:
    """Sends pipelines that end with the owner's clock, and asks for the clock's earlier time.

    All keys of an owner lie on one node, which loses its newest writes first. If Redis still has the last acknowledged
    time, no acknowledged write is missing; otherwise `lost` is called with the owner.
    """

    def __init__(self, redis: Redis, keys: Keys, clocks: StoreClocks, lost: Callable[[str], None]) -> None:
        self._redis = redis
        self._keys = keys
        self._clocks = clocks
        self._lost = lost
        # Times that Redis may have: the last acknowledged time, and times sent since then without an answer.
        self._possible: dict[str, set[bytes | None]] = {}

    def found(self, owner: str, time: bytes | None) -> None:
        """Notes the owner's time when Redis was read; a different time at the first write means a loss."""
        self._possible.setdefault(owner, set()).add(time)

    def forget(self, owner: str) -> None:
        """Forgets an owner of whom Redis has nothing any more."""
        self._possible.pop(owner, None)

    async def write(self, owners: Sequence[str], fill: Callable[[Pipeline], object]) -> None:
        """Sends what `fill` adds to a pipeline, all for these owners. Raises UNAVAILABLE."""
        times = [repr(self._clocks.time(owner)) for owner in owners]
        async with self._redis.pipeline(transaction=False) as pipeline:
            fill(pipeline)
            for owner, time in zip(owners, times, strict=True):
                pipeline.set(self._keys.clock(owner), time, get=True)
                if owner in self._possible:
                    self._possible[owner].add(time.encode())
            answers: list[Any] = await pipeline.execute()
        for owner, time, before in zip(owners, times, answers[-len(owners) :], strict=True):
            possible = self._possible.get(owner)
            self._possible[owner] = {time.encode()}
            if possible is not None and before not in possible:
                self._lost(owner)
