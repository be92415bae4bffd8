"""Leases: granted retention requests, each of one holder for one block.

A block has the highest priority among its leases, or the default priority. The clock of a lease starts when its block
first has no references, and then runs on, whether the block is used again or not.

Even a block shared by very many sequences has at most `MAX_LEASES` leases. Beyond that, the lease of the lowest
priority breaks; among equal priorities, the lease that ends first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, Protocol

from cachemgr.retention.priority import DEFAULT_PRIORITY, RULE, RetentionRequest, priority_or_default
from cachemgr.types import BlockView, EventKind, LeaseView, RemovalCause


class LeasedBlock(Protocol):
    """A block as its leases see it."""

    lease: Lease | None
    # Whether one of its leases has run its full time.
    lease_ended: bool
    priority: int

    @property
    def refs(self) -> int:
        """Number of references. A lease's clock starts when there are none."""

    @property
    def parent(self) -> object:
        """None as long as the block is not in the index."""


class LeasedPool(Protocol):
    """The pool of a block as its leases see it. The pool is only asked about its own blocks."""

    honoured_leases: int
    broken_leases: int
    is_lost: bool

    def reprioritise(self, block: Any) -> BlockView:
        """Updates the priority of a block whose leases have changed, and returns its view."""

    def view(self, block: Any) -> BlockView:
        """Returns the block as seen from outside."""


class LeaseEvents(Protocol):
    """The log in which leases are announced."""

    def add(
        self, kind: EventKind, block: BlockView, cause: RemovalCause = RemovalCause.NONE, lease: LeaseView | None = None
    ) -> None:
        """Numbers an event and keeps it."""


# The limit for one block: every operation looks at all of its leases, and its record in Redis holds them.
MAX_LEASES = 16

# Leases that one call ends, since very many may expire at the same moment. Each takes some microseconds.
ENDED_AT_A_TIME = 2048

# Below this many entries, there is no search for leases that have ended early.
_MIN_LIMIT = 10_000

# Looked up once, since very many leases may end at a time.
_EXPIRED, _NONE = EventKind.LEASE_EXPIRED, RemovalCause.NONE


def shown_priority(request: RetentionRequest) -> int:
    """The priority that a request alone gives."""
    return priority_or_default(request.priority)


class Lease:
    """One holder's request for one block, in a list that begins at `block.lease`. `block` is None after its end.

    `deadline` is None until the clock runs, and for a request without a duration.
    """

    __slots__ = ("block", "deadline", "next", "pool", "request")

    def __init__(self, pool: LeasedPool, block: LeasedBlock, request: RetentionRequest) -> None:
        self.pool = pool
        self.block: LeasedBlock | None = block
        self.request = request
        self.deadline: float | None = None
        self.next: Lease | None = None

    def remaining(self, now: float) -> float | None:
        """Seconds until the lease ends; the whole duration until the clock starts; None for no end."""
        return self.request.duration if self.deadline is None else max(0.0, self.deadline - now)


def leases_of(block: LeasedBlock) -> Iterator[Lease]:
    """Yields all leases of a block, newest first."""
    lease = block.lease
    while lease is not None:
        # Read before the yield, since the caller may end the lease.
        following = lease.next
        yield lease
        lease = following


def effective_priority(block: LeasedBlock) -> int:
    """The largest priority among a block's leases."""
    if block.lease is None:
        return DEFAULT_PRIORITY
    return priority_or_default(max(lease.request.priority for lease in leases_of(block)))


def offload_floor(block: LeasedBlock, default: int) -> int:
    """The minimum priority for a block to be moved to a lower tier rather than dropped."""
    floors = [lease.request.offload_min_priority for lease in leases_of(block)]
    return max((floor for floor in floors if floor is not None), default=default)


class Deadlines:
    """Leases whose clocks run, in a queue per duration: leases of one duration end in the order of their starts.

    While there are few durations, adding and taking a lease takes constant time.
    """

    def __init__(self) -> None:
        self._queues: dict[float, deque[Lease]] = {}
        # (deadline of the first, number of the queue, duration) of every queue.
        self._heads: list[tuple[float, int, float]] = []
        self._made = 0
        self._size = 0
        self._limit = _MIN_LIMIT

    def __len__(self) -> int:
        return self._size

    def add(self, lease: Lease, now: float, seconds: float) -> None:
        """Starts a lease's clock; `now` never decreases."""
        lease.deadline = now + seconds
        queue = self._queues.get(seconds)
        if queue is None:
            queue = self._queues[seconds] = deque()
            self._made += 1
            heappush(self._heads, (lease.deadline, self._made, seconds))
        queue.append(lease)
        self._size += 1
        if self._size > self._limit:
            self._drop_ended()

    def is_due(self, now: float) -> bool:
        """Whether a lease's time is over."""
        return bool(self._heads) and self._heads[0][0] <= now

    def due(self, now: float, count: int) -> Iterator[Lease]:
        """Takes up to `count` leases whose time is over, in order of deadline; some may have ended early."""
        heads, queues = self._heads, self._queues
        while count and self.is_due(now):
            _, number, seconds = heappop(heads)
            queue = queues[seconds]
            # Up to the next deadline of another queue.
            until = min(now, heads[0][0]) if heads else now
            while count and queue and _deadline(queue[0]) <= until:
                count -= 1
                self._size -= 1
                yield queue.popleft()
            if queue:
                heappush(heads, (_deadline(queue[0]), number, seconds))
            else:
                del queues[seconds]

    def _drop_ended(self) -> None:
        """Drops leases that have ended early, which would otherwise stay until their deadline."""
        for seconds, queue in list(self._queues.items()):
            alive = deque(lease for lease in queue if lease.block is not None)
            if alive:
                self._queues[seconds] = alive
            else:
                del self._queues[seconds]
        numbers = {seconds: number for _, number, seconds in self._heads}
        self._heads = [(_deadline(queue[0]), numbers[seconds], seconds) for seconds, queue in self._queues.items()]
        heapify(self._heads)
        self._size = sum(map(len, self._queues.values()))
        self._limit = max(_MIN_LIMIT, 2 * self._size)


def _deadline(lease: Lease) -> float:
    assert lease.deadline is not None
    return lease.deadline


class LeaseBook:
    """The clock of all leases of a manager. `now` is the time of the call that is being served."""

    def __init__(self, events: LeaseEvents) -> None:
        self.now = 0.0
        self._events = events
        self._deadlines = Deadlines()
        # By holder, in the order in which the leases were granted.
        self._of_rules: dict[str, dict[Lease, None]] = {}

    def advance(self, now: float) -> None:
        """Ends at most `ENDED_AT_A_TIME` leases whose time is over, earliest first."""
        self.now = max(now, self.now)
        for lease in self._deadlines.due(self.now, ENDED_AT_A_TIME):
            if lease.block is not None and not lease.pool.is_lost:
                self._expire(lease, lease.block)

    @property
    def is_behind(self) -> bool:
        """Whether some leases whose time is over have not been ended yet."""
        return self._deadlines.is_due(self.now)

    def grant(self, pool: LeasedPool, block: LeasedBlock, request: RetentionRequest) -> bool:
        """Adds a lease, which replaces the holder's older lease. False if too many leases outrank the new lease."""
        lease = Lease(pool, block, request)
        self._end_older(lease, block)
        broken = self._add(lease, block)
        is_granted = broken is not lease
        if is_granted and not block.refs:
            self.start(block)
        if block.parent is None:
            block.priority = effective_priority(block)
            return is_granted
        view = pool.reprioritise(block)
        if is_granted:
            self._announce_broken(broken, view)
            granted = LeaseView(request.holder, shown_priority(request), request.duration)
            self._events.add(EventKind.LEASE_GRANTED, view, lease=granted)
        return is_granted

    def start(self, block: LeasedBlock) -> bool:
        """Starts the clocks of a block without references. Returns whether any clock has started."""
        started = [lease for lease in leases_of(block) if lease.deadline is None and lease.request.duration is not None]
        for lease in started:
            assert lease.request.duration is not None
            self._deadlines.add(lease, self.now, lease.request.duration)
        return bool(started)

    def restore(self, pool: LeasedPool, block: LeasedBlock, request: RetentionRequest, remaining: float | None) -> None:
        """Adds a stored lease to a block that is being restored; the lease's clock runs on, or starts."""
        lease = Lease(pool, block, request)
        seconds = request.duration if remaining is None else remaining
        if seconds is not None:
            self._deadlines.add(lease, self.now, seconds)
        self._end_older(lease, block)
        self._add(lease, block)
        block.priority = effective_priority(block)

    def move(self, source: LeasedBlock, target: LeasedBlock) -> None:
        """Passes leases on to a block that holds the same tokens and more.

        Both blocks keep their priorities, since they may be in the eviction order: the caller discards the source and
        reprioritises the target.
        """
        target.lease_ended = target.lease_ended or source.lease_ended
        for lease in leases_of(source):
            self._unlink(lease, source)
            # The request of the target's own holder is newer.
            if _held_by(target, lease.request.holder) is None:
                self._announce_broken(self._add(lease, target), lease.pool.view(target))

    def announce(self, pool: LeasedPool, block: LeasedBlock) -> None:
        """Announces the leases of a block that has just entered the prefix tree."""
        view = pool.view(block)
        for lease in leases_of(block):
            self._events.add(EventKind.LEASE_GRANTED, view, lease=self.view(lease))

    def forget(self, block: LeasedBlock) -> None:
        """Ends all leases of a block without events: the block was never indexed, or its executor is lost."""
        for lease in leases_of(block):
            self._unlink(lease, block)
        # The slot may still have to wait for a copy.
        block.priority = DEFAULT_PRIORITY

    def break_all(self, block: LeasedBlock, view: BlockView, cause: RemovalCause) -> None:
        """Ends all leases of a block that leaves the prefix tree; `view` is the block's last view."""
        for lease in leases_of(block):
            lease.pool.broken_leases += 1
            self._events.add(EventKind.LEASE_BROKEN, view, cause, self.view(lease))
            self._unlink(lease, block)
        block.priority = DEFAULT_PRIORITY

    def revoke(self, pool: LeasedPool, block: LeasedBlock, holder: str, cause: RemovalCause) -> None:
        """Ends a holder's lease of a block that stays. Without an event if the block is not in the prefix tree."""
        for lease in leases_of(block):
            if lease.request.holder == holder:
                view = self.view(lease)
                self._unlink(lease, block)
                pool.broken_leases += 1
                if block.parent is None:
                    block.priority = effective_priority(block)
                    continue
                pool.reprioritise(block)
                self._events.add(EventKind.LEASE_BROKEN, pool.view(block), cause, view)

    def of_rule(self, holder: str) -> list[Lease]:
        """All leases that a rule has granted."""
        return [lease for lease in self._of_rules.get(holder, ()) if not lease.pool.is_lost]

    def view(self, lease: Lease) -> LeaseView:
        """The lease as seen from outside."""
        request = lease.request
        return LeaseView(request.holder, shown_priority(request), lease.remaining(self.now), lease.deadline is not None)

    def _add(self, lease: Lease, block: LeasedBlock) -> Lease | None:
        """Links a lease; returns the lease that breaks if there are too many."""
        self._link(lease, block)
        leases = list(leases_of(block))
        if len(leases) <= MAX_LEASES:
            return None
        # Among equal leases, the oldest.
        lowest = min(reversed(leases), key=lambda one: (one.request.priority, self._end(one)))
        self._unlink(lowest, block)
        return lowest

    def _end(self, lease: Lease) -> float:
        remaining = lease.remaining(self.now)
        return inf if remaining is None else remaining

    def _announce_broken(self, broken: Lease | None, view: BlockView) -> None:
        if broken is not None:
            broken.pool.broken_leases += 1
            self._events.add(EventKind.LEASE_BROKEN, view, RemovalCause.TOO_MANY_LEASES, self.view(broken))

    def _end_older(self, lease: Lease, block: LeasedBlock) -> None:
        """Ends the older lease of the same holder, if there is one."""
        older = _held_by(block, lease.request.holder)
        if older is not None:
            # It counts as honoured, since it lasted until its holder replaced it.
            older.pool.honoured_leases += 1
            self._unlink(older, block)

    def _link(self, lease: Lease, block: LeasedBlock) -> None:
        lease.block = block
        lease.next, block.lease = block.lease, lease
        if _is_rule(lease):
            self._of_rules.setdefault(lease.request.holder, {})[lease] = None

    def _unlink(self, lease: Lease, block: LeasedBlock) -> None:
        if block.lease is lease:
            block.lease = lease.next
        else:
            for before in leases_of(block):
                if before.next is lease:
                    before.next = lease.next
                    break
        lease.block = lease.next = None
        if _is_rule(lease):
            leases = self._of_rules[lease.request.holder]
            del leases[lease]
            if not leases:
                del self._of_rules[lease.request.holder]

    def _expire(self, lease: Lease, block: LeasedBlock) -> None:
        self._unlink(lease, block)
        block.lease_ended = True
        lease.pool.honoured_leases += 1
        request = lease.request
        ended = tuple.__new__(LeaseView, (request.holder, shown_priority(request), 0.0, False))
        self._events.add(_EXPIRED, lease.pool.reprioritise(block), _NONE, ended)


def _held_by(block: LeasedBlock, holder: str) -> Lease | None:
    return next((lease for lease in leases_of(block) if lease.request.holder == holder), None)


def _is_rule(lease: Lease) -> bool:
    return lease.request.holder.startswith(RULE)
