"""The index by key in Redis: which executors have a block, for routers that have not seen enough events yet.

One background task follows the manager's events in a separate table, and writes changes. Readers treat the index as a
hint, so nothing waits for it. While Redis is down, changes are dropped; afterwards the whole table is written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from itertools import islice
from time import monotonic
from typing import NamedTuple

import structlog
from prometheus_client import Counter, Gauge
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from cachemgr.blocks.events import Event
from cachemgr.errors import EventsGoneError
from cachemgr.queries import Queries
from cachemgr.slices import sliced
from cachemgr.types import BlockView, EventKind, ExecutorSpec, TierKind
from protos.kvcommon.key_index import Entry, FormatError, IndexedExecutor, Position, block_name, executor_name
from protos.rpc.redis_client import UNAVAILABLE, reason

PENDING = Gauge("kvkeep_key_index_pending_blocks", "Changed blocks that the index by key does not have yet.")
LAG = Gauge("kvkeep_key_index_lag_events", "Events that the index by key does not have yet.")
REWRITES = Counter("kvkeep_key_index_rewrites", "Times that an executor's whole index by key was written.")

# Seconds after which entries expire. Entries that stay are rewritten in half of this time.
KEPT_SECONDS = 24 * 3600
# Seconds between checks for data loss while idle, and between retries while Redis is down.
BEAT_SECONDS, RETRY_SECONDS = 1.0, 1.0
# The limit on the time for the last writes of a process that ends.
CLOSE_SECONDS = 3.0
# Events that are processed at a time, and blocks that are written at a time: about a millisecond each.
_EVENTS, _BLOCKS = 512, 64

log = structlog.get_logger()


class Place(NamedTuple):
    """The place of a block. first: the key of the first block of its chain.

    A block whose parent is in the same tier has the place of its parent, as one object.
    """

    first: bytes
    tier: TierKind


class IndexedPool:
    """The blocks of an executor's pool, and which of them are out of date in Redis.

    Of an executor with several layer groups, this is the pool of the first group with full attention, which keeps the
    whole prefix. If no group has full attention, this is the pool of the first group.
    """

    def __init__(self, spec: ExecutorSpec, number: int) -> None:
        """number: the event after which the pool is empty."""
        self.spec = spec
        group = min(spec.pools, key=lambda pool: (pool.attention_window is not None, pool.group)).group
        self.pool_id = spec.pool_ids[group]
        self.blocks: dict[bytes, Place] = {}
        # Tiers of orphaned blocks, by the key of the parent, then by the key of the block. Orphaned blocks lie in lower
        # tiers, and no prompt finds them until the parent is back.
        self._orphans: dict[bytes, dict[bytes, TierKind]] = {}
        # Changed blocks by key, with the first key of their chain.
        self.changed: dict[bytes, bytes] = {}
        # Whether the whole pool must be written. Meanwhile, changes are not noted.
        self.is_stale = False
        # Entries from earlier events do not count.
        self.since = number
        self.written_at = monotonic()
        # The executor's announcement that Redis has acknowledged; None before the first write.
        self.acknowledged: bytes | None = None
        # The version of the weights that was written last.
        self.written_version = spec.weight_version

    @property
    def pending(self) -> int:
        """Blocks that must be written."""
        return len(self.blocks) if self.is_stale else len(self.changed)

    @property
    def is_pending(self) -> bool:
        """Whether anything is not in Redis yet."""
        is_written = self.acknowledged is not None and self.written_version == self.spec.weight_version
        return self.is_stale or bool(self.changed) or not is_written

    def note(self, event: Event) -> None:
        """Processes an event about a block of the pool."""
        block = event.block
        if event.kind is EventKind.REMOVED:
            place = self.blocks.pop(block.key, None)
            if place is not None:
                self._changed(block.key, place)
            elif (orphans := self._orphans.get(block.parent_key)) is not None:
                orphans.pop(block.key, None)
                if not orphans:
                    del self._orphans[block.parent_key]
        # Prompts are looked up by full blocks. A block that was forgotten after the event has no tokens.
        elif block.num_tokens == self.spec.block_size:
            self._store(block)

    def _store(self, block: BlockView) -> None:
        known = self.blocks.get(block.key)
        if known is None and block.depth:
            known = self.blocks.get(block.parent_key)
            if known is None:
                self._orphans.setdefault(block.parent_key, {})[block.key] = block.tier
            else:
                self._place(block.key, block.tier, known)
        elif known is None or known.tier is not block.tier:
            self._place(block.key, block.tier, known or Place(block.key, block.tier))

    def _place(self, key: bytes, tier: TierKind, near: Place) -> None:
        """Enters a block of the chain of `near`, and the orphaned blocks below it."""
        entering = [(key, tier)]
        while entering:
            key, tier = entering.pop()
            place = self.blocks[key] = near if near.tier is tier else Place(near.first, tier)
            self._changed(key, place)
            if self._orphans:
                entering += self._orphans.pop(key, {}).items()

    def _changed(self, key: bytes, place: Place) -> None:
        if not self.is_stale:
            self.changed[key] = place.first

    def rewrite(self) -> None:
        """Marks the whole pool to be written again."""
        self.is_stale = True
        self.changed.clear()

    def chunks(self) -> Iterator[list[tuple[bytes, bytes]]]:
        """Takes the changes to write: keys, each with the first key of its chain."""
        rest: Iterator[tuple[bytes, bytes]]
        if self.is_stale:
            self.is_stale = False
            # A block that leaves meanwhile is skipped here, and noted as changed.
            rest = ((key, place.first) for key in list(self.blocks) if (place := self.blocks.get(key)) is not None)
        else:
            taken, self.changed = self.changed, {}
            rest = iter(taken.items())
        while chunk := list(islice(rest, _BLOCKS)):
            yield chunk


class KeyIndex:
    """Writes the effects of a manager's events to Redis."""

    def __init__(
        self, redis: Redis, queries: Queries, *, epoch: int, shard: str, interval: float, max_pending: int
    ) -> None:
        """epoch, shard: the manager's. interval: seconds for which changes are collected.

        max_pending: limit on changed blocks.
        """
        self._redis = redis
        self._queries = queries
        self._epoch = epoch
        self._shard = shard
        self._interval = interval
        self._max_pending = max_pending
        # The pools by id.
        self._pools: dict[str, IndexedPool] = {}
        # Lost executors that are still in Redis.
        self._lost: set[str] = set()
        # The number of the last processed event, and of the last event that Redis has.
        self._number = self._written = 0
        self._beat_at = 0.0
        self._flushing: asyncio.Future[None] | None = None
        self._up: bool | None = None

    @property
    def is_current(self) -> bool:
        """Whether Redis is up to date."""
        # Changes in flight are no longer pending, but not in Redis yet.
        is_writing = self._flushing is not None and not self._flushing.done()
        return self._written == self._queries.last_event and not self._is_pending and not is_writing

    @property
    def _is_pending(self) -> bool:
        return bool(self._lost) or any(pool.is_pending for pool in self._pools.values())

    @property
    def _is_beat_due(self) -> bool:
        return monotonic() >= self._beat_at

    async def run(self) -> None:
        """Follows the manager until it is cancelled. Any error is a bug, and ends the process."""
        while True:
            await asyncio.sleep(RETRY_SECONDS if self._up is False else self._interval)
            await self._follow()
            if self._is_pending or (self._pools and self._is_beat_due):
                # Not cancelled with this task, or the outcome of an exchange with Redis would be unknown.
                self._flushing = asyncio.ensure_future(self._flush())
                await asyncio.wait({self._flushing})
                self._flushing.result()
            else:
                self._written = self._number
            PENDING.set(sum(pool.pending for pool in self._pools.values()))
            LAG.set(self._queries.last_event - self._written)

    async def close(self, *, write: bool = True) -> None:
        """Writes pending changes, if `write` and Redis is up, and closes the connection."""
        task = asyncio.ensure_future(self._write_last(write=write))
        await asyncio.wait({task}, timeout=CLOSE_SECONDS)
        task.cancel()
        await self._redis.aclose()

    async def _write_last(self, *, write: bool) -> None:
        if self._flushing is not None:
            await asyncio.wait({self._flushing})
        if write:
            await self._follow()
            await self._flush()

    # Events

    async def _follow(self) -> None:
        """Processes all events, and marks pools that have too many changes, or old entries, to be written again."""
        while self._number != self._queries.last_event:
            try:
                events = self._queries.events_after(self._number, _EVENTS)
            except EventsGoneError:
                await self._begin_again()
                continue
            for event in events:
                self._note(self._pools, event)
            self._number = events[-1].number
            await asyncio.sleep(0)
        for pool in self._pools.values():
            if len(pool.changed) > self._max_pending or monotonic() >= pool.written_at + KEPT_SECONDS / 2:
                pool.rewrite()

    async def _begin_again(self) -> None:
        """Reads the whole cache in place of events that are gone, unless more events are gone meanwhile."""
        with contextlib.closing(self._queries.snapshot()) as snapshot:
            try:
                async for _ in sliced(snapshot.slots()):
                    snapshot.catch_up()
            except EventsGoneError:
                return
        pools: dict[str, IndexedPool] = {}
        async for events in sliced(snapshot.events()):
            for event in events:
                if event is not None:
                    self._note(pools, event)
        self._lost.update(pool.spec.executor_id for pool in self._pools.values())
        self._lost.difference_update(pool.spec.executor_id for pool in pools.values())
        for pool_id, pool in pools.items():
            pool.rewrite()
            if (before := self._pools.get(pool_id)) is not None:
                pool.acknowledged = before.acknowledged
        self._pools, self._number = pools, snapshot.number

    def _note(self, pools: dict[str, IndexedPool], event: Event) -> None:
        if event.kind in (EventKind.STORED, EventKind.REMOVED, EventKind.UPDATED):
            pool = pools.get(event.block.pool_id)
            if pool is not None:
                pool.note(event)
        elif event.kind is EventKind.EXECUTOR_REGISTERED:
            assert event.executor is not None
            pool = IndexedPool(event.executor, event.number)
            known = pools.get(pool.pool_id)
            if known is None:
                pools[pool.pool_id] = pool
                self._lost.discard(pool.spec.executor_id)
            else:
                # The executor has restarted; blocks that it lost have separate events.
                known.spec = event.executor
        elif event.kind is EventKind.EXECUTOR_LOST:
            assert event.executor is not None
            for pool_id in event.executor.pool_ids:
                if pools.pop(pool_id, None) is not None:
                    self._lost.add(event.executor.executor_id)

    # Redis

    async def _flush(self) -> None:
        """Writes pending changes. After a failure, everything is written again later."""
        number, is_beat = self._number, self._is_beat_due
        try:
            await self._remove_lost()
            pools = [pool for pool in self._pools.values() if is_beat or pool.is_pending]
            for pool in pools:
                await self._write(pool)
            await self._announce(pools, number)
        except UNAVAILABLE as error:
            for pool in self._pools.values():
                pool.rewrite()
                pool.acknowledged = None
            self._set_up(False, reason(error))
        else:
            self._written = number
            if is_beat:
                self._beat_at = monotonic() + BEAT_SECONDS
            self._set_up(True)

    async def _remove_lost(self) -> None:
        for executor_id in list(self._lost):
            name = executor_name(executor_id)
            if not self._is_of_later_manager(await self._redis.get(name)):
                await self._redis.delete(name)
            self._lost.discard(executor_id)

    def _is_of_later_manager(self, value: object) -> bool:
        try:
            return isinstance(value, bytes) and IndexedExecutor.decode(value).manager_epoch > self._epoch
        except FormatError:
            return False

    async def _write(self, pool: IndexedPool) -> None:
        is_rewrite, number = pool.is_stale, self._number
        if is_rewrite:
            REWRITES.inc()
            pool.written_at = monotonic()
        for chunk in pool.chunks():
            async with self._redis.pipeline(transaction=False) as pipeline:
                self._fill(pipeline, pool, chunk)
                await pipeline.execute()
            await self._follow()
            if self._pools.get(pool.pool_id) is not pool:
                return
        if is_rewrite:
            pool.since = number

    def _fill(self, pipeline: Pipeline, pool: IndexedPool, chunk: list[tuple[bytes, bytes]]) -> None:
        position = Position(self._epoch, self._number)
        for key, first in chunk:
            name, place = block_name(first, key), pool.blocks.get(key)
            if place is None:
                pipeline.hdel(name, pool.spec.executor_id)
            else:
                pipeline.hset(name, pool.spec.executor_id, Entry(place.tier, position).encode())
                pipeline.expire(name, KEPT_SECONDS)

    async def _announce(self, pools: list[IndexedPool], number: int) -> None:
        """Announces executors once all their entries are written.

        If the previous announcement of an executor is gone, Redis has lost data, or a later manager has the executor.
        """
        written = [pool for pool in pools if self._pools.get(pool.pool_id) is pool and not pool.is_stale]
        specs = [pool.spec for pool in written]
        values = [self._announcement(pool, number) for pool in written]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for pool, value in zip(written, values, strict=True):
                pipeline.set(executor_name(pool.spec.executor_id), value, ex=KEPT_SECONDS, get=True)
            before: list[object] = await pipeline.execute() if written else []
        for pool, spec, value, found in zip(written, specs, values, before, strict=True):
            pool.written_version = spec.weight_version
            expected, pool.acknowledged = pool.acknowledged, value
            if expected is None or found == expected:
                continue
            if self._is_of_later_manager(found):
                # The later manager finds that its announcement was replaced, and writes it again.
                log.warning("another cache manager has the executor now", executor=pool.spec.executor_id)
                del self._pools[pool.pool_id]
            else:
                log.warning("redis lost data; writing the index by key again", executor=pool.spec.executor_id)
                pool.rewrite()

    def _announcement(self, pool: IndexedPool, number: int) -> bytes:
        return IndexedExecutor(
            manager_epoch=self._epoch,
            since=pool.since,
            event_number=number,
            executor_epoch=pool.spec.executor_epoch,
            model_fingerprint=pool.spec.model_fingerprint,
            block_size=pool.spec.block_size,
            shard=self._shard,
            weight_version=pool.spec.weight_version,
        ).encode()

    def _set_up(self, up: bool, why: str = "") -> None:
        if up is not self._up:
            if up:
                log.info("the index by key is written")
            else:
                log.warning("the index by key cannot be written; the whole index will be written later", error=why)
        self._up = up
