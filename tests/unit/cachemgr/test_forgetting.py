"""Forgetting: out of every tier at once, and no byte outlives its last use."""

from dataclasses import replace

import pytest

from cachemgr.slices import at_once
from cachemgr.types import EventKind, ForgetTarget, HintAction, Hints, Prefix, RemovalCause, TierKind
from tests.support.in_process_manager import CONFIG, World

PROMPT = list(range(10, 19))


def forget(world: World, *, validate_only: bool = False, **target: object):
    receipt = at_once(world.operators.forget(ForgetTarget(**target), validate_only=validate_only))
    world.check()
    return receipt


def test_a_salt_is_forgotten_and_overwritten_and_other_salts_stay():
    world = World(12)
    world.cache(PROMPT, salt="a")
    world.cache(PROMPT, salt="b")
    world.cache(PROMPT)
    receipt = forget(world, salt="a")
    assert receipt.removed == {TierKind.DEVICE: 3}
    assert (receipt.used_blocks, receipt.shared_blocks, receipt.zeroing_blocks) == (0, 0, 3)
    assert [world.found(PROMPT, salt=salt) for salt in ("a", "b", None)] == [0, 9, 9]
    assert world.device.count("a", PROMPT[0]) == 9
    world.run_executor_copies()
    world.check()
    assert (
        world.device.count("a", PROMPT[0]),
        world.device.count("b", PROMPT[0]),
        world.device.count(None, PROMPT[0]),
    ) == (0, 9, 9)


def test_forgotten_slots_are_not_allocated_before_they_are_overwritten():
    world = World(4)
    world.cache(PROMPT, salt="a")
    forget(world, salt="a")
    zeros = world.queries.executor_transfers("e")
    assert [(copy.source_slot, copy.num_tokens) for copy in zeros] == [(0, 4)] * 3
    assert world.free == 1
    assert not world.admit([1] * 8).admitted
    assert world.queries.executor_transfers("e") == zeros
    world.run_executor_copies()
    assert world.queries.executor_transfers("e") == []
    assert world.free == 4
    world.check()
    assert world.admit([1] * 16).admitted


def test_a_failed_overwrite_does_not_count():
    world = World(4)
    world.cache(PROMPT, salt="a")
    forget(world, salt="a")
    tickets = [copy.ticket for copy in world.queries.executor_transfers("e")]
    world.manager.confirm_transfers("e", world.executor_epoch, [], tickets)
    world.check()
    assert world.free == 1
    world.run_executor_copies()
    assert (world.free, world.device.count("a", PROMPT[0])) == (4, 0)


def test_used_blocks_are_overwritten_when_their_last_user_ends():
    world = World(12)
    world.cache(PROMPT, salt="a")
    world.run(PROMPT, "live", salt="a")
    receipt = forget(world, salt="a")
    assert (receipt.removed[TierKind.DEVICE], receipt.used_blocks, receipt.zeroing_blocks) == (3, 2, 1)
    assert world.found(PROMPT, salt="a") == 0
    world.run_executor_copies()
    world.step()
    world.finish("live")
    world.check()
    assert world.device.count("a", PROMPT[0]) > 0
    world.run_executor_copies()
    world.check()
    assert world.device.count("a", PROMPT[0]) == 0
    assert world.free == 12


def test_uncomputed_blocks_of_a_forgotten_sequence_are_not_matched():
    world = World(12)
    world.admit(PROMPT, "live", salt="a")
    forget(world, salt="a")
    admission = world.admit(PROMPT, "later", salt="a")
    assert (admission.cached_tokens, admission.wait_for_handle) == (0, 0)


def test_a_forgotten_sequence_does_not_scrub_blocks_that_another_sequence_fills():
    world = World(12)
    world.admit(PROMPT, "writer", session_id="y")
    reader = world.admit([*PROMPT, 1, 2, 3], "reader", session_id="x")
    assert reader.wait_for_handle == world.live["writer"].handle
    forget(world, session_id="x")
    world.release("reader")
    world.check()
    # The reader's own blocks are overwritten, and the writer's blocks are not.
    world.run_executor_copies()
    world.release("writer")
    assert world.queries.executor_transfers("e") == []
    assert world.free == 12
    world.check()


def test_a_fork_of_a_forgotten_sequence_stores_nothing_either():
    world = World(16)
    world.run(PROMPT, "live", salt="a")
    forget(world, salt="a")
    admission = world.manager.fork(world.caller, "live", "child")
    live = world.live["live"]
    child = world.enter(world.request(live.tokens, "child", salt="a"), admission, live.tokens)
    world.compute(child, 14)
    world.finish("child")
    world.finish("live")
    world.check()
    assert world.journal.blocks == {}
    world.run_executor_copies()
    assert world.device.count("a", PROMPT[0]) == 0


def test_a_copy_that_is_under_way_does_not_save_its_source():
    world = World(12)
    world.cache(PROMPT, salt="a")
    admission = world.admit([*PROMPT[:6], 99, 98], "part", salt="a")
    assert admission.transfers
    forget(world, salt="a")
    world.compute(world.live["part"], 8)
    world.finish("part")
    world.check()
    world.run_executor_copies()
    world.check()
    assert world.device.count("a", PROMPT[0]) == 0
    assert world.free == 12


def test_a_prefix_is_forgotten_with_its_descendants_and_ancestors():
    world = World(16)
    world.cache([*PROMPT[:8], 50, 51])
    world.cache([*PROMPT[:4], 60, 61, 62, 63])
    world.cache([70, 71, 72, 73])
    receipt = forget(world, prefix=Prefix(tuple(PROMPT[:8])))
    assert receipt.removed == {TierKind.DEVICE: 4}
    assert world.found([70, 71, 72, 73]) == 4
    world.run_executor_copies()
    assert world.device.count(None, PROMPT[0]) == 0


def test_blocks_with_children_of_another_session_stay():
    world = World(16)
    world.cache(PROMPT, session_id="x")
    world.cache([*PROMPT[:4], 50, 51, 52, 53], session_id="y")
    receipt = forget(world, session_id="x")
    assert (receipt.removed, receipt.shared_blocks) == ({TierKind.DEVICE: 2}, 1)
    assert world.found(PROMPT) == 4
    assert world.found([*PROMPT[:4], 50, 51, 52, 53]) == 8


def test_blocks_in_use_by_another_session_stay_and_unused_ones_are_forgotten():
    world = World(16)
    world.cache(PROMPT, session_id="x")
    world.run([*PROMPT[:4], 50], "live", session_id="y")
    receipt = forget(world, session_id="x")
    assert (receipt.removed, receipt.shared_blocks) == ({TierKind.DEVICE: 2}, 1)
    world.finish("live")
    assert world.found([*PROMPT[:4], 50]) == 5


def test_forgotten_blocks_in_flight_are_overwritten_behind_the_copy():
    world = World(3, host_blocks=3)
    world.cache(PROMPT, salt="a")
    world.admit(list(range(100, 112)), "b")
    receipt = forget(world, salt="a")
    assert receipt.removed == {TierKind.HOST: 3}
    world.compute(world.live["b"], 12)
    world.check()
    world.run_executor_copies()
    world.check()
    assert world.device.count("a", PROMPT[0]) == 0


def test_windowed_groups_forget_all_blocks_of_the_salt():
    world = World(16, windows=(None, 3))
    world.cache(PROMPT, salt="a")
    world.cache(PROMPT)
    receipt = forget(world, salt="a")
    assert receipt.removed == {TierKind.DEVICE: 6}
    world.run_executor_copies()
    world.check()
    assert (world.device.count("a", PROMPT[0]), world.device.count(None, PROMPT[0])) == (0, 18)


def test_events_that_are_kept_have_no_tokens_of_it_any_more():
    world = World(12)
    world.cache(PROMPT, salt="a")
    world.cache(PROMPT)
    before = world.queries.last_event
    forget(world, salt="a")
    events = world.queries.events_after(0)
    mine = [event for event in events if event.block.scope and event.block.scope.salt == "a"]
    assert mine
    assert all(event.block.tokens == b"" for event in mine)
    removed = [event for event in world.queries.events_after(before) if event.kind is EventKind.REMOVED]
    assert [event.cause for event in removed] == [RemovalCause.FORGOTTEN] * 3
    others = [event for event in events if event.kind is EventKind.STORED and event.block.scope.salt is None]
    assert all(event.block.tokens for event in others)


def test_a_pin_does_not_put_forgetting_off():
    world = World(40, config=replace(CONFIG, pin_budget=0.5))
    world.cache(list(range(9)), salt="s")
    world.operators.pin_prefix(Prefix(tuple(range(8)), salt="s"), "ops", 60.0, validate_only=False)
    target = ForgetTarget(salt="s")
    said = at_once(world.operators.forget(target, validate_only=True))
    assert len(list(world.queries.holds())) == 1
    receipt = at_once(world.operators.forget(target, validate_only=False))
    assert receipt == said
    assert (receipt.used_blocks, receipt.zeroing_blocks) == (0, 3)
    assert list(world.queries.holds()) == []
    world.check()
    world.run_executor_copies()
    assert world.free == 40


@pytest.mark.parametrize("windows", [(3,), (None, 3)])
def test_window_blocks_in_use_by_another_session_outlive_forgotten_ancestors(windows):
    world = World(12, windows=windows)
    world.cache([*range(12)], session_id="x")
    assert world.run([*range(12), 50], "other", session_id="y").cached_tokens == 12
    said = at_once(world.operators.forget(ForgetTarget(session_id="x"), validate_only=False))
    # In the group with full attention all three are in use, in the window's only the last.
    assert (said.removed, said.shared_blocks) == ({TierKind.DEVICE: 2}, 1 + 3 * (len(windows) - 1))
    assert (
        at_once(world.operators.forget(ForgetTarget(session_id="x"), validate_only=True)).shared_blocks
        == said.shared_blocks
    )


def failing_on_the_way_down(world: World, tokens: list[int], group: int, depth: int) -> None:
    """Moves a cached prompt to the host, where the block of one depth does not arrive in one group."""
    action = HintAction("one", "Demote", "0.1", {"tier": "host"})
    world.operators.hint(Prefix(tuple(tokens)), Hints("0.1", "m", (action,)), None)
    slots = {block.slot for block in world.queries.records("e") if (block.group, block.depth) == (group, depth)}
    for copy in world.queries.executor_transfers("e"):
        world.copy(copy, copy.group == group and copy.target_slot in slots)
    world.confirm()
    world.check()


def test_a_window_keeps_no_block_whose_full_attention_block_is_forgotten():
    world = World(8, windows=(None, 5), host_blocks=8)
    first = [10, 11, 12, 13]
    world.cache(first, session_id="x")
    world.cache([*first, 20, 21, 22, 23], session_id="y")
    # The window's block, on its way still, stays for now.
    failing_on_the_way_down(world, [*first, 20, 21, 22, 23], group=0, depth=1)
    receipt = forget(world, session_id="x")
    assert (receipt.removed, receipt.shared_blocks) == ({TierKind.HOST: 2}, 0)
    world.run_executor_copies()
    below = [held for (_, tier, _), slot in world.device.memory.items() if tier for held in slot if held]
    assert [held for held in below if held.position < 4] == []


def test_a_prefix_is_forgotten_behind_a_gap_in_a_window():
    world = World(8, windows=(None, 5), host_blocks=8)
    world.cache(list(range(12)))
    failing_on_the_way_down(world, list(range(12)), group=1, depth=1)
    receipt = forget(world, prefix=Prefix((0, 1, 2, 3)))
    assert receipt.removed == {TierKind.HOST: 5}
    assert receipt.zeroing_blocks == 5


def test_another_sessions_hold_outlives_forgotten_window_blocks():
    world = World(20, windows=(None, 3))
    world.cache([*range(12)], session_id="x")
    world.run([*range(12), 50], "other", session_id="y", no_store=True)
    assert world.manager.hold(world.caller, "other", "agent", 60.0)
    world.finish("other")
    said = forget(world, session_id="x")
    assert (said.removed, said.shared_blocks) == ({TierKind.DEVICE: 2}, 4)
    assert len(list(world.queries.holds())) == 1
    again = forget(world, session_id="x")
    assert (again.removed, again.shared_blocks) == ({}, 4)
