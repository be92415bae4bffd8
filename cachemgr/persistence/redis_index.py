"""The copy of the prefix index in Redis: written behind by one background task, read back after a restart.

Nothing here blocks or fails the cache manager. While Redis is away changes are coalesced up to a bound; beyond it
they are dropped and the whole index is written when Redis is back.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import structlog
from prometheus_client import Counter, Gauge, Histogram
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import TimeoutError as RedisTimeoutError

from cachemgr.blocks.block_record import BlockRecord, encode, encode_place
from cachemgr.operators.operator_journal import Kind
from cachemgr.persistence.absent_executors import Absences
from cachemgr.persistence.consistency import Difference, compare_blocks
from cachemgr.persistence.index_reading import Reading
from cachemgr.persistence.lease_clock import StoreClocks, at_rest, pin_awake
from cachemgr.persistence.loss_detection import OPERATORS, MarkedWrites, clock_key
from cachemgr.persistence.operator_state import OperatorSource, OperatorStore
from cachemgr.persistence.redis_client import UNAVAILABLE, executor_key, operators_key, reason
from cachemgr.persistence.write_queue import Changes, Current, Place, WriteBehind
from cachemgr.types import PinRecord, TierKind
from protos.kvcache.v1 import kvcache_pb2 as pb

UP = Gauge("kvkeep_redis_up", "Whether the last exchange with Redis succeeded.")
PENDING = Gauge("kvkeep_redis_pending_blocks", "Blocks whose change is not in Redis yet.")
FLUSH_SECONDS = Histogram("kvkeep_redis_flush_seconds", "Time of one flush to Redis.")
RESYNCS = Counter("kvkeep_redis_resyncs", "Times that an executor's whole index was written again.")

SCHEMA = b"2"
# How long others wait for Redis, at most: a start, and whoever needs what it holds or has written.
START_SECONDS = 1.0
WAIT_SECONDS = 3.0
# And who wants all of it compared.
COMPARE_SECONDS = 60.0
# At least so often the clocks are written.
BEAT_SECONDS = 1.0
# Redis may still carry out what it was sent before an answer did not come; by then it has.
_SETTLE_SECONDS = 1.0
# Blocks that are written, and read, at a time.
_CHUNK, _READ = 256, 1024

T = TypeVar("T")
# Places with what is there.
Chunk = list[tuple[Place, BlockRecord | None]]
log = structlog.get_logger()


class IndexStore:
    """The journal that the manager reports to, and the task that brings it to Redis.

    `snapshot` gives every indexed block of an executor; it is asked for a resync only. `now` is the manager's time.
    `knows` says whether an executor is registered. `operators` is what operators said, and `restore` takes what Redis
    remembers of it.
    """

    def __init__(
        self,
        redis: Redis,
        snapshot: Callable[[str], Iterable[BlockRecord]],
        *,
        interval: float = 0.05,
        max_pending: int = 200_000,
        flush_at: int = 2_000,
        now: Callable[[], float] = monotonic,
        knows: Callable[[str], bool] = lambda _: True,
        operators: Callable[[], OperatorSource] | None = None,
        restore: Callable[[pb.RememberedOperators], None] | None = None,
    ) -> None:
        self._redis = redis
        self._snapshot = snapshot
        self._clocks = StoreClocks(now)
        self._writes = MarkedWrites(redis, self._clocks, self._lost)
        self._absences = Absences(redis, self._clocks, lambda one: knows(one) or self._is_awaited(one))
        self._operators = OperatorStore(redis, self._clocks, self._writes, max_pending, operators, restore)
        self._interval = interval
        self._flush_at = flush_at
        self._queue = WriteBehind(max_pending)
        self._epochs: dict[str, int] = {}
        # Of executors whose copy is not taken back yet.
        self._readings: dict[str, Reading] = {}
        self._changed = asyncio.Event()
        self._large = asyncio.Event()
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
        """Blocks and operators' entries whose change is not in Redis yet."""
        return self._queue.pending + self._operators.pending

    def cleared(self, executor_id: str, epoch: int) -> None:
        """The executor starts an epoch with an empty index."""
        self._epochs[executor_id] = epoch
        self._absences.came(executor_id)
        self._queue.clear(executor_id, epoch)
        self._note()

    def stored(self, executor_id: str, group: int, tier: TierKind, slot: int, current: Current) -> None:
        """A block came to a place, or the one there changed; what it is then is asked for when it is written."""
        self._put(executor_id, (group, tier, slot), current)

    def removed(self, executor_id: str, group: int, tier: TierKind, slot: int) -> None:
        """The block at this place left it, or the index."""
        self._put(executor_id, (group, tier, slot), None)

    def operator_changed(self, kind: Kind, name: str, executor_id: str = "") -> None:
        """What an operator said is new, another, or gone. Written at once: it is seldom, and missed when it is lost."""
        self._operators.changed(kind, name, executor_id)
        self._changed.set()
        self._large.set()

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
                async with asyncio.timeout(BEAT_SECONDS):
                    await self._changed.wait()
            if self.up:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval):
                        await self._large.wait()
                pause = self._interval
            else:
                await asyncio.sleep(pause)
                pause = min(pause * 2, 2.0)
            await self.flush_soon(None)

    async def flush(self) -> bool:
        """Writes everything that is pending; False when Redis could not be reached, which loses nothing."""
        async with self._one_at_a_time:
            self._changed.clear()
            self._large.clear()
            with FLUSH_SECONDS.time():
                reached = await self._flush()
            PENDING.set(self.pending)
            if not reached:
                self._changed.set()
            return reached

    async def start(self) -> None:
        """Reads what operators said, if Redis can be asked in a short time; else `run` does it later."""
        await self.flush_soon(START_SECONDS)

    async def flush_soon(self, seconds: float | None = WAIT_SECONDS) -> bool:
        """As `flush`, but after this time it goes on alone and the answer is no."""
        return await self._soon(self.flush(), seconds) or False

    async def _soon(self, work: Coroutine[None, None, T], seconds: float | None) -> T | None:
        """What work leads to, None when that takes too long; it goes on then, also when the caller is cancelled.

        An exchange with Redis is never cancelled: its outcome would not be known. And Redis's client may forget that
        it was, as it uses wait_for, which does so in Python 3.11.
        """
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
        self._is_up(False, TimeoutError("Redis takes too long"))
        return None

    async def _flush(self) -> bool:
        try:
            await self._absences.begin()
            # Before anything that takes long to make: a Redis that takes no writes now says so here.
            came = await self._beat()
            if self._in_doubt:
                await asyncio.sleep(_SETTLE_SECONDS)
                came = await self._beat()
                self._in_doubt = False
            self._absences.noted(came)
            await self._operators.read()
            await self._operators.write(pins=False)
            while (taken := self._queue.take(self._readings)) is not None:
                try:
                    await self._write(*taken)
                except BaseException:
                    self._queue.give_back(*taken)
                    raise
            await self._operators.write(pins=True, unread=self._readings)
            await self._forget_absent()
        except UNAVAILABLE as error:
            self._in_doubt |= isinstance(error, TimeoutError | RedisTimeoutError)
            return self._is_up(False, error)
        return self._is_up(True)

    async def _beat(self) -> list[str]:
        """Writes what time it is, and who has come; tells who these are."""
        owners = list(dict.fromkeys((OPERATORS, *self._clocks)))
        came = self._absences.coming

        def fill(pipeline: Pipeline) -> None:
            pipeline.set(operators_key("schema"), SCHEMA)
            self._absences.note(pipeline, came)

        await self._writes.write(owners, fill)
        return came

    async def _forget_absent(self) -> None:
        """Deletes what nobody will take back. Who registers meanwhile reads all of it or finds out at its first write.

        That one's clock is deleted with the rest, and so is not what was read.
        """
        for executor_id in await self._absences.look():
            if self._absences.is_here(executor_id):
                continue
            self._epochs.pop(executor_id, None)
            self._readings.pop(executor_id, None)
            self._queue.drop(executor_id)
            self._clocks.forget(executor_id)
            self._writes.forget(executor_id)
            kept = ("blocks", Kind.PIN.value, "epoch", "clock")
            await self._redis.delete(*(executor_key(executor_id, what) for what in kept))
            await self._absences.forget(executor_id)
            log.info("forgot an executor that has not come back", executor=executor_id)

    def _lost(self, owner: str) -> None:
        log.warning("redis has lost what it had; writing all of it again", executor=owner)
        if owner == OPERATORS:
            self._operators.rewrite_shared()
            for executor_id in self._epochs:
                self._absences.came(executor_id)
        elif owner in self._epochs:
            self.replace(owner, self._epochs[owner])

    async def _write(self, executor_id: str, changes: Changes) -> None:
        # Asked for chunk by chunk: whatever changes meanwhile is noted again, and wins.
        blocks: Iterable[tuple[Place, BlockRecord | None]] = (
            (place, self._current(executor_id, current)) for place, current in changes.blocks.items()
        )
        if changes.resync:
            RESYNCS.inc()
            now = self._clocks.time(executor_id)
            # Read chunk by chunk, too: whatever changes behind the reader is noted again.
            blocks = ((block.place, at_rest(block, now)) for block in self._snapshot(executor_id))
            log.info("writing the whole index again", executor=executor_id)
        key = executor_key(executor_id, "blocks")
        for number, chunk in enumerate(_chunks(blocks)):
            # In an order in which each part of it may be the last that arrives.
            def fill(pipeline: Pipeline, first: bool = number == 0, chunk: Chunk = chunk) -> None:
                if first and changes.cleared:
                    pipeline.delete(key)
                    if changes.resync:
                        pipeline.delete(executor_key(executor_id, Kind.PIN.value))
                    pipeline.set(executor_key(executor_id, "epoch"), changes.epoch)
                _add(pipeline, key, chunk)

            await self._writes.write([executor_id], fill)

    def _current(self, executor_id: str, current: Current | None) -> BlockRecord | None:
        block = None if current is None else current()
        return None if block is None else at_rest(block, self._clocks.time(executor_id))

    async def recall(self, executor_id: str, seconds: float = WAIT_SECONDS) -> Reading:
        """Begins to read what Redis remembers of an executor, and waits for it for this time at most.

        The reading goes on for as long as it takes, also when Redis is away. Until `taken_back` nothing of the executor
        is written: nothing is deleted unread. What was read for a registration that is over is read again.
        """
        reading = self._readings.get(executor_id)
        if reading is None or reading.is_spent:
            was_stale = reading is not None and reading.is_stale
            if executor_id in self._epochs:
                # What this process has not written yet of an earlier registration.
                await self.flush_soon(seconds)
            is_stale = self._queue.drop(executor_id) or was_stale
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
        """Tries for ever: each page has its own deadline, the whole has none."""
        count, pause = _READ, self._interval
        while True:
            reading.clear()
            try:
                await self._read_all(reading, count)
            except UNAVAILABLE as error:
                self._is_up(False, error)
            else:
                reading.is_complete.set()
                return
            await asyncio.sleep(pause)
            # Smaller pages come through where large ones take longer than an answer may.
            pause, count = min(pause * 2, 1.0), max(16, count // 2)

    async def _read_all(self, reading: Reading, count: int) -> None:
        executor_id = reading.executor_id
        clock = await self._redis.get(clock_key(executor_id))
        epoch = await self._redis.get(executor_key(executor_id, "epoch"))
        if epoch is not None:
            async for place, value in self._redis.hscan_iter(executor_key(executor_id, "blocks"), count=count):
                reading.add(place, value)
            reading.pins = await self._operators.stored_pins(executor_id)
            reading.epoch = int(epoch) if epoch.isdigit() else 0
        reading.time = _number(clock)
        self._writes.found(executor_id, clock if isinstance(clock, bytes) else None)

    def registered(self, executor_id: str, epoch: int) -> None:
        """The manager has accepted an epoch; its changes are written once its remembered blocks are taken back."""
        self._epochs[executor_id] = epoch
        self._absences.came(executor_id)
        reading = self._readings.get(executor_id)
        if reading is not None and reading.is_spent:
            # Another registration took the first parts.
            reading.is_stale = True

    def epoch_of(self, executor_id: str) -> int:
        """The epoch that was accepted last, 0 for none."""
        return self._epochs.get(executor_id, 0)

    def parts(self, reading: Reading) -> Iterator[list[BlockRecord]]:
        """The blocks of a complete reading, as `Reading.parts` tells them; the executor's clock goes on."""
        executor_id = reading.executor_id
        if executor_id not in self._clocks:
            # What remained of leases when the manager died remains of them now.
            self._clocks.start(executor_id, reading.time)
        return reading.parts(lambda: self.epoch_of(executor_id), lambda: self._clocks.time(executor_id))

    def pins(self, reading: Reading) -> list[PinRecord]:
        """The pins of a complete reading, with the time that remains of them."""
        now = self._clocks.time(reading.executor_id)
        return [pin_awake(pin, now) for pin in reading.pins]

    def is_current(self, reading: Reading) -> bool:
        """Whether a reading was not begun again for another registration."""
        return self._readings.get(reading.executor_id) is reading

    def _is_awaited(self, executor_id: str) -> bool:
        reading = self._readings.get(executor_id)
        return reading is not None and not reading.is_spent

    def leave(self, reading: Reading) -> None:
        """The executor is gone before all was taken: Redis keeps what it has for when that comes back."""
        reading.is_spent = True
        reading.has_been_taken.set()

    def taken_back(self, reading: Reading) -> None:
        """All that was read is in the index, or cannot be: changes are written from now on."""
        executor_id = reading.executor_id
        del self._readings[executor_id]
        if reading.is_stale or not reading.is_of(self.epoch_of(executor_id)):
            self.replace(executor_id, self.epoch_of(executor_id))
        reading.has_been_taken.set()
        self._note()

    async def compare(self, executor_ids: Iterable[str]) -> list[Difference] | None:
        """Where Redis disagrees with the manager, once it has all changes; None when that takes too long.

        Other writes wait meanwhile.
        """
        return await self._soon(self._compare(list(executor_ids)), COMPARE_SECONDS)

    async def _compare(self, executor_ids: list[str]) -> list[Difference] | None:
        async with self._one_at_a_time:
            if not await self._flush():
                return None
            try:
                found = await self._operators.compare([one for one in executor_ids if one not in self._readings])
                for executor_id in executor_ids:
                    if executor_id in self._readings:
                        # All of it is still to be written.
                        continue
                    now = self._clocks.time(executor_id)
                    # What changes meanwhile is pending when it is compared.
                    indexed = (at_rest(block, now) for block in self._snapshot(executor_id))
                    stored = self._redis.hscan_iter(executor_key(executor_id, "blocks"), count=_READ)
                    is_pending = partial(self._queue.is_pending, executor_id)
                    found += await compare_blocks(executor_id, stored, indexed, is_pending)
            except UNAVAILABLE as error:
                self._is_up(False, error)
                return None
            return found

    def replace(self, executor_id: str, epoch: int) -> None:
        """Whatever Redis holds of an executor gives way to the snapshot, soon."""
        self._epochs[executor_id] = epoch
        self._queue.resync(executor_id, epoch)
        self._operators.rewrite(Kind.PIN, executor_id)
        self._note()

    async def close(self, *, write: bool = True) -> None:
        """Writes what is pending, if that is wanted and Redis is there, and closes the connection."""
        if write and not await self.flush_soon():
            log.warning("stopping with changes that Redis does not have", changes=self.pending)
        for task in list(self._tasks):
            task.cancel()
        await self._redis.aclose()

    def _is_up(self, up: bool, error: BaseException | None = None) -> bool:
        if up is not self._up:
            if up:
                log.info("redis is up")
            else:
                why = "" if error is None else reason(error)
                log.warning("redis is down; changes wait for it", error=why, changes=self.pending)
        self._up = up
        UP.set(up)
        return up


def _number(value: bytes | str | None) -> float:
    """What a key holds; 0 when it is not there, or nothing that a manager wrote."""
    try:
        return float(value or 0)
    except ValueError:
        return 0.0


def _chunks(
    blocks: Iterable[tuple[Place, BlockRecord | None]],
) -> Iterable[Chunk]:
    """At least one chunk, which may be empty: an epoch is written also without blocks."""
    rest = iter(blocks)
    yield list(itertools.islice(rest, _CHUNK))
    while chunk := list(itertools.islice(rest, _CHUNK)):
        yield chunk


def _add(pipeline: Pipeline, key: str, chunk: Chunk) -> None:
    stored: dict[Any, Any] = {encode_place(*place): encode(block) for place, block in chunk if block is not None}
    removed = [encode_place(*place) for place, block in chunk if block is None]
    if stored:
        pipeline.hset(key, mapping=stored)
    if removed:
        pipeline.hdel(key, *removed)
