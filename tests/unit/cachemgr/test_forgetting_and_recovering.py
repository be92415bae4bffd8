"""Forgetting what is not in the index yet: remembered blocks come back after the call has begun, or do not."""

import pytest

from cachemgr import forget_history
from cachemgr.admin_api import ForgetTarget, Prefix
from tests.unit.cachemgr.operators import small_steps
from tests.unit.cachemgr.test_forgetting import PROMPT, found, left
from tests.unit.cachemgr.world import World

TARGETS = [
    ForgetTarget(salt="a"),
    ForgetTarget(session_id="x"),
    ForgetTarget(prefix=Prefix(PROMPT[:5], salt="a")),
    ForgetTarget(prefix=Prefix(PROMPT[:2], salt="a")),
]


def cached() -> World:
    world = World(12)
    world.cache(PROMPT, salt="a", session_id="x")
    world.cache(PROMPT, salt="b", session_id="y")
    return world


def remembered(world: World):
    return list(world.journal.blocks.values())


def lose_executor(world: World) -> None:
    world.now += 2 * world.config.lease_seconds
    world.manager.expire()
    assert not world.manager.knows_executor("e")


def check_forgotten(world: World) -> None:
    world.check()
    assert [found(world, salt=salt) for salt in "ab"] == [0, 9]
    world.run_executor_copies()
    assert [left(world, salt) for salt in "ab"] == [0, 9]
    world.check()


@pytest.mark.parametrize("target", TARGETS)
def test_what_was_forgotten_before_the_executor_registered_does_not_come_back(target):
    world = cached()
    world.lose_manager()
    assert world.manager.forget(target, validate_only=True).removed == {}
    assert world.manager.forget(target, validate_only=False).removed == {}
    assert world.manager.register_executor(world.spec(), remembered(world)) == (3, 0)
    check_forgotten(world)


@pytest.mark.parametrize("target", TARGETS)
def test_what_was_forgotten_while_the_executor_was_lost_does_not_come_back(target):
    world = cached()
    lose_executor(world)
    world.manager.forget(target, validate_only=False)
    assert world.manager.register_executor(world.spec(), remembered(world)) == (3, 0)
    check_forgotten(world)


@pytest.mark.parametrize("target", TARGETS)
def test_an_executor_that_is_lost_during_the_call_brings_nothing_back(target):
    world = cached()
    with small_steps():
        steps = world.manager.forget_in_steps(target, validate_only=False)
        next(steps)
        lose_executor(world)
        world.manager.register_executor(world.spec(), remembered(world))
        for _ in steps:
            world.manager.go_on()
    check_forgotten(world)


@pytest.mark.parametrize("target", TARGETS)
def test_an_executor_that_is_lost_in_its_recovery_brings_nothing_back(target):
    world = cached()
    world.begin_recovery()
    world.read_store(1)
    world.manager.forget(target, validate_only=False)
    world.read_store(1)
    lose_executor(world)
    world.unread = sorted(world.stored.values(), key=lambda block: block.depth)
    world.manager.register_executor(world.spec(), later=True)
    world.end_recovery()
    check_forgotten(world)


def test_what_is_cached_after_it_was_forgotten_comes_back():
    world = cached()
    world.manager.forget(TARGETS[0], validate_only=False)
    world.run_executor_copies()
    world.cache(PROMPT, salt="a")
    lose_executor(world)
    assert world.manager.register_executor(world.spec(), remembered(world)) == (6, 0)
    assert found(world, salt="a") == 9
    world.check()


def test_what_stands_on_a_forgotten_block_whose_bytes_are_lost_does_not_come_back():
    world = World(12)
    world.cache(list(range(10, 15)), salt="a", session_id="x")
    world.cache(list(range(10, 27)), salt="a", session_id="y")
    world.lose_manager()
    world.manager.forget(ForgetTarget(session_id="x"), validate_only=False)
    assert world.manager.register_executor(world.spec(), remembered(world)) == (0, 0)
    world.check()


def test_beyond_the_bound_an_executor_that_was_away_brings_nothing_back(monkeypatch):
    monkeypatch.setattr(forget_history, "MOST_KEPT", 2)
    world = cached()
    world.lose_manager()
    for salt in "cdc":
        world.manager.forget(ForgetTarget(salt=salt), validate_only=False)
    assert world.manager.register_executor(world.spec(), remembered(world)) == (6, 0)
    lose_executor(world)
    for salt in "ce":
        world.manager.forget(ForgetTarget(salt=salt), validate_only=False)
    assert world.manager.register_executor(world.spec(), remembered(world)) == (6, 0)
    lose_executor(world)
    for salt in "cde":
        world.manager.forget(ForgetTarget(salt=salt), validate_only=False)
    assert world.manager.register_executor(world.spec(), remembered(world)) == (0, 0)
    world.check()


@pytest.mark.parametrize("starts_again", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_what_was_still_to_be_overwritten_when_the_executor_was_lost_is_overwritten_when_it_comes_back(
    target, starts_again
):
    world = World(12, host_blocks=6)
    world.cache(PROMPT, salt="a", session_id="x")
    world.cache(PROMPT, salt="b", session_id="y")
    if starts_again:
        # All of it moves down, as the device's bytes are gone.
        world.cache(list(range(100, 148)))
        world.run_executor_copies()
    world.manager.forget(target, validate_only=False)
    assert left(world, "a") == 9
    lose_executor(world)
    if starts_again:
        assert world.come_back().lower_blocks == 3
    else:
        world.manager.register_executor(world.spec(), remembered(world))
    check_forgotten(world)
