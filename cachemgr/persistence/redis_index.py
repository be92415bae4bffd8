"""The copy of the prefix index in Redis: written by one background task, read back after a restart.

Nothing here blocks or fails the cache manager. While Redis is down, changes are coalesced up to a limit. Beyond the
limit, they are dropped, and the whole index is written when Redis answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Coroutine, Iterable, Iterator
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import structlog
from prometheus_client import Counter, Gauge, Histogram
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import TimeoutError as RedisTimeoutError

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.operators.operator_journal import Kind
from cachemgr.persistence.claims import Absences, Claim
from cachemgr.persistence.consistency import Difference, compare_blocks
from cachemgr.persistence.lease_clock import StoreClocks, parse_time, pin_with_remaining_time, with_end_times
from cachemgr.persistence.marked_writes import MarkedWrites
from cachemgr.persistence.operator_state import OperatorStore
from cachemgr.persistence.pending_changes import Changes, Current, PendingChanges
from cachemgr.persistence.reading import Reading
from cachemgr.persistence.records import encode_block, encode_slot
from cachemgr.persistence.redis_keys import OPERATORS, Keys
from cachemgr.persistence.restoring import Restoring
from cachemgr.queries import Queries
from cachemgr.types import Slot
from protos.rpc.redis_client import UNAVAILABLE, reason

UP = Gauge("kvkeep_redis_up", "Whether the last exchange with Redis succeeded.")
PENDING = Gauge(
    "kvkeep_redis_pending_blocks", "Changed blocks and operators' entries that are not written to Redis yet."
)
FLUSH_SECONDS = Histogram("kvkeep_redis_flush_seconds", "Time of one flush to Redis.")
RESYNCS = Counter("kvkeep_redis_resyncs", "Times that an executor's whole index was written again.")
RECOVERING = Gauge("kvkeep_recovering_executors", "Executors whose stored blocks are not all restored yet.")

SCHEMA = b"2"
# Limits on waiting for Redis: at the start, in calls that need its content or acknowledgement, and in a comparison.
START_SECONDS = 1.0
WAIT_SECONDS = 3.0
COMPARE_SECONDS = 60.0
# The maximum time between two writes of the clocks.
BEAT_SECONDS = 1.0
# Redis may still carry out an unanswered write within this time.
_SETTLE_SECONDS = 1.0
# How many blocks are written, and read, at a time.
_CHUNK, _READ = 256, 1024

T = TypeVar("T")
# Slots with their blocks.
Chunk = list[tuple[Slot, BlockRecord | None]]
log = structlog.get_logger()


class IndexStore:
    """Writes queued changes to Redis, and hands stored blocks back to the manager."""

    def __init__(
        self,
        redis: Redis,
        queue: PendingChanges,
        source: Queries,
        calls: Restoring,
        *,
        epoch: int,
        shard: str = "",
        interval: float = 0.05,
    ) -> None:
        """epoch, shard: the manager's. interval: seconds for which changes are collected before a write."""
        self._redis = redis
        self._keys = keys = Keys(shard)
        self._claim = Claim(redis, keys, epoch)
        self._queue = queue
        self._source = source
        self._calls = calls
        self._clocks = StoreClocks(source)
        self._writes = MarkedWrites(redis, keys, self._clocks, self._lost)
        self._absences = Absences(redis, keys, self._clocks, self._is_here)
        self._operators = OperatorStore(redis, keys, self._clocks, self._writes, queue.entries, source, calls)
        self._interval = interval
        # Readings of executors whose copy is not restored yet.
        self._readings: dict[str, Reading] = {}
        # Readings of registered executors, in the order in which they are restored.
        self._registered: asyncio.Queue[Reading] = asyncio.Queue()
        self._recovering: set[Reading] = set()
        self._one_at_a_time = asyncio.Lock()
        self._in_doubt = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._up: bool | None = None

    @property
    def up(self) -> bool:
        """Whether the last exchange with Redis succeeded."""
        return bool(self._up)

    @property
    def pending(self) -> int:
        """Number of blocks and operators' entries whose change is not in Redis yet."""
        return self._queue.pending

    @property
    def is_restoring(self) -> bool:
        """Whether stored blocks are being restored; until they are, changes of their executors are not written."""
        return bool(self._readings)

    async def run(self) -> None:
        """Writes and recovers for ever. Any error is a bug, and ends the process."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_writing())
            while True:
                group.create_task(self.restore(await self._registered.get()))

    async def _keep_writing(self) -> None:
        """Flushes for ever: soon after a change, at once after many changes, and less often while Redis is down."""
        pause = self._interval
        while True:
            # Not wait_for, which in Python 3.11 loses a cancellation if the awaited event has just happened.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_SECONDS):
                    await self._queue.has_changed.wait()
            if self.up:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval):
                        await self._queue.is_large.wait()
                pause = self._interval
            else:
                await asyncio.sleep(pause)
                pause = min(pause * 2, 2.0)
            await self.flush_soon(None)

    async def flush(self) -> bool:
        """Writes pending changes; returns False if Redis could not be reached. The changes then stay queued.

        Also returns False once a later manager has claimed the keys. Changes of executors whose copy is not restored
        yet stay queued, whatever the result.
        """
        async with self._one_at_a_time:
            self._queue.has_changed.clear()
            self._queue.is_large.clear()
            with FLUSH_SECONDS.time():
                reached = await self._flush()
            PENDING.set(self.pending)
            if not reached:
                self._queue.has_changed.set()
            return reached

    async def start(self) -> None:
        """Reads operators' settings if Redis answers quickly; otherwise `run` reads them later."""
        await self.flush_soon(START_SECONDS)

    async def flush_soon(self, seconds: float | None = WAIT_SECONDS) -> bool:
        """Like `flush`, but returns False after `seconds`, if given; the flush then continues in the background."""
        return await self._run_bounded(self.flush(), seconds) or False

    async def _run_bounded(self, work: Coroutine[None, None, T], seconds: float | None) -> T | None:
        """The result of the work; None if it takes too long, and Redis then counts as down.

        The work then continues, also if the caller is cancelled.

        An exchange with Redis is never cancelled, because the outcome would be unknown. Redis's client may also swallow
        the cancellation: the client uses asyncio.wait_for, which can lose a cancellation in Python 3.11.
        """
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
        self._set_up(False, TimeoutError("Redis takes too long"))
        return None

    async def _flush(self) -> bool:
        try:
            await self._claim.check()
            await self._absences.begin()
            # Before any expensive work: if Redis accepts no writes now, this fails.
            came = await self._beat()
            if self._in_doubt:
                await asyncio.sleep(_SETTLE_SECONDS)
                came = await self._beat()
                self._in_doubt = False
            self._queue.arrived.difference_update(came)
            await self._operators.read()
            await self._operators.write(pins=False)
            while (taken := self._queue.blocks.take(self._readings)) is not None:
                # Taken changes count as pending until they are written, which takes long with a slow Redis.
                PENDING.set(self.pending + len(taken[1].blocks))
                try:
                    await self._write(*taken)
                except BaseException:
                    self._queue.blocks.requeue(*taken)
                    raise
                PENDING.set(self.pending)
            await self._operators.write(pins=True, unread=self._readings)
            await self._forget_absent()
        except UNAVAILABLE as error:
            self._in_doubt |= isinstance(error, TimeoutError | RedisTimeoutError)
            return self._set_up(False, error)
        return self._set_up(True)

    async def _beat(self) -> list[str]:
        """Writes the clocks, and which executors have registered; returns these executors."""
        owners = list(dict.fromkeys((OPERATORS, *self._clocks)))
        came = list(self._queue.arrived)

        def fill(pipeline: Pipeline) -> None:
            pipeline.set(self._keys.operators("schema"), SCHEMA)
            self._absences.note(pipeline, came)

        await self._writes.write(owners, fill)
        return came

    async def _forget_absent(self) -> None:
        """Deletes copies of absent executors.

        An executor that registers meanwhile reads its whole copy or none of it. If it reads nothing, the first write
        for the executor finds the clock missing, and the executor's whole index is written again.
        """
        for executor_id in await self._absences.look():
            if self._absences.is_here(executor_id):
                continue
            self._queue.epochs.pop(executor_id, None)
            self._readings.pop(executor_id, None)
            self._queue.blocks.drop(executor_id)
            self._clocks.forget(executor_id)
            self._writes.forget(executor_id)
            kept = ("blocks", Kind.PIN.value, "epoch", "clock")
            await self._redis.delete(*(self._keys.executor(executor_id, what) for what in kept))
            await self._absences.forget(executor_id)
            log.info("removed the index of an executor that did not register again", executor=executor_id)

    def _lost(self, owner: str) -> None:
        log.warning("redis lost data; writing the whole index again", executor=owner)
        if owner == OPERATORS:
            self._operators.rewrite_shared()
            self._queue.arrived.update(self._queue.epochs)
        elif owner in self._queue.epochs:
            self._queue.replace(owner, self._queue.epochs[owner])

    async def _write(self, executor_id: str, changes: Changes) -> None:
        # Read chunk by chunk; a block that changes meanwhile is noted again.
        blocks: Iterable[tuple[Slot, BlockRecord | None]] = (
            (slot, self._current(executor_id, current)) for slot, current in changes.blocks.items()
        )
        if changes.resync:
            RESYNCS.inc()
            # Also read chunk by chunk.
            blocks = ((block.tier_slot, block) for block in self._records(executor_id))
            log.info("writing the whole index again", executor=executor_id)
        key = self._keys.executor(executor_id, "blocks")
        for number, chunk in enumerate(_chunks(blocks)):
            # Ordered so that the data stays valid if the write is cut off anywhere.
            def fill(pipeline: Pipeline, first: bool = number == 0, chunk: Chunk = chunk) -> None:
                if first and changes.cleared:
                    pipeline.delete(key)
                    if changes.resync:
                        pipeline.delete(self._keys.executor(executor_id, Kind.PIN.value))
                    pipeline.set(self._keys.executor(executor_id, "epoch"), changes.epoch)
                _add(pipeline, key, chunk)

            await self._writes.write([executor_id], fill)

    def _records(self, executor_id: str) -> Iterator[BlockRecord]:
        # The remaining times of each record are those at its turn, and time passes between two turns.
        return (with_end_times(block, self._clocks.time(executor_id)) for block in self._source.records(executor_id))

    def _current(self, executor_id: str, current: Current | None) -> BlockRecord | None:
        block = None if current is None else current()
        return None if block is None else with_end_times(block, self._clocks.time(executor_id))

    async def recall(self, executor_id: str, seconds: float = WAIT_SECONDS) -> Reading:
        """Begins to read Redis's copy of an executor, and waits for it for at most `seconds`.

        The reading takes as long as necessary, even while Redis is down. Until the copy is restored, no change of the
        executor is written, so nothing is deleted unread. If blocks of the copy were handed out for an earlier
        registration, the copy is read again.
        """
        reading = self._readings.get(executor_id)
        if reading is None or reading.is_spent:
            was_stale = reading is not None and reading.is_stale
            if executor_id in self._queue.epochs:
                # Writes changes that are still pending from an earlier registration.
                await self.flush_soon(seconds)
            is_stale = self._queue.blocks.drop(executor_id) or was_stale
            reading = self._readings[executor_id] = Reading(executor_id, is_stale=is_stale)
            task = asyncio.ensure_future(self._read(reading))
            self._tasks.add(task)
            task.add_done_callback(self._has_ended)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await reading.is_complete.wait()
        return reading

    def _has_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()

    async def _read(self, reading: Reading) -> None:
        """Reads a copy, with retries for ever: each page has a deadline, the whole reading has none."""
        count, pause = _READ, self._interval
        while True:
            reading.clear()
            try:
                await self._read_all(reading, count)
            except UNAVAILABLE as error:
                self._set_up(False, error)
            else:
                reading.is_complete.set()
                return
            await asyncio.sleep(pause)
            # Smaller pages may succeed if large pages exceed the deadline of an answer.
            pause, count = min(pause * 2, 1.0), max(16, count // 2)

    async def _read_all(self, reading: Reading, count: int) -> None:
        executor_id = reading.executor_id
        clock = await self._redis.get(self._keys.clock(executor_id))
        epoch = await self._redis.get(self._keys.executor(executor_id, "epoch"))
        if epoch is not None:
            async for field, value in self._redis.hscan_iter(self._keys.executor(executor_id, "blocks"), count=count):
                reading.add(field, value)
            reading.pins = await self._operators.stored_pins(executor_id)
            reading.epoch = int(epoch) if epoch.isdigit() else 0
        reading.time = parse_time(clock) or 0.0
        self._writes.found(executor_id, clock if isinstance(clock, bytes) else None)

    def registered(self, executor_id: str, epoch: int) -> None:
        """Notes that the manager has accepted an executor's epoch.

        The executor's changes are written once its stored blocks are restored.
        """
        self._queue.registered(executor_id, epoch)
        reading = self._readings.get(executor_id)
        if reading is not None and reading.is_spent:
            # Parts of the reading may have been taken for an earlier registration.
            reading.is_stale = True

    def epoch_of(self, executor_id: str) -> int:
        """The last accepted epoch; 0 for none."""
        return self._queue.epochs.get(executor_id, 0)

    async def recover(self, reading: Reading, seconds: float) -> None:
        """Queues a registered executor's reading to be restored, and waits for at most `seconds`."""
        if reading not in self._recovering:
            self._recovering.add(reading)
            RECOVERING.set(len(self._recovering))
            self._registered.put_nowait(reading)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await reading.has_been_restored.wait()

    async def restore(self, reading: Reading) -> None:
        """Restores a reading to the index once it is complete, and then lets changes of its executor be written."""
        executor_id, calls = reading.executor_id, self._calls
        await reading.is_complete.wait()
        begin = monotonic()
        for part in self._parts(reading):
            if not self._is_wanted(reading):
                break
            calls.restore_blocks(executor_id, self.epoch_of(executor_id), part)
            # Waiting calls come first.
            await asyncio.sleep(0)
        self._recovering.discard(reading)
        RECOVERING.set(len(self._recovering))
        if not self._is_wanted(reading):
            # Redis keeps its copy until the executor registers again.
            reading.is_spent = True
            reading.has_been_restored.set()
            log.info("an executor ended before its stored blocks were restored", executor=executor_id)
            return
        now = self._clocks.time(executor_id)
        restored = calls.end_recovery(
            executor_id, self.epoch_of(executor_id), [pin_with_remaining_time(pin, now) for pin in reading.pins]
        )
        self._restored(reading)
        log.info(
            "stored blocks are restored",
            executor=executor_id,
            stored=reading.num_blocks,
            device_blocks=restored.device_blocks,
            lower_blocks=restored.lower_blocks,
            seconds=round(monotonic() - begin, 3),
        )

    def _is_wanted(self, reading: Reading) -> bool:
        """Whether the registration for which a reading was begun still exists."""
        if self._readings.get(reading.executor_id) is not reading:
            return False
        return not reading.num_blocks or self._calls.is_recovering(reading.executor_id)

    def _parts(self, reading: Reading) -> Iterator[list[BlockRecord]]:
        """Yields the blocks of a complete reading, as `Reading.parts` does. Starts the executor's clock if needed."""
        executor_id = reading.executor_id
        if executor_id not in self._clocks:
            # Leases keep the remaining time that they had when the manager died.
            self._clocks.start(executor_id, reading.time)
        return reading.parts(lambda: self.epoch_of(executor_id), lambda: self._clocks.time(executor_id))

    def _is_here(self, executor_id: str) -> bool:
        """Whether an executor is registered or about to be."""
        reading = self._readings.get(executor_id)
        return self._source.knows_executor(executor_id) or (reading is not None and not reading.is_spent)

    def _restored(self, reading: Reading) -> None:
        """Notes that every readable block is in the index or rejected; from now on, changes are written."""
        executor_id = reading.executor_id
        del self._readings[executor_id]
        # Writing everything again also deletes blocks that cannot be read.
        if reading.is_stale or reading.num_unreadable or not reading.is_of(self.epoch_of(executor_id)):
            self._queue.replace(executor_id, self.epoch_of(executor_id))
        reading.has_been_restored.set()
        self._queue.note()

    async def compare(self, executor_ids: Iterable[str]) -> list[Difference] | None:
        """Differences between Redis and the manager, once Redis has all changes; None if Redis is down or too slow.

        Leaves out executors whose copy is not restored yet. Other writes wait until the end of the comparison.
        """
        return await self._run_bounded(self._compare(list(executor_ids)), COMPARE_SECONDS)

    async def _compare(self, executor_ids: list[str]) -> list[Difference] | None:
        async with self._one_at_a_time:
            if not await self._flush():
                return None
            try:
                found = await self._operators.compare([one for one in executor_ids if one not in self._readings])
                for executor_id in executor_ids:
                    if executor_id in self._readings:
                        # The whole index has yet to be written.
                        continue
                    # A block that changes meanwhile is pending when it is compared.
                    indexed = self._records(executor_id)
                    stored = self._redis.hscan_iter(self._keys.executor(executor_id, "blocks"), count=_READ)
                    is_pending = partial(self._queue.blocks.is_pending, executor_id)
                    found += await compare_blocks(executor_id, stored, indexed, is_pending)
            except UNAVAILABLE as error:
                self._set_up(False, error)
                return None
            return found

    async def close(self, *, write: bool = True) -> None:
        """Writes pending changes, if `write` and Redis is up, and closes the connection."""
        if write and not await self.flush_soon():
            log.warning("stopping with changes that Redis does not have", changes=self.pending)
        for task in list(self._tasks):
            task.cancel()
        await self._redis.aclose()

    def _set_up(self, up: bool, error: BaseException | None = None) -> bool:
        if up is not self._up:
            if up:
                log.info("redis is up")
            else:
                why = "" if error is None else reason(error)
                log.warning("redis is down; changes wait for it", error=why, changes=self.pending)
        self._up = up
        UP.set(up)
        return up


def _chunks(
    blocks: Iterable[tuple[Slot, BlockRecord | None]],
) -> Iterable[Chunk]:
    """Yields at least one chunk, perhaps empty, since an epoch is written even without blocks."""
    rest = iter(blocks)
    yield list(itertools.islice(rest, _CHUNK))
    while chunk := list(itertools.islice(rest, _CHUNK)):
        yield chunk


def _add(pipeline: Pipeline, key: str, chunk: Chunk) -> None:
    stored: dict[Any, Any] = {encode_slot(*slot): encode_block(block) for slot, block in chunk if block is not None}
    removed = [encode_slot(*slot) for slot, block in chunk if block is None]
    if stored:
        pipeline.hset(key, mapping=stored)
    if removed:
        pipeline.hdel(key, *removed)
