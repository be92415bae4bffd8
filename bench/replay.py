"""Replays requests through a cache manager with a virtual clock, and counts hits and outcomes of leases."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import thread_time

from bench.driver import CONFIG, Driver
from bench.trace_file import BLOCK_TOKENS, Request
from cachemgr.blocks.events import Event
from cachemgr.types import EventKind, GhostReport, RemovalCause, Retention

# Seconds that a request keeps its blocks. Prompts take no time, as the time would depend on hits.
START_SECONDS, SECONDS_PER_TOKEN = 0.2, 0.01
# Generated tokens are unlike all others; see the ids of a trace.
_FIRST_GENERATED = 1 << 31


class PoolTooSmallError(ValueError):
    """Some request needs more than the whole pool."""


def service_seconds(request: Request) -> float:
    """From a request's arrival to its end."""
    return START_SECONDS + SECONDS_PER_TOKEN * request.output_length


def pause(rng: random.Random) -> float:
    """Seconds that a conversation waits for a tool: 86 % up to 1 s, 95 % up to 10 s, the rest 70 s on average."""
    share = rng.random()
    if share < 0.86:
        return rng.uniform(0.0, 1.0)
    if share < 0.95:
        return rng.uniform(1.0, 10.0)
    return 10.0 + rng.expovariate(1 / 60)


def with_pauses(requests: Sequence[Request], seed: int) -> list[Request]:
    """The requests, but each follow-up arrives a pause after the previous request of its conversation has ended."""
    rng = random.Random(seed)
    ends: dict[int, float] = {}
    moved = []
    for request in requests:
        if request.follows:
            request = replace(request, time=ends[request.conversation] + pause(rng))
        ends[request.conversation] = request.time + service_seconds(request)
        moved.append(request)
    return sorted(moved, key=lambda request: request.time)


def upper_bound(requests: Iterable[Request]) -> int:
    """Tokens that a cache without evictions would find."""
    longest: dict[int, int] = {}
    found = 0
    for request in requests:
        own, matching = 0, True
        for index, number in enumerate(request.hash_ids):
            length = min(BLOCK_TOKENS, request.input_length - index * BLOCK_TOKENS)
            known = min(length, longest.get(number, 0))
            if matching:
                own += known
                matching = known == BLOCK_TOKENS
            longest[number] = max(length, longest.get(number, 0))
        found += min(own, request.input_length - 1)
    return found


def demand(requests: Sequence[Request], keep_seconds: float) -> tuple[float, float]:
    """Tokens, in whole blocks of the trace, that are in use or to be kept: the mean over time, and the maximum.

    A prompt and its generated tokens are to be kept for `keep_seconds` after the request's end.
    """
    changes: list[tuple[float, int, int]] = []
    for index, request in enumerate(requests):
        end = request.time + service_seconds(request) + keep_seconds
        changes += [(request.time, 1, index), (end, -1, index)]
    changes.sort()
    users: dict[int, int] = {}
    outputs, before, area, most = 0, changes[0][0], 0.0, 0
    for time, change, index in changes:
        blocks = len(users) + outputs
        area += blocks * (time - before)
        before, most = time, max(most, blocks)
        for number in requests[index].hash_ids:
            users[number] = users.get(number, 0) + change
            if not users[number]:
                del users[number]
        outputs += change * -(-requests[index].output_length // BLOCK_TOKENS)
    return area / (before - changes[0][0]) * BLOCK_TOKENS, most * float(BLOCK_TOKENS)


@dataclass
class LeaseCount:
    """The outcomes of leases, from the manager's events.

    Honoured: the block was cached until the lease's own end, or until a retention request of the same holder or a
    longer block with the same tokens replaced it. Broken: the block was removed earlier. Other leases have not ended.
    """

    granted: int = 0
    honoured: int = 0
    broken: int = 0
    _open: dict[bytes, set[str]] = field(default_factory=dict)

    def see(self, event: Event) -> None:
        """Takes the next event."""
        key = event.block.key
        if event.kind is EventKind.REMOVED and event.cause is RemovalCause.COVERED:
            self.honoured += len(self._open.pop(key, ()))
        if event.lease is None:
            return
        holders = self._open.setdefault(key, set())
        if event.kind is EventKind.LEASE_GRANTED:
            self.granted += 1
            self.honoured += event.lease.holder in holders
            holders.add(event.lease.holder)
            return
        holders.discard(event.lease.holder)
        if not holders:
            del self._open[key]
        self.honoured += event.kind is EventKind.LEASE_EXPIRED
        self.broken += event.kind is EventKind.LEASE_BROKEN


@dataclass
class Outcome:
    """Queried and found tokens, of all requests and of follow-ups in a conversation."""

    asked: int = 0
    found: int = 0
    asked_following: int = 0
    found_following: int = 0
    # Requests that found too few free blocks on arrival.
    waited: int = 0
    leases: LeaseCount = field(default_factory=LeaseCount)

    @property
    def hit_rate(self) -> float:
        """The share of all prompt tokens."""
        return self.found / self.asked

    @property
    def following_hit_rate(self) -> float:
        """The share of the prompt tokens of follow-ups."""
        return self.found_following / max(1, self.asked_following)


class Replay:
    """One pool. A request begins when all blocks that it may need are free; until then all later requests wait, too."""

    def __init__(self, num_blocks: int, block_size: int, ghost_sample: int = 0) -> None:
        # Blocks are allocated for the whole output at once, and none beyond it.
        config = replace(CONFIG, capacity_ahead_tokens=0, ghost_sample=ghost_sample)
        self._driver = Driver(num_blocks, block_size=block_size, config=config)
        # Admissions leave some blocks free; a copy needs its source in addition to its target.
        self._most_used = num_blocks - int(num_blocks * CONFIG.free_watermark) - 1
        self._block_size = block_size
        self._generated = _FIRST_GENERATED
        self._names = 0
        self._seen = self._driver.manager.queries.last_event
        self._waiting: deque[tuple[Request, Retention | None]] = deque()
        # (end, handle) of running requests.
        self._running: list[tuple[float, int]] = []
        self._requests: dict[int, Request] = {}
        self.outcome = Outcome()

    def run(self, requests: Iterable[Request], retention: Iterable[Retention | None]) -> Outcome:
        """All requests, each with its retention request, until the last has ended. Raises PoolTooSmallError."""
        for request, kept in zip(requests, retention, strict=True):
            if self._needed(request) > self._most_used:
                raise PoolTooSmallError(f"a request of {request.input_length} tokens does not fit into the pool")
            self._end_until(request.time)
            self._driver.now = request.time
            self._waiting.append((request, kept))
            self._start_waiting()
            self.outcome.waited += bool(self._waiting)
        self._end_until(math.inf)
        return self.outcome

    def ghosts(self) -> GhostReport:
        """The report of the manager's ghost caches on all requests."""
        found = self._driver.manager.queries.ghosts("e")
        assert found is not None
        return found[0]

    def time_ghosts(self) -> list[float]:
        """Measures ghost caches from now on; each call adds its CPU seconds to the returned list."""
        seconds: list[float] = []
        followed = self._driver.manager._state.executors["e"].ghosts
        for name in ("admitted", "released"):
            setattr(followed, name, _timed(getattr(followed, name), seconds))
        return seconds

    def _needed(self, request: Request) -> int:
        return -(-_capacity(request) // self._block_size)

    def _end_until(self, time: float) -> None:
        while self._running and self._running[0][0] <= time:
            self._driver.now, handle = heapq.heappop(self._running)
            request = self._requests.pop(handle)
            count = request.output_length
            generated = range(self._generated, self._generated + count)
            self._generated += count
            # The last generated token is never computed.
            computed = request.input_length + max(0, count - 1)
            self._driver.sync({handle: computed}, [generated], released=[handle])
            self._watch()
            self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting:
            used = self._driver.pool.used_blocks
            if used + self._needed(self._waiting[0][0]) > self._most_used:
                return
            self._start(*self._waiting.popleft())

    def _start(self, request: Request, retention: Retention | None) -> None:
        """Allocates blocks for the prompt and all tokens to be generated; computes the prompt."""
        driver, outcome = self._driver, self.outcome
        self._names += 1
        name = str(self._names)
        options: dict[str, object] = {} if retention is None else {"retention": retention}
        if retention is not None and any(part.duration is not None for part in retention.ranges):
            # A retention with an end belongs to the conversation: the retention of the next request replaces it.
            options["session_id"] = f"c{request.conversation}"
        admission = driver.admit(name, request.tokens(), **options)
        assert admission.admitted
        driver.confirm(admission)
        driver.reserve(admission.sequence_handle, _capacity(request))
        driver.sync({admission.sequence_handle: request.input_length})
        heapq.heappush(self._running, (driver.now + service_seconds(request), admission.sequence_handle))
        self._requests[admission.sequence_handle] = request
        outcome.asked += request.input_length
        outcome.found += admission.cached_tokens
        if request.follows:
            outcome.asked_following += request.input_length
            outcome.found_following += admission.cached_tokens
        self._watch()

    def _watch(self) -> None:
        manager = self._driver.manager
        for event in manager.queries.events_after(self._seen, manager.queries.last_event - self._seen):
            self.outcome.leases.see(event)
        self._seen = manager.queries.last_event


def _timed(call: Callable[..., None], seconds: list[float]) -> Callable[..., None]:
    def timed(*arguments: object, **options: object) -> None:
        start = thread_time()
        call(*arguments, **options)
        seconds.append(thread_time() - start)

    return timed


def _capacity(request: Request) -> int:
    """Tokens that the request needs blocks for; a sync extends to two more tokens than are computed."""
    return request.input_length + max(2, request.output_length)
