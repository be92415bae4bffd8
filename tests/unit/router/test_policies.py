"""Which engine each policy chooses."""

from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.router.expected_seconds import (
    Candidate,
    Match,
    Rates,
    _median_of_others,
    levelled,
    seconds_to_first_token,
)
from scheduler.router.policies import (
    IMBALANCE,
    POLICIES,
    Cost,
    LeastLoad,
    Policy,
    Prefix,
    Prompt,
    RoundRobin,
    SessionAffinity,
)

BLOCK = 16
KEYS = list(range(1, 65))
PROMPT = Prompt(KEYS, len(KEYS) * BLOCK)
RATES = Rates(prompt_token=1e-3, host_block=2e-3, disk_block=8e-3, request=2.0)


def engine(name: str, *, device: int = 0, host: int = 0, disk: int = 0, **fields: object) -> Candidate:
    plain = Candidate(name, BLOCK, Match(device, host, disk), 0.0, 0, 8, RATES, 0.0)
    return replace(plain, **fields)  # type: ignore[arg-type]


def chosen(policy: Policy, prompt: Prompt, *candidates: Candidate) -> str:
    return policy.choose(prompt, candidates).name


def test_the_expected_time_counts_queue_prefill_onloading_and_the_wait_for_admission() -> None:
    assert seconds_to_first_token(engine("a"), 1024) == pytest.approx(1.024)
    assert seconds_to_first_token(engine("a", queued_tokens=500), 1024) == pytest.approx(1.524)
    assert seconds_to_first_token(engine("a", device=32), 1024) == pytest.approx(0.512)
    assert seconds_to_first_token(engine("a", device=16, host=16, disk=16), 1024) == pytest.approx(
        0.256 + 0.032 + 0.128
    )
    # The last token of a prompt is always computed.
    assert seconds_to_first_token(engine("a", device=64), 1024) == pytest.approx(0.001)
    # A step of each sample that runs there.
    rates = RATES._replace(step=0.01)
    assert seconds_to_first_token(engine("a", device=64, load=3, rates=rates), 1024) == pytest.approx(0.001 + 0.03)
    # Nine samples are before it, and the batch holds eight: two have to end.
    assert seconds_to_first_token(engine("a", device=64, load=9), 1024) == pytest.approx(0.001 + 2 * 2.0 / 8)


def test_what_an_engine_has_not_measured_or_nearly_as_most_is_as_most_have_it() -> None:
    rates = [Rates(), Rates(prompt_token=2e-3), Rates(5e-3, 1e-3), Rates(2.5e-3)]
    level = Rates(2.5e-3, 1e-3)
    assert levelled(rates, [0.0] * 4) == [level, level, Rates(5e-3, 1e-3), level]


@pytest.mark.parametrize("others", [1, 3])
def test_an_engine_that_was_slow_once_is_as_fast_as_the_others_after_a_while(others: int) -> None:
    """Also where there is only one other, which would else get all prompts for good."""
    rates = [Rates(30e-3), *[Rates(5e-3)] * others]

    def ratio(age: float) -> float:
        slow, *fast = levelled(rates, [age] + [0.0] * others)
        assert slow.prompt_token is not None
        assert fast[0].prompt_token is not None
        return slow.prompt_token / fast[0].prompt_token

    assert ratio(0.0) == pytest.approx(6.0)
    assert 1.5 < ratio(5.0) < 6.0
    assert ratio(40.0) == 1.0


@given(st.lists(st.floats(1e-6, 1.0) | st.sampled_from([0.25, 0.5]), min_size=2, max_size=12))
def test_the_others_of_each_engine_have_the_median_of_a_list_without_the_engine(values: list[float]) -> None:
    ordered = sorted(values)
    for at, value in enumerate(values):
        assert _median_of_others(value, ordered) == median(values[:at] + values[at + 1 :])


@pytest.mark.parametrize(
    "rates", [RATES._replace(step=0.05, sequence=2e-3), RATES, Rates()], ids=["measured", "no steps yet", "nothing yet"]
)
def test_streams_that_share_a_prefix_spread_where_each_makes_the_steps_longer(rates: Rates) -> None:
    """Sixty long outputs after one common prompt, which the first engine has cached."""
    cost, loads = Cost(), dict.fromkeys("abcd", 0)
    prompt = PROMPT._replace(output_tokens=200.0)
    for _ in range(60):
        # Each that got one has the prefix, too.
        engines = [
            engine(name, device=64 if load or name == "a" else 0, load=load, max_running=64, rates=rates)
            for name, load in loads.items()
        ]
        loads[chosen(cost, prompt, *engines)] += 1
    assert set(loads.values()) == {15}


def test_streams_that_cost_others_nothing_stay_where_their_prefix_is() -> None:
    rates = RATES._replace(step=0.05, sequence=0.0)
    warm, cold = engine("a", device=64, load=10, max_running=64, rates=rates), engine("b", rates=rates)
    assert chosen(Cost(), PROMPT._replace(output_tokens=200.0), warm, cold) == "a"
    slow = RATES._replace(step=0.05, sequence=1e-4)
    few = replace(warm, rates=slow), replace(cold, rates=slow)
    # A thousand tokens are computed again sooner than ten streams wait for each other.
    assert chosen(Cost(), PROMPT._replace(output_tokens=200.0), *few) == "a"
    assert chosen(Cost(), PROMPT._replace(output_tokens=2_000.0), *few) == "b"


def test_blocks_that_are_onloaded_slower_than_computed_cost_no_more_than_computing() -> None:
    slow = RATES._replace(disk_block=5.0)
    assert seconds_to_first_token(engine("a", disk=64, rates=slow), 1024) == pytest.approx(1.024, rel=1e-2)


def test_prefix_forgets_engines_that_are_gone() -> None:
    prefix = Prefix()
    assert chosen(prefix, PROMPT, engine("a"), engine("b", load=9)) == "a"
    # It stays away for a while, and comes back.
    assert chosen(prefix, PROMPT, engine("b")) == "b"
    assert chosen(prefix, PROMPT, engine("a", load=1), engine("c")) == "a"
    for number in range(100):
        chosen(prefix, PROMPT, engine(f"new-{number}"))
    assert len(prefix._given) <= 2


def test_cost_follows_the_prefix_until_its_queue_is_longer_than_what_computing_it_again_costs_all() -> None:
    cost, idle = Cost(), engine("cold")
    assert chosen(cost, PROMPT, idle, engine("warm", device=48)) == "warm"
    # Half of the engines have a queue: each uncached token counts twice.
    assert chosen(cost, PROMPT, idle, engine("warm", device=48, queued_tokens=1_500)) == "warm"
    assert chosen(cost, PROMPT, idle, engine("warm", device=48, queued_tokens=1_600)) == "cold"
    # All have one: three times.
    busy = engine("cold", queued_tokens=1)
    assert chosen(cost, PROMPT, busy, engine("warm", device=48, queued_tokens=2_250)) == "warm"
    assert chosen(cost, PROMPT, busy, engine("warm", device=48, queued_tokens=2_450)) == "cold"


def test_cost_gives_cold_prompts_to_the_engine_that_waited_longest_for_one() -> None:
    assert chosen(Cost(), PROMPT, engine("a", cold_at=5.0), engine("b", cold_at=3.0), engine("c", cold_at=4.0)) == "b"


def test_cost_keeps_a_session_on_its_engine_where_others_are_no_better() -> None:
    cost, asked = Cost(), PROMPT._replace(session="s")
    assert chosen(cost, asked, engine("a", device=32), engine("b")) == "a"
    near = engine("a", device=32, load=1)
    assert chosen(cost, PROMPT, near, engine("b", device=32)) == "b"
    assert chosen(cost, asked, near, engine("b", device=32)) == "a"
    assert chosen(cost, asked, near, engine("b", device=64)) == "b"
    # It stays where it moved.
    assert chosen(cost, asked, engine("a", device=64), engine("b", device=64)) == "b"


def test_round_robin_takes_turns() -> None:
    policy = RoundRobin()
    names = [chosen(policy, PROMPT, engine("a"), engine("b"), engine("c")) for _ in range(6)]
    assert sorted(names[:3]) == ["a", "b", "c"]
    assert names[:3] == names[3:]


def test_least_load_compares_samples_and_then_prompt_tokens() -> None:
    assert chosen(LeastLoad(), PROMPT, engine("a", load=2), engine("b", load=1, queued_tokens=9000)) == "b"
    assert chosen(LeastLoad(), PROMPT, engine("a", load=1, queued_tokens=5), engine("b", load=1)) == "b"


def test_sessions_stay_when_an_engine_is_added_and_few_move_when_one_is_removed() -> None:
    policy, engines = SessionAffinity(), [engine(name) for name in "abcd"]
    prompts = [PROMPT._replace(session=f"s{number}") for number in range(200)]
    homes = [policy.choose(prompt, engines).name for prompt in prompts]
    assert all(25 <= homes.count(name) <= 80 for name in "abcd")
    after = [policy.choose(prompt, engines[:3]).name for prompt in prompts]
    assert all(new == old for new, old in zip(after, homes, strict=True) if old != "d")


def test_prefix_follows_its_own_decisions_and_gives_up_on_a_busy_engine() -> None:
    policy, a, b = Prefix(), engine("a"), engine("b", cold_at=1.0)
    assert chosen(policy, PROMPT, a, b) == "a"
    longer = Prompt([*KEYS, 99], PROMPT.num_tokens + BLOCK)
    assert chosen(policy, longer, replace(a, load=3), b) == "a"
    other = Prompt([1, 2, *range(200, 262)], PROMPT.num_tokens)
    assert chosen(policy, other, replace(a, load=3), b) == "b"
    assert chosen(policy, longer, replace(a, load=IMBALANCE + 1), b) == "b"


def test_the_names_of_policies_are_those_that_settings_take() -> None:
    assert list(POLICIES) == ["cost", "prefix", "session", "least-load", "round-robin"]
