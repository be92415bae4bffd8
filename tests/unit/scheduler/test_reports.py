"""What the running set tells of progress, and when."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from scheduler.bridge import Report
from scheduler.core.batch import GATHER_STEPS
from scheduler.core.step_message import Flight, build_step
from scheduler.sequence import Sequence
from tests.unit.scheduler.test_planner import BLOCK, admitted, answer, depths, sequence, traffic


@given(traffic(), st.integers(1, 64), depths)
def test_everything_is_told_once(sequences: list[Sequence], budget: int, depth: int) -> None:
    running = admitted(*sequences)
    in_flight: list[Flight] = []
    number = 0
    computed: dict[int, int] = {}
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    while len(running):
        plan = running.plan(budget)
        if plan.compute:
            number += 1
            in_flight.append(build_step(number, plan, [])[1])
        if len(in_flight) == depth or not plan.compute:
            answer(running, in_flight.pop(0))
        report = running.take_report(everything=False)
        for handle, progress in report.progress.items():
            assert progress.computed > computed.get(handle, 0)
            computed[handle] = progress.computed
            tokens[handle] += progress.token_ids
        # What is released must be told before, or with it.
        assert set(report.released) <= computed.keys()
    for item in sequences:
        assert computed[item.handle] == item.computed
        assert tokens[item.handle] == item.token_ids[len(item.request.prompt_ids) :]


def reports(item: Sequence, steps: int) -> list[Report]:
    """What a lone sequence's steps bring, each answered before the next."""
    running = admitted(item)
    result = []
    for number in range(1, steps + 1):
        answer(running, build_step(number, running.plan(64), running.removed)[1])
        result.append(running.take_report(everything=False))
    return result


def test_progress_that_nobody_waits_for_is_gathered() -> None:
    told = [bool(one.progress) for one in reports(sequence(1, 8, max_tokens=100, blocks=50), 3 * GATHER_STEPS)]
    # With the first token the prompt can be shared: that is told at once.
    assert told == [step % GATHER_STEPS == 0 for step in range(3 * GATHER_STEPS)]


def test_progress_is_told_at_once_when_room_runs_out() -> None:
    told = [bool(one.progress) for one in reports(sequence(1, 8, max_tokens=100, blocks=8), 8 * BLOCK - 8)]
    assert all(told[-4:])
    assert not all(told)


def test_the_last_progress_comes_with_the_release() -> None:
    *_, last = reports(sequence(1, 8, max_tokens=4, blocks=50), 4)
    assert last.released == [1]
    assert last.progress[1].token_ids == [1, 1, 1]
