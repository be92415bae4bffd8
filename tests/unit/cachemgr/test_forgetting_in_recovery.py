"""Forgetting and purging of blocks that the store remembers and the index does not have yet."""

import pytest

from cachemgr.operators import forget
from cachemgr.slices import at_once
from cachemgr.types import BlockFilter, ForgetTarget, HintAction, Hints, Prefix, TierKind, Transfer
from tests.support.in_process_manager import World, retain
from tests.support.random_operations import small_steps

PROMPT = list(range(10, 19))
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


def stored(world: World):
    return list(world.journal.blocks.values())


def lose_executor(world: World) -> None:
    world.now += 2 * world.config.lease_seconds
    world.manager.expire()
    assert not world.manager.queries.knows_executor("e")


def check_forgotten(world: World) -> None:
    world.check()
    assert [world.found(PROMPT, salt=salt) for salt in "ab"] == [0, 9]
    world.run_executor_copies()
    assert [world.device.count(salt, PROMPT[0]) for salt in "ab"] == [0, 9]
    world.check()


def forget_before_a_registration(world: World, target: ForgetTarget) -> None:
    world.lose_manager()
    assert at_once(world.operators.forget(target, validate_only=True)).removed == {}
    assert at_once(world.operators.forget(target, validate_only=False)).removed == {}
    assert world.manager.register_executor(world.spec(), stored(world)) == (3, 0)


def forget_while_the_executor_is_lost(world: World, target: ForgetTarget) -> None:
    lose_executor(world)
    at_once(world.operators.forget(target, validate_only=False))
    assert world.manager.register_executor(world.spec(), stored(world)) == (3, 0)


def lose_the_executor_during_the_call(world: World, target: ForgetTarget) -> None:
    with small_steps():
        steps = world.operators.forget(target, validate_only=False)
        next(steps)
        lose_executor(world)
        world.manager.register_executor(world.spec(), stored(world))
        for _ in steps:
            world.manager.go_on()


def lose_the_executor_in_its_recovery(world: World, target: ForgetTarget) -> None:
    world.begin_recovery()
    world.read_store(1)
    at_once(world.operators.forget(target, validate_only=False))
    world.read_store(1)
    lose_executor(world)
    world.read_again()
    world.end_recovery()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "forget",
    [
        forget_before_a_registration,
        forget_while_the_executor_is_lost,
        lose_the_executor_during_the_call,
        lose_the_executor_in_its_recovery,
    ],
)
def test_forgotten_blocks_are_not_restored(forget, target):
    world = cached()
    forget(world, target)
    check_forgotten(world)


def test_blocks_cached_after_a_forget_are_restored():
    world = cached()
    at_once(world.operators.forget(TARGETS[0], validate_only=False))
    world.run_executor_copies()
    world.cache(PROMPT, salt="a")
    lose_executor(world)
    assert world.manager.register_executor(world.spec(), stored(world)) == (6, 0)
    assert world.found(PROMPT, salt="a") == 9


def test_children_of_forgotten_blocks_with_lost_bytes_are_not_restored():
    world = World(12)
    world.cache(list(range(10, 15)), salt="a", session_id="x")
    world.cache(list(range(10, 27)), salt="a", session_id="y")
    world.lose_manager()
    at_once(world.operators.forget(ForgetTarget(session_id="x"), validate_only=False))
    assert world.manager.register_executor(world.spec(), stored(world)) == (0, 0)


def test_beyond_the_bound_an_executor_that_was_away_brings_nothing_back(monkeypatch):
    monkeypatch.setattr(forget, "MOST_KEPT", 2)
    world = cached()
    world.lose_manager()
    for salt in "cdc":
        at_once(world.operators.forget(ForgetTarget(salt=salt), validate_only=False))
    assert world.manager.register_executor(world.spec(), stored(world)) == (6, 0)
    lose_executor(world)
    for salt in "ce":
        at_once(world.operators.forget(ForgetTarget(salt=salt), validate_only=False))
    assert world.manager.register_executor(world.spec(), stored(world)) == (6, 0)
    lose_executor(world)
    for salt in "cde":
        at_once(world.operators.forget(ForgetTarget(salt=salt), validate_only=False))
    assert world.manager.register_executor(world.spec(), stored(world)) == (0, 0)


@pytest.mark.parametrize("starts_again", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_open_overwrites_of_a_lost_executor_are_done_when_it_registers_again(target, starts_again):
    world = World(12, host_blocks=6)
    world.cache(PROMPT, salt="a", session_id="x")
    world.cache(PROMPT, salt="b", session_id="y")
    if starts_again:
        # All of it is offloaded, as the device's bytes are lost.
        world.cache(list(range(100, 148)))
        world.run_executor_copies()
    at_once(world.operators.forget(target, validate_only=False))
    assert world.device.count("a", PROMPT[0]) == 9
    lose_executor(world)
    if starts_again:
        assert world.register_again().lower_blocks == 3
    else:
        world.manager.register_executor(world.spec(), stored(world))
    check_forgotten(world)


def test_blocks_purged_in_a_recovery_are_not_restored_after_a_loss_of_the_executor():
    world = cached()
    world.begin_recovery()
    at_once(world.operators.purge(BlockFilter(salt="a"), validate_only=False))
    for _ in range(2):
        lose_executor(world)
        world.read_again()
    world.end_recovery()
    world.check()
    assert [world.found(PROMPT, salt=salt) for salt in "ab"] == [0, 9]


def test_blocks_purged_in_a_recovery_are_not_restored_after_a_restart_of_the_executor():
    world = World(12, host_blocks=6)
    world.cache(PROMPT, salt="a")
    world.cache(PROMPT, salt="b")
    world.cache(list(range(100, 148)))
    world.run_executor_copies()
    world.begin_recovery()
    at_once(world.operators.purge(BlockFilter(salt="a"), validate_only=False))
    world.start_executor()
    world.start_scheduler()
    world.end_recovery()
    world.check()
    assert [world.found(PROMPT, salt=salt) for salt in "ab"] == [0, 9]


@pytest.mark.parametrize(
    ("selected", "left"),
    [
        (BlockFilter(prefix=Prefix(PROMPT[:4], salt="a")), [0, 9]),
        (BlockFilter(prefix=Prefix(PROMPT[:8], salt="a")), [0, 9]),
        (BlockFilter(max_priority=40), [9, 0]),
        (BlockFilter(tier=TierKind.HOST), [9, 9]),
        (BlockFilter(tier=TierKind.DEVICE), [0, 0]),
    ],
)
def test_a_purge_in_a_recovery_takes_exactly_the_blocks_of_its_filter(selected, left):
    world = World(12)
    world.cache(PROMPT, salt="a", retention=retain(70))
    world.cache(PROMPT, salt="b")
    world.begin_recovery()
    at_once(world.operators.purge(selected, validate_only=False))
    world.end_recovery()
    world.check()
    assert [world.found(PROMPT, salt=salt) for salt in "ab"] == left


def test_a_purge_of_a_pool_in_a_recovery_leaves_the_blocks_of_other_pools():
    world = World(12, windows=(3, None))
    world.cache(PROMPT)
    world.begin_recovery()
    first, second = world.queries.pools()
    at_once(world.operators.purge(BlockFilter(pool_id=first.pool_id), validate_only=False))
    world.end_recovery()
    world.check()
    blocks = [
        [view for _, view in filter(None, world.queries.blocks(pool.pool_id)) if view.key] for pool in (first, second)
    ]
    assert [len(of_pool) for of_pool in blocks] == [0, 3]


def test_a_purge_in_a_recovery_spares_blocks_cached_after_it():
    world = cached()
    world.begin_recovery()
    at_once(world.operators.purge(BlockFilter(salt="a"), validate_only=False))
    lose_executor(world)
    world.unread = None
    world.journal.is_read = True
    # The store has nothing any more.
    world.executor_epoch += 1
    world.device.lose()
    world.manager.register_executor(world.spec())
    world.start_scheduler()
    world.cache(PROMPT, salt="a")
    records = list(world.queries.records("e"))
    lose_executor(world)
    world.manager.register_executor(world.spec(), records)
    assert world.found(PROMPT, salt="a") == 9


def register_again_in_the_same_epoch(world: World) -> None:
    """The scheduler stays, and gives up what it had there when the executor registers again."""
    world.expire_executor()
    world.live.clear()
    world.leaving.clear()
    world.start_scheduler()
    world.manager.register_executor(world.spec(), stored(world))
    for _ in range(3):
        world.run_executor_copies()
    world.check()


@pytest.mark.parametrize("computed", [False, True])
def test_bytes_of_a_forgotten_sequence_do_not_outlive_it_when_the_executor_is_lost(computed):
    world = World(12)
    world.cache(list(range(60, 69)), salt="b")
    world.admit(PROMPT, "live", salt="a")
    if computed:
        world.compute(world.live["live"], len(PROMPT))
        world.sync()
    at_once(world.operators.forget(TARGETS[0], validate_only=False))
    if not computed:
        world.compute(world.live["live"], len(PROMPT))
        world.sync()
    assert world.device.count("a", PROMPT[0]) == 9
    register_again_in_the_same_epoch(world)
    assert world.device.count("a", PROMPT[0]) == 0


def prefetching() -> tuple[World, list[Transfer]]:
    """What is below comes to the device: copies that the executor has run, and not confirmed."""
    world = World(12, host_blocks=12)
    world.cache(PROMPT, salt="a")
    world.cache(list(range(100, 148)))
    world.run_executor_copies()
    prefetch = Hints("0.1", "m", (HintAction("one", "Prefetch", "0.1", {}),))
    world.operators.hint(Prefix(tuple(PROMPT), salt="a"), prefetch, None)
    copies = world.queries.executor_transfers("e")
    # Two others are evicted.
    assert len(copies) == 4
    return world, copies


@pytest.mark.parametrize("executor", ["has not run", "has run", "is lost"])
def test_bytes_of_a_prefetch_in_flight_are_overwritten(executor):
    world, copies = prefetching()
    if executor != "has not run":
        for copy in copies:
            world.copy(copy)
    at_once(world.operators.forget(TARGETS[0], validate_only=False))
    if executor == "is lost":
        world.done.clear()
        register_again_in_the_same_epoch(world)
    for _ in range(4):
        world.run_executor_copies()
        world.check()
    assert world.device.count("a", PROMPT[0]) == 0


def test_bytes_of_copies_that_a_sequence_has_left_are_overwritten():
    world = World(12, host_blocks=12)
    world.cache(PROMPT, salt="a")
    world.cache(list(range(100, 148)))
    world.run_executor_copies()
    world.admit(PROMPT, "gone", salt="a")
    live = world.live["gone"]
    assert live.copies
    # The scheduler has sent them, and gives the sequence up at once.
    live.started = True
    world.step_number += 1
    world.leave(live)
    world.sync()
    at_once(world.operators.forget(TARGETS[0], validate_only=False))
    for copy in live.copies:
        world.copy(copy, False)
    world.confirm()
    for _ in range(4):
        world.run_executor_copies()
        world.check()
    assert world.device.count("a", PROMPT[0]) == 0
