"""Syncs: repeated, refused, or applied as a whole."""

import dataclasses

import pytest

from cachemgr.errors import (
    InvalidField,
    ManagerRestartedError,
    StaleSchedulerError,
    SyncNumberError,
    UnknownSchedulerError,
)
from cachemgr.types import ManagerConfig
from tests.support.in_process_manager import World


def started():
    """Sequence "a" of nine known tokens in 12 tokens of capacity, five of them computed and reported."""
    world = World()
    world.admit(list(range(9)), "a")
    world.step()
    world.sync()
    return world


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"manager_epoch": 2}, ManagerRestartedError),
        ({"scheduler_epoch": 2}, StaleSchedulerError),
        ({"scheduler_id": "other"}, UnknownSchedulerError),
        ({"sync_number": 3}, SyncNumberError),
        ({"sync_number": 0}, SyncNumberError),
    ],
    ids=str,
)
def test_a_sync_of_another_time_is_refused_with_its_reason(change, error):
    world = started()
    with pytest.raises(error):
        world.manager.sync(dataclasses.replace(world.next_sync(), **change))


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"computed_tokens": []}, "computed_tokens"),
        ({"new_token_counts": [0, 0]}, "new_token_counts"),
        ({"new_token_counts": [1]}, "new_token_ids"),
        ({"new_token_ids": [1]}, "new_token_ids"),
        ({"computed_tokens": [4]}, "computed_tokens[0]"),
        ({"computed_tokens": [10]}, "computed_tokens[0]"),
        ({"computed_tokens": [13], "new_token_counts": [8], "new_token_ids": [1] * 8}, "computed_tokens[0]"),
        ({"trimmed_handles": ["a"], "trimmed_capacity_tokens": []}, "trimmed_capacity_tokens"),
        ({"trimmed_handles": ["a"], "trimmed_capacity_tokens": [8]}, "trimmed_capacity_tokens[0]"),
        ({"trimmed_handles": ["a", "a"], "trimmed_capacity_tokens": [12, 12]}, "trimmed_handles"),
        ({"released_handles": ["a", "a"]}, "released_handles"),
        ({"handles": ["a", "a"], "computed_tokens": [5, 5], "new_token_counts": [0, 0]}, "handles"),
    ],
    ids=str,
)
def test_columns_that_do_not_fit_are_refused_and_nothing_changes(columns, field):
    world = started()
    handle = world.live["a"].handle
    request = world.next_sync()
    named = {name: [handle if entry == "a" else entry for entry in column] for name, column in columns.items()}
    before = (list(world.manager.queries.sequences()), world.manager.queries.pools(), world.manager.queries.last_event)
    with pytest.raises(InvalidField) as refused:
        world.manager.sync(dataclasses.replace(request, **named))
    assert list(refused.value.fields) == [field]
    assert (
        list(world.manager.queries.sequences()),
        world.manager.queries.pools(),
        world.manager.queries.last_event,
    ) == before
    world.manager.sync(request)
    world.check()


def test_repeating_a_sync_gives_its_answer_and_does_nothing():
    world = World()
    world.admit(list(range(8)), "a")
    world.step(20)
    request = world.next_sync()
    answer = world.manager.sync(request)
    assert answer.extended_slots
    free = world.free
    assert world.manager.sync(request) == answer
    assert world.free == free
    world.check()


def test_unknown_handles_are_reported_and_are_no_error():
    world = started()
    answer = world.manager.sync(
        dataclasses.replace(
            world.next_sync(),
            handles=[4],
            computed_tokens=[1],
            new_token_counts=[2],
            new_token_ids=[1, 2],
            released_handles=[5],
            trimmed_handles=[6],
            trimmed_capacity_tokens=[1],
        ),
    )
    assert answer.unknown_handles == [4, 5, 6]
    world.check()


def test_new_tokens_go_to_their_sequences():
    world = World(12)
    for name in ("a", "b"):
        world.admit([ord(name)] * 3, name)
    for _ in range(6):
        world.step()
        world.sync()
        world.check()
    a, b = (world.live[name].tokens for name in ("a", "b"))
    world.finish("a")
    world.finish("b")
    assert world.cached_tokens(a) == len(a) - 1
    assert world.cached_tokens(b) == len(b) - 1


def test_capacity_grows_two_tokens_ahead_of_what_is_computed():
    world = World()
    world.admit([1, 2], "a")
    for computed in range(2, 20):
        world.step()
        world.sync()
        assert world.live["a"].computed == computed
        assert world.live["a"].capacity == -(-(computed + 2) // 4) * 4


def test_capacity_ahead_stops_at_the_watermark_and_need_does_not():
    world = World(8, config=ManagerConfig(capacity_ahead_tokens=16, free_watermark=0.25))
    world.admit([1, 2], "a")
    world.step()
    world.sync()
    assert world.live["a"].capacity == 20
    world.admit([3], "b")
    world.sync()
    assert world.free == 2
    live = world.live["a"]
    while live.computed < 19:
        world.step(names={"a"})
        world.sync()
    assert world.free == 1
    assert live.capacity == 24


def test_blocks_that_are_missing_are_counted_and_nobody_gets_any_ahead():
    world = World(3, config=ManagerConfig(capacity_ahead_tokens=8, free_watermark=0))
    world.admit([1, 2, 3], "a")
    world.admit([4], "b")
    world.step()
    answer = world.sync()
    assert answer.blocks_short == 0
    assert world.free == 0
    live = world.live["a"]
    while live.computed < live.capacity:
        world.step()
        answer = world.sync()
    # One for each of them.
    assert answer.blocks_short == 2
    assert answer.free_blocks == 0
    world.check()


def test_trimmed_capacity_comes_back_and_goes_to_who_needs_it():
    world = World(4, config=ManagerConfig(capacity_ahead_tokens=4, free_watermark=0))
    world.admit([1], "a")
    world.admit([2, 3, 4], "b")
    assert world.free == 0
    world.trimmed[world.live["a"].handle] = 4
    del world.live["a"].tables[0][1:]
    world.sync()
    assert world.live["a"].capacity == 4
    assert world.free == 1
    world.check()


def test_a_report_and_a_release_in_one_sync_store_what_was_computed():
    world = World()
    world.admit(list(range(9)), "a")
    world.step(20)
    world.leave(world.live["a"])
    world.sync()
    assert world.free == 8
    assert sorted(len(block.token_ids) for block in world.journal.blocks.values()) == [1, 4, 4]
    world.check()


def test_stored_blocks_remember_the_step_of_their_sync():
    world = World()
    world.admit(list(range(9)), "a")
    world.step(5)
    world.sync()
    world.step(3)
    world.sync()
    assert [block.stored_step for block in world.manager.queries.records("e")] == [1, 2]


def test_free_blocks_are_the_least_over_the_groups():
    world = World(8, windows=(None, 3))
    world.admit(list(range(9)), "a")
    world.step(20)
    answer = world.sync()
    assert answer.free_blocks == min(pool.free_blocks for pool in world.manager.queries.pools()) == 5
    assert answer.total_blocks == 8
