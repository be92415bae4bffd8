"""The last events, numbered without a gap."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from cachemgr import slices
from cachemgr.errors import EventsGoneError
from cachemgr.slices import Slices
from cachemgr.types import BlockView, EventKind, ExecutorSpec, LeaseView, RemovalCause

_new = tuple.__new__
# The block of events about executors.
NO_BLOCK = BlockView.of_pool("")


class Event(NamedTuple):
    """What happened to a block. For CREATED, only the pool is set.

    The cause of LEASE_BROKEN says why the lease ended, even if the block stays.

    Events about executors have the executor, without the contents of its memory, and no block.
    """

    number: int
    kind: EventKind
    block: BlockView
    cause: RemovalCause = RemovalCause.NONE
    lease: LeaseView | None = None
    for_sequence_id: str = ""
    executor: ExecutorSpec | None = None


class QuietListener(Protocol):
    """Follows changes of blocks, including changes that cause no event."""

    def changed_quietly(self, pool_id: str, key: bytes) -> None:
        """Notes that an indexed block was stored or has changed, such as when the clock of a lease has started."""


class EventLog:
    """A ring of the last `capacity` events."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._ring: list[Event] = []
        self.last = 0
        # Number of completed calls of `scrub`.
        self.scrubs = 0
        self.quiet_listeners: list[QuietListener] = []

    def add(
        self,
        kind: EventKind,
        block: BlockView,
        cause: RemovalCause = RemovalCause.NONE,
        lease: LeaseView | None = None,
        for_sequence_id: str = "",
        executor: ExecutorSpec | None = None,
    ) -> None:
        """Numbers an event and keeps it."""
        # Takes a third of the time of Event(...); runs for each block that is stored or removed.
        last, ring = self.last, self._ring
        event = _new(Event, (last + 1, kind, block, cause, lease, for_sequence_id, executor))
        if len(ring) < self._capacity:
            ring.append(event)
        else:
            ring[last % self._capacity] = event
        self.last = last + 1

    def after(self, number: int, limit: int) -> list[Event]:
        """Returns up to `limit` events after a number.

        Raises EventsGoneError if the first of these events is not kept, or if the number is larger than the last.
        """
        oldest = self.last - len(self._ring) + 1
        if not oldest - 1 <= number <= self.last:
            raise EventsGoneError(
                f"events after {number} are not kept",
                fields={"after_event_number": f"must be from {oldest - 1} to {self.last}"},
                metadata={"oldest": str(oldest), "newest": str(self.last)},
            )
        end = min(self.last, number + limit)
        return [self._ring[index % self._capacity] for index in range(number, end)]

    def scrub(self, gone: set[bytes], is_meant: Callable[[BlockView], bool]) -> Slices[None]:
        """Removes token ids from the events of all blocks that are meant or in `gone`, and of their descendants.

        Adds the keys of all these blocks to `gone`.
        """
        number = self.last - len(self._ring)
        # In order of time, so that parents come first; includes events that are added during the scrub.
        while number < self.last:
            begin = max(number, self.last - len(self._ring))
            number = min(self.last, begin + slices.LOOKS)
            for at in range(begin, number):
                event = self._ring[at % self._capacity]
                block = event.block
                if block.tokens and (block.key in gone or block.parent_key in gone or is_meant(block)):
                    gone.add(block.key)
                    self._ring[at % self._capacity] = event._replace(block=block._replace(tokens=b""))
            yield
        self.scrubs += 1
