"""Calls that name a sequence by its id are for the scheduler that admitted it, under its newest epoch."""

from collections.abc import Callable

import pytest

from cachemgr.errors import SequenceExistsError, StaleSchedulerError, UnknownSchedulerError, UnknownSequenceError
from cachemgr.manager import CacheManager
from cachemgr.operators.state_dump import state_hash
from cachemgr.types import Freed, HintAction, Hints, Prefix, SchedulerEpoch, SyncRequest
from tests.support.in_process_manager import World

CALLS: dict[str, Callable[[CacheManager, SchedulerEpoch], object]] = {
    "extend": lambda manager, caller: manager.extend(caller, "a", 20),
    "truncate": lambda manager, caller: manager.truncate(caller, "a", 9),
    "fork": lambda manager, caller: manager.fork(caller, "a", "b"),
    "hold": lambda manager, caller: manager.hold(caller, "a", "me", 5.0),
    "release": lambda manager, caller: manager.release(caller, "a"),
    "estimate": lambda manager, caller: manager.queries.estimate(caller, "a", 1, 0),
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
    before = state_hash(world.queries.state())
    with pytest.raises(StaleSchedulerError):
        call(world.manager, old)
    with pytest.raises(UnknownSchedulerError):
        call(world.manager, SchedulerEpoch("nobody", 1))
    assert state_hash(world.queries.state()) == before
    call(world.manager, world.caller)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_sequence_of_another_scheduler_is_unknown(
    world: World, call: Callable[[CacheManager, SchedulerEpoch], object]
):
    stranger = SchedulerEpoch("other", 1)
    world.manager.register_scheduler(*stranger)
    before = state_hash(world.queries.state())
    if call in (CALLS["release"], CALLS["truncate"]):
        assert call(world.manager, stranger) == Freed(found=False)
    else:
        with pytest.raises(UnknownSequenceError):
            call(world.manager, stranger)
    assert state_hash(world.queries.state()) == before


def test_a_fork_is_repeated_only_by_its_own_scheduler(world: World):
    fork = world.manager.fork(world.caller, "a", "b")
    assert world.manager.fork(world.caller, "a", "b") == fork
    stranger = SchedulerEpoch("other", 1)
    world.manager.register_scheduler(*stranger)
    with pytest.raises(SequenceExistsError):
        world.manager.fork(stranger, "a", "b")


def test_scheduler_ids_are_those_whose_lease_has_not_ended():
    world = World()
    world.manager.register_scheduler("other", 1)
    assert sorted(world.queries.scheduler_ids()) == ["other", "s"]
    world.now += world.config.lease_seconds / 2
    world.manager.register_scheduler("other", 2)
    world.now += world.config.lease_seconds / 2 + 1
    world.manager.expire()
    assert world.queries.scheduler_ids() == ["other"]


def test_a_scheduler_cancels_no_copy_of_another_scheduler():
    world = World()
    world.cache([*range(4), 10, 11, 12])
    (copy,) = world.admit([*range(4), 10, 11, 20, 21, 22], "b").transfers
    cancel_as_a_stranger(world, copy.ticket)
    assert world.sync().void_handles == []
    world.step()
    world.confirm()
    world.check()


def test_a_scheduler_cancels_no_copy_that_the_executor_runs_by_itself():
    world = World(8, host_blocks=8)
    world.cache(list(range(8)))
    demote = Hints("0.1", "m", (HintAction("one", "Demote", "0.1", {"tier": "host"}),))
    world.operators.hint(Prefix(tuple(range(8))), demote, None)
    copies = world.queries.executor_transfers("e")
    assert copies
    cancel_as_a_stranger(world, *(copy.ticket for copy in copies))
    assert world.queries.executor_transfers("e") == copies


def cancel_as_a_stranger(world: World, *tickets: int) -> None:
    """Another scheduler says that it has not sent these copies; nothing but its own counters changes."""
    world.manager.register_scheduler("other", 1)
    before = blocks_and_tickets(world)
    world.manager.sync(SyncRequest("other", 1, world.manager.epoch, 1, cancelled_tickets=tickets))
    assert blocks_and_tickets(world) == before
    world.check()


def blocks_and_tickets(world: World) -> list[str]:
    return [line for line in world.queries.state() if line.startswith(('{"kind":"block"', '{"kind":"ticket"'))]
