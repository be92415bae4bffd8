"""New weights of an executor: which blocks match then, which are evicted first, and the state after a restart."""

import pytest

from cachemgr.errors import StaleExecutorError, UnknownExecutorError
from cachemgr.operators.state_dump import state_hash
from cachemgr.slices import at_once
from cachemgr.types import EventKind, ForgetTarget, MissReason, Prefix, RemovalCause
from protos.errors import InvalidField
from tests.support.in_process_manager import World, retain

PROMPT = list(range(10, 18))


def update(world: World, weight_version: str) -> int:
    found = at_once(world.update_weights(weight_version))
    world.sync()
    world.check()
    return found


def priorities(world: World) -> list[int]:
    return sorted(view.priority for _, view in filter(None, world.queries.blocks("e/0")) if view.key)


def holders(world: World) -> list[str]:
    return [lease.holder for _, _, lease in filter(None, world.queries.leases("e/0", ""))]


def test_blocks_of_other_weights_match_no_prompt_and_match_again_when_these_are_back() -> None:
    world = World(8)
    world.cache(PROMPT)
    assert update(world, "v1") == 2
    assert world.found(PROMPT) == 0
    (found,) = world.queries.explain(Prefix(tuple(PROMPT)), 0)
    assert found.miss_reason is MissReason.OTHER_WEIGHTS
    world.cache(PROMPT)
    assert world.found(PROMPT) == 8
    assert update(world, "") == 2
    assert world.found(PROMPT) == 8


def test_blocks_of_other_weights_are_evicted_before_all_others_whatever_they_were_promised() -> None:
    world = World(8)
    world.cache(PROMPT, retention=retain(90))
    update(world, "v1")
    world.cache(PROMPT, retention=retain(1))
    # Four of the eight blocks are empty, and two are of other weights.
    world.cache(list(range(100, 124)))
    assert world.found(PROMPT) == 8
    update(world, "")
    assert world.found(PROMPT) == 0


def test_leases_of_blocks_of_other_weights_are_broken_and_said_to_be() -> None:
    world = World(8)
    world.cache(PROMPT, session_id="x", retention=retain(90, 30.0))
    first = world.queries.last_event
    update(world, "v1")
    events = world.queries.events_after(first, 100)
    broken = [(one.cause, one.lease.holder) for one in events if one.kind is EventKind.LEASE_BROKEN and one.lease]
    assert broken == [(RemovalCause.WEIGHTS_UPDATED, "session/x")] * 2
    assert holders(world) == ["weights"] * 2
    assert priorities(world) == [0, 0]
    update(world, "")
    assert holders(world) == []
    assert priorities(world) == [35, 35]


def test_a_sequence_of_before_stores_under_its_own_weights() -> None:
    world = World(8)
    world.admit(PROMPT, "a")
    world.step(4)
    at_once(world.manager.update_weights("e", world.executor_epoch, "v1"))
    world.step(20)
    world.finish("a")
    assert world.found(PROMPT) == 0
    at_once(world.manager.update_weights("e", world.executor_epoch, ""))
    assert world.found(PROMPT) == 8


def test_what_a_sequence_of_before_stores_is_evicted_before_all_others() -> None:
    world = World(8)
    world.admit(PROMPT, "a", retention=retain(90))
    world.step(4)
    at_once(world.manager.update_weights("e", world.executor_epoch, "v1"))
    world.step(20)
    world.finish("a")
    assert (set(priorities(world)), set(holders(world))) == ({0}, {"weights"})


def test_watchers_learn_the_new_version() -> None:
    world = World(8)
    first = world.queries.last_event
    update(world, "v1")
    [event] = world.queries.events_after(first, 10)
    assert event.executor is not None
    assert (event.kind, event.executor.weight_version) == (EventKind.EXECUTOR_REGISTERED, "v1")
    # Twice the same version is no change.
    before, state = world.queries.last_event, state_hash(world.queries.state())
    assert at_once(world.manager.update_weights("e", world.executor_epoch, "v1")) == 0
    assert (world.queries.last_event, state_hash(world.queries.state())) == (before, state)


def test_a_manager_that_starts_again_restores_blocks_of_all_weights_in_their_order() -> None:
    world = World(12)
    world.cache(PROMPT, retention=retain(90))
    update(world, "v1")
    world.cache(PROMPT, retention=retain(80))
    world.restart_manager()
    world.check()
    assert priorities(world) == [0, 0, 80, 80]
    assert world.found(PROMPT) == 8
    # The manager was away while the weights changed.
    world.weight_version = ""
    world.restart_manager()
    world.check()
    assert priorities(world) == [0, 0, 35, 35]
    assert world.found(PROMPT) == 8


def test_an_executor_that_starts_again_finds_the_blocks_of_its_first_weights_in_lower_tiers() -> None:
    world = World(4, host_blocks=8)
    world.cache(PROMPT)
    world.open_write_through_copies()
    world.run_executor_copies()
    update(world, "v1")
    world.cache(PROMPT)
    world.open_write_through_copies()
    world.run_executor_copies()
    assert priorities(world) == [0, 0, 35, 35]
    world.weight_version = ""
    world.start_executor()
    world.check()
    assert world.tiers_of(PROMPT) == ["host", "host"]
    assert priorities(world) == [0, 0, 35, 35]


def test_the_executor_that_registers_again_knows_its_weights_best() -> None:
    world = World(8)
    world.cache(PROMPT)
    at_once(world.manager.update_weights("e", world.executor_epoch, "v1"))
    world.manager.register_executor(world.spec())
    assert world.found(PROMPT) == 8
    assert holders(world) == []


def test_what_is_forgotten_is_forgotten_of_all_weights() -> None:
    world = World(12)
    world.cache(PROMPT)
    update(world, "v1")
    world.cache(PROMPT)
    update(world, "v2")
    receipt = at_once(world.operators.forget(ForgetTarget(prefix=Prefix(tuple(PROMPT))), validate_only=False))
    assert sum(receipt.removed.values()) == 4
    world.check()
    for version in ("", "v1"):
        update(world, version)
        assert world.found(PROMPT) == 0


def test_what_was_forgotten_before_it_was_read_is_forgotten_of_all_weights() -> None:
    world = World(12)
    world.cache(PROMPT)
    update(world, "v1")
    world.cache(PROMPT)
    world.begin_recovery()
    at_once(world.operators.forget(ForgetTarget(prefix=Prefix(tuple(PROMPT))), validate_only=False))
    world.end_recovery()
    assert list(world.queries.records("e")) == []


@pytest.mark.parametrize(
    ("executor_id", "epochs", "version", "error"),
    [
        ("nobody", 0, "v1", UnknownExecutorError),
        ("e", 1, "v1", StaleExecutorError),
        ("e", 0, "v" * 257, InvalidField),
    ],
)
def test_bad_updates_change_nothing(executor_id: str, epochs: int, version: str, error: type[Exception]) -> None:
    world = World(8)
    world.cache(PROMPT)
    before = state_hash(world.queries.state())
    with pytest.raises(error):
        at_once(world.manager.update_weights(executor_id, world.executor_epoch + epochs, version))
    assert state_hash(world.queries.state()) == before
