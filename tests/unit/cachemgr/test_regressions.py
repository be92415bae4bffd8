"""Faults that were found once, each by a few calls in an unlucky order."""

from array import array
from dataclasses import replace
from typing import Any

import pytest

from cachemgr import manager
from cachemgr.sequences import release
from cachemgr.slices import at_once
from cachemgr.types import (
    AdmitRequest,
    BlockFilter,
    ExecutorSpec,
    ExtraKey,
    ForgetTarget,
    HintAction,
    Hints,
    PoolSpec,
    Prefix,
    Quota,
    RetentionRule,
    RuleAction,
    RuleMatch,
)
from tests.support.in_process_manager import BLOCK, CONFIG, FINGERPRINT, World, retain
from tests.support.random_operations import small_steps

ONES = [1] * 4


def test_a_held_and_covered_block_is_forgotten_once():
    world = World(16)
    world.run([*ONES, 2, 2, 2], "a", salt="a")
    world.manager.hold(world.caller, "a", "ops", 60.0)
    world.finish("a")
    world.cache([*ONES, 2, 2, 2, 2, 2], salt="a", no_read=True)
    world.check()
    at_once(world.operators.forget(ForgetTarget(salt="a"), validate_only=False))
    world.check()
    world.run_executor_copies()
    assert (world.free, list(world.queries.records("e"))) == (16, [])


def test_a_pin_follows_its_blocks_to_the_device():
    world = World(8, host_blocks=8, config=replace(CONFIG, pin_budget=0.5))
    world.cache(list(range(8)))
    world.run(list(range(100, 132)), "b")
    world.finish("b")
    prefix = Prefix(tuple(range(8)))
    assert world.tiers_of([*range(8)]) == ["host"] * 2
    world.operators.pin_prefix(prefix, "ops", 1000.0, validate_only=False)
    world.run([*range(8), 50], "c")
    world.finish("c")
    world.check()
    for first in (200, 300, 400):
        world.cache(list(range(first, first + 20)))
        world.check()
    assert world.tiers_of([*range(8)]) == ["device"] * 2
    (hold,) = world.queries.holds()
    assert world.operators.release_hold(hold.name) == 2


def test_a_rule_renews_its_pin_and_pushes_no_operators_pin_aside():
    world = World(20, config=replace(CONFIG, pin_budget=0.2))
    world.cache(list(range(50, 58)))
    world.operators.pin_prefix(Prefix(tuple(range(50, 58))), "ops", 1e6, validate_only=False)
    rule = RetentionRule("sys", match=RuleMatch(prefix_token_ids=(7, 7, 7, 7)), action=RuleAction(pin_duration=60.0))
    at_once(world.operators.create_rule(rule, validate_only=False))
    for _ in range(12):
        world.cache([7, 7, 7, 7, 1])
    assert [(hold.owner, hold.num_blocks) for hold in world.queries.holds()] == [("ops", 2), ("rule/sys", 1)]


def test_two_owners_of_the_same_blocks_need_the_budget_once():
    world = World(40, config=replace(CONFIG, pin_budget=0.1))
    world.cache(list(range(16)))
    prefix = Prefix(tuple(range(16)))
    world.operators.pin_prefix(prefix, "one", 60.0, validate_only=False)
    (second,) = world.operators.pin_prefix(prefix, "other", 60.0, validate_only=False)
    assert (second.degraded, len(list(world.queries.holds()))) == ((), 2)


def test_a_host_ceiling_of_zero_evicts_no_block_of_others():
    world = World(4, host_blocks=4)
    world.cache(list(range(16)))
    world.cache(list(range(100, 116)), tenant_id="t")
    at_once(world.operators.set_quota(Quota(tenant_id="t", host_ceiling=0), validate_only=False))
    world.cache(list(range(200, 216)))
    ((_, _, _, host),) = world.queries.quotas()
    assert host == 0


def test_text_that_follows_a_truncated_image_is_not_found_under_it():
    image = (ExtraKey(8, 4, b"image"),)
    world = World(16)
    world.run([*range(12), 5], "a", extra_keys=image)
    world.truncate("a", 8)
    live = world.live["a"]
    live.tokens += [8, 9, 10, 11, 3]
    world.compute(live, 12)
    world.finish("a")
    world.check()
    assert world.found([*range(12)]) == 12
    assert world.found([*range(12)], extra_keys=image) == 8


def test_an_offload_rule_grants_no_priority():
    world = World(8)
    world.cache(list(range(4)), session_id="s", retention=retain(10))
    rule = RetentionRule("r", action=RuleAction(offload_min_priority=50))
    at_once(world.operators.create_rule(rule, validate_only=False))
    world.cache([*range(4), 9])
    assert [view.priority for _, view in filter(None, world.queries.blocks("e/0")) if not view.depth] == [10]


def test_a_rule_with_another_match_no_longer_applies_to_running_sequences():
    world = World(8)
    rule = RetentionRule("r", match=RuleMatch(salt="a"), action=RuleAction(priority=80))
    at_once(world.operators.create_rule(rule, validate_only=False))
    world.admit(list(range(9)), "q", salt="a")
    changed = RetentionRule("r", match=RuleMatch(salt="b"), action=RuleAction(priority=80))
    at_once(world.operators.update_rule(changed, ("match",), validate_only=False))
    world.compute(world.live["q"], 9)
    world.finish("q")
    assert {view.priority for _, view in filter(None, world.queries.blocks("e/0"))} == {35}


def test_a_repeated_admission_may_write_its_hints_in_another_order():
    world = World(8)
    payloads = [{"priority": 5, "duration_seconds": 9}, {"duration_seconds": 9, "priority": 5}]
    answers = []
    for payload in payloads:
        hints = Hints("0.1", "m", (HintAction("1", "Retain", "0.1", payload),))
        answers.append(world.manager.admit(replace(world.request([1, 2, 3], "same"), hints=hints)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6)])
def test_a_short_prefix_is_forgotten_with_all_that_begins_with_it(windows):
    world = World(16, windows=windows)
    world.cache([1, 2, 3])
    world.cache([1, 2, 3, 4, 5, 6, 7, 8, 9])
    world.cache([1, 9, 9, 9, 9])
    at_once(world.operators.forget(ForgetTarget(prefix=Prefix((1, 2, 3))), validate_only=False))
    world.check()
    assert {block.token_ids[:2] for block in world.queries.records("e") if not block.depth} == {(1, 9)}
    assert world.cached_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) <= 1


def test_window_blocks_that_can_never_match_are_removed():
    world = World(12, windows=(None, 4))
    world.cache(list(range(8)), retention=retain(90))
    world.cache(list(range(50, 58)))
    selected = BlockFilter(pool_id="e/0", prefix=Prefix(tuple(range(8))))
    at_once(world.operators.purge(selected, validate_only=False))
    # The blocks of the window after the lost blocks are worth nothing, whatever their priority.
    assert all(block.token_ids[0] >= 50 for block in world.queries.records("e"))
    assert {block.group for block in world.queries.records("e")} == {0, 1}


def test_an_executor_that_registers_while_blocks_are_forgotten_disturbs_nothing():
    for steps_before in range(40):
        world = World(12)
        world.cache(list(range(12)), salt="a")
        with small_steps():
            steps = world.operators.forget(ForgetTarget(salt="a"), validate_only=False)
            ended = any(_has_ended(steps) for _ in range(steps_before))
            spec = ExecutorSpec("f", 1, "m", FINGERPRINT, BLOCK, [PoolSpec(0, 12)])
            world.manager.register_executor(spec)
            world.manager.admit(AdmitRequest("other", "s", world.scheduler_epoch, "f", array("I", range(12)), salt="a"))
            while not ended:
                ended = _has_ended(steps)
        assert all(event.block.scope is None or not event.block.tokens for event in world.queries.events_after(0))


@pytest.mark.parametrize("change", ["update", "delete"])
def test_an_executor_that_is_lost_while_a_rule_changes_disturbs_nothing(change, monkeypatch):
    # Its blocks are given up together, with their leases, and freed later.
    monkeypatch.setattr(release, "MOST_REPORTED", 0)
    monkeypatch.setattr(manager, "FREED_AT_A_TIME", 1)
    for steps_before in range(20):
        world = World(12)
        rule = RetentionRule("r", match=RuleMatch(salt="a"), action=RuleAction(priority=80))
        at_once(world.operators.create_rule(rule, validate_only=False))
        world.cache(list(range(12)), salt="a")
        other = replace(rule, match=RuleMatch(salt="b"))
        with small_steps():
            steps: Any
            if change == "update":
                steps = world.operators.update_rule(other, ("match",), validate_only=False)
            else:
                steps = world.operators.delete_rule("r", "", validate_only=False)
            ended = any(_has_ended(steps) for _ in range(steps_before))
            world.expire_executor()
            while not ended:
                ended = _has_ended(steps)
        while world.manager.lost_blocks:
            world.manager.expire()
        world.check()


def _has_ended(steps: Any) -> bool:
    return next(steps, _has_ended) is _has_ended


def test_a_trim_may_be_reported_together_with_a_token_that_was_sampled_behind_it() -> None:
    world = World(8)
    world.run(list(range(7)), "a")
    live = world.live["a"]
    world.step(names={"a"})
    assert (live.computed, len(live.tokens)) == (8, 9)
    world.trimmed[live.handle] = 8
    del live.tables[0][2:]
    world.sync()
    world.check()
    assert live.capacity >= 9


def test_a_long_forget_leaves_what_has_taken_the_slots_of_its_blocks_meanwhile() -> None:
    prompt, taken = list(range(100, 128)), 0
    for steps_before in range(40):
        world = World(8)
        world.cache(list(range(16)), salt="a")
        with small_steps():
            steps: Any = world.operators.forget(ForgetTarget(salt="a"), validate_only=False)
            ended = any(_has_ended(steps) for _ in range(steps_before))
            admitted = world.admit(prompt, "b").admitted
            if admitted:
                world.compute(world.live["b"], len(prompt))
                world.leave(world.live["b"])
                world.sync()
                taken += 1
            while not ended:
                ended = _has_ended(steps)
        world.check()
        if admitted:
            assert world.found(prompt) >= 24, steps_before
    assert taken > 5
