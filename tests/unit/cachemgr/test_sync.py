"""Syncs: capacity, missing blocks and steps."""

from cachemgr.types import ManagerConfig
from tests.support.in_process_manager import World


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


def test_missing_blocks_are_counted_and_no_sequence_gets_capacity_ahead():
    world = World(3, config=ManagerConfig(capacity_ahead_tokens=8, free_watermark=0))
    world.admit([1, 2, 3], "a")
    world.admit([4], "b")
    world.step()
    answer = world.sync()
    assert answer.missing_blocks == 0
    assert world.free == 0
    live = world.live["a"]
    while live.computed < live.capacity:
        world.step()
        answer = world.sync()
    # One for each of them.
    assert answer.missing_blocks == 2
    assert answer.free_blocks == 0


def test_stored_blocks_remember_the_step_of_their_sync():
    world = World()
    world.admit(list(range(9)), "a")
    world.step(5)
    world.sync()
    world.step(3)
    world.sync()
    assert [block.stored_step for block in world.queries.records("e")] == [1, 2]


def test_free_blocks_are_the_least_over_the_groups():
    world = World(8, windows=(None, 3))
    world.admit(list(range(9)), "a")
    world.step(20)
    answer = world.sync()
    assert answer.free_blocks == min(pool.free_blocks for pool in world.queries.pools()) == 5
    assert answer.total_blocks == 8
