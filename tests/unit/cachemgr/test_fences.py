"""Calls that name a sequence by its id are for the scheduler that admitted it, under its newest epoch."""

import pytest

from cachemgr.errors import SequenceExistsError
from cachemgr.types import HintAction, Hints, Prefix, SchedulerEpoch, SyncRequest
from tests.support.in_process_manager import World


def test_a_fork_is_repeated_only_by_its_own_scheduler():
    world = World()
    world.run(list(range(9)), "a")
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
