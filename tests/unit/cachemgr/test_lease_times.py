"""Leases in time: the start of their clock, their end, and their events."""

import dataclasses
from random import Random

from cachemgr.blocks.block import Block
from cachemgr.retention import leases
from cachemgr.retention.leases import Deadlines, Lease
from cachemgr.retention.priority import RetentionRequest
from cachemgr.slices import at_once
from cachemgr.types import BlockFilter, EventKind, RemovalCause, Retention, RetentionRange
from tests.support.in_process_manager import CONFIG, World, retain

PROMPT = [1, 2, 3, 4, 5]
LEASES = (EventKind.LEASE_GRANTED, EventKind.LEASE_EXPIRED, EventKind.LEASE_BROKEN)


def priorities(world):
    world.manager.expire()
    return {view.slot: view.priority for _, view in filter(None, world.queries.blocks("e/0"))}


def first(world):
    return priorities(world)[1]


def lease_events(world, after=0):
    events = [event for event in world.queries.events_after(after) if event.kind in LEASES]
    return [(event.kind, event.block.slot, event.lease.holder, event.lease.priority) for event in events]


def patient(num_blocks=8):
    """A world in which no process is lost for being silent."""
    return World(num_blocks, config=dataclasses.replace(CONFIG, lease_seconds=1e9))


def test_a_session_does_not_replace_the_lease_of_a_request_with_the_same_name():
    world = patient()
    world.cache(PROMPT, request_id="chat", retention=retain(80))
    world.cache(PROMPT, session_id="chat", retention=retain(10))
    assert first(world) == 80


def test_a_later_attempt_of_a_request_replaces_its_lease():
    world = patient()
    world.cache(PROMPT, request_id="a", retention=retain(80, 5.0))
    world.cache(PROMPT, request_id="a", retention=retain(60, 9.0))
    assert first(world) == 60


def test_the_end_of_a_lease_keeps_the_time_of_last_use():
    world = patient(4)
    world.cache([10, 11, 12, 13])
    world.cache([20, 21, 22, 23], retention=retain(80, 1.0))
    world.cache([30, 31, 32, 33])
    world.now = 1.0
    world.manager.expire()
    world.check()
    lost = []
    for count in (8, 12, 16):
        world.admit([99] * count, f"n{count}", no_store=True)
        world.release(f"n{count}")
        lost.append(world.first_tokens())
    assert lost == [{20, 30}, {30}, set()]


def test_a_longer_block_takes_over_the_leases_of_the_shorter_one_that_it_covers():
    world = patient()
    world.cache([1, 2], session_id="s", retention=retain(80, 10.0))
    world.now = 4.0
    world.cache([1, 2, 3], retention=retain(50))
    world.check()
    assert list(priorities(world).values()) == [80]
    world.now = 10.0
    assert list(priorities(world).values()) == [50]


def test_leases_have_events_when_granted_ended_and_broken():
    world = patient(4)
    world.cache(PROMPT, session_id="s", retention=retain(80, 5.0))
    holder = "session/s"
    granted = [(EventKind.LEASE_GRANTED, slot, holder, 80) for slot in (1, 2)]
    assert lease_events(world) == granted
    before = world.queries.last_event
    world.now = 5.0
    world.manager.expire()
    expired = lease_events(world, before)
    assert sorted(expired) == [(EventKind.LEASE_EXPIRED, slot, holder, 80) for slot in (1, 2)]

    world.cache(PROMPT, session_id="s", retention=retain(60, 5.0))
    before = world.queries.last_event
    at_once(world.operators.purge(BlockFilter(), validate_only=False))
    broken = [event for event in world.queries.events_after(before) if event.kind is EventKind.LEASE_BROKEN]
    assert [event.cause for event in broken] == [RemovalCause.PURGED] * len(broken)
    assert {event.lease.holder for event in broken} == {holder}
    assert all(event.lease.remaining == 5.0 for event in broken)
    world.now = 100.0
    world.manager.expire()
    assert lease_events(world, before) == [(EventKind.LEASE_BROKEN, event.block.slot, holder, 60) for event in broken]


def test_an_eviction_breaks_leases_before_it_removes_the_block():
    world = patient(3)
    world.cache([1, 2, 3, 4], retention=retain(80, 50.0))
    before = world.queries.last_event
    world.cache([9] * 12, no_store=True)
    kinds = [(event.kind, event.cause) for event in world.queries.events_after(before)]
    assert kinds == [(EventKind.LEASE_BROKEN, RemovalCause.EVICTED), (EventKind.REMOVED, RemovalCause.EVICTED)]


def test_leases_of_a_promised_block_that_is_never_computed_end_with_it():
    world = patient()
    world.admit([1, 2, 3, 4, 5, 6, 7, 8, 9], "writer")
    world.admit([1, 2, 3, 4, 5, 6, 7, 8, 9], "reader", retention=retain(80, 5.0))
    before = world.queries.last_event
    world.release("writer")
    # The reader is void, and is released.
    world.sync()
    assert world.free == 8
    assert world.queries.events_after(before) == []
    world.now = 10.0
    world.manager.expire()
    assert world.queries.events_after(before) == []


def test_decode_blocks_have_a_duration_of_their_own():
    world = patient()
    retention = Retention((RetentionRange(0, None, 80, 5.0),), 60, 20.0)
    world.cache([1, 2, 3, 4], generate=4, retention=retention)
    world.now = 5.0
    assert sorted(priorities(world).values()) == [35, 60]
    world.now = 20.0
    assert sorted(priorities(world).values()) == [35, 35]


def test_leases_end_in_the_order_of_their_deadlines_whatever_their_durations():
    book, ended = Deadlines(), []
    random = Random(1)
    now, expected = 0.0, []
    for number in range(2000):
        now += random.random()
        lease = Lease(None, Block(number), RetentionRequest("session/x", 1, None))
        book.add(lease, now, random.choice([1.0, 5.0, 30.0]))
        expected.append((lease.deadline, number))
        ended += [(one.deadline, one.block.index) for one in book.due(now, 2000)]
    ended += [(one.deadline, one.block.index) for one in book.due(now + 100, 2000)]
    assert ended == sorted(expected)
    assert len(book) == 0


def test_very_many_leases_end_a_part_per_call(monkeypatch):
    monkeypatch.setattr(leases, "ENDED_AT_A_TIME", 2)
    world = patient()
    world.cache(list(range(12)), retention=Retention((RetentionRange(0, None, 80, 5.0),)))
    world.cache([40, 41, 42, 43], retention=Retention((RetentionRange(0, None, 90, 6.0),)))
    world.now = 6.0
    left = []
    while not left or world.manager.is_behind:
        world.manager.expire()
        left.append(sorted(view.priority for _, view in filter(None, world.queries.blocks("e/0"))))
        assert world.queries.check_pool() == []
    assert left == [[35, 35, 80, 90], [35, 35, 35, 35]]


def test_a_lease_past_its_deadline_covers_no_other(monkeypatch):
    monkeypatch.setattr(leases, "ENDED_AT_A_TIME", 1)
    world = patient()
    world.cache([1, 2, 3, 4], retention=Retention((RetentionRange(0, None, 90, 5.0),)))
    world.cache([5, 6, 7, 8], retention=Retention((RetentionRange(0, None, 90, 5.0),)))
    world.now = 20.0
    later = Retention((RetentionRange(0, None, 60, 5.0),))
    world.cache([5, 6, 7, 8], retention=later)
    while world.manager.is_behind:
        world.manager.expire()
    assert sorted(priorities(world).values()) == [35, 60]


def test_replaced_leases_do_not_pile_up():
    book, before = Deadlines(), None
    for number in range(50_000):
        lease = Lease(None, Block(number), RetentionRequest("session/x", 1, 1e9))
        book.add(lease, float(number), 1e9)
        if before is not None:
            before.block = None
        before = lease
    assert len(book) <= 10_001
