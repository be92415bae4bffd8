"""Schedulers and executors whose lease ends: references end, and cached blocks stay while their device lives."""

import dataclasses
import gc

import pytest

from cachemgr import manager
from cachemgr.blocks.block import Block
from cachemgr.errors import StaleExecutorError, UnknownExecutorError, UnknownSchedulerError
from cachemgr.sequences import release as lifecycle
from cachemgr.types import EventKind, RemovalCause
from tests.support.in_process_manager import World, retain
from tests.support.random_operations import live_long, small_steps
from tests.support.work import work_of


def running():
    """Sequence "a" with nine computed tokens."""
    world = World()
    world.run(list(range(9)), "a")
    return world


def test_a_scheduler_whose_lease_ends_loses_its_sequences_and_their_blocks_stay_cached():
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


def test_a_sync_and_an_admission_renew_the_scheduler():
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
def test_blocks_of_a_lost_scheduler_are_freed_in_parts_and_its_sequences_are_unknown(is_silent):
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
        # The id is free, and blocks that are already freed can be found.
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


def test_an_executor_whose_lease_ends_loses_its_pool_and_its_sequences_are_void():
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


def test_a_lost_pool_has_no_reference_cycles():
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


def test_slots_of_a_lost_registration_are_allocated_once_its_sequences_are_released():
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


def test_an_older_executor_epoch_counts_again_once_the_lease_of_the_newer_has_run_out():
    """The clock that epochs are taken from may have been set back while the executor was down."""
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


# Executors with very many blocks


def cached(blocks: int) -> World:
    world = World(blocks)
    for first in range(0, blocks * 4 - 40, 40):
        world.cache(list(range(first, first + 40)), retention=retain(80, 500.0))
    return world


def lose(world: World) -> None:
    world.now += 1000
    world.manager.expire()
    assert world.queries.pools() == []


def test_few_lost_blocks_have_an_event_each():
    world = cached(40)
    number, count = world.queries.last_event, world.queries.pools()[0].cached_blocks
    lose(world)
    events = world.queries.events_after(number)
    causes = [event.cause for event in events if event.kind is EventKind.REMOVED]
    assert causes == [RemovalCause.EXECUTOR_LOST] * count


def test_too_many_lost_blocks_have_no_events_but_that_of_their_executor(monkeypatch):
    monkeypatch.setattr(lifecycle, "MOST_REPORTED", 10)
    world = cached(40)
    number = world.queries.last_event
    lose(world)
    *others, last = world.queries.events_after(number)
    assert EventKind.REMOVED not in {event.kind for event in others}
    assert (last.kind, last.executor.executor_id, last.executor.executor_epoch) == (EventKind.EXECUTOR_LOST, "e", 1)
    # No lease of a lost block ends later.
    number = world.queries.last_event
    world.now += 1000
    world.manager.expire()
    assert world.queries.events_after(number) == []
    world.start_scheduler()
    world.start_executor()
    world.cache(list(range(40)))
    world.check()
    kinds = [event.kind for event in world.queries.events_after(number)]
    assert kinds[:2] == [EventKind.EXECUTOR_REGISTERED, EventKind.CREATED]


def test_the_work_of_a_loss_is_independent_of_the_blocks(monkeypatch):
    monkeypatch.setattr(lifecycle, "MOST_REPORTED", 10)

    monkeypatch.setattr(manager, "FREED_AT_A_TIME", 20)

    def cost(blocks: int) -> int:
        world = cached(blocks)
        world.now += 1000
        world.manager._state.leases.advance(world.now)
        return work_of(world.manager.expire)

    assert cost(400) < 1.2 * cost(100)


def test_the_memory_of_lost_blocks_is_freed(monkeypatch):
    monkeypatch.setattr(lifecycle, "MOST_REPORTED", 10)
    world = cached(200)
    gc.collect()
    before = number_of_blocks()
    assert before > 190
    gc.disable()
    try:
        lose(world)
        while world.manager.lost_blocks:
            world.manager.expire()
        assert number_of_blocks() < before - 180
    finally:
        gc.enable()


def number_of_blocks() -> int:
    return sum(type(one) is Block for one in gc.get_objects())


@pytest.mark.parametrize("seed", range(10))
def test_random_lives_continue_where_every_loss_is_too_large_to_report(seed, monkeypatch):
    monkeypatch.setattr(lifecycle, "MOST_REPORTED", 0)
    live_long(400_000 + seed, 250)
