"""Leases of one block: with few holders all leases are kept, with too many the lowest breaks."""

import dataclasses
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemgr.blocks.block_record import LeaseRecord
from cachemgr.retention.bounds import MAX_SESSION_SECONDS
from cachemgr.retention.leases import MAX_LEASES, leases_of, offload_floor
from cachemgr.retention.priority import DEFAULT_PRIORITY, RetentionRequest
from cachemgr.slices import at_once
from cachemgr.telemetry.nested_caches import NestedCaches
from cachemgr.types import (
    EventKind,
    Outcome,
    RemovalCause,
    Retention,
    RetentionRange,
    RetentionRule,
    RuleAction,
    RuleMatch,
)
from tests.support.in_process_manager import CONFIG, World, retain
from tests.support.work import work_of

PROMPT = [1, 2, 3, 4, 5]
# Below every requested floor.
FLOOR = -1


@dataclass
class Requested:
    """One retention request of the model; `deadline` is None while its clock stands, and for none."""

    holder: str
    priority: int
    floor: int | None
    duration: float | None
    deadline: float | None = None

    def remaining(self, now: float) -> float:
        left = self.duration if self.deadline is None else self.deadline - now
        return float("inf") if left is None else left


class AllLeases:
    """The model: a list of each holder's last request. most: limit of requests; beyond it, the lowest is dropped."""

    def __init__(self, most: int = 1_000_000) -> None:
        self.kept: list[Requested] = []
        self._most = most

    def grant(self, one: Requested, now: float, is_used: bool) -> None:
        self.kept = [other for other in self.kept if other.holder != one.holder]
        self.kept.append(dataclasses.replace(one))
        if len(self.kept) > self._most:
            self.kept.remove(min(self.kept, key=lambda other: (other.priority, other.remaining(now))))
        if not is_used:
            self.start(now)

    def start(self, now: float) -> None:
        for one in self.kept:
            if one.deadline is None and one.duration is not None:
                one.deadline = now + one.duration

    def advance(self, now: float) -> None:
        self.kept = [one for one in self.kept if one.deadline is None or one.deadline > now]

    def state(self) -> tuple[int, int]:
        floors = [one.floor for one in self.kept if one.floor is not None]
        return max((one.priority for one in self.kept), default=DEFAULT_PRIORITY), max(floors, default=FLOOR)

    def holders(self) -> set[str]:
        return {one.holder for one in self.kept}


class OneBlock:
    """A block of a cache, and its leases."""

    def __init__(self) -> None:
        self.caches = NestedCaches((8.0,))
        self.now = 0.0
        self.block, _ = self.caches.use(b"key")
        self.block.stored = True

    def grant(self, one: Requested) -> None:
        self.caches.grant(self.block, RetentionRequest(one.holder, one.priority, one.duration, one.floor))
        assert len(list(leases_of(self.block))) <= MAX_LEASES

    def drop(self) -> None:
        self.caches.drop(self.block)

    def use(self) -> None:
        self.caches.use(b"key")

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.caches.advance(self.now)

    def state(self) -> tuple[int, int]:
        return self.block.priority, offload_floor(self.block, FLOOR)


def play(steps, *models):
    """Uses of a block one after the other: the request of each, whether it ends, and the following pause.

    Yields the block's state and the models' after every change.
    """
    block = OneBlock()
    for requested, ends, pause in steps:
        if not block.block.refs:
            block.use()
        for one in requested:
            block.grant(one)
            for model in models:
                model.grant(one, block.now, is_used=True)
            yield block, *models
        if ends:
            block.drop()
            for model in models:
                model.start(block.now)
        block.advance(pause)
        for model in models:
            model.advance(block.now)
        yield block, *models


DURATIONS = st.sampled_from([None, 1.0, 5.0, 20.0])
REQUESTS = st.tuples(st.sampled_from([20, 60, 90]), st.sampled_from([None, 40]), DURATIONS)


def steps(holders):
    """Uses of a block with retention requests of such holders; the holder "request/" is different each time."""
    requests = st.lists(st.builds(lambda holder, parts: Requested(holder, *parts), holders, REQUESTS), max_size=3)
    return st.lists(st.tuples(requests, st.booleans(), st.sampled_from([0.0, 0.5, 3.0, 10.0])), max_size=40).map(
        _numbered
    )


def _numbered(found):
    count = 0
    for requested, _, _ in found:
        for one in requested:
            count += 1
            if one.holder == "request/":
                one.holder += str(count)
    return found


@settings(max_examples=200, deadline=None)
@given(steps(st.sampled_from([*(f"request/{number}" for number in range(10)), "session/a", "session/b", "rule/r"])))
def test_a_block_has_what_each_of_few_holders_requested_last(found):
    """Whatever others request meanwhile, lower or higher, for longer or shorter: rule 14."""
    for block, model in play(found, AllLeases()):
        assert block.state() == model.state()
        assert {lease.request.holder for lease in leases_of(block.block)} == model.holders()


@settings(max_examples=200, deadline=None)
@given(steps(st.sampled_from(["request/", "rule/r", *(f"session/{number}" for number in range(60))])))
def test_of_too_many_leases_the_lowest_break_whoever_holds_them(found):
    for block, few, everything in play(found, AllLeases(MAX_LEASES), AllLeases()):
        assert block.state() == few.state()
        assert {lease.request.holder for lease in leases_of(block.block)} == few.holders()
        # The highest is always there.
        assert block.block.priority == everything.state()[0] or len(everything.kept) > MAX_LEASES


def patient(num_blocks: int = 8) -> World:
    return World(num_blocks, config=dataclasses.replace(CONFIG, lease_seconds=1e12))


def priority(world: World) -> int:
    world.manager.expire()
    return next(view.priority for _, view in filter(None, world.queries.blocks("e/0")) if view.slot == 1)


def leases(world: World):
    return [lease for _, view, lease in filter(None, world.queries.leases("e/0", "")) if view.slot == 1]


def broken(world: World, after: int = 0):
    return [
        event.lease
        for event in world.queries.events_after(after)
        if event.kind is EventKind.LEASE_BROKEN and event.block.slot == 1
    ]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 60), st.sampled_from([0, 0, 1, 7])), max_size=50))
def test_too_many_leases_break_by_priority_with_receipts_and_events(found):
    world, model = patient(), AllLeases(MAX_LEASES)
    seen = 0
    for count, (wanted, duration, pause) in enumerate(found):
        holder = f"request/{count}"
        before = model.holders() | {holder}
        admission = world.cache(PROMPT, request_id=str(count), retention=retain(wanted, float(duration)))
        # Of the block that is used its clock stands until now.
        model.grant(Requested(holder, wanted, None, float(duration)), world.now, is_used=True)
        gone = before - model.holders()
        if holder in gone:
            assert admission.receipts[0].outcome is Outcome.REJECTED
            assert "too many leases of a higher priority or more time" in admission.receipts[0].reason
        else:
            assert admission.receipts[0].outcome is Outcome.GRANTED
        assert {lease.holder for lease in broken(world, seen)} == gone - {holder}
        seen = world.queries.last_event
        model.start(world.now)
        assert priority(world) == model.state()[0]
        world.now += pause
        model.advance(world.now)
        assert priority(world) == model.state()[0]
        assert {lease.holder for lease in leases(world)} == model.holders()


def test_the_lease_of_a_rule_breaks_before_a_higher_one_of_a_session():
    world = patient()
    rule = RetentionRule("low", 0, RuleMatch(salt="a"), RuleAction(priority=10))
    at_once(world.operators.create_rule(rule, validate_only=False))
    for count in range(MAX_LEASES):
        request = retain(50 + count, 1000.0 - 10 * count)
        world.cache(PROMPT, salt="a", session_id=str(count), retention=request)
    seen = world.queries.last_event
    world.cache(PROMPT, salt="a")
    assert broken(world, seen) == []
    assert min(lease.priority for lease in leases(world)) == 50


def test_what_a_request_wants_later_replaces_its_earlier_wish_whatever_others_wanted_meanwhile():
    world = patient()
    world.cache(PROMPT, request_id="r4", retention=retain(60, 60.0))
    world.cache(PROMPT, request_id="r5", retention=retain(55, 30.0))
    world.cache(PROMPT, request_id="r4", retention=retain(20, 60.0))
    assert priority(world) == 55
    world.now += 30
    assert priority(world) == 20


def test_a_lease_broken_for_one_of_a_higher_priority_has_an_event_with_the_cause():
    world = patient()
    for count in range(MAX_LEASES):
        world.cache(PROMPT, retention=retain(10 + count, 1000.0 - count))
    seen = world.queries.last_event
    assert len(leases(world)) == MAX_LEASES
    world.cache(PROMPT, retention=retain(90, 5.0))
    assert priority(world) == 90
    (event,) = [
        event
        for event in world.queries.events_after(seen)
        if event.kind is EventKind.LEASE_BROKEN and event.block.slot == 1
    ]
    assert (event.cause, event.lease.priority, event.lease.remaining) == (RemovalCause.TOO_MANY_LEASES, 10, 1000.0)


def test_a_request_for_blocks_with_too_many_leases_is_clipped():
    world = World(16, config=dataclasses.replace(CONFIG, lease_seconds=1e12))
    prompt = list(range(13))
    for count in range(MAX_LEASES):
        retention = Retention((RetentionRange(0, 4, 90 - count, 100.0 + count),))
        world.cache(prompt, retention=retention)
    receipt = world.cache(prompt, retention=retain(20, 1000.0)).receipts[0]
    assert receipt.outcome is Outcome.CLIPPED
    assert receipt.reason == "1 of its blocks have too many leases of a higher priority or more time"
    assert receipt.num_blocks == 3


def test_an_endless_lease_of_a_session_ends_a_day_after_its_last_request():
    world = patient()
    admission = world.cache(PROMPT, session_id="chat", retention=retain(80))
    for receipt in admission.receipts:
        assert (receipt.outcome, receipt.duration) == (Outcome.CLIPPED, MAX_SESSION_SECONDS)
        assert receipt.reason == "the duration is at most 86400 s"
    world.now = MAX_SESSION_SECONDS - 1
    world.cache(PROMPT, session_id="chat", retention=retain(80))
    world.now = 2 * MAX_SESSION_SECONDS - 2
    assert priority(world) == 80
    world.now += 1
    assert priority(world) == 35
    # A request alone may be without an end.
    world.cache(PROMPT, retention=retain(80))
    world.now *= 10
    assert priority(world) == 80


@pytest.mark.parametrize(
    "options",
    [
        lambda count: {"session_id": str(count), "retention": retain(80)},
        lambda count: {"session_id": str(count), "retention": retain(80, 3600.0)},
        lambda count: {"request_id": str(count), "retention": retain(80, 86400.0)},
        lambda count: {"request_id": str(count), "retention": retain(count % 101, 86400.0 - count)},
    ],
    ids=["sessions", "sessions with an end", "requests with an end", "of all priorities"],
)
def test_the_cost_of_an_admission_is_independent_of_requests_for_its_prefix(options):
    world = World(64, config=dataclasses.replace(CONFIG, lease_seconds=1e12, event_history=100))
    prompt = list(range(33))
    world.cache(prompt)

    def admit(first, last):
        for count in range(first, last):
            world.now += 0.01
            assert world.admit(prompt, f"a{count}", **options(count)).admitted
            world.release(f"a{count}")

    admit(0, 200)
    few = work_of(lambda: admit(200, 220))
    admit(220, 1000)
    assert work_of(lambda: admit(1000, 1020)) < 1.5 * few


def test_too_many_leases_of_a_record_are_restored_in_linear_work(worlds):
    def work(number):
        world = patient()
        world.cache(PROMPT, session_id="u", retention=retain(60))
        (record,) = [record for record in world.queries.records("e") if record.slot == 1]
        leases = tuple(LeaseRecord(f"session/{one}", 60, None, None) for one in range(number))
        world.lose_manager()
        world.now += 1
        spent = work_of(lambda: world.manager.register_executor(world.spec(), [record._replace(leases=leases)]))
        assert priority(world) == 60
        (record,) = [record for record in world.queries.records("e") if record.slot == 1]
        assert len(record.leases) <= MAX_LEASES
        return spent

    assert work(1000) < 2.2 * work(500)
    # The store does not know of these leases.
    worlds.clear()


def test_the_clock_of_leases_never_runs_back():
    book = World().manager._state.leases
    book.advance(10.0)
    book.advance(4.0)
    assert book.now == 10.0
