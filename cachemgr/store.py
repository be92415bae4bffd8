"""The copy of the prefix index in Redis: written behind by one background task, read back after a restart.

Nothing here blocks or fails the cache manager. While Redis is away changes are coalesced up to a bound; beyond it
they are dropped and the whole index is written when Redis is back.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any
from urllib.parse import quote

import structlog
from prometheus_client import Counter, Gauge, Histogram
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from cachemgr.records import BlockRecord, RecordError, decode, encode, encode_place
from cachemgr.write_behind import Changes, Current, Place, WriteBehind

UP = Gauge("kvkeep_redis_up", "Whether the last exchange with Redis succeeded.")
PENDING = Gauge("kvkeep_redis_pending_blocks", "Blocks whose change is not in Redis yet.")
FLUSH_SECONDS = Histogram("kvkeep_redis_flush_seconds", "Time of one flush to Redis.")
RESYNCS = Counter("kvkeep_redis_resyncs", "Times that an executor's whole index was written again.")

_CHUNK = 256
_UNAVAILABLE = (RedisError, OSError, TimeoutError)

log = structlog.get_logger()


def open_redis(url: str) -> Redis:
    """A client that fails fast: the store does its own waiting and trying again."""
    return Redis.from_url(
        url,
        socket_connect_timeout=1.0,
        socket_timeout=2.0,
        retry=Retry(NoBackoff(), 0),
        decode_responses=False,
    )


class IndexStore:
    """The journal that the index reports to, and the task that brings it to Redis.

    `snapshot` gives every indexed block of an executor; it is asked for a resync only.
    """

    def __init__(
        self,
        redis: Redis,
        snapshot: Callable[[str], Iterable[BlockRecord]],
        *,
        interval: float = 0.05,
        max_pending: int = 200_000,
        flush_at: int = 2_000,
    ) -> None:
        self._redis = redis
        self._snapshot = snapshot
        self._interval = interval
        self._flush_at = flush_at
        self._queue = WriteBehind(max_pending)
        self._epochs: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._large = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._up: bool | None = None

    @property
    def up(self) -> bool:
        """Whether the last exchange with Redis succeeded."""
        return bool(self._up)

    @property
    def pending(self) -> int:
        """Blocks whose change is not in Redis yet."""
        return self._queue.pending

    def cleared(self, executor_id: str, epoch: int) -> None:
        """The executor starts an epoch with an empty index."""
        self._epochs[executor_id] = epoch
        self._queue.clear(executor_id, epoch)
        self._note()

    def stored(self, executor_id: str, group: int, slot: int, current: Current) -> None:
        """A block entered the index, or one in it changed; what it is then is asked for when it is written."""
        self._put(executor_id, (group, slot), current)

    def removed(self, executor_id: str, group: int, slot: int) -> None:
        """The block at this place left the index."""
        self._put(executor_id, (group, slot), None)

    def _put(self, executor_id: str, place: Place, current: Current | None) -> None:
        self._queue.put(executor_id, self._epochs.get(executor_id, 0), place, current)
        self._note()

    def _note(self) -> None:
        self._changed.set()
        if self._queue.pending >= self._flush_at:
            self._large.set()

    async def run(self) -> None:
        """Flushes for ever: soon after a change, at once when there are many, and slower while Redis is away."""
        pause = self._interval
        while True:
            # Not wait_for, which in Python 3.11 forgets a cancellation when what it waits for has just happened.
            with contextlib.suppress(TimeoutError):
                # Waking up without a change keeps kvkeep_redis_up true to the facts.
                async with asyncio.timeout(5.0):
                    await self._changed.wait()
            if self.up:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval):
                        await self._large.wait()
                pause = self._interval
            else:
                await asyncio.sleep(pause)
                pause = min(pause * 2, 2.0)
            await self.flush()

    async def flush(self) -> bool:
        """Writes everything that is pending; False when Redis could not be reached, which loses nothing."""
        async with self._one_at_a_time:
            self._changed.clear()
            self._large.clear()
            with FLUSH_SECONDS.time():
                reached = await self._flush()
            PENDING.set(self._queue.pending)
            if not reached:
                self._changed.set()
            return reached

    async def _flush(self) -> bool:
        if self._queue.pending == 0:
            try:
                await self._redis.ping()
            except _UNAVAILABLE as error:
                return self._is_up(False, error)
        while (taken := self._queue.take()) is not None:
            executor_id, changes = taken
            try:
                await self._write(executor_id, changes)
            except _UNAVAILABLE as error:
                self._queue.give_back(executor_id, changes)
                return self._is_up(False, error)
            except asyncio.CancelledError:
                self._queue.give_back(executor_id, changes)
                raise
        return self._is_up(True)

    async def _write(self, executor_id: str, changes: Changes) -> None:
        # Asked for chunk by chunk: whatever changes meanwhile is noted again, and wins.
        blocks: Iterable[tuple[Place, BlockRecord | None]] = (
            (place, None if current is None else current()) for place, current in changes.blocks.items()
        )
        if changes.resync:
            RESYNCS.inc()
            blocks = [((block.group, block.slot), block) for block in self._snapshot(executor_id)]
            log.info("writing the whole index again", executor=executor_id)
        first = True
        for chunk in _chunks(blocks):
            async with self._redis.pipeline(transaction=True) as pipeline:
                if first and changes.cleared:
                    pipeline.delete(_blocks_key(executor_id))
                    pipeline.set(_epoch_key(executor_id), changes.epoch)
                first = False
                _add(pipeline, _blocks_key(executor_id), chunk)
                await pipeline.execute()

    async def load(self, executor_id: str, epoch: int) -> list[BlockRecord] | None:
        """What Redis remembers of an executor's epoch, parents before children.

        None when it knows another epoch, or cannot be asked: then `replace` what it holds once the epoch is accepted.
        """
        if not await self.flush():
            return None
        try:
            known = await self._redis.get(_epoch_key(executor_id))
            if known is None or int(known) != epoch:
                return None
            blocks = sorted([block async for block in self._read(executor_id)], key=lambda block: block.depth)
        except _UNAVAILABLE as error:
            self._is_up(False, error)
            return None
        self._epochs[executor_id] = epoch
        return blocks

    def replace(self, executor_id: str, epoch: int) -> None:
        """Whatever Redis holds of an executor gives way to the snapshot, soon."""
        self._epochs[executor_id] = epoch
        self._queue.resync(executor_id, epoch)
        self._note()

    async def _read(self, executor_id: str) -> AsyncIterator[BlockRecord]:
        unreadable = 0
        async for place, value in self._redis.hscan_iter(_blocks_key(executor_id), count=_CHUNK):
            try:
                yield decode(place, value)
            except RecordError:
                unreadable += 1
        if unreadable:
            log.warning("left out blocks that another version wrote", executor=executor_id, blocks=unreadable)

    async def close(self) -> None:
        """Writes what is pending, if Redis is there, and closes the connection."""
        if not await self.flush():
            log.warning("stopping with changes that Redis does not have", blocks=self._queue.pending)
        await self._redis.aclose()

    def _is_up(self, up: bool, error: BaseException | None = None) -> bool:
        if up is not self._up:
            if up:
                log.info("redis is up")
            else:
                log.warning("redis is down; changes wait for it", error=str(error), blocks=self._queue.pending)
        self._up = up
        UP.set(up)
        return up


def _epoch_key(executor_id: str) -> str:
    return f"kvkeep:{{{quote(executor_id, safe='')}}}:epoch"


def _blocks_key(executor_id: str) -> str:
    return f"kvkeep:{{{quote(executor_id, safe='')}}}:blocks"


def _chunks(
    blocks: Iterable[tuple[Place, BlockRecord | None]],
) -> Iterable[list[tuple[Place, BlockRecord | None]]]:
    """At least one chunk, which may be empty: an epoch is written also without blocks."""
    rest = iter(blocks)
    yield list(itertools.islice(rest, _CHUNK))
    while chunk := list(itertools.islice(rest, _CHUNK)):
        yield chunk


def _add(pipeline: Pipeline, key: str, chunk: list[tuple[Place, BlockRecord | None]]) -> None:
    stored: dict[Any, Any] = {encode_place(*place): encode(block) for place, block in chunk if block is not None}
    removed = [encode_place(*place) for place, block in chunk if block is None]
    if stored:
        pipeline.hset(key, mapping=stored)
    if removed:
        pipeline.hdel(key, *removed)
