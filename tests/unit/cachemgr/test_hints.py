"""Hints of agents: each action answered, with a request and by itself."""

import dataclasses

import pytest

from cachemgr.operators import hints as hint_runner
from cachemgr.operators.state_dump import state_hash
from cachemgr.retention.bounds import MAX_SESSION_SECONDS
from cachemgr.sequences.holds import MAX_PINS
from cachemgr.slices import at_once
from cachemgr.types import HintAction, HintOutcome, Hints, Prefix
from protos.kvcommon import block_keys
from tests.support.in_process_manager import CONFIG, World, retain
from tests.support.work import work_of

PROMPT = list(range(10, 18))
ACCEPTED, CLIPPED, DEFERRED = HintOutcome.ACCEPTED, HintOutcome.CLIPPED, HintOutcome.DEFERRED
REJECTED, MISSING = HintOutcome.REJECTED, HintOutcome.MISSING


def hints(kind: str, version: str = "0.1", **payload: object) -> Hints:
    return Hints("0.1", "m", (HintAction("one", kind, version, payload),))


def send(world: World, kind: str, tokens: list[int] = PROMPT, session_id: str | None = None, **payload: object):
    """Outcome and number of blocks of one hint."""
    (answer,), _ = world.operators.hint(Prefix(tuple(tokens)), hints(kind, **payload), session_id)
    assert answer.action_id == "one"
    world.check()
    return answer.outcome, answer.num_blocks


def priorities(world: World) -> list[int]:
    return [view.priority for view, _, _ in world.queries.explain(Prefix(tuple(PROMPT)), 0)[0].blocks]


def with_prompt(num_blocks: int = 10, **options: object) -> World:
    world = World(num_blocks, **options)
    world.cache(PROMPT)
    return world


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("Retain", {"priority": 80}),
        ("Pin", {"owner": "a", "duration_seconds": 5}),
        ("Demote", {}),
        ("Demote", {"tier": "host"}),
        ("Prefetch", {}),
        ("Share", {}),
    ],
)
def test_hints_about_uncached_prompts_are_missing_and_change_nothing(kind, payload):
    world = with_prompt()
    before = state_hash(world.queries.state())
    assert send(world, kind, [1, 2, 3, 4], **payload) == (MISSING, 0)
    assert state_hash(world.queries.state()) == before


def test_retained_blocks_have_the_priority_for_the_duration():
    world = with_prompt()
    assert send(world, "Retain", priority=80, duration_seconds=5) == (ACCEPTED, 2)
    assert priorities(world) == [80, 80]
    assert {lease.holder for _, _, lease in filter(None, world.queries.leases("e/0", ""))} == {"hint/m"}
    world.now = 5.0
    world.manager.expire()
    assert priorities(world) == [35, 35]


def test_an_endless_lease_of_a_hint_ends_after_a_day():
    world = World(10, config=dataclasses.replace(CONFIG, lease_seconds=1e9))
    world.cache(PROMPT)
    assert send(world, "Retain", priority=80) == (CLIPPED, 2)
    world.now = MAX_SESSION_SECONDS - 1
    world.manager.expire()
    assert priorities(world) == [80, 80]
    world.now = MAX_SESSION_SECONDS
    world.manager.expire()
    assert priorities(world) == [35, 35]


def test_pins_are_accepted_clipped_or_rejected_by_their_budget():
    for budget, answer in ((0.3, (ACCEPTED, 2)), (0.1, (CLIPPED, 1)), (0.01, (REJECTED, 0))):
        world = with_prompt(config=dataclasses.replace(CONFIG, pin_budget=budget))
        assert send(world, "Pin", owner="agent", duration_seconds=5) == answer
        assert [hold.num_blocks for hold in world.queries.holds("hint/agent")] == [answer[1]] * (answer[1] > 0)


def test_pins_by_hints_are_bounded_in_time_and_owned_by_their_caller():
    world = with_prompt(config=dataclasses.replace(CONFIG, max_retention_seconds=5.0, pin_budget=0.2))
    world.operators.pin_prefix(Prefix(tuple(PROMPT)), "agent", 60.0, validate_only=False)
    assert send(world, "Pin", owner="agent", duration_seconds=50) == (CLIPPED, 2)
    pins = {hold.owner: (hold.num_blocks, hold.remaining) for hold in world.queries.holds("")}
    assert pins == {"agent": (2, 60.0), "hint/agent": (2, 5.0)}
    # An owner of a tenant is that of no other.
    action = HintAction("one", "Pin", "0.1", {"owner": "agent", "duration_seconds": 4})
    admission = world.admit([*PROMPT, 1], tenant_id="t", hints=Hints("0.1", "m", (action,)))
    assert admission.hint_answers[0].outcome is ACCEPTED
    assert {hold.owner for hold in world.queries.holds("")} == {*pins, "hint/t/agent"}


def test_demoted_blocks_are_evicted_first():
    world = with_prompt(4)
    world.cache([50, 51, 52, 53])
    assert send(world, "Retain", [50, 51, 52, 53], priority=80, duration_seconds=5)[0] is ACCEPTED
    assert send(world, "Demote", priority=1) == (ACCEPTED, 2)
    world.cache([99] * 12, no_store=True)
    assert priorities(world) == []
    assert len(list(world.queries.records("e"))) == 1


def test_a_demotion_to_the_host_begins_copies_that_the_executor_runs():
    world = with_prompt(4, host_blocks=4)
    assert send(world, "Demote", tier="host") == (ACCEPTED, 2)
    assert world.free == 2
    world.run_executor_copies()
    world.check()
    assert world.free == 4
    assert world.tiers_of(PROMPT) == ["host"] * 2


def test_blocks_in_use_or_without_a_host_slot_are_not_demoted():
    world = with_prompt(8)
    assert send(world, "Demote", tier="host") == (REJECTED, 0)
    world = World(8, host_blocks=1)
    world.cache(PROMPT)
    assert send(world, "Demote", tier="host") == (CLIPPED, 1)
    world = World(8, host_blocks=4)
    world.run([*PROMPT, 1], "live")
    assert send(world, "Demote", tier="host") == (REJECTED, 0)


def test_a_prefetch_onloads_blocks_of_lower_tiers():
    world = with_prompt(4, host_blocks=4)
    assert send(world, "Prefetch") == (ACCEPTED, 0)
    send(world, "Demote", tier="host")
    world.run_executor_copies()
    (answer,), begun = world.operators.hint(Prefix(tuple(PROMPT)), hints("Prefetch"), None)
    assert (answer.outcome, answer.num_blocks, len(begun)) == (DEFERRED, 2, 2)
    world.check()
    world.run_executor_copies()
    world.check()
    assert world.tiers_of(PROMPT) == ["device"] * 2


def test_prefetched_blocks_stay_on_the_device_when_the_manager_starts_again():
    world = with_prompt(4, host_blocks=4, config=dataclasses.replace(CONFIG, write_through=False))
    send(world, "Demote", tier="host")
    world.run_executor_copies()
    world.operators.hint(Prefix(tuple(PROMPT)), hints("Prefetch"), None)
    world.run_executor_copies()
    assert world.restart_manager().device_blocks == 2
    assert world.tiers_of(PROMPT) == ["device"] * 2


def test_blocks_in_flight_are_not_prefetched_again():
    world = with_prompt(8, host_blocks=4)
    send(world, "Demote", tier="host")
    world.run_executor_copies()
    answers, begun = world.operators.hint(Prefix(tuple(PROMPT)), many(("Prefetch", {}), ("Prefetch", {})), None)
    assert [(answer.outcome, answer.num_blocks) for answer in answers] == [(DEFERRED, 2), (REJECTED, 0)]
    assert len(begun) == 2
    assert send(world, "Prefetch") == (REJECTED, 0)
    assert world.free == 6
    world.run_executor_copies()
    world.check()
    assert world.tiers_of(PROMPT) == ["device"] * 2


@pytest.mark.parametrize(
    ("kind", "version", "payload", "detail"),
    [
        ("Fly", "0.1", {}, "action_type"),
        ("Retain", "0.2", {"priority": 1}, "action_version"),
        ("Retain", "0.1", {}, "payload.priority"),
        ("Retain", "0.1", {"priority": 101}, "payload.priority"),
        ("Retain", "0.1", {"priority": 1.5}, "payload.priority"),
        ("Retain", "0.1", {"priority": True}, "payload.priority"),
        ("Retain", "0.1", {"priority": "high"}, "payload.priority"),
        ("Retain", "0.1", {"priority": float("nan")}, "payload.priority"),
        ("Retain", "0.1", {"priority": float("inf")}, "payload.priority"),
        ("Retain", "0.1", {"priority": 1, "duration_seconds": 0}, "payload.duration_seconds"),
        ("Pin", "0.1", {"duration_seconds": 1}, "payload.owner"),
        ("Pin", "0.1", {"owner": "a"}, "payload.duration_seconds"),
        ("Pin", "0.1", {"owner": 7, "duration_seconds": 1}, "payload.owner"),
        ("Pin", "0.1", {"owner": "o" * 257, "duration_seconds": 1}, "payload.owner"),
        ("Demote", "0.1", {"priority": -1}, "payload.priority"),
        ("Demote", "0.1", {"tier": "tape"}, "payload.tier"),
        ("Demote", "0.1", {"tier": "disk"}, "payload.tier"),
    ],
)
def test_an_invalid_action_is_rejected_by_itself(kind, version, payload, detail):
    world = with_prompt()
    before = state_hash(world.queries.state())
    (answer,), begun = world.operators.hint(Prefix(tuple(PROMPT)), hints(kind, version, **payload), None)
    assert (answer.outcome, answer.num_blocks, begun) == (REJECTED, 0, [])
    assert answer.detail.startswith(detail)
    assert state_hash(world.queries.state()) == before


def test_a_retain_of_a_request_is_deferred_until_its_blocks_are_computed():
    world = World(8)
    admission = world.run(PROMPT, "a", session_id="x", hints=hints("Retain", priority=80, duration_seconds=5))
    (answer,) = admission.hint_answers
    assert answer.outcome is DEFERRED
    world.finish("a")
    assert priorities(world) == [80, 80]


def test_other_hints_of_a_request_are_carried_out_at_once():
    world = with_prompt(config=dataclasses.replace(CONFIG, pin_budget=0.5))
    actions = tuple(
        HintAction(name, kind, "0.1", payload)
        for name, kind, payload in (
            ("1", "Pin", {"owner": "a", "duration_seconds": 5}),
            ("2", "Fly", {}),
            ("3", "Share", {}),
        )
    )
    admission = world.run([*PROMPT, 1], "a", hints=Hints("0.1", "m", actions))
    answers = [(answer.action_id, answer.outcome) for answer in admission.hint_answers]
    assert answers == [("1", ACCEPTED), ("2", REJECTED), ("3", ACCEPTED)]


def many(*kinds: tuple[str, dict]) -> Hints:
    actions = tuple(HintAction(f"a{index}", kind, "0.1", payload) for index, (kind, payload) in enumerate(kinds))
    return Hints("0.1", "m", actions)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [("Share", {}), ("Retain", {"priority": 80}), ("Demote", {}), ("Demote", {"tier": "host"}), ("Prefetch", {})],
    ids=["Share", "Retain", "Demote", "Demote to the host", "Prefetch"],
)
def test_a_prompt_is_hashed_looked_up_and_leased_once_for_all_actions(kind, payload, monkeypatch):
    world = World(200)
    prompt = list(range(600))
    world.cache(prompt)

    def work(name, number):
        asked = many(*[(kind, payload)] * number)
        return work_of(lambda: world.admit(prompt, name, hints=asked))

    hashed = []
    begin_child = block_keys._begin_child
    monkeypatch.setattr(block_keys, "_begin_child", lambda: hashed.append(1) or begin_child())
    few = work("one", 1)
    first = len(hashed)
    many_actions = work("all", 64)
    assert len(hashed) == 2 * first
    # They are looked up once, too.
    assert many_actions < 2 * few


def test_the_last_retention_request_of_an_envelope_counts():
    world = with_prompt()
    kinds = [("Retain", {"priority": 80}), ("Demote", {}), ("Retain", {"priority": 60}), ("Retain", {"priority": 101})]
    answers, _ = world.operators.hint(Prefix(tuple(PROMPT)), many(*kinds), None)
    assert [answer.outcome for answer in answers] == [CLIPPED, ACCEPTED, CLIPPED, REJECTED]
    assert set(priorities(world)) == {60}
    answers, _ = world.operators.hint(Prefix(tuple(PROMPT)), many(("Retain", {"priority": 90}), ("Demote", {})), None)
    assert set(priorities(world)) == {0}


def test_actions_that_move_blocks_are_seen_by_those_behind_them():
    world = with_prompt(6, host_blocks=1)
    to_host, back = ("Demote", {"tier": "host"}), ("Prefetch", {})
    world.run([*range(50, 58), 1], "live")
    assert world.free == 3
    answers, begun = world.operators.hint(Prefix(tuple(PROMPT)), many(back, to_host, to_host, back, back), None)
    found = [(answer.outcome, answer.num_blocks) for answer in answers]
    assert found == [(ACCEPTED, 0), (CLIPPED, 1), (REJECTED, 0), (REJECTED, 0), (REJECTED, 0)]
    assert begun == []
    world.run_executor_copies()
    world.check()
    answers, _ = world.operators.hint(Prefix(tuple(PROMPT)), many(back, back, to_host), None)
    assert [(answer.outcome, answer.num_blocks) for answer in answers] == [(DEFERRED, 1), (REJECTED, 0), (REJECTED, 0)]
    world.run_executor_copies()
    world.check()
    assert world.tiers_of(PROMPT) == ["device"] * 2


def test_a_retain_between_two_demotions_lets_the_second_offload():
    world = World(8, host_blocks=2)
    world.cache([70, 71, 72, 73, 74, 75, 76, 77], retention=retain(60))
    send(world, "Demote", [70, 71, 72, 73, 74, 75, 76, 77], tier="host")
    world.run_executor_copies()
    world.cache(PROMPT)
    to_host = ("Demote", {"tier": "host"})
    answers, _ = world.operators.hint(
        Prefix(tuple(PROMPT)), many(to_host, ("Retain", {"priority": 90, "duration_seconds": 5}), to_host), None
    )
    found = [(answer.outcome, answer.num_blocks) for answer in answers]
    assert found == [(REJECTED, 0), (ACCEPTED, 2), (ACCEPTED, 2)]
    world.run_executor_copies()


def test_a_prefetch_onloads_a_windows_blocks_left_after_evictions_in_another_group():
    world = World(3, windows=(None, 5), host_blocks=2)
    at_once(world.operators.update_pool("e/0", 2, world.queries.pool("e/0").etag, validate_only=False))
    world.cache(list(range(8)))
    assert send(world, "Demote", list(range(8)), tier="host") == (ACCEPTED, 4)
    world.run_executor_copies()
    world.cache([50, 51, 52, 53], retention=retain(80))
    world.run([60, 61], "live")
    # In the first group the other prompt is offloaded, and the second block is evicted there: the window loses it, too.
    assert send(world, "Prefetch", list(range(8))) == (CLIPPED, 2)
    world.run_executor_copies()


@pytest.mark.parametrize(("budget", "first"), [(1.0, ACCEPTED), (0.1, CLIPPED), (0.01, REJECTED)])
def test_pins_of_one_envelope_go_over_a_bounded_number_of_blocks(monkeypatch, budget, first):
    monkeypatch.setattr(hint_runner, "MAX_PINNED_BLOCKS", 4)
    world = with_prompt(config=dataclasses.replace(CONFIG, pin_budget=budget))
    pins = many(*[("Pin", {"owner": f"o{number}", "duration_seconds": 5}) for number in range(3)])
    answers, _ = world.operators.hint(Prefix(tuple(PROMPT)), pins, None)
    assert [answer.outcome for answer in answers] == [first, first, REJECTED]
    assert answers[2].detail == "the pins of this request already cover 4 blocks"
    # The next request's are its own.
    assert send(world, "Pin", owner="o2", duration_seconds=5)[0] is first


def test_callers_make_a_bounded_number_of_pins_and_operators_any():
    world = with_prompt()
    for number in range(MAX_PINS):
        world.operators.hint(Prefix(tuple(PROMPT)), hints("Pin", owner=f"o{number}", duration_seconds=50), None)
    assert send(world, "Pin", owner="more", duration_seconds=5) == (REJECTED, 0)
    # Whose pin is there already keeps it.
    assert send(world, "Pin", owner="o1", duration_seconds=60)[0] is not REJECTED
    (pinned,) = world.operators.pin_prefix(Prefix(tuple(PROMPT)), "ops", 5.0, validate_only=False)
    for name in (pinned.name, next(hold.name for hold in world.queries.holds("hint/o2"))):
        world.operators.release_hold(name)
    assert send(world, "Pin", owner="more", duration_seconds=5)[0] is not REJECTED
