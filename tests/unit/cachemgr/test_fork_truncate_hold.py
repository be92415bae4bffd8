"""Truncations, forks and holds of sequences."""

import pytest

from cachemgr.errors import (
    SequenceExistsError,
    SequenceUnsettledError,
    WindowPassedError,
)
from tests.support.in_process_manager import World


def test_a_truncation_before_a_released_window_is_refused():
    world = World(12, windows=(3,))
    world.run(list(range(12)), "a")
    with pytest.raises(WindowPassedError):
        world.manager.truncate(world.caller, "a", 6)


@pytest.mark.parametrize("prompt", [1, 4, 7, 8, 9])
def test_a_fork_of_the_prompt_leaves_its_last_token_to_compute_however_far_its_parent_is(prompt):
    world = World(24)
    tokens = list(range(prompt))
    world.run(tokens, "a", generate=6)
    parent = world.live["a"]
    fork = world.manager.fork(world.caller, "a", "b", prompt)
    assert fork.cached_tokens == prompt - 1
    full, copied = divmod(prompt - 1, 4)
    assert [slot for slot in fork.block_tables[0].slots if slot in parent.tables[0]] == parent.tables[0][:full]
    assert len(fork.block_tables[0].slots) == full + 1
    assert [(copy.source_slot, copy.num_tokens) for copy in fork.transfers] == (
        [(parent.tables[0][full], copied)] if copied else []
    )
    world.enter(world.request(tokens, "b"), fork, tokens)
    world.check()
    for _ in range(6):
        # Attending checks every token that the fork sees.
        world.step()
        world.confirm()
        world.sync()
        world.check()
    assert len(world.live["b"].tokens) == prompt + 6


def test_a_fork_before_a_released_window_is_refused():
    world = World(24, windows=(None, 3))
    world.run(list(range(9)), "a", generate=4)
    assert world.manager.fork(world.caller, "a", "b", 12).admitted
    with pytest.raises(WindowPassedError):
        world.manager.fork(world.caller, "a", "c", 9)


def test_a_fork_is_idempotent():
    world = World(12)
    world.run(list(range(10)), "a")
    first = world.manager.fork(world.caller, "a", "b")
    assert world.manager.fork(world.caller, "a", "b") == first
    with pytest.raises(SequenceExistsError):
        world.manager.fork(world.caller, "a", "b", 10)
    with pytest.raises(SequenceExistsError):
        world.manager.fork(world.caller, "b", "a")


def test_a_waiting_sequence_cannot_be_forked():
    world = World(12)
    world.cache(list(range(6)))
    world.admit([*range(5), 90, 91], "a")
    with pytest.raises(SequenceUnsettledError):
        world.manager.fork(world.caller, "a", "b")


def test_a_hold_lasts_from_the_release_on_for_its_duration():
    world = World(8)
    world.run(list(range(9)), "a")
    assert world.manager.hold(world.caller, "a", "me", 5.0) == 3
    world.now = 100.0
    world.manager.renew_executor("e", 1, 1)
    world.sync()
    world.finish("a")
    assert world.free == 5
    world.check()
    world.now = 104.0
    world.manager.expire()
    assert world.free == 5
    world.now = 105.0
    world.manager.expire()
    assert world.free == 8
    world.check()
    assert world.cached_tokens(list(range(9))) == 8


def test_the_longest_of_several_holds_counts():
    world = World(8)
    world.run(list(range(9)), "a")
    world.manager.hold(world.caller, "a", "me", 2.0)
    world.manager.hold(world.caller, "a", "you", 4.0)
    world.manager.hold(world.caller, "a", "me", 1.0)
    world.finish("a")
    for world.now, free in ((1.5, 5), (3.9, 5), (4.0, 8)):
        world.manager.expire()
        assert world.free == free
        world.check()


def test_a_fork_whose_copy_has_not_run_is_void_when_its_source_is_truncated():
    world = World(12)
    world.run(list(range(10)), "a")
    fork = world.fork("a", "b")
    assert fork.copies
    world.truncate("a", 9)
    assert world.sync().void_handles == [fork.handle]
