"""Wishes for blocks as leases: who asked, for which priority, for how long.

A block has the largest priority among its leases, or the default one. The clock of a lease starts when its block can
be taken for the first time, and runs on from then, whether the block is used again or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from cachemgr.api import BlockView, EventKind, LeaseView, RemovalCause
from cachemgr.deadlines import Deadlines
from cachemgr.retention import DEFAULT_PRIORITY, NO_PRIORITY, Wish

if TYPE_CHECKING:
    from cachemgr.block import Block
    from cachemgr.events import EventLog


class LeasedPool(Protocol):
    """What a lease needs of the pool that its block is in."""

    honoured_leases: int
    broken_leases: int

    def reprioritise(self, block: Block) -> BlockView:
        """Gives a block whose leases have changed the priority that these have now, and shows it."""

    def view(self, block: Block) -> BlockView:
        """The block as seen from outside."""


# Looked up once: very many may end at a time.
_EXPIRED, _NONE = EventKind.LEASE_EXPIRED, RemovalCause.NONE


def shown_priority(wish: Wish) -> int:
    """What a wish comes to by itself."""
    return DEFAULT_PRIORITY if wish.priority == NO_PRIORITY else wish.priority


class Lease:
    """One holder's wish for one block, in a list that begins at `block.lease`. `block` is None when it has ended.

    `deadline` is None as long as the clock does not run, and for a wish without a duration.
    """

    __slots__ = ("block", "deadline", "next", "pool", "wish")

    def __init__(self, pool: LeasedPool, block: Block, wish: Wish) -> None:
        self.pool = pool
        self.block: Block | None = block
        self.wish = wish
        self.deadline: float | None = None
        self.next: Lease | None = None

    def remaining(self, now: float) -> float | None:
        """Seconds until it ends; None for no end."""
        return self.wish.duration if self.deadline is None else max(0.0, self.deadline - now)


def leases_of(block: Block) -> Iterator[Lease]:
    """All leases of a block, the newest first."""
    lease = block.lease
    while lease is not None:
        # Taken first: whoever walks may end the lease.
        following = lease.next
        yield lease
        lease = following


def effective_priority(block: Block) -> int:
    """The largest priority among a block's leases."""
    if block.lease is None:
        return DEFAULT_PRIORITY
    largest = max(lease.wish.priority for lease in leases_of(block))
    return DEFAULT_PRIORITY if largest == NO_PRIORITY else largest


def offload_floor(block: Block, default: int) -> int:
    """The priority that a block must have to be moved to a lower tier rather than dropped."""
    floors = [lease.wish.offload_min_priority for lease in leases_of(block)]
    return max((floor for floor in floors if floor is not None), default=default)


class LeaseBook:
    """The clock of all leases of a manager. `now` is the time of the call that is being served."""

    def __init__(self, events: EventLog) -> None:
        self.now = 0.0
        self._events = events
        self._deadlines = Deadlines()

    def advance(self, now: float) -> None:
        """Ends every lease whose time is over."""
        self.now = max(now, self.now)
        for lease in self._deadlines.due(self.now):
            if lease.block is not None:
                self._expire(lease, lease.block)

    def grant(self, pool: LeasedPool, block: Block, wish: Wish) -> None:
        """Adds a lease, or puts it in the place of the holder's older one."""
        lease = Lease(pool, block, wish)
        if not _link(lease, block):
            return
        if not block.refs:
            self.start(block)
        if block.parent is not None:
            self._events.add(EventKind.LEASE_GRANTED, pool.reprioritise(block), lease=self.view(lease))
        else:
            block.priority = effective_priority(block)

    def start(self, block: Block) -> bool:
        """The block can be taken: clocks that do not run yet begin to. Whether there were any."""
        started = False
        for lease in leases_of(block):
            if lease.deadline is None and lease.wish.duration is not None:
                self._run(lease, lease.wish.duration)
                started = True
        return started

    def restore(self, pool: LeasedPool, block: Block, wish: Wish, remaining: float | None) -> None:
        """Gives a block that is being put back a lease of before; its clock runs on, or starts."""
        lease = Lease(pool, block, wish)
        _link(lease, block)
        block.priority = effective_priority(block)
        seconds = wish.duration if remaining is None else remaining
        if seconds is not None:
            self._run(lease, seconds)

    def move(self, source: Block, target: Block) -> None:
        """Passes leases on to a block that holds the same tokens and more.

        Both keep their priorities, as they may stand in the eviction order: the caller discards the source and
        reprioritises the target.
        """
        for lease in leases_of(source):
            _unlink(lease, source)
            # What the target's own holder wishes is newer.
            if all(other.wish.holder != lease.wish.holder for other in leases_of(target)):
                _link(lease, target)

    def announce(self, pool: LeasedPool, block: Block) -> None:
        """Tells of the leases of a block that has just entered the index."""
        view = pool.view(block)
        for lease in leases_of(block):
            self._events.add(EventKind.LEASE_GRANTED, view, lease=self.view(lease))

    def forget(self, block: Block) -> None:
        """Ends all leases of a block that never entered the index; nobody has heard of them."""
        for lease in leases_of(block):
            _unlink(lease, block)
        # Its slot may have to wait for a copy.
        block.priority = DEFAULT_PRIORITY

    def break_all(self, block: Block, view: BlockView, cause: RemovalCause) -> None:
        """Ends all leases of a block that leaves the index, `view` being how it was seen last."""
        for lease in leases_of(block):
            lease.pool.broken_leases += 1
            self._events.add(EventKind.LEASE_BROKEN, view, cause, self.view(lease))
            _unlink(lease, block)
        block.priority = DEFAULT_PRIORITY

    def revoke(self, pool: LeasedPool, block: Block, holder: str, cause: RemovalCause) -> None:
        """Ends a holder's lease of a block that stays."""
        for lease in leases_of(block):
            if lease.wish.holder == holder:
                view = self.view(lease)
                _unlink(lease, block)
                pool.broken_leases += 1
                if block.parent is None:
                    block.priority = effective_priority(block)
                    continue
                pool.reprioritise(block)
                self._events.add(EventKind.LEASE_BROKEN, pool.view(block), cause, view)

    def view(self, lease: Lease) -> LeaseView:
        """The lease as seen from outside."""
        wish = lease.wish
        return LeaseView(wish.holder, shown_priority(wish), lease.remaining(self.now))

    def _run(self, lease: Lease, seconds: float) -> None:
        self._deadlines.add(lease, self.now, seconds)

    def _expire(self, lease: Lease, block: Block) -> None:
        _unlink(lease, block)
        lease.pool.honoured_leases += 1
        wish = lease.wish
        ended = tuple.__new__(LeaseView, (wish.holder, shown_priority(wish), 0.0))
        self._events.add(_EXPIRED, lease.pool.reprioritise(block), _NONE, ended)


def _link(lease: Lease, block: Block) -> bool:
    """False when the block has no use for the lease.

    Wishes of requests without a duration are one lease, that of the largest: none of them can end before another, and
    a prefix that every request asks for does not collect a lease from each.
    """
    for other in leases_of(block):
        mine = other.wish.holder == lease.wish.holder
        both_endless = other.wish.endless and lease.wish.endless and not mine
        if both_endless and other.wish.priority >= lease.wish.priority:
            return False
        if both_endless or mine:
            # It lasted until its holder wished something else.
            other.pool.honoured_leases += not both_endless
            _unlink(other, block)
    lease.block = block
    lease.next, block.lease = block.lease, lease
    return True


def _unlink(lease: Lease, block: Block) -> None:
    if block.lease is lease:
        block.lease = lease.next
    else:
        for before in leases_of(block):
            if before.next is lease:
                before.next = lease.next
                break
    lease.block = lease.next = None
