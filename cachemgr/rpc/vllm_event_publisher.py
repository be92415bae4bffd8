"""Publishes the contents of each executor's cache over ZeroMQ, in vLLM's format, for routers that follow engines.

Every executor has a PUB socket for its batches and a ROUTER socket for replays. A reader that has missed batches asks
for a replay by number; if these batches are no longer kept, it gets the whole cache instead. Numbers grow over
restarts, so that a reader notices each restart. Slow readers miss batches, and so never slow or grow the cache manager.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import structlog
import zmq
import zmq.asyncio
from prometheus_client import Counter

from cachemgr.blocks.events import Event
from cachemgr.errors import EventsGoneError
from cachemgr.queries import Queries
from cachemgr.rpc.event_feed import EventFeed, ShuttingDownError
from cachemgr.rpc.vllm_event_messages import Batch
from cachemgr.slices import sliced
from cachemgr.types import EventKind, ExecutorSpec, TierKind
from protos.rpc import addresses

# How many events one slice looks at.
_MAX_EVENTS = 512
# Limits of a batch, whichever is reached first; only a batch with a single block may exceed the bytes.
_MAX_BLOCKS, _MAX_BYTES = 512, 1 << 16
# Approximate sizes in bytes: a block's hash and extra keys, and a token.
_BLOCK_BYTES, _TOKEN_BYTES = 32, 5
# The limit on batches that wait for a slow reader; further batches are dropped for that reader.
WAITING_BATCHES = 256
# Bytes of batches that are kept per executor for replays, and the overhead of a batch besides its message.
KEPT_BYTES, _KEPT_BATCH_BYTES = 16 << 20, 128
# If there are no events for this time, an empty batch tells new readers, and readers that missed a batch, the number.
BEAT_SECONDS = 1.0
# The time after which a replay ends if its reader takes nothing, and the time between attempts to send.
_PATIENCE_SECONDS, _RETRY_SECONDS = 10.0, 0.02
# The limit on replays that an executor's readers may request at once. If other readers wait, a reader must take
# something within the first of these times, and the whole replay within the second.
_MOST_REPLAYS, _SHORT_PATIENCE_SECONDS, _SHARED_SECONDS = 32, 0.5, 30.0
# The time limit for the last messages at the end.
_LINGER_MILLISECONDS = 100
# Marks the end of a replay, in place of a number.
_END = (-1).to_bytes(8, "big", signed=True)

BATCHES = Counter("kvkeep_zmq_batches", "Batches of events published to routers.", ["executor"])
REPLAYS = Counter("kvkeep_zmq_replays", "Replays for routers, of kept batches or of the whole cache.", ["source"])
REFUSED = Counter(
    "kvkeep_zmq_refused_requests", "Requests for replays that were malformed, or whose replay failed.", ["cause"]
)

log = structlog.get_logger()


@dataclass(frozen=True)
class ZmqSettings:
    """The base addresses. An executor whose name ends in a number adds it to the ports.

    Without an address for replays, there are none. In `topic`, {executor_id} and {model} are the executor's.
    """

    events: str
    replays: str = ""
    topic: str = ""
    token_ids: bool = False


class Stream:
    """The batches of one address: the executor and its published blocks, and the newest batches for replays."""

    def __init__(
        self, publisher: zmq.Socket[bytes], replays: zmq.asyncio.Socket | None, next_number: int, *, token_ids: bool
    ) -> None:
        self.replays = replays
        # By reader: the first numbers of requested replays that are not finished; a reader's replays run one by one.
        self.asked: dict[bytes, deque[int]] = {}
        self.executor_id = self.pool_id = ""
        self.is_lost = True
        # The number of the newest batch.
        self.last = next_number - 1
        # The tiers of published blocks by key, in the order in which blocks entered their tier. The ancestors of a
        # device block are on the device, and so come before it.
        self.known: dict[bytes, TierKind] = {}
        self.batch_blocks = _MAX_BLOCKS
        self._publisher = publisher
        self._token_ids = token_ids
        self._topic = b""
        self._block_size = 0
        self._batch = self.new_batch()
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._published = 0.0

    def new_batch(self) -> Batch:
        return Batch(self._block_size, token_ids=self._token_ids)

    def begin(self, executor: ExecutorSpec, pool_id: str, topic: str) -> None:
        """Begins to publish the blocks of this pool, which may have blocks of its executor's last epoch."""
        # Waiting events are about the previous executor, for the readers of its topic.
        self.flush()
        self.executor_id, self.pool_id, self.is_lost = executor.executor_id, pool_id, False
        self._topic = topic.replace("{executor_id}", executor.executor_id).replace("{model}", executor.model).encode()
        self._block_size = executor.block_size
        size = _BLOCK_BYTES + (_TOKEN_BYTES * executor.block_size if self._token_ids else 0)
        self.batch_blocks = max(1, min(_MAX_BLOCKS, _MAX_BYTES // size))
        self._batch = self.new_batch()

    def end(self) -> None:
        """Ends the publishing of a lost executor."""
        self.is_lost = True
        self.clear()

    def clear(self) -> None:
        """Replaces the next batch by a batch which says that all blocks are gone."""
        self.known.clear()
        self._batch = self.new_batch()
        self._batch.clear()

    def note(self, event: Event) -> None:
        """Adds the change of an event to the next batch, which is published when it is full."""
        block, batch = event.block, self._batch
        before = self.known.get(block.key)
        if event.kind is EventKind.REMOVED:
            if before is None:
                return
            del self.known[block.key]
            batch.remove(block.key, before)
        elif event.kind in (EventKind.STORED, EventKind.UPDATED) and block.tier is not before:
            if before is not None:
                del self.known[block.key]
                batch.remove(block.key, before)
            # Readers only know full blocks. A block that was forgotten since then has no tokens.
            if block.num_tokens == self._block_size:
                self.known[block.key] = block.tier
                batch.store(block)
        if batch.num_blocks >= self.batch_blocks:
            self.publish()

    def flush(self) -> None:
        """Publishes waiting events, if any."""
        if self._batch:
            self.publish()

    def beat(self) -> None:
        """Publishes a batch without events if there was none for a while."""
        if time.monotonic() >= self._published + BEAT_SECONDS:
            self.publish()

    def publish(self) -> None:
        """Publishes a batch, with events or without."""
        self._published = time.monotonic()
        message = self._batch.encoded()
        self._batch = self.new_batch()
        self.last += 1
        # A reader with too many waiting batches misses this batch.
        self._publisher.send_multipart((self._topic, self.last.to_bytes(8, "big"), message), zmq.DONTWAIT)
        BATCHES.labels(self.executor_id).inc()
        self._kept.append(message)
        self._kept_bytes += len(message) + _KEPT_BATCH_BYTES
        while self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()) + _KEPT_BATCH_BYTES

    def kept_from(self, number: int) -> list[tuple[int, bytes]] | None:
        """The batches from a number on; None if the first of them is no longer kept."""
        first = self.last + 1 - len(self._kept)
        if number < first:
            return None
        if number > self.last:
            return []
        return list(enumerate(islice(self._kept, number - first, None), start=number))

    def close(self) -> None:
        """Closes the sockets, but ends replays first, since readers may wait for their end for ever."""
        self._publisher.close(linger=0)
        if self.replays is None:
            return
        socket: zmq.Socket[bytes] = zmq.Socket.shadow(self.replays)
        readers = [reader for reader, numbers in self.asked.items() for _ in numbers]
        with contextlib.suppress(zmq.Again):
            # Limited, since requests may keep coming for ever.
            while len(readers) < WAITING_BATCHES:
                readers.append(socket.recv_multipart(zmq.DONTWAIT)[0])
        for reader in readers:
            # Fails if too many batches already wait for a slow reader.
            with contextlib.suppress(zmq.ZMQError):
                socket.send_multipart((reader, b"", _END, b""), zmq.DONTWAIT)
        self.replays.close(linger=_LINGER_MILLISECONDS)

    def forget(self) -> None:
        """Drops the kept batches, which may have tokens of forgotten blocks."""
        self._kept.clear()
        self._kept_bytes = 0


class ZmqEvents:
    """Follows a manager's events; publishes the events of each executor's first layer group with full attention."""

    def __init__(self, queries: Queries, feed: EventFeed, settings: ZmqSettings, first_number: int) -> None:
        """`first_number` is the number of each executor's first batch, and is larger at every start."""
        self._queries = queries
        self._feed = feed
        self._settings = settings
        self._first_number = first_number
        self._scrubs = queries.scrubs
        # Streams by the number that executors add to the ports, and by the pool that they publish.
        self._streams: dict[int, Stream] = {}
        self._by_pool: dict[str, Stream] = {}
        self._context = zmq.asyncio.Context()
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Publishes until it is cancelled; after the end of the feed, there is nothing new."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await self._follow()
        finally:
            for stream in self._streams.values():
                stream.close()
            self._context.term()

    async def _follow(self) -> None:
        number = 0
        with contextlib.suppress(ShuttingDownError):
            while True:
                try:
                    number = await self._publish_after(number)
                except EventsGoneError:
                    number = await self._begin_again(number)
                for stream in self._streams.values():
                    stream.beat()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_SECONDS):
                        await self._feed.wait_for_events(number)
        await asyncio.Event().wait()

    async def _publish_after(self, number: int) -> int:
        """Publishes all events after a number; returns the number of the last event. Raises EventsGoneError."""
        while happened := self._queries.events_after(number, _MAX_EVENTS):
            self._publish(happened)
            number = happened[-1].number
            await asyncio.sleep(0)
        if self._scrubs != self._queries.scrubs:
            self._scrubs = self._queries.scrubs
            for stream in self._streams.values():
                stream.forget()
        return number

    async def _begin_again(self, number: int) -> int:
        """Publishes the whole cache in place of events after a number that are gone.

        Returns the number of the last event that it includes, or the given number if more events are gone meanwhile.
        """
        with contextlib.closing(self._queries.snapshot()) as snapshot:
            try:
                async for _ in sliced(snapshot.slots()):
                    snapshot.catch_up()
            except EventsGoneError:
                return number
        for stream in self._streams.values():
            if not self._queries.knows_executor(stream.executor_id):
                stream.end()
        async for events in sliced(snapshot.events()):
            self._publish(event for event in events if event is not None)
        return snapshot.number

    def _publish(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.executor is not None:
                self._executor_changed(event.kind, event.executor)
            elif (stream := self._by_pool.get(event.block.pool_id)) is not None:
                if event.kind is EventKind.CREATED:
                    stream.clear()
                else:
                    stream.note(event)
        for stream in self._streams.values():
            stream.flush()

    def _executor_changed(self, kind: EventKind, executor: ExecutorSpec) -> None:
        if kind is EventKind.EXECUTOR_LOST:
            for pool_id in executor.pool_ids:
                if (stream := self._by_pool.pop(pool_id, None)) is not None:
                    stream.end()
            return
        pools = zip(executor.pool_ids, executor.pools, strict=True)
        pool_id = next((pool_id for pool_id, pool in pools if pool.attention_window is None), "")
        stream = self._stream_of(executor.executor_id) if pool_id else None
        if stream is not None:
            self._by_pool.pop(stream.pool_id, None)
            self._by_pool[pool_id] = stream
            stream.begin(executor, pool_id, self._settings.topic)

    def _stream_of(self, executor_id: str) -> Stream | None:
        """The stream for an executor; None, with an error in the log, if it can have none."""
        number = addresses.number_of(executor_id)
        stream = self._streams.get(number)
        if stream is None:
            return self._open(executor_id, number)
        if stream.is_lost or stream.executor_id == executor_id:
            return stream
        log.error(
            "the blocks of an executor are not published: another executor's name ends with the same number",
            executor=executor_id,
            other=stream.executor_id,
        )
        return None

    def _open(self, executor_id: str, number: int) -> Stream | None:
        """Opens the sockets for executors with a number; None, with an error in the log, if that fails."""
        publisher = zmq.Socket(self._context, zmq.PUB)
        publisher.sndhwm = WAITING_BATCHES
        replays = self._context.socket(zmq.ROUTER) if self._settings.replays else None
        try:
            bound = [_bind(publisher, self._settings.events, number)]
            if replays is not None:
                # Sending fails instead of dropping a part of a replay.
                replays.router_mandatory = True
                replays.sndhwm = replays.rcvhwm = WAITING_BATCHES
                bound.append(_bind(replays, self._settings.replays, number))
        except (zmq.ZMQError, ValueError) as error:
            log.error("the blocks of an executor are not published", executor=executor_id, error=str(error))
            publisher.close(linger=0)
            if replays is not None:
                replays.close(linger=0)
            return None
        log.info("publishing events", executor=executor_id, addresses=bound)
        stream = Stream(publisher, replays, self._first_number, token_ids=self._settings.token_ids)
        self._streams[number] = stream
        if replays is not None:
            assert self._tasks is not None
            self._tasks.create_task(self._answer_replays(stream, replays))
        return stream

    async def _answer_replays(self, stream: Stream, socket: zmq.asyncio.Socket) -> None:
        """Takes the requests of an executor's readers, as long as fewer than `_MOST_REPLAYS` replays are open."""
        assert self._tasks is not None
        places = asyncio.Semaphore(_MOST_REPLAYS)
        while True:
            await places.acquire()
            reader, number = await _request(socket)
            if reader in stream.asked:
                stream.asked[reader].append(number)
            else:
                stream.asked[reader] = deque([number])
                self._tasks.create_task(self._answer(stream, socket, reader, places))

    async def _answer(
        self, stream: Stream, socket: zmq.asyncio.Socket, reader: bytes, places: asyncio.Semaphore
    ) -> None:
        """Sends the replays that one reader asks for, in order of its requests."""
        numbers = stream.asked[reader]
        while numbers:
            has_ended = False
            try:
                has_ended = await self._replay(stream, socket, reader, places)
            except Exception:  # A reader's request must not stop other readers or the manager.
                REFUSED.labels("failed").inc()
                log.exception("a replay failed", executor=stream.executor_id)
            if not has_ended:
                numbers.popleft()
            places.release()
        del stream.asked[reader]

    async def _replay(
        self, stream: Stream, socket: zmq.asyncio.Socket, reader: bytes, places: asyncio.Semaphore
    ) -> bool:
        """Sends a whole replay, or returns False; removes its request at the moment when its end is sent."""
        numbers, until = stream.asked[reader], time.monotonic() + _SHARED_SECONDS
        kept = stream.kept_from(numbers[0])
        REPLAYS.labels("everything" if kept is None else "kept").inc()
        async for number, message in self._everything(stream) if kept is None else _each(kept):
            if not await _send(socket, (reader, b"", number.to_bytes(8, "big"), message), places, until):
                return False
        return await _send(socket, (reader, b"", _END, b""), places, until, numbers.popleft)

    async def _everything(self, stream: Stream) -> AsyncIterator[tuple[int, bytes]]:
        """Yields the published blocks in as many batches as needed; the last has the number of the newest batch.

        A block that changes meanwhile is sent as of its turn, or left out; its change is in a later batch.
        """
        keys, pool_id, size = list(stream.known), stream.pool_id, stream.batch_blocks
        begins = range(0, len(keys), size)
        number = stream.last - len(begins)
        batch = stream.new_batch()
        batch.clear()
        yield number, batch.encoded()
        for begin in begins:
            batch = stream.new_batch()
            for block in self._queries.cached_views(pool_id, keys[begin : begin + size]):
                batch.store(block)
            number += 1
            yield number, batch.encoded()


async def _each(kept: list[tuple[int, bytes]]) -> AsyncIterator[tuple[int, bytes]]:
    for one in kept:
        yield one


async def _request(socket: zmq.asyncio.Socket) -> tuple[bytes, int]:
    """The next request for a replay: who asks, and from which number on. Other messages are only counted."""
    while True:
        # Polls first: a request that is received at the end of the process would be lost.
        await socket.poll()
        try:
            reader, *frames = await socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            continue
        if len(frames) == 2 and not frames[0] and len(frames[1]) == len(_END):
            return reader, int.from_bytes(frames[1], "big")
        REFUSED.labels("malformed").inc()


async def _send(
    socket: zmq.asyncio.Socket,
    frames: tuple[bytes, ...],
    places: asyncio.Semaphore,
    until: float,
    sent: Callable[[], object] = lambda: None,
) -> bool:
    """Sends one message of a replay; False if its reader is gone, takes nothing, or has taken too long.

    sent: called before anything else can happen. places: locked if other readers wait. until: the time limit then.
    """
    begun = now = time.monotonic()
    while now < (min(begun + _SHORT_PATIENCE_SECONDS, until) if places.locked() else begun + _PATIENCE_SECONDS):
        try:
            await socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            await asyncio.sleep(_RETRY_SECONDS)
            now = time.monotonic()
        except zmq.ZMQError:
            return False
        else:
            sent()
            # Other calls are served between two messages.
            await asyncio.sleep(0)
            return True
    return False


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, address: str, number: int) -> str:
    """Binds to the address with `number` added to its port; returns the address. Raises ZMQError, ValueError."""
    host, port = addresses.split_host_port(addresses.moved(address, number))
    host = "127.0.0.1" if host == "localhost" else host
    socket.tcp_keepalive = 1
    # Subscriptions and requests for replays are short.
    socket.maxmsgsize = 1024
    if ":" in host:
        socket.ipv6 = True
        host = f"[{host}]"
    socket.bind(f"tcp://{host}:{port}")
    return f"{host}:{port}"
