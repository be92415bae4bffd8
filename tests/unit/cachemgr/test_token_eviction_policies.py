"""Policies of token eviction: their precedence, their limits, and their effect on an admission."""

import dataclasses

import pytest

from cachemgr.errors import PoolSpecError, RulePolicyError, SequenceTooLongError
from cachemgr.operators.state_dump import state_hash
from cachemgr.slices import at_once
from cachemgr.types import ManagerConfig, RetentionRule, RuleAction, RuleMatch
from protos.errors import InvalidField
from protos.kvcommon.eviction import Kind
from tests.support.in_process_manager import BLOCK, POLICIES, World, asked

WINDOW = asked("SLIDING_WINDOW", recent_tokens=6)
KEYDIFF = asked("KEYDIFF", start_tokens=1, recent_tokens=2, max_cache_tokens=8, period_tokens=3)
AVERAGE = asked("AVERAGE", max_cache_tokens=8, period_tokens=2, during_prefill=True)
SUM = asked("SUM", start_tokens=4, recent_tokens=4, max_cache_tokens=12, score_window_tokens=3)
PROMPT = list(range(10, 29))


def make(world: World, name: str, policy: object, order: int = 0, **match: object) -> None:
    spec = RetentionRule(name, order, RuleMatch(**match), RuleAction(eviction_policy=policy))
    at_once(world.operators.create_rule(spec, validate_only=False))


def test_the_answer_has_the_whole_policy_and_so_has_the_sequence():
    world = World(20)
    policy = world.admit(PROMPT, "a", eviction_policy=WINDOW).eviction_policy
    assert policy is not None
    assert (policy.kind, policy.start, policy.recent, policy.maximum) == (Kind.SLIDING_WINDOW, 0, 6, 6)
    assert (policy.block_size, policy.period) == (BLOCK, 1)
    (live,) = world.queries.sequences()
    assert live.eviction is not None
    assert (live.eviction.policy, live.has_evicted_tokens) == (policy, False)
    assert world.admit(PROMPT, "b").eviction_policy is None


@pytest.mark.parametrize(
    ("rules", "own", "kind"),
    [
        ([], None, None),
        ([WINDOW], None, Kind.SLIDING_WINDOW),
        ([None, WINDOW], None, Kind.SLIDING_WINDOW),
        ([KEYDIFF, WINDOW], None, Kind.KEYDIFF),
        ([asked("NONE"), WINDOW], None, None),
        ([WINDOW], KEYDIFF, Kind.KEYDIFF),
        ([WINDOW], asked("NONE"), None),
    ],
)
def test_the_policy_is_the_requests_or_else_of_the_first_rule_with_one(rules, own, kind):
    world = World(20)
    for order, requested in enumerate(rules):
        action = RuleAction(priority=50, eviction_policy=requested)
        at_once(world.operators.create_rule(RetentionRule(f"r{order}", order, action=action), validate_only=False))
    policy = world.admit(PROMPT, eviction_policy=own).eviction_policy
    assert (None if policy is None else policy.kind) == kind


@pytest.mark.parametrize("windows", [(None, 5), (5,)])
def test_a_model_with_windows_takes_no_policy(windows):
    world = World(20, windows=windows)
    before = state_hash(world.queries.state())
    for call in (world.manager.admit, lambda request: world.queries.preview(request, 4)):
        with pytest.raises(InvalidField) as refused:
            call(world.request(PROMPT, eviction_policy=WINDOW))
        assert list(refused.value.fields) == ["eviction_policy.kind"]
    assert state_hash(world.queries.state()) == before


def test_positions_are_compacted_where_keys_can_be_rotated_and_that_does_not_change_within_an_epoch():
    world = World(20)
    requested = asked("KEYDIFF", max_cache_tokens=8, period_tokens=2, start_tokens=1, recent_tokens=2, positions=2)
    spec = dataclasses.replace(world.spec(), plain_rotary=True)
    with pytest.raises(PoolSpecError):
        world.manager.register_executor(spec)
    before = state_hash(world.queries.state())
    world.manager.register_executor(dataclasses.replace(spec, executor_epoch=2))
    assert state_hash(world.queries.state()) != before
    policy = world.admit(PROMPT, eviction_policy=requested).eviction_policy
    assert policy is not None
    assert policy.compacted


def test_a_rule_that_the_executor_cannot_carry_is_named():
    world = World(20)
    make(world, "six", asked("SUM", start_tokens=6))
    before = state_hash(world.queries.state())
    with pytest.raises(RulePolicyError, match=r"rule six.*start_tokens") as refused:
        world.admit(PROMPT)
    assert refused.value.metadata == {"rule": "six"}
    assert state_hash(world.queries.state()) == before
    assert world.admit(PROMPT, eviction_policy=asked("NONE")).admitted


def test_a_changed_rule_applies_to_later_sequences():
    world = World(40)
    make(world, "r", WINDOW)
    hashes = [state_hash(world.queries.state())]
    first = world.admit(PROMPT, "a")
    spec = RetentionRule("r", action=RuleAction(eviction_policy=KEYDIFF))
    changed, _, _ = at_once(world.operators.update_rule(spec, ("action.eviction_policy",), validate_only=False))
    assert changed.action == RuleAction(eviction_policy=KEYDIFF)
    hashes.append(state_hash(world.queries.state()))
    assert world.manager.admit(world.live["a"].request) == first
    second = world.admit(PROMPT, "b").eviction_policy
    assert second is not None
    assert second.kind is Kind.KEYDIFF
    at_once(world.operators.delete_rule("r", "", validate_only=False))
    assert world.admit(PROMPT, "c").eviction_policy is None
    assert len(set(hashes)) == 2


@pytest.mark.parametrize(
    ("requested", "cached"),
    [
        (None, 18),
        (WINDOW, 18),
        (KEYDIFF, 18),
        (AVERAGE, 0),
        # The queries that count are computed: 3 and 1 of 19.
        (SUM, 16),
        (asked("TOVA", max_cache_tokens=8, start_tokens=1, recent_tokens=2, period_tokens=2), 18),
        (asked("SNAPKV", max_cache_tokens=8, recent_tokens=5, score_window_tokens=5), 14),
        (asked("RANDOM", max_cache_tokens=8, start_tokens=1, recent_tokens=2, period_tokens=2), 18),
        (
            asked("RANDOM", max_cache_tokens=10, start_tokens=1, recent_tokens=2, period_tokens=2, during_prefill=True),
            9,
        ),
    ],
)
def test_reuse_leaves_the_queries_that_a_policy_scores(requested, cached):
    world = World(30)
    world.cache(PROMPT)
    preview = world.queries.preview(world.request(PROMPT, eviction_policy=requested), 0)
    assert world.admit(PROMPT, eviction_policy=requested).cached_tokens == preview.cached_tokens == cached


def test_a_policy_during_prefill_gets_blocks_for_tokens_before_its_first_eviction():
    world = World(40, config=ManagerConfig(capacity_ahead_tokens=8, free_watermark=0))
    long = list(range(100, 160))
    assert world.admit(long, "a", eviction_policy=AVERAGE).capacity_tokens == 8
    assert world.admit(list(range(200, 203)), "b", eviction_policy=AVERAGE).capacity_tokens == 8
    waiting = asked("AVERAGE", max_cache_tokens=8, period_tokens=2)
    assert world.admit(list(range(300, 319)), "c", eviction_policy=waiting).capacity_tokens == 20


def test_capacity_ahead_stops_where_it_first_evicts():
    world = World(40, config=ManagerConfig(capacity_ahead_tokens=16, free_watermark=0))
    world.admit([1, 2], "a", eviction_policy=KEYDIFF)
    world.step()
    world.sync()
    assert world.live["a"].capacity == 8
    # It waits for the end of a prompt, and evicts there.
    world.admit(PROMPT, "b", eviction_policy=asked("LAST", max_cache_tokens=30))
    world.step(20, names={"b"})
    world.sync()
    assert world.live["b"].capacity == 20


@pytest.mark.parametrize(
    ("requested", "tokens", "blocks", "options", "field"),
    [
        # 19 tokens, and another table for 8.
        (KEYDIFF, 19, 7, {}, "eviction_policy"),
        (KEYDIFF, 3, 4, {}, "eviction_policy"),
        (AVERAGE, 19, 4, {}, "eviction_policy"),
        # Without another table.
        (KEYDIFF, 19, 5, {"no_store": True}, "token_ids"),
        # Never more than 5 of a prompt and two steps' tokens.
        (asked("SNAPKV", max_cache_tokens=5, recent_tokens=2, score_window_tokens=2), 19, 7, {}, "eviction_policy"),
        (asked("SNAPKV", max_cache_tokens=30, recent_tokens=2, score_window_tokens=2), 19, 5, {}, "token_ids"),
    ],
)
def test_both_tables_of_a_sequence_must_fit_into_the_pool(requested, tokens, blocks, options, field):
    tight = World(blocks - 1)
    before = state_hash(tight.manager.queries.state())
    with pytest.raises(SequenceTooLongError) as refused:
        tight.admit(PROMPT[:tokens], eviction_policy=requested, **options)
    assert list(refused.value.fields) == [field]
    assert state_hash(tight.manager.queries.state()) == before
    world = World(blocks)
    generate = 1 if requested.message().kind == Kind.SNAPKV else 12
    world.run(PROMPT[:tokens], "a", eviction_policy=requested, generate=generate, **options)


@pytest.mark.parametrize("requested", POLICIES, ids=[Kind(requested.message().kind).name for requested in POLICIES])
@pytest.mark.parametrize(("prompt", "new"), [(1, 1), (3, 30), (8, 1), (12, 20), (30, 3), (30, 40)])
def test_a_preview_has_the_blocks_to_completion(requested, prompt, new):
    """They are the sequence's blocks at once, except for the blocks that the manager gives a step ahead."""
    tokens = list(range(100, 100 + prompt))
    world = World(40)
    (estimate,) = world.queries.preview(world.request(tokens, eviction_policy=requested), new).estimates
    world.admit(tokens, "a", eviction_policy=requested)
    live = world.live["a"]
    most = 40 - world.free
    assert estimate.next_step == most
    while live.computed < prompt + new - 1:
        world.compute(live, live.computed + 1)
        most = max(most, 40 - world.free)
        world.sync()
        most = max(most, 40 - world.free)
    assert estimate.completion in (most - 1, most)


def test_a_preview_asks_the_rules_as_an_admission_does():
    world = World(40)
    make(world, "r", AVERAGE)
    preview = world.queries.preview(world.request(PROMPT), 10)
    assert [one.next_step for one in preview.estimates] == [2]
    with pytest.raises(SequenceTooLongError) as refused:
        World(4).manager.queries.preview(world.request(PROMPT[:3]), 20)
    assert list(refused.value.fields) == ["max_new_tokens"]
