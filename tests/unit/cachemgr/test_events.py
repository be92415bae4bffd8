"""Events: numbered, without a gap, after a snapshot."""

import pytest

from cachemgr.errors import EventsGoneError
from cachemgr.types import BlockFilter, EventKind, ManagerConfig, RemovalCause
from tests.support.in_process_manager import World, wish


def kinds(events):
    return [event.kind.name for event in events]


def test_the_first_event_is_the_pool():
    world = World()
    (created,) = world.manager.queries.events_after(0)
    assert (created.number, created.kind, created.block.pool_id) == (1, EventKind.CREATED, "e/0")
    assert world.manager.queries.events_after(1) == []


def test_blocks_are_stored_parents_first():
    world = World()
    world.cache(list(range(10)))
    stored = world.manager.queries.events_after(1)
    assert kinds(stored) == ["STORED"] * 3
    assert [event.block.num_tokens for event in stored] == [4, 4, 2]
    assert stored[0].block.parent_key == b""
    assert [event.block.parent_key for event in stored[1:]] == [event.block.key for event in stored[:-1]]


def test_every_lost_block_is_reported_with_its_cause():
    world = World(4)
    world.cache([1, 2])
    world.cache([1, 2, 3, 4, 5])
    before = world.manager.queries.last_event
    world.cache([50] * 14, no_store=True)
    world.cache([60, 61])
    world.manager.operators.purge(BlockFilter(), validate_only=False)
    world.cache([70, 71])
    world.start_executor()
    causes = [event.cause for event in world.manager.queries.events_after(0) if event.kind == EventKind.REMOVED]
    assert causes == [
        RemovalCause.COVERED,
        RemovalCause.EVICTED,
        RemovalCause.EVICTED,
        RemovalCause.PURGED,
        RemovalCause.EXECUTOR_LOST,
    ]
    assert before < world.manager.queries.last_event


def test_a_wish_that_changes_a_priority_is_reported_once():
    world = World()
    world.cache([1, 2, 3, 4, 5], retention=wish(50))
    before = world.manager.queries.last_event
    world.cache([1, 2, 3, 4, 5])
    world.cache([1, 2, 3, 4, 5], retention=wish(10))
    assert world.manager.queries.events_after(before) == []
    world.cache([1, 2, 3, 4, 5], retention=wish(80))
    assert [(event.kind, event.block.priority) for event in world.manager.queries.events_after(before)] == [
        (EventKind.UPDATED, 80),
        (EventKind.LEASE_GRANTED, 80),
        (EventKind.UPDATED, 80),
        (EventKind.LEASE_GRANTED, 80),
    ]


def test_a_snapshot_and_the_events_behind_it_give_the_cache():
    world = World(6)
    world.cache(list(range(9)))
    snapshot = world.manager.queries.snapshot()
    assert kinds(snapshot.events) == ["CREATED", "STORED", "STORED", "STORED"]
    assert {event.number for event in snapshot.events} == {snapshot.number} == {world.manager.queries.last_event}
    known = {event.block.key for event in snapshot.events if event.kind == EventKind.STORED}
    world.cache(list(range(50, 64)))
    world.cache(list(range(70, 75)))
    number = snapshot.number
    for event in world.manager.queries.events_after(snapshot.number):
        number += 1
        assert event.number == number
        if event.kind == EventKind.STORED:
            known.add(event.block.key)
        elif event.kind == EventKind.REMOVED:
            known.remove(event.block.key)
    assert known == {block.key for block in world.manager.queries.records("e")}


def test_too_old_a_number_and_one_that_is_not_there_yet_are_out_of_range():
    world = World(config=ManagerConfig(event_history=4))
    world.cache(list(range(20)))
    world.cache([90, 91])
    last = world.manager.queries.last_event
    assert last > 4
    assert [event.number for event in world.manager.queries.events_after(last - 4)] == list(range(last - 3, last + 1))
    assert [event.number for event in world.manager.queries.events_after(last - 4, limit=2)] == [last - 3, last - 2]
    for number in (0, last - 5, last + 1):
        with pytest.raises(EventsGoneError) as refused:
            world.manager.queries.events_after(number)
        assert refused.value.metadata == {"oldest": str(last - 3), "newest": str(last)}
