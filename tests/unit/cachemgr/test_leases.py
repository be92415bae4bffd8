"""Who is gone loses what it held; what was computed stays findable while its device lives."""

import dataclasses
import gc

import pytest

from cachemgr.blocks.block import Block
from cachemgr.errors import StaleExecutorError, UnknownExecutorError, UnknownSchedulerError
from tests.support.in_process_manager import World
from tests.support.random_operations import small_steps


def running():
    """Sequence "a" with nine computed tokens."""
    world = World()
    world.run(list(range(9)), "a")
    return world


def test_a_silent_scheduler_loses_its_sequences_and_their_blocks_stay_cached():
    world = running()
    world.now = 9.0
    world.manager.renew_executor("e", 1, 1)
    world.now = 10.1
    world.manager.expire()
    assert list(world.queries.sequences()) == []
    assert world.free == 8
    world.check()
    with pytest.raises(UnknownSchedulerError):
        world.manager.sync(world.next_sync())
    world.start_scheduler()
    assert world.cached_tokens(list(range(9))) == 8


def test_a_sync_and_an_admission_keep_the_scheduler():
    world = World()
    world.now = 8.0
    world.sync()
    world.now = 16.0
    world.manager.renew_executor("e", 1, 1)
    world.admit([1], "a")
    world.now = 24.0
    world.manager.renew_executor("e", 1, 1)
    world.now = 25.0
    world.manager.expire()
    assert len(list(world.queries.sequences())) == 1


@pytest.mark.parametrize("is_silent", [False, True])
def test_what_a_scheduler_held_that_is_gone_is_freed_a_part_at_a_time_and_nothing_can_name_it(is_silent):
    world = World(12)
    for name in "abc":
        world.run([ord(name)] * 9, name)
    with small_steps():
        if is_silent:
            world.now = 9.0
            world.renew()
            world.now = 11.0
            world.manager.expire()
        world.start_scheduler()
        assert [pool.used_blocks for pool in world.queries.pools()] == [6]
        assert list(world.queries.sequences()) == []
        assert world.manager.is_behind
        world.check()
        # The id is free, and what is already freed can be found.
        assert world.admit([ord("a")] * 9, "a").cached_tokens == 8
        world.check()
        assert [pool.used_blocks for pool in world.queries.pools()] == [9]
        world.manager.expire()
        world.check()
        assert world.manager.is_behind
        world.manager.expire()
        assert not world.manager.is_behind
    assert [pool.used_blocks for pool in world.queries.pools()] == [3]
    assert [sequence.sequence_id for sequence in world.queries.sequences()] == ["a"]
    world.check()


def test_a_scheduler_that_is_gone_may_have_had_sequences_in_a_lost_executor():
    world = World(12)
    for name in "abc":
        world.run([ord(name)] * 9, name)
    with small_steps():
        world.manager.register_scheduler("s", 2)
        world.start_executor()
        world.check()
        while world.manager.is_behind:
            world.manager.expire()
            world.check()
    assert world.free == 12


def test_a_silent_executor_loses_its_pool_and_its_sequences_are_void():
    world = running()
    handle = world.live["a"].handle
    world.now = 9.0
    world.sync()
    world.now = 10.1
    world.manager.expire()
    assert world.queries.pools() == []
    with pytest.raises(UnknownExecutorError):
        world.admit([1])
    answer = world.sync()
    assert answer.void_handles == [handle]
    assert answer.free_blocks == 0
    world.sync()
    assert list(world.queries.sequences()) == []


def test_a_lost_pool_leaves_nothing_to_the_garbage_collector():
    world = World(8)
    world.cache(list(range(13)))
    world.cache([*range(8), 50, 51, 52, 53, 54])
    gc.collect()
    gc.disable()
    try:
        world.start_executor()
        assert not [one for one in gc.get_objects() if type(one) is Block and one.key]
    finally:
        gc.enable()


def test_a_newer_executor_epoch_voids_everything_of_the_older_and_its_copies():
    world = World()
    world.cache(list(range(8)))
    world.admit(list(range(8)), "b")
    assert world.live["b"].copies
    world.run([50, 51], "c")
    world.manager.hold(world.caller, "c", "me", 5.0)
    world.finish("c")
    ticket, handle = world.live["b"].copies[0].ticket, world.live["b"].handle
    world.executor_epoch = 1
    world.start_executor()
    world.check()
    assert world.journal.epoch == 2
    assert world.free == 8
    assert world.manager.confirm_transfers("e", 2, [ticket], []) == 1
    assert world.manager.sync(world.next_sync()).void_handles == []
    assert handle not in {view.sequence_handle for view in world.queries.sequences()}
    assert world.cached_tokens(list(range(8))) == 0


def test_slots_of_a_lost_registration_are_given_away_only_after_its_old_sequences_are_released():
    world = running()
    world.now = 9.0
    world.sync()
    world.now = 10.1
    world.manager.expire()
    world.now = 10.2
    world.manager.register_executor(dataclasses.replace(world.spec(), last_write_steps=()))
    assert not world.admit([1], "b").admitted
    world.sync()
    assert not world.admit([1], "b").admitted
    world.sync()
    assert world.admit([1], "b").admitted
    world.check()


def test_an_older_executor_epoch_counts_again_once_the_lease_of_the_newer_has_run_out():
    """The clock that epochs are taken from may have gone back while the executor was down."""
    world = running()
    spec = world.spec()
    world.start_executor()
    with pytest.raises(StaleExecutorError):
        world.manager.register_executor(spec)
    world.expire_executor()
    world.manager.register_executor(spec)
    world.executor_epoch = spec.executor_epoch
    world.start_scheduler()
    assert world.run([1, 2, 3], "after").cached_tokens == 0
    world.check()
