"""Events as messages: many in each, and each made once for all that watch the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from cachemgr.blocks.events import Event
from cachemgr.rpc import convert, tenancy
from cachemgr.types import EventKind
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.identity import current

# Bounds of a message, whichever is met first. gRPC's clients take 4 MiB.
MAX_EVENTS, MAX_BYTES = 512, 1 << 20
# Watchers are at most so many batches apart, or each makes its own.
_KEPT = 16


class Wanted(NamedTuple):
    """What a watcher gets to see. Equal ones get equal messages."""

    pool_id: str
    salt: str | None
    token_ids: bool
    tenant: str

    @classmethod
    def of(cls, request: pb.WatchEventsRequest) -> Wanted:
        """What the caller being served asks for, and may see."""
        identity = current()
        salt = request.salt if request.HasField("salt") else None
        return cls(request.pool_id, salt, request.include_token_ids, "" if identity is None else identity.tenant)

    def includes(self, event: Event) -> bool:
        """Whether the watcher is told of an event."""
        block = event.block
        if self.pool_id and block.pool_id != self.pool_id:
            return False
        if event.kind is EventKind.CREATED:
            return True
        if not tenancy.sees(block.domain):
            return False
        return self.salt is None or (block.domain is not None and block.domain.salt == self.salt)


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
