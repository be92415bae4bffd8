"""Operators' rules: their matches, their effects, and changes of them while sequences run."""

import pytest

from cachemgr.errors import StaleRuleError
from cachemgr.retention.rule_book import FIELDS
from cachemgr.slices import at_once
from cachemgr.types import (
    EventKind,
    Prefix,
    RemovalCause,
    Retention,
    RetentionRange,
    RetentionRule,
    RuleAction,
    RuleMatch,
    TierKind,
)
from protos.errors import InvalidField
from protos.kvcommon.tokens import pack, unpack
from tests.support.in_process_manager import World, retain

PROMPT = list(range(10, 19))


ALL = RuleMatch()


def make(world: World, name: str, match: RuleMatch = ALL, order: int = 0, **action: object):
    spec = RetentionRule(name, order, match, RuleAction(**action))
    return at_once(world.operators.create_rule(spec, validate_only=False))


def update(world: World, rule: RetentionRule, mask: tuple[str, ...]):
    return at_once(world.operators.update_rule(rule, mask, validate_only=False))


def delete(world: World, name: str, *, validate_only: bool = False) -> int:
    return at_once(world.operators.delete_rule(name, "", validate_only=validate_only))


def priorities(world: World) -> dict[int, int]:
    """Priority of the block with each first token."""
    world.manager.expire()
    return {unpack(view.tokens)[0]: view.priority for _, view in filter(None, world.queries.blocks("e/0")) if view.key}


def holders(world: World) -> set[str]:
    return {lease.holder for _, _, lease in filter(None, world.queries.leases("e/0", ""))}


@pytest.mark.parametrize(
    ("match", "options", "applies"),
    [
        (RuleMatch(), {}, True),
        (RuleMatch(salt="a"), {"salt": "a"}, True),
        (RuleMatch(salt="a"), {"salt": "b"}, False),
        (RuleMatch(salt="a"), {}, False),
        (RuleMatch(tenant_id="t"), {"tenant_id": "t"}, True),
        (RuleMatch(tenant_id="t"), {}, False),
        (RuleMatch(adapter_id=0), {"adapter_id": 0}, True),
        (RuleMatch(adapter_id=0), {}, False),
        (RuleMatch(salt="a", tenant_id="t"), {"salt": "a"}, False),
        (RuleMatch(prefix_token_ids=(10, 11)), {}, True),
        (RuleMatch(prefix_token_ids=(10, 12)), {}, False),
        (RuleMatch(prefix_token_ids=tuple(PROMPT)), {}, True),
        (RuleMatch(prefix_token_ids=(*PROMPT, 1)), {}, False),
    ],
)
def test_a_rule_is_about_requests_that_match_in_all_that_is_set(match, options, applies):
    world = World(12)
    make(world, "r", match, priority=80)
    world.cache(PROMPT, **options)
    assert (80 in priorities(world).values()) == applies


ONE_BLOCK = Retention((RetentionRange(0, 4, 20),))


@pytest.mark.parametrize(
    ("rules", "own", "expected"),
    [
        # Blocks count by their first token.
        ([(RuleMatch(start=1, end=8), 0, 80)], Retention(), (35, 80, 35)),
        ([(RuleMatch(prefix_token_ids=(10, 11, 12, 13, 14)), 0, 80)], Retention(), (80, 80, 35)),
        # The first rule in order counts, by name among equals.
        (
            [(RuleMatch(end=4), 1, 90), (RuleMatch(start=4), 2, 50), (RuleMatch(start=4), 2, 60), (ALL, 3, 10)],
            Retention(),
            (90, 50, 50),
        ),
        # Ranges of the request go before any rule.
        ([(ALL, 0, 90)], ONE_BLOCK, (20, 35, 35)),
    ],
)
def test_a_block_has_the_priority_of_the_request_or_else_of_the_first_rule(rules, own, expected):
    world = World(12)
    for name, (match, order, priority) in zip("zabc", rules, strict=False):
        make(world, name, match, order, priority=priority)
    world.cache(PROMPT, retention=own)
    assert priorities(world) == dict(zip((10, 14, 18), expected, strict=True))


def test_a_rule_without_storage_precedes_the_retention_of_a_request():
    world = World(12)
    make(world, "r", RuleMatch(salt="a"), no_store=True)
    world.cache(PROMPT, salt="a", retention=retain(90))
    assert priorities(world) == {}


def test_an_offload_floor_decides_which_blocks_are_offloaded_whatever_the_request_says():
    world = World(4, host_blocks=8)
    make(world, "r", RuleMatch(salt="a"), offload_min_priority=60)
    world.cache(PROMPT, salt="a")
    world.cache(list(range(100, 116)), no_store=True)
    assert world.queries.explain(Prefix(tuple(PROMPT), salt="a"), 0)[0].blocks == []
    world.cache(PROMPT, salt="a", retention=retain(70))
    world.cache(list(range(100, 116)), no_store=True)
    below = world.queries.explain(Prefix(tuple(PROMPT), salt="a"), 0)[0].blocks
    assert {view.tier for view, _, _ in below} == {TierKind.HOST}


def test_a_changed_rule_reaches_cached_blocks_at_once_and_is_announced():
    world = World(12)
    make(world, "r", priority=80)
    world.cache(PROMPT)
    before = world.queries.last_event
    spec = RetentionRule("r", action=RuleAction(priority=60))
    _, leases, matching = update(world, spec, ("action.retention_priority",))
    assert (leases, matching) == (3, 3)
    assert set(priorities(world).values()) == {60}
    told = {(event.kind, event.lease and event.lease.priority) for event in world.queries.events_after(before)}
    assert (EventKind.LEASE_GRANTED, 60) in told


def test_a_changed_rule_reaches_blocks_that_running_sequences_commit_later():
    world = World(12)
    make(world, "r", priority=80)
    world.admit(PROMPT, "a")
    update(world, RetentionRule("r", action=RuleAction(priority=60)), ("action",))
    world.compute(world.live["a"], 9)
    world.finish("a")
    assert set(priorities(world).values()) == {60}


def test_a_rule_about_a_beginning_counts_it_under_every_salt_and_its_last_part_too():
    world = World(20)
    world.cache(PROMPT)
    world.cache(PROMPT, salt="a")
    world.cache([*PROMPT[:5], 90, 91, 92], adapter_id=0)
    world.cache([1, *PROMPT[1:]])
    match = RuleMatch(prefix_token_ids=tuple(PROMPT[:6]))
    assert make(world, "r", match, priority=80)[1] == 5


def test_a_deleted_rule_ends_its_leases_with_events_and_no_others():
    world = World(12)
    make(world, "r", priority=80)
    make(world, "s", RuleMatch(salt="a"), order=-1, priority=70)
    world.cache(PROMPT)
    world.cache(PROMPT, session_id="x", retention=retain(50))
    world.run(PROMPT, "live", salt="a")
    before = world.queries.last_event
    assert delete(world, "r", validate_only=True) == 3
    assert delete(world, "r") == 3
    assert holders(world) == {"session/x", "rule/s"}
    broken = [event for event in world.queries.events_after(before) if event.kind is EventKind.LEASE_BROKEN]
    assert [(event.cause, event.lease.holder) for event in broken] == [(RemovalCause.RULE_CHANGED, "rule/r")] * 3
    assert [rule.name for rule in world.queries.rules()] == ["s"]
    world.check()
    world.cache([1, 2, 3, 4])
    assert holders(world) == {"session/x", "rule/s"}


def test_etags_change_with_every_change_and_stale_ones_are_refused():
    world = World(12)
    first, _ = make(world, "r", priority=80)
    changed = RetentionRule("r", action=RuleAction(priority=60), etag=first.etag)
    second, _, _ = update(world, changed, FIELDS)
    assert second.etag != first.etag
    before = world.queries.rules()
    with pytest.raises(StaleRuleError) as refused:
        update(world, changed, FIELDS)
    assert list(refused.value.fields) == ["rule.etag"]
    with pytest.raises(StaleRuleError):
        at_once(world.operators.delete_rule("r", first.etag, validate_only=False))
    assert world.queries.rules() == before
    at_once(world.operators.delete_rule("r", second.etag, validate_only=False))


def test_a_mask_changes_only_what_it_names():
    world = World(12)
    make(world, "r", RuleMatch(salt="a", start=4), order=3, priority=80, duration=5.0)
    spec = RetentionRule("r", 9, RuleMatch(salt="b"), RuleAction(priority=60))
    rule, _, _ = update(world, spec, ("action.retention_priority", "match.salt"))
    assert (rule.order, rule.match, rule.action) == (3, RuleMatch(salt="b", start=4), RuleAction(60, 5.0))
    rule, _, _ = update(world, spec, ("order",))
    assert (rule.order, rule.match.start) == (9, 4)
    rule, _, _ = update(world, spec, FIELDS)
    assert (rule.match, rule.action) == (spec.match, spec.action)


def test_a_rule_pins_blocks_of_a_released_sequence():
    world = World(20)
    make(world, "r", RuleMatch(end=8), pin_duration=5.0)
    world.cache(PROMPT)
    (hold,) = world.queries.holds()
    assert (hold.pin, hold.owner, hold.num_blocks, hold.remaining) == (True, "rule/r", 2, 5.0)
    world.check()
    assert world.free == 18
    world.cache(list(range(100, 172)))
    assert {10, 14} <= set(priorities(world))
    world.now = 5.0
    world.manager.expire()
    assert (list(world.queries.holds()), world.free) == ([], 20)


def test_a_rule_does_not_pin_for_requests_with_retention_nor_once_deleted():
    world = World(20)
    make(world, "r", pin_duration=5.0)
    world.cache(PROMPT, retention=retain(10))
    world.run(PROMPT, "a")
    delete(world, "r")
    world.finish("a")
    assert list(world.queries.holds()) == []


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_leases_of_a_rule_end_with_the_device_that_their_blocks_were_to_be_computed_on(windows):
    world = World(16, windows=windows)
    make(world, "r", priority=80)
    world.admit(PROMPT)
    # It waits for the first one's blocks, and has leases on them.
    assert world.admit(PROMPT).wait_for_handle
    assert delete(world, "r", validate_only=True) == 2 * len(windows)
    world.start_executor()
    assert delete(world, "r", validate_only=True) == 0


def test_rules_are_found_by_what_prompts_begin_with_in_their_order():
    world = World(12)
    prefixes = [(10,), (10, 11), (10, 12), (11,), (), tuple(PROMPT), (*PROMPT, 7)]
    for number, prefix in enumerate(prefixes):
        make(world, f"r{number}", RuleMatch(prefix_token_ids=prefix), order=10 - number, priority=number)
    make(world, "salted", RuleMatch(salt="a", prefix_token_ids=(10,)), order=-1, priority=50)

    def found(**options):
        request = world.request(PROMPT, **options)
        return [rule.spec.name for rule in world.manager._state.rules.for_request(request, pack(request.token_ids))]

    assert found() == ["r5", "r4", "r1", "r0"]
    assert found(salt="a") == ["salted", "r5", "r4", "r1", "r0"]
    delete(world, "r4")
    moved = RetentionRule("r0", 10, RuleMatch(prefix_token_ids=(11,)), RuleAction(priority=0))
    update(world, moved, ("match",))
    assert found() == ["r5", "r1"]


def test_there_are_few_rules_about_the_same_prompts():
    world = World(12)
    for number in range(64):
        make(world, f"r{number}", RuleMatch(salt="a", start=number), priority=1)
    with pytest.raises(InvalidField) as refused:
        make(world, "more", RuleMatch(salt="a"), priority=1)
    assert list(refused.value.fields) == ["rule.match"]
    make(world, "other", RuleMatch(salt="b"), priority=1)
    moved = RetentionRule("other", match=RuleMatch(salt="a"), action=RuleAction(priority=1))
    with pytest.raises(InvalidField):
        update(world, moved, ("match",))
    # What is about the same prompts already stays so.
    same = RetentionRule("r1", match=RuleMatch(salt="a", end=4), action=RuleAction(priority=1))
    update(world, same, ("match",))
