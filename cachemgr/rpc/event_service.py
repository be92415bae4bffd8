"""The events' gRPC service: a snapshot, then every event, many in each message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, NamedTuple

from cachemgr.blocks.events import Event
from cachemgr.rpc import convert, tenancy
from cachemgr.rpc.mutations import ServiceContext
from cachemgr.steps import sliced
from cachemgr.types import EventKind
from cachemgr.validation import check_id
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc.identity import current

# gRPC hands every method its context, of which nothing is needed here.
# ruff: noqa: N802, ARG002

# Bounds of a message, whichever is met first. gRPC's clients take 4 MiB.
MAX_EVENTS, MAX_BYTES = 512, 1 << 20
# Watchers are at most so many batches apart, or each makes its own.
_KEPT = 16


class Wanted(NamedTuple):
    """The events that a watcher gets. Equal watchers get equal messages."""

    pool_id: str
    salt: str | None
    token_ids: bool
    tenant: str

    @classmethod
    def of(cls, request: pb.WatchEventsRequest) -> Wanted:
        """Those that the caller being served asks for, and may see."""
        identity = current()
        salt = request.salt if request.HasField("salt") else None
        return cls(request.pool_id, salt, request.include_token_ids, "" if identity is None else identity.tenant)

    def includes(self, event: Event) -> bool:
        block = event.block
        if self.pool_id and block.pool_id != self.pool_id:
            return False
        if event.kind is EventKind.CREATED:
            return True
        if not tenancy.sees(block.scope):
            return False
        return self.salt is None or (block.scope is not None and block.scope.salt == self.salt)


def pack(wanted: Wanted, events: Iterable[Event], *, snapshot: bool) -> Iterator[pb.WatchEventsResponse]:
    """The events that are wanted, in as few messages as the bounds allow; none when no event is wanted."""
    # The sequence that a slot was needed for may be of another salt.
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
            yield pb.WatchEventsResponse(events=found)
            found, size = [], message.ByteSize()
        found.append(message)
    if found:
        yield pb.WatchEventsResponse(events=found)


class Batches:
    """The newest messages, for watchers that come to the same events."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Wanted, int, int], list[pb.WatchEventsResponse]] = {}

    def of(self, wanted: Wanted, events: list[Event]) -> Iterable[pb.WatchEventsResponse]:
        """The messages of events that follow each other; at least one event must be given."""
        if wanted.token_ids:
            # Not kept: prompts that are forgotten must be gone from memory.
            return pack(wanted, events, snapshot=False)
        key = (wanted, events[0].number, events[-1].number)
        if key not in self._kept:
            self._kept[key] = list(pack(wanted, events, snapshot=False))
            if len(self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]
        return self._kept[key]


class CacheEventService(pb_grpc.CacheEventServiceServicer):
    def __init__(self, context: ServiceContext) -> None:
        self._manager = context.manager
        self._feed = context.feed
        self._batches = Batches()

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.WatchEventsResponse]:
        """A snapshot unless told where to continue, then every event. A consumer too slow gets OUT_OF_RANGE."""
        if request.HasField("salt"):
            check_id("salt", request.salt)
        if request.pool_id:
            self._manager.queries.pool(request.pool_id)
        wanted = Wanted.of(request)
        if request.HasField("after_event_number"):
            number = request.after_event_number
        else:
            with contextlib.closing(self._manager.queries.snapshot()) as snapshot:
                async for _ in sliced(snapshot.steps()):
                    snapshot.catch_up()
            number = snapshot.number
            async for events in sliced(snapshot.events()):
                for message in pack(wanted, (event for event in events if event is not None), snapshot=True):
                    yield message
        while True:
            while happened := self._manager.queries.events_after(number, MAX_EVENTS):
                for message in self._batches.of(wanted, happened):
                    yield message
                number = happened[-1].number
                # A filter may leave nothing to send of many events.
                await asyncio.sleep(0)
            await self._feed.wait_for_events(number)
