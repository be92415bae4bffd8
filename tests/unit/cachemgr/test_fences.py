"""Calls that name a sequence by its id are for the scheduler that admitted it, under its newest epoch."""

from collections.abc import Callable

import pytest

from cachemgr.api import Freed, SchedulerEpoch
from cachemgr.dump import state_hash
from cachemgr.errors import SequenceExistsError, StaleSchedulerError, UnknownSchedulerError, UnknownSequenceError
from cachemgr.manager import CacheManager
from tests.unit.cachemgr.world import World

CALLS: dict[str, Callable[[CacheManager, SchedulerEpoch], object]] = {
    "extend": lambda manager, caller: manager.extend(caller, "a", 20),
    "truncate": lambda manager, caller: manager.truncate(caller, "a", 9),
    "fork": lambda manager, caller: manager.fork(caller, "a", "b"),
    "hold": lambda manager, caller: manager.hold(caller, "a", "me", 5.0),
    "release": lambda manager, caller: manager.release(caller, "a"),
    "estimate": lambda manager, caller: manager.estimate(caller, "a", 1, 0),
}


@pytest.fixture
def world() -> World:
    world = World(8)
    world.run(list(range(9)), "a")
    return world


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_older_epoch_of_a_scheduler_changes_nothing(
    world: World, call: Callable[[CacheManager, SchedulerEpoch], object]
):
    old = world.caller
    world.start_scheduler()
    # The id in use again, as after a retry that came too late.
    world.run(list(range(9)), "a")
    before = state_hash(world.manager.state())
    with pytest.raises(StaleSchedulerError):
        call(world.manager, old)
    with pytest.raises(UnknownSchedulerError):
        call(world.manager, SchedulerEpoch("nobody", 1))
    assert state_hash(world.manager.state()) == before
    call(world.manager, world.caller)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_sequence_of_another_scheduler_is_unknown(
    world: World, call: Callable[[CacheManager, SchedulerEpoch], object]
):
    stranger = SchedulerEpoch("other", 1)
    world.manager.register_scheduler(*stranger)
    before = state_hash(world.manager.state())
    if call in (CALLS["release"], CALLS["truncate"]):
        assert call(world.manager, stranger) == Freed(found=False)
    else:
        with pytest.raises(UnknownSequenceError):
            call(world.manager, stranger)
    assert state_hash(world.manager.state()) == before


def test_a_fork_is_repeated_only_by_its_own_scheduler(world: World):
    fork = world.manager.fork(world.caller, "a", "b")
    assert world.manager.fork(world.caller, "a", "b") == fork
    stranger = SchedulerEpoch("other", 1)
    world.manager.register_scheduler(*stranger)
    with pytest.raises(SequenceExistsError):
        world.manager.fork(stranger, "a", "b")


def test_an_executor_is_told_of_the_schedulers_whose_lease_has_not_ended():
    world = World()
    world.manager.register_scheduler("other", 1)
    assert sorted(world.manager.scheduler_ids()) == ["other", "s"]
    world.now += world.config.lease_seconds / 2
    world.manager.register_scheduler("other", 2)
    world.now += world.config.lease_seconds / 2 + 1
    world.manager.expire()
    assert world.manager.scheduler_ids() == ["other"]
