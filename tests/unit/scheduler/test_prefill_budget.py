"""The prefills of prompts beside decoding sequences: any machine, any noise."""

import itertools
from collections import deque
from math import inf
from statistics import median

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scheduler.core.batch import RunningBatch
from scheduler.core.planner import plan_step
from scheduler.core.prefill_budget import (
    DEFAULT_SHARE,
    LEAST_CHUNK,
    LONGEST_STEP,
    MIN_TOKENS,
    REFRESH_STEPS,
    PrefillBudget,
)
from scheduler.core.step_message import build_step
from scheduler.sequence import Sequence
from tests.support.scheduler.sequences import Pipeline, answer, depths, sequence, updates

BUDGET = 512


def seen(*steps: tuple[int, int, float], target: float = 0.0) -> PrefillBudget:
    """A budget after steps: their decoding sequences, prompt tokens and seconds."""
    prefills = PrefillBudget(target)
    for step in steps:
        prefills.observe(*step)
    return prefills


class Machine:
    """A device whose steps take a time for itself, one for each decoding sequence and one for each prompt token."""

    def __init__(self, fixed: float, row: float, token: float) -> None:
        self.fixed, self.row, self.token = fixed, row, token

    def seconds(self, decoding: int, prompt_tokens: int) -> float:
        return self.fixed + self.row * decoding + self.token * prompt_tokens


machines = st.builds(
    Machine, fixed=st.floats(1e-4, 0.1), row=st.floats(0, 1e-2), token=st.floats(1e-6, 1e-2, allow_subnormal=False)
)


def steps(
    prefills: PrefillBudget, machine: Machine, count: int, *, decoding: int = 4, noise: object = (), depth: int = 2
) -> list[int]:
    """Prompt tokens of each of `count` steps with an endless prompt, of which `depth` are under way at once."""
    noises = itertools.cycle(noise or [1.0])  # type: ignore[call-overload]
    in_flight: deque[int] = deque()
    given: list[int] = []
    for _ in range(count):
        bound = prefills.max_prefill_tokens(decoding, decoding, 1)
        given.append(BUDGET - decoding if bound is None else min(BUDGET - decoding, bound))
        in_flight.append(given[-1])
        if len(in_flight) == depth:
            tokens = in_flight.popleft()
            prefills.observe(decoding, tokens, machine.seconds(decoding, tokens) * next(noises))
    return given


def ideal(machine: Machine, decoding: int, share: float = DEFAULT_SHARE) -> float:
    """Prompt tokens that take this share of decoding alone."""
    return machine.seconds(decoding, 0) * share / machine.token


@given(machines, st.integers(1, 64), depths)
def test_the_budget_converges_to_the_share_on_any_machine(machine: Machine, decoding: int, depth: int) -> None:
    given_tokens = steps(PrefillBudget(), machine, 300, decoding=decoding, depth=depth)[200:]
    wanted = max(MIN_TOKENS, min(BUDGET - decoding, ideal(machine, decoding)))
    assert all(tokens == 0 or abs(tokens - wanted) < 1.5 for tokens in given_tokens)


@given(machines, st.lists(st.floats(0.9, 1.1), min_size=5, max_size=50))
def test_noise_does_not_move_the_budget(machine: Machine, noise: list[float]) -> None:
    given_tokens = [tokens for tokens in steps(PrefillBudget(), machine, 400, noise=noise)[200:] if tokens]
    wanted = min(BUDGET - 4, ideal(machine, 4))
    assert median(given_tokens) <= max(MIN_TOKENS, 3 * wanted)
    assert median(given_tokens) >= min(MIN_TOKENS, wanted / 3)


@given(machines, st.sampled_from([0.25, 4.0]))
def test_the_budget_follows_a_machine_that_becomes_faster_or_slower(machine: Machine, factor: float) -> None:
    prefills = PrefillBudget()
    steps(prefills, machine, 100)
    changed = Machine(machine.fixed, machine.row, machine.token * factor)
    wanted = max(MIN_TOKENS, min(BUDGET - 4, ideal(changed, 4)))
    assert all(tokens == 0 or abs(tokens - wanted) < 1.5 for tokens in steps(prefills, changed, 200)[100:])


@given(st.lists(st.floats(-1, 100), min_size=1, max_size=30), st.floats(0, 1), st.integers(1, 64))
def test_a_prompt_is_delayed_for_a_few_steps_only(times: list[float], target: float, decoding: int) -> None:
    prefills, seconds = PrefillBudget(target), itertools.cycle(times)
    held = 0
    for _ in range(4 * REFRESH_STEPS):
        tokens = prefills.max_prefill_tokens(decoding, decoding, 1)
        held = held + 1 if tokens == 0 else 0
        assert held <= 1
        assert tokens is None or tokens == 0 or tokens >= MIN_TOKENS
        prefills.observe(decoding, BUDGET if tokens is None else tokens, next(seconds))


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.01, 5.0]),
    st.integers(1, 64),
    depths,
)
def test_every_sequence_ends_within_the_budget(
    times: list[float], requests: list[tuple[int, int]], target: float, budget: int, depth: int
) -> None:
    batch, prefills, seconds = RunningBatch(), PrefillBudget(target), itertools.cycle(times)
    waiting = [
        sequence(handle, prompt, max_tokens=output, blocks=(prompt + output) // 4 + 1)
        for handle, (prompt, output) in enumerate(requests, 1)
    ]
    total, work = len(waiting), sum(prompt + output for prompt, output in requests)
    pipeline = Pipeline(batch, depth)
    released: list[int] = []
    number = 0
    while waiting or len(batch):
        # A request arrives while others run.
        if waiting and number % 3 == 0:
            batch.admit(waiting.pop(0))
        plan = batch.plan(budget, prefills)
        assert plan.num_tokens <= budget
        number += 1
        step = pipeline.turn(plan)
        assert step or plan.compute or waiting
        if step:
            answer(batch, step)
            prefills.observe(len(step.decodes), step.prefill_tokens, next(seconds))
        released += updates(batch)[1].released
        assert number <= 3 * total + 6 * work + REFRESH_STEPS
    assert len(released) == total


@given(machines, st.integers(1, 64), st.integers(1, BUDGET), st.integers(1, BUDGET))
def test_the_time_of_a_step_is_known_after_a_similar_one(
    machine: Machine, decoding: int, seen: int, tokens: int
) -> None:
    prefills = PrefillBudget()
    assert prefills.seconds(0, tokens) == inf
    prefills.observe(0, seen, machine.seconds(0, seen))
    assert prefills.seconds(decoding, 0) == inf, "a prompt does not say what decoding takes"
    assert prefills.seconds(0, seen) == pytest.approx(machine.seconds(0, seen))
    prefills.observe(decoding, 0, machine.seconds(decoding, 0))
    assert prefills.seconds(decoding, 0) == pytest.approx(machine.seconds(decoding, 0))
    assert prefills.seconds(2 * decoding + 1, 0) == inf, "few sequences do not say what many take"
    for _ in range(9):
        prefills.observe(decoding, seen, machine.seconds(decoding, seen))
    assert prefills.seconds(decoding, 2 * seen + 1) == inf, "few tokens do not say what many take"
    if tokens <= 2 * seen:
        assert prefills.seconds(decoding, tokens) == pytest.approx(machine.seconds(decoding, tokens))


def test_times_of_other_batch_sizes_are_forgotten() -> None:
    assert seen(*[(1, 0, 0.002)] * 3, (512, 0, 0.02)).seconds(512, 0) == 0.02


@given(machines, st.integers(0, 64), st.floats(0.7, 1.4))
def test_no_step_is_long_once_times_are_known(machine: Machine, decoding: int, noise: float) -> None:
    # Where hardly any time is left for prompts it is found more slowly.
    assume(machine.seconds(decoding, LEAST_CHUNK) < LONGEST_STEP / 2)
    prefills = PrefillBudget()
    for number in range(60):
        tokens = prefills.within_longest_step(decoding, BUDGET - decoding)
        seconds = machine.seconds(decoding, tokens)
        assert tokens >= LEAST_CHUNK
        # A few slow or fast steps move nothing.
        prefills.observe(decoding, tokens, seconds * (noise if number % 5 == 4 else 1.0))
        if number >= 30:
            assert seconds <= 1.05 * LONGEST_STEP
    assert tokens == BUDGET - decoding or machine.seconds(decoding, 2 * tokens) > LONGEST_STEP


def test_a_burst_of_prompts_is_bounded_too() -> None:
    prefills = PrefillBudget()
    prompts = [sequence(handle, 400, blocks=110) for handle in (1, 2)]
    assert plan_step(prompts, 512, prefills).num_tokens == 512
    prefills.observe(0, 512, 2 * LONGEST_STEP)
    assert plan_step(prompts, 512, prefills).num_tokens == 256


def streaming(handle: int, since: float) -> Sequence:
    """A sequence that decodes and had its first token at a time."""
    item = sequence(handle, 8, max_tokens=50, blocks=20)
    batch = RunningBatch()
    batch.admit(item)
    answer(batch, build_step(1, plan_step([item], 64), [])[1])
    item.first_token_at = since
    return item


def test_a_prompt_is_bounded_only_by_earlier_streams() -> None:
    def planned(since: float, arrived_at: float) -> int:
        prompt = sequence(2, 400, blocks=110, arrived_at=arrived_at)
        plan = plan_step([streaming(1, since), prompt], 200, seen((1, 0, 0.02), (1, 100, 0.12)))
        return {item.handle: count for item, count in plan.compute}[2]

    # 40 % of 20 ms, at 1 ms for each token.
    assert planned(since=1.0, arrived_at=2.0) == 8
    assert planned(since=2.0, arrived_at=1.0) == 199


def test_an_early_prompt_lifts_no_bound_of_later_prompts() -> None:
    early = sequence(2, 30, blocks=110, arrived_at=1.0)
    late = sequence(3, 400, blocks=110, arrived_at=3.0)
    plan = plan_step([streaming(1, 2.0), early, late], 200, seen((1, 0, 0.02), (1, 100, 0.12)))
    assert {item.handle: count for item, count in plan.prefills} == {2: 30, 3: 8}


def test_many_prompts_may_slow_few_streams_down() -> None:
    prefills = seen((2, 0, 0.02), (2, 100, 0.12))
    assert [prefills.max_prefill_tokens(2, 2, waiting) for waiting in (1, 2, 4)] == [8, 18, 38]


def test_no_prompt_is_bounded_without_decodes() -> None:
    assert PrefillBudget().max_prefill_tokens(0, 0, 3) is None
    assert PrefillBudget(0.001).max_prefill_tokens(0, 0, 3) is None


def test_a_target_holds_for_every_stream() -> None:
    prefills = seen((2, 0, 0.02), (2, 100, 0.12), target=0.03)
    assert prefills.max_prefill_tokens(2, 0, 9) == 9
    prefills.observe(2, 0, 0.05)
    prefills.observe(2, 0, 0.05)
    assert prefills.max_prefill_tokens(2, 0, 9) == MIN_TOKENS


def test_the_time_of_decodes_is_measured_again() -> None:
    prefills = seen((2, 0, 0.02))
    for _ in range(REFRESH_STEPS):
        assert prefills.max_prefill_tokens(2, 2, 1) != 0
        prefills.observe(2, 8, 0.03)
    assert prefills.max_prefill_tokens(2, 2, 1) == 0
    assert prefills.max_prefill_tokens(2, 2, 1) != 0, "one shows it, whenever it is answered"
    prefills.observe(2, 0, 0.02)
    assert prefills.max_prefill_tokens(2, 2, 1) != 0
    assert prefills.max_prefill_tokens(5, 5, 1) == 0


def test_few_tokens_say_little_about_many() -> None:
    assert seen((4, 0, 0.02), (4, 8, 0.02)).max_prefill_tokens(4, 4, 1) == 16


def test_an_executor_without_times_has_no_budget() -> None:
    assert seen((4, 0, 0.0)).max_prefill_tokens(4, 4, 1) is None


def test_an_estimate_needs_a_first_step() -> None:
    prefills = PrefillBudget()
    assert prefills.estimate(4, 100) is None
    prefills.observe(0, 64, 0.64)
    assert prefills.estimate(0, 6400) == pytest.approx(64)
    prefills.observe(4, 0, 0.1)
    # Also where a token of a prompt costs nothing, as far as that can be seen.
    for _ in range(5):
        prefills.observe(4, 64, 0.1)
    assert prefills.estimate(0, 100) == 0
    assert prefills.estimate(4, 100) == pytest.approx(0.1)


def test_the_time_of_a_prompt_token_is_learned_from_long_chunks() -> None:
    assert seen((0, 63, 1.0)).prompt_token_seconds is None
    assert seen((0, 63, 1.0), (4, 0, 0.1), (4, 100, 0.3)).prompt_token_seconds == pytest.approx(0.002)
    # An executor without times makes no tier slow.
    assert seen((0, 100, 0.0)).prompt_token_seconds is None


def test_a_prompt_token_takes_its_share_of_whole_steps_and_the_ends_of_prompts_do_not_count() -> None:
    budget = PrefillBudget()
    assert budget.prefill_token_seconds is None
    for _ in range(3):
        budget.observe(4, 0, 0.05)
    # Nothing but the end of a prompt yet.
    budget.observe(4, 5, 0.05)
    assert budget.prefill_token_seconds == pytest.approx(0.01)
    # A device that hides these tokens behind the decodes still takes the whole step.
    budget.observe(4, 100, 0.05)
    assert budget.prefill_token_seconds == pytest.approx(0.0005)
    budget.observe(0, 300, 0.06)
    assert budget.prefill_token_seconds == pytest.approx(0.11 / 400)


def test_after_steps_with_drafts_a_step_that_only_decodes_is_due() -> None:
    budget = seen((4, 0, 0.01), (4, 64, 0.02))
    assert budget.max_prefill_tokens(4, 4, 1)
    budget.note_drafts()
    assert budget.max_prefill_tokens(4, 4, 1) == 0
    # A single such step.
    assert budget.max_prefill_tokens(4, 4, 1)
