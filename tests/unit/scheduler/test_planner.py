"""The planner, on its own: any mix of sequences, any budget."""

from hypothesis import given
from hypothesis import strategies as st

from protos.execution.v1 import execution_pb2 as pb
from scheduler.bridge import SyncAnswer
from scheduler.core.batch import RunningSet
from scheduler.core.loop import MOST_AHEAD
from scheduler.core.planner import choose_victim, plan_step, trimmable
from scheduler.core.step_message import Flight, build_step
from scheduler.request import Candidate, Request
from scheduler.sequence import Exit, Sequence

BLOCK = 4


def sequence(
    handle: int,
    prompt: int = 10,
    *,
    max_tokens: int = 5,
    priority: int = 0,
    blocks: int | None = None,
    arrived_at: float = 0.0,
    **fields: object,
) -> Sequence:
    """Admitted, with blocks for its prompt and one more unless said otherwise."""
    request = Request(
        f"r{handle}", tuple(range(prompt)), max_tokens, pb.SamplingParams(), handle, arrived_at, priority=priority
    )
    count = -(-prompt // BLOCK) + 1 if blocks is None else blocks
    fields.setdefault("cached_tokens", 0)
    return Sequence(
        Candidate(request, request.prompt_ids),
        handle,
        tables=[[100 * handle + i for i in range(count)]],
        block_size=BLOCK,
        **fields,  # type: ignore[arg-type]
    )


def admitted(*sequences: Sequence) -> RunningSet:
    """A running set of these."""
    running = RunningSet()
    for item in sequences:
        running.admit(item)
    return running


def answer(running: RunningSet, flight: Flight) -> None:
    """Answers a step with token 1 for whoever samples."""
    samples = [item.handle for item, _, samples in flight.compute if samples and not item.stopped]
    running.commit(
        flight,
        pb.StepResult(
            step=flight.step, sequences=samples, token_ids=[1] * len(samples), stopped=[False] * len(samples)
        ),
    )


@st.composite
def traffic(draw: st.DrawFn) -> list[Sequence]:
    """Sequences with enough blocks for all they may want; some wait for an earlier one's prefix."""
    sequences: list[Sequence] = []
    for handle in range(1, draw(st.integers(1, 12)) + 1):
        prompt, max_tokens = draw(st.integers(1, 40)), draw(st.integers(1, 6))
        writer = draw(st.sampled_from(sequences)) if sequences and draw(st.booleans()) else None
        shared = 0
        if writer is not None and prompt > BLOCK:
            shared = min(len(writer.token_ids), prompt - 1) // BLOCK * BLOCK
        sequences.append(
            sequence(
                handle,
                prompt,
                max_tokens=max_tokens,
                priority=draw(st.integers(-1, 1)),
                blocks=-(-(prompt + max_tokens) // BLOCK),
                cached_tokens=shared,
                wait_for=writer.handle if writer and shared else 0,
            )
        )
    return sequences


# Steps that are sent before the first of them is answered.
depths = st.integers(2, 1 + MOST_AHEAD)


@given(traffic(), st.integers(1, 64), depths)
def test_everybody_ends_and_no_step_exceeds_its_budget(sequences: list[Sequence], budget: int, depth: int) -> None:
    running = admitted(*sequences)
    in_flight: list[Flight] = []
    number = 0
    while len(running):
        plan = plan_step(running.ranked, budget)
        assert plan.num_tokens <= budget
        assert not plan.stalled
        if plan.compute:
            number += 1
            in_flight.append(build_step(number, plan, running.removed)[1])
            running.removed = []
        assert in_flight, "nothing to run though sequences are live"
        if len(in_flight) == depth or not plan.compute:
            answer(running, in_flight.pop(0))
        for item in running.ranked:
            assert item.computed <= item.planned <= item.capacity
            assert item.output_planned <= item.request.max_tokens
    assert sorted(running.take_report().released) == sorted(item.handle for item in sequences)


@given(traffic(), st.integers(1, 64))
def test_of_equal_priority_the_earlier_one_is_started_first(sequences: list[Sequence], budget: int) -> None:
    ranked = admitted(*sequences).ranked
    computing = {item.handle for item, _ in plan_step(ranked, budget).compute}
    free = [item for item in ranked if not item.wait_for]
    skipped = [item.request.rank for item in free if item.handle not in computing]
    last_granted = [item.request.rank for item in free if item.handle in computing][-1:]
    assert not skipped or not last_granted or min(skipped) > last_granted[0]


def test_decoding_comes_before_prompts() -> None:
    old, young = sequence(1, 30), sequence(2, 3)
    running = admitted(old, young)
    answer(running, build_step(1, plan_step([young], 3), [])[1])
    assert [(item.handle, count) for item, count in plan_step(running.ranked, 8).compute] == [(2, 1), (1, 7)]


def test_a_follower_starts_in_the_step_that_computes_its_prefix() -> None:
    writer, follower = sequence(1, 20), sequence(2, 20, cached_tokens=16, wait_for=1)
    running = admitted(writer, follower)
    first = plan_step(running.ranked, 12)
    assert [item.handle for item, _ in first.compute] == [1]
    build_step(1, first, [])
    assert {item.handle for item, _ in plan_step(running.ranked, 12).compute} == {1, 2}


def test_a_sequence_without_room_sits_out_and_the_others_go_on() -> None:
    full, free = sequence(1, 8, blocks=2), sequence(2, 8)
    running = admitted(full, free)
    answer(running, build_step(1, plan_step(running.ranked, 64), [])[1])
    plan = plan_step(running.ranked, 64)
    assert plan.stalled == plan.idle == [full]
    assert [item.handle for item, _ in plan.compute] == [2]


def test_the_first_in_rank_is_never_a_victim_and_unstarted_ones_go_first() -> None:
    first, started, fresh = sequence(1), sequence(2), sequence(3, priority=-1)
    started.started = True
    assert choose_victim([first]) is None
    assert choose_victim([first, started]) is started
    assert choose_victim([first, fresh, started]) is fresh


def test_only_what_the_executor_does_not_have_is_trimmed() -> None:
    stalled, rich = sequence(1, 8, blocks=2), sequence(2, 8, blocks=9)
    assert trimmable([stalled, rich], [stalled]) == [rich]
    assert rich.trim() == 3 * BLOCK
    assert trimmable([stalled, rich], [stalled]) == []


def test_blocks_given_before_a_trim_was_heard_of_are_not_taken() -> None:
    rich = sequence(2, 8, blocks=9)
    running = admitted(rich)
    kept = rich.trim() // BLOCK
    running.apply(SyncAnswer([(2, 0, [77])], [], 0, released=[], trimmed=[]))
    assert len(rich.tables[0]) == kept
    running.apply(SyncAnswer([(2, 0, [88])], [], 0, released=[], trimmed=[2]))
    assert rich.tables[0][-1] == 88


def test_after_one_relief_the_next_waits_for_the_managers_answer() -> None:
    sequences = [sequence(handle, 8, blocks=2) for handle in (1, 2, 3)]
    running = admitted(*sequences)
    answer(running, build_step(1, plan_step(running.ranked, 64), [])[1])
    running.apply(SyncAnswer([], [], 3, released=[], trimmed=[]))
    running.plan(64)
    running.plan(64)
    assert running.take_report().preempted == [3]
    running.apply(SyncAnswer([], [], 2, released=[3], trimmed=[]))
    running.plan(64)
    assert running.take_report().preempted == [2]


def test_a_preempted_sequence_comes_back_with_all_its_tokens_once_nothing_touches_it() -> None:
    running = admitted(sequence(1), sequence(2))
    flights = [build_step(n, plan_step(running.ranked, 64), [])[1] for n in (1, 2)]
    victim = running.ranked[1]
    running.leave(victim, Exit.PREEMPTED)
    answer(running, flights[0])
    assert running.take_report().released == []
    answer(running, flights[1])
    report = running.take_report()
    assert report.released == [2]
    assert report.again[0].token_ids == (*range(10), 1, 1)
    assert report.again[0].sequence_id == "r2#2.1"


def test_nobody_starts_on_blocks_that_a_victim_of_the_same_step_would_have_filled() -> None:
    starving = sequence(1, 4, max_tokens=50, priority=5, blocks=1)
    writer = sequence(2, 24, blocks=6)
    running = admitted(starving, writer)
    _, first = build_step(1, running.plan(8), [])
    reader = sequence(3, 18, priority=10, cached_tokens=16, wait_for=2, blocks=5)
    running.admit(reader)
    _, second = build_step(2, running.plan(8), [])
    answer(running, first)
    running.apply(SyncAnswer(released=[], trimmed=[], blocks_short=1, extensions=[], void_handles=[]))
    _, third = build_step(3, running.plan(32), running.removed)
    assert writer.exit is Exit.PREEMPTED
    assert reader.handle not in {item.handle for item, _, _ in third.compute}
    answer(running, second)
    answer(running, third)
    assert reader.exit is Exit.RESTARTED
    assert reader.request.arrival not in {arrival for arrival, _, _ in running.report.outputs}
