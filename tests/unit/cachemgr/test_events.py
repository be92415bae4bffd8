"""Removal events and their causes, and event numbers out of range."""

import pytest

from cachemgr.errors import EventsGoneError
from cachemgr.slices import at_once
from cachemgr.types import BlockFilter, EventKind, ManagerConfig, RemovalCause
from tests.support.in_process_manager import World


def test_every_lost_block_is_reported_with_its_cause():
    world = World(4)
    world.cache([1, 2])
    world.cache([1, 2, 3, 4, 5])
    before = world.queries.last_event
    world.cache([50] * 14, no_store=True)
    world.cache([60, 61])
    at_once(world.operators.purge(BlockFilter(), validate_only=False))
    world.cache([70, 71])
    world.start_executor()
    causes = [event.cause for event in world.queries.events_after(0) if event.kind == EventKind.REMOVED]
    assert causes == [
        RemovalCause.COVERED,
        RemovalCause.EVICTED,
        RemovalCause.EVICTED,
        RemovalCause.PURGED,
        RemovalCause.EXECUTOR_LOST,
    ]
    assert before < world.queries.last_event


def test_too_old_a_number_and_one_that_is_not_there_yet_are_out_of_range():
    world = World(config=ManagerConfig(event_history=4))
    world.cache(list(range(20)))
    world.cache([90, 91])
    last = world.queries.last_event
    assert last > 4
    assert [event.number for event in world.queries.events_after(last - 4)] == list(range(last - 3, last + 1))
    assert [event.number for event in world.queries.events_after(last - 4, limit=2)] == [last - 3, last - 2]
    for number in (0, last - 5, last + 1):
        with pytest.raises(EventsGoneError) as refused:
            world.queries.events_after(number)
        assert refused.value.metadata == {"oldest": str(last - 3), "newest": str(last)}
