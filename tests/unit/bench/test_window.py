"""What requests keep together is added up over time, outputs are compared position by position."""

import pytest

from bench.research.window import BLOCK_SIZE, kept_by, policy
from bench.totals import Course, agreement, largest, totals
from protos.kvcommon.eviction import Layout, parse


def whole(total: int) -> int:
    return total


def test_a_request_keeps_its_prompt_and_then_a_token_more_each_time() -> None:
    found = totals([Course(3, [1.0, 2.0, 3.0])], whole)
    assert found == [(1.0, 3), (2.0, 4), (3.0, 5), (3.5, 0)]


def test_requests_of_one_step_count_together_though_reported_one_by_one() -> None:
    courses = [Course(3, [1.0, 2.0]), Course(5, [1.01, 2.01])]
    assert largest(courses, whole) == 4 + 6
    later = [Course(3, [1.0, 2.0]), Course(5, [3.0, 4.0])]
    assert largest(later, whole) == 6


def test_a_preempted_request_keeps_nothing_while_it_waits() -> None:
    course = Course(3, [1.0, 2.0, 9.0, 10.0], preemptions=1)
    assert totals([course], whole) == [(1.0, 3), (2.0, 4), (2.5, 0), (9.0, 5), (10.0, 6), (10.5, 0)]
    # It was preempted twice, once before it had any token.
    assert totals([Course(3, [1.0], preemptions=2)], whole) == [(1.0, 3), (1.0, 0)]


def test_a_window_bounds_what_each_request_keeps() -> None:
    courses = [Course(6, [float(at) for at in range(30)]), Course(8, [at + 0.1 for at in range(30)])]
    assert largest(courses, kept_by(None)) == 6 + 29 + 8 + 29
    assert largest(courses, kept_by(20)) == 40
    assert largest(courses, kept_by(64)) == 6 + 29 + 8 + 29


def test_a_window_evicts_before_every_step() -> None:
    """Otherwise requests would keep more tokens than these figures say, and short requests would evict nothing."""
    made = parse(policy(20), Layout(BLOCK_SIZE, (None,), plain_rotary=True))
    assert made is not None
    kept = 6
    for computed in range(6, 60):
        kept = made.kept_after(kept, computed, prompt=6)
        assert kept == kept_by(20)(computed)
        kept += 1


def test_agreement_is_the_share_of_equal_positions() -> None:
    assert agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == 5 / 6
    with pytest.raises(ValueError, match="shorter"):
        agreement([[1, 2]], [[1]])
