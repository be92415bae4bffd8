"""What a sequence adds to a step, from the times of steps."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.decode_times import DecodeTimes
from scheduler.core.prefill_budget import PrefillBudget


def seen(*steps: tuple[int, float]) -> DecodeTimes:
    times = DecodeTimes()
    for step in steps:
        times.observe(*step)
    return times


def test_nothing_is_known_before_steps_of_different_sizes() -> None:
    assert seen().sequence_seconds is None
    assert seen((4, 0.02), (4, 0.03)).sequence_seconds is None
    assert seen((4, 0.02), (8, 0.03)).sequence_seconds == pytest.approx(0.0025)


@given(
    base=st.floats(1e-3, 0.1),
    slope=st.floats(0, 1e-2),
    sizes=st.lists(st.integers(1, 7), min_size=2, max_size=60).filter(lambda sizes: len(set(sizes)) > 1),
)
def test_it_is_found_whatever_sizes_come(base: float, slope: float, sizes: list[int]) -> None:
    found = seen(*((size, base + slope * size) for size in sizes)).sequence_seconds
    assert found == pytest.approx(slope, abs=1e-9)


def test_slow_steps_now_and_then_change_nothing() -> None:
    slow = itertools.cycle([1.0, 1.0, 40.0, 1.0, 1.0])
    steps = [(size, (0.05 + 0.002 * size) * next(slow)) for _ in range(5) for size in (1, 3, 6)]
    assert seen(*steps).sequence_seconds == pytest.approx(0.002)


def test_a_device_that_becomes_faster_is_known_soon() -> None:
    steps = [(size, 0.05 + 0.004 * size) for _ in range(9) for size in (2, 4, 6)]
    steps += [(size, 0.05 + 0.001 * size) for _ in range(5) for size in (2, 4, 6)]
    assert seen(*steps).sequence_seconds == pytest.approx(0.001)


def test_sizes_of_large_batches_are_few() -> None:
    times = DecodeTimes()
    for size in range(1, 513):
        times.observe(size, 0.01 + 1e-5 * size)
    assert len(times._times) <= 16
    assert times.sequence_seconds == pytest.approx(1e-5, rel=0.2)


def test_a_step_never_takes_less_for_more_sequences() -> None:
    assert seen((1, 0.03), (8, 0.02)).sequence_seconds == 0.0


def test_steps_with_prompts_say_nothing_of_it() -> None:
    budget = PrefillBudget()
    for size in (1, 2, 4):
        budget.observe(size, 0, 0.01 + 0.001 * size)
        budget.observe(size, 100, 1.0)
    assert budget.sequence_seconds == pytest.approx(0.001)
