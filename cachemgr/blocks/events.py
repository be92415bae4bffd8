"""The last events, numbered without a gap."""

from collections.abc import Callable
from typing import NamedTuple

from cachemgr import steps
from cachemgr.errors import EventsGoneError
from cachemgr.steps import Steps
from cachemgr.types import BlockView, EventKind, LeaseView, RemovalCause

_new = tuple.__new__


class Event(NamedTuple):
    """What happened to a block; for CREATED only its pool is set. A broken lease has the cause of its block's loss."""

    number: int
    kind: EventKind
    block: BlockView
    cause: RemovalCause = RemovalCause.NONE
    lease: LeaseView | None = None
    for_sequence_id: str = ""


class EventLog:
    """A ring of the last `capacity` events."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._ring: list[Event] = []
        self.last = 0
        # Counts the ends of `scrub`.
        self.scrubs = 0
        # Called with the pool and key of a block that changes without an event: the clock of a lease has started.
        self.quiet: list[Callable[[str, bytes], None]] = []

    def add(
        self,
        kind: EventKind,
        block: BlockView,
        cause: RemovalCause = RemovalCause.NONE,
        lease: LeaseView | None = None,
        for_sequence_id: str = "",
    ) -> None:
        """Numbers an event and keeps it."""
        # A third of the time of Event(...), for each block that is stored or removed.
        last, ring = self.last, self._ring
        event = _new(Event, (last + 1, kind, block, cause, lease, for_sequence_id))
        if len(ring) < self._capacity:
            ring.append(event)
        else:
            ring[last % self._capacity] = event
        self.last = last + 1

    def skip(self, count: int) -> None:
        """Skips at least so many numbers: watchers behind them begin with a snapshot."""
        # The next event comes to the beginning of the ring.
        self.last = -(-(self.last + count) // self._capacity) * self._capacity
        self._ring = []

    def after(self, number: int, limit: int) -> list[Event]:
        """Up to `limit` events behind a number. Raises EventsGoneError when the first of them is not kept."""
        if number > self.last or number < self.last - len(self._ring):
            raise EventsGoneError(
                f"events behind {number} are not kept",
                fields={"after_event_number": "is not that of an event that is kept, nor of the newest"},
                metadata={"oldest": str(self.last - len(self._ring) + 1), "newest": str(self.last)},
            )
        end = min(self.last, number + limit)
        return [self._ring[index % self._capacity] for index in range(number, end)]

    def scrub(self, gone: set[bytes], is_meant: Callable[[BlockView], bool]) -> Steps[None]:
        """Removes the token ids of blocks from all events: of those meant, those in `gone`, and their descendants.

        The keys of all of these are added to `gone`.
        """
        number = self.last - len(self._ring)
        # In the order of time, in which parents come first; also events that come meanwhile.
        while number < self.last:
            begin = max(number, self.last - len(self._ring))
            number = min(self.last, begin + steps.LOOKS)
            for at in range(begin, number):
                event = self._ring[at % self._capacity]
                block = event.block
                if block.tokens and (block.key in gone or block.parent_key in gone or is_meant(block)):
                    gone.add(block.key)
                    self._ring[at % self._capacity] = event._replace(block=block._replace(tokens=b""))
            yield
        self.scrubs += 1
