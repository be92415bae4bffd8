"""The planner, on its own: any mix of sequences, any budget."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.bridge import SyncAnswer
from scheduler.core.planner import choose_victim, plan_step, trimmable
from scheduler.core.step_message import build_step
from scheduler.sequence import LeaveReason, Sequence
from tests.support.scheduler.sequences import (
    BLOCK,
    Pipeline,
    answer,
    batch_of,
    depths,
    sequence,
    synced,
    traffic,
    updates,
)


@given(traffic(), st.integers(1, 64), depths)
def test_every_sequence_ends_and_no_step_exceeds_its_tokens(sequences: list[Sequence], budget: int, depth: int) -> None:
    batch = batch_of(*sequences)
    pipeline = Pipeline(batch, depth)
    while len(batch):
        plan = plan_step(batch.ranked, budget)
        assert plan.num_tokens <= budget
        assert not plan.out_of_blocks
        step = pipeline.turn(plan)
        assert step or plan.compute, "nothing to run though sequences are live"
        if step:
            answer(batch, step)
        for item in batch.ranked:
            assert item.computed <= item.planned <= item.capacity
            assert item.known <= item.limit
    assert sorted(updates(batch)[1].released) == sorted(item.handle for item in sequences)


@given(traffic(), st.integers(1, 64))
def test_an_earlier_sequence_of_equal_priority_starts_first(sequences: list[Sequence], budget: int) -> None:
    ranked = batch_of(*sequences).ranked
    computing = {item.handle for item, _ in plan_step(ranked, budget).compute}
    free = [item for item in ranked if not item.wait_for]
    skipped = [item.request.rank for item in free if item.handle not in computing]
    last_granted = [item.request.rank for item in free if item.handle in computing][-1:]
    assert not skipped or not last_granted or min(skipped) > last_granted[0]


def test_decodes_come_before_prefills() -> None:
    old, young = sequence(1, 30), sequence(2, 3)
    batch = batch_of(old, young)
    answer(batch, build_step(1, plan_step([young], 3), [])[1])
    assert [(item.handle, count) for item, count in plan_step(batch.ranked, 8).compute] == [(2, 1), (1, 7)]


def test_a_follower_starts_in_the_step_that_computes_its_prefix() -> None:
    writer, follower = sequence(1, 20), sequence(2, 20, cached_tokens=16, wait_for=1)
    batch = batch_of(writer, follower)
    first = plan_step(batch.ranked, 12)
    assert [item.handle for item, _ in first.compute] == [1]
    build_step(1, first, [])
    assert {item.handle for item, _ in plan_step(batch.ranked, 12).compute} == {1, 2}


def test_a_sequence_out_of_blocks_skips_the_step() -> None:
    full, free = sequence(1, 8, blocks=2), sequence(2, 8)
    batch = batch_of(full, free)
    answer(batch, build_step(1, plan_step(batch.ranked, 64), [])[1])
    plan = plan_step(batch.ranked, 64)
    assert plan.out_of_blocks == plan.skipped == [full]
    assert [item.handle for item, _ in plan.compute] == [2]


def test_the_first_in_rank_is_never_a_victim() -> None:
    first, started, fresh = sequence(1), sequence(2), sequence(3, priority=-1)
    started.started = True
    assert choose_victim([first]) is None
    assert choose_victim([first, started]) is started
    assert choose_victim([first, fresh, started]) is fresh


def test_only_unsent_blocks_are_trimmed() -> None:
    stalled, rich = sequence(1, 8, blocks=2), sequence(2, 8, blocks=9)
    assert trimmable([stalled, rich], [stalled]) == [rich]
    assert rich.trim() == 3 * BLOCK
    assert trimmable([stalled, rich], [stalled]) == []


def test_blocks_allocated_before_a_trim_are_ignored() -> None:
    rich = sequence(2, 8, blocks=9)
    batch = batch_of(rich)
    kept = rich.trim() // BLOCK
    batch.apply(SyncAnswer([(2, 0, [77])], [], 0, released=[], trimmed=[]))
    assert len(rich.tables[0]) == kept
    batch.apply(SyncAnswer([(2, 0, [88])], [], 0, released=[], trimmed=[2]))
    assert rich.tables[0][-1] == 88


def test_blocks_are_reclaimed_again_only_after_the_managers_answer() -> None:
    sequences = [sequence(handle, 8, blocks=2) for handle in (1, 2, 3)]
    batch = batch_of(*sequences)
    answer(batch, build_step(1, plan_step(batch.ranked, 64), [])[1])
    batch.apply(synced(missing_blocks=3))
    batch.plan(64)
    batch.plan(64)
    assert updates(batch)[0].preempted == [3]
    batch.apply(synced(released=[3], missing_blocks=2))
    batch.plan(64)
    assert updates(batch)[0].preempted == [2]


def test_a_preempted_sequence_resumes_with_all_its_tokens_once_nothing_touches_it() -> None:
    batch = batch_of(sequence(1), sequence(2))
    flights = [build_step(n, plan_step(batch.ranked, 64), [])[1] for n in (1, 2)]
    victim = batch.ranked[1]
    batch.leave(victim, LeaveReason.PREEMPTED)
    answer(batch, flights[0])
    assert updates(batch)[1].released == []
    answer(batch, flights[1])
    tokens, update = updates(batch)
    assert update.released == [2]
    assert list(tokens.retried[0].token_ids) == [*range(10), 1, 1]
    assert tokens.retried[0].sequence_id("s") == "r2#s.2.1"


def test_a_preempted_sequence_that_is_cancelled_does_not_resume() -> None:
    batch = batch_of(sequence(1), sequence(2))
    _, flight = build_step(1, plan_step(batch.ranked, 64), [])
    batch.leave(batch.ranked[1], LeaveReason.PREEMPTED)
    batch.cancel(2)
    answer(batch, flight)
    tokens, update = updates(batch)
    assert (update.released, tokens.retried) == ([2], [])


def test_the_output_of_a_cancelled_sequence_is_not_reported() -> None:
    batch = batch_of(sequence(1), sequence(2))
    _, flight = build_step(1, plan_step(batch.ranked, 64), [])
    batch.cancel(2)
    answer(batch, flight)
    assert [arrival for arrival, _, _ in updates(batch)[0].outputs] == [1]


def test_no_sequence_starts_on_blocks_of_the_same_steps_victim() -> None:
    starving = sequence(1, 4, max_tokens=50, priority=5, blocks=1)
    writer = sequence(2, 24, blocks=6)
    batch = batch_of(starving, writer)
    _, first = build_step(1, batch.plan(8), [])
    reader = sequence(3, 18, priority=10, cached_tokens=16, wait_for=2, blocks=5)
    batch.admit(reader)
    _, second = build_step(2, batch.plan(8), [])
    answer(batch, first)
    batch.apply(synced(missing_blocks=1))
    _, third = build_step(3, batch.plan(32), batch.removed)
    assert writer.leave_reason is LeaveReason.PREEMPTED
    assert reader.handle not in {item.handle for item, _, _ in third.compute}
    answer(batch, second)
    answer(batch, third)
    assert reader.leave_reason is LeaveReason.RESTARTED
    assert reader.request.arrival not in {arrival for arrival, _, _ in batch.updates.outputs}
