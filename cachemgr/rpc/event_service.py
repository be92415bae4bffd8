"""The gRPC service of events: a snapshot, then every event, many per message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, NamedTuple

from cachemgr.blocks.block_pool import BlockPool
from cachemgr.blocks.events import Event
from cachemgr.errors import EventsGoneError
from cachemgr.manager import CacheManager
from cachemgr.rpc import convert, key_events, tenancy
from cachemgr.rpc.mutations import ServiceContext
from cachemgr.slices import sliced
from cachemgr.types import EventKind, ExecutorSpec, Scope
from cachemgr.validation import check_id
from protos.errors import InvalidField
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc.identity import current

# gRPC passes every method its context, which is not needed here.
# ruff: noqa: N802, ARG002

# Limits of a message, whichever is reached first. gRPC's clients accept 4 MiB.
MAX_EVENTS, MAX_BYTES = 512, 1 << 20
# The limit on events, or slots of a snapshot, per message of keys: two milliseconds of work.
MAX_KEYS = 4096
# The minimum time between messages for watchers of keys. All get messages at the same moments, so messages are shared.
KEYS_SECONDS = 0.02
# How many batches are kept; a watcher that needs an older batch makes the batch again.
_KEPT = 16


class Wanted(NamedTuple):
    """The events that a watcher gets. Equal watchers get equal messages."""

    pool_id: str
    salt: str | None
    token_ids: bool
    tenant: str
    keys_only: bool = False

    @classmethod
    def of(cls, request: pb.WatchEventsRequest) -> Wanted:
        """The events that the current caller asks for and may see."""
        identity = current()
        salt = request.salt if request.HasField("salt") else None
        tenant = "" if identity is None else identity.tenant
        return cls(request.pool_id, salt, request.include_token_ids, tenant, request.keys_only)

    @property
    def is_all(self) -> bool:
        """Whether no event is left out."""
        return not self.pool_id and self.salt is None and not self.tenant

    def includes(self, event: Event) -> bool:
        if event.executor is not None:
            return self.is_about(event.executor)
        block = event.block
        if self.pool_id and block.pool_id != self.pool_id:
            return False
        return event.kind is EventKind.CREATED or self.shows(block.scope)

    def is_about(self, executor: ExecutorSpec) -> bool:
        """Whether the watcher follows a pool of this executor."""
        return not self.pool_id or self.pool_id in executor.pool_ids

    def shows(self, scope: Scope | None) -> bool:
        """Whether blocks of a cache scope are shown."""
        if not tenancy.sees(scope):
            return False
        return self.salt is None or (scope is not None and scope.salt == self.salt)


def pack(
    wanted: Wanted, events: Iterable[Event], *, manager_epoch: int, snapshot: bool
) -> Iterator[pb.WatchEventsResponse]:
    """Packs the wanted events into as few messages as the limits allow; none if no event is wanted."""
    # The sequence that needed the slot may have a different salt.
    hidden = wanted.salt is not None or bool(wanted.tenant)
    found: list[pb.Event] = []
    size = 0
    for event in events:
        if not wanted.includes(event):
            continue
        shown = event._replace(for_sequence_id="") if hidden else event
        message = convert.event(shown, snapshot=snapshot, token_ids=wanted.token_ids)
        size += message.ByteSize()
        if found and (len(found) == MAX_EVENTS or size > MAX_BYTES):
            yield pb.WatchEventsResponse(events=found, manager_epoch=manager_epoch)
            found, size = [], message.ByteSize()
        found.append(message)
    if found:
        yield pb.WatchEventsResponse(events=found, manager_epoch=manager_epoch)


def pack_keys(wanted: Wanted, events: Iterable[Event]) -> list[pb.CacheChange]:
    """Returns the net changes of the wanted events."""
    return key_events.changes(events, None if wanted.is_all else wanted.includes)


class Batches:
    """The newest messages, shared by watchers that reach the same events."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self._kept: dict[tuple[Wanted, int, int], list[pb.WatchEventsResponse]] = {}

    def after(self, wanted: Wanted, number: int, end: int) -> tuple[Iterable[pb.WatchEventsResponse], int]:
        """The messages of the next events after `number` up to `end`, and the number of the last event in the messages.

        Raises EventsGoneError.
        """
        last = min(end, number + (MAX_KEYS if wanted.keys_only else MAX_EVENTS))
        key = (wanted, number, last)
        kept = self._kept.get(key)
        if kept is not None:
            return kept, last
        events = self._manager.queries.events_after(number, last - number)
        epoch = self._manager.epoch
        if wanted.keys_only:
            # Sent even without a change, so that a watcher that continues after its number loses nothing.
            changes = pack_keys(wanted, events)
            found = [pb.WatchEventsResponse(manager_epoch=epoch, changes=changes, last_event_number=last)]
        elif wanted.token_ids:
            # Not kept, since forgotten prompts must be gone from memory.
            return pack(wanted, events, manager_epoch=epoch, snapshot=False), last
        else:
            found = list(pack(wanted, events, manager_epoch=epoch, snapshot=False))
        self._kept[key] = found
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return found, last


class CacheEventService(pb_grpc.CacheEventServiceServicer):
    def __init__(self, context: ServiceContext, *, keys_seconds: float = KEYS_SECONDS) -> None:
        """keys_seconds: the minimum time between two messages for a watcher of keys."""
        self._manager = context.manager
        self._feed = context.feed
        self._batches = Batches(context.manager)
        self._keys_seconds = keys_seconds

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.WatchEventsResponse]:
        """Streams a snapshot, unless told where to continue, then every event. Slow consumers get OUT_OF_RANGE."""
        self._check(request)
        wanted, queries = Wanted.of(request), self._manager.queries
        if request.HasField("after_event_number"):
            number = request.after_event_number
        elif wanted.keys_only:
            async for message in self._key_snapshot(wanted):
                yield message
                number = message.last_event_number
        else:
            with contextlib.closing(queries.snapshot()) as snapshot:
                async for _ in sliced(snapshot.slots()):
                    snapshot.catch_up()
            number = snapshot.number
            async for events in sliced(snapshot.events()):
                shown = (event for event in events if event is not None)
                for message in pack(wanted, shown, manager_epoch=self._manager.epoch, snapshot=True):
                    yield message
        while True:
            end = queries.last_event
            while number != end:
                messages, number = self._batches.after(wanted, number, end)
                for message in messages:
                    yield message
                # A filter may leave nothing to send, even of many events.
                await asyncio.sleep(0)
            await self._feed.wait_for_events(number)
            if wanted.keys_only:
                await self._turn()

    def _check(self, request: pb.WatchEventsRequest) -> None:
        if request.HasField("salt"):
            check_id("salt", request.salt)
        if request.pool_id:
            self._manager.queries.pool(request.pool_id)
        if request.keys_only and request.include_token_ids:
            raise InvalidField("include_token_ids", "must not be set together with keys_only")
        if request.manager_epoch not in (0, self._manager.epoch):
            raise EventsGoneError(
                "the cache manager has started again: its events have other numbers",
                fields={"manager_epoch": f"is not {self._manager.epoch}"},
            )

    async def _turn(self) -> None:
        """Waits for the moment at which all watchers of keys get the changes since the last such moment."""
        if self._keys_seconds:
            await asyncio.sleep(self._keys_seconds - asyncio.get_running_loop().time() % self._keys_seconds)

    async def _key_snapshot(self, wanted: Wanted) -> AsyncIterator[pb.WatchEventsResponse]:
        """Yields the cache in parts, each with the changes up to then; all parts make up the cache at the last event.

        Every change of a block while the parts are read is an event, and overrides what was read earlier.
        """
        queries, epoch = self._manager.queries, self._manager.epoch
        number = queries.last_event
        executors = [spec for spec in queries.executors() if wanted.is_about(spec)]
        changes = [pb.CacheChange(registered=convert.executor(spec)) for spec in executors]
        for pool in queries.block_pools(wanted.pool_id):
            for part in self._keys_in_parts(wanted, pool):
                changes += part
                while number < (end := queries.last_event):
                    events = queries.events_after(number, min(MAX_KEYS, end - number))
                    changes += pack_keys(wanted, events)
                    number = events[-1].number
                yield pb.WatchEventsResponse(
                    manager_epoch=epoch, changes=changes, last_event_number=number, snapshot=True
                )
                changes = []
                await asyncio.sleep(0)
        yield pb.WatchEventsResponse(
            manager_epoch=epoch, changes=changes, last_event_number=number, snapshot=True, snapshot_end=True
        )

    def _keys_in_parts(self, wanted: Wanted, pool: BlockPool) -> Iterator[list[pb.CacheChange]]:
        """Yields the indexed blocks of a pool, which may change between two parts."""
        is_meant = None if wanted.is_all else lambda block: wanted.shows(block.scope)
        blocks, after = pool.blocks, 0
        while after < len(blocks):
            found = self._manager.queries.indexed_keys(pool, after, MAX_KEYS, is_meant)
            yield key_events.of_keys(pool.pool_id, found.items())
            after += MAX_KEYS
            if pool.blocks is not blocks:
                # The executor has restarted, so blocks that stay may have new indexes.
                blocks, after = pool.blocks, 0
