"""Copies on their way to the executor, and sequences that wait for blocks from lower tiers."""

import pytest

from protos.execution.v1 import execution_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2
from scheduler.bridge import SyncAnswer
from scheduler.core.batch import RunningBatch
from scheduler.core.planner import plan_step
from scheduler.request import Tier
from scheduler.sequence import Copy, LeaveReason, Sequence
from tests.support.scheduler.copies import down, up, within
from tests.support.scheduler.sequences import BLOCK, answer, batch_of, run, send, sequence, synced, updates


def onloading(handle: int, *copies: Copy, **fields: object) -> Sequence:
    """A sequence whose first two blocks are onloaded, unless `copies` says otherwise."""
    fields = {"cached_tokens": 2 * BLOCK} | fields
    return sequence(handle, copies=copies or (up(10 * handle), up(10 * handle + 1)), **fields)


def joined(message: pb.Step) -> list[int]:
    """Handles of the sequences that join with a step."""
    return [new.sequence for new in message.new_sequences]


def test_tiers_have_the_numbers_of_both_protocols() -> None:
    for tier in Tier:
        assert getattr(pb, f"STEP_TIER_{tier.name}") == getattr(kvcache_pb2, f"TIER_{tier.name}") == tier


def test_copies_within_the_device_travel_once_with_the_next_step_and_say_nothing_of_tiers() -> None:
    batch = batch_of(sequence(1, cached_tokens=6, copies=(within(9),)))
    message = run(batch, 1)
    assert message.copy_tickets == [9]
    assert message.copy_source_slots == [5]
    assert message.copy_target_slots == [101]
    assert not message.copy_source_tiers
    assert not message.copy_target_tiers
    assert message.new_sequences[0].num_computed_tokens == 6
    assert not run(batch, 2).copy_tickets


def test_a_sequence_joins_when_all_its_onloads_have_ended() -> None:
    other, waiting = sequence(1), onloading(2, down(20), up(21), within(22, 102), up(23, 103, Tier.DISK))
    batch = batch_of(other, waiting)
    message = run(batch, 1)
    assert joined(message) == [1]
    assert message.copy_tickets == [20, 21, 22, 23]
    assert message.copy_source_tiers == [pb.STEP_TIER_DEVICE, pb.STEP_TIER_HOST, pb.STEP_TIER_DEVICE, pb.STEP_TIER_DISK]
    assert message.copy_target_tiers == [pb.STEP_TIER_HOST, *[pb.STEP_TIER_DEVICE] * 3]
    assert joined(run(batch, 2, copied=[21])) == []
    assert updates(batch)[0].onloaded == []
    assert joined(run(batch, 3, copied=[23, 99])) == []
    assert updates(batch)[0].onloaded == [(2, BLOCK, BLOCK)]
    message = run(batch, 4)
    assert joined(message) == [2]
    assert not message.copy_tickets
    assert not batch.copies.waiting
    assert not batch.copies.onloading
    assert other.computed == 10 + 3


def test_a_sequence_with_a_failed_onload_restarts_without_that_tier() -> None:
    for tier, usable in ((Tier.HOST, Tier.DEVICE), (Tier.DISK, Tier.HOST)):
        batch = batch_of(onloading(1, up(1), up(2, 102, tier), up(3, 103)))
        run(batch, 1, copied=[2], failed=[2])
        tokens, update = updates(batch)
        assert update.released == [1]
        [again] = tokens.retried
        assert (again.lowest_tier, again.preempted, again.sequence_id("s")) == (usable, False, "r1#s.1.1")
        assert update.cancelled_tickets == []
        run(batch, 2, copied=[1, 3])
        assert not batch.copies.waiting


def test_an_onload_that_is_only_reported_as_failed_has_failed() -> None:
    batch = batch_of(onloading(1))
    run(batch, 1, copied=[11], failed=[10])
    assert updates(batch)[1].released == [1]


@pytest.mark.parametrize("shared", [BLOCK, 4 * BLOCK])
def test_a_follower_of_an_onloading_sequence_waits_and_restarts_with_it(shared: int) -> None:
    writer = onloading(1, prompt=24)
    follower = sequence(2, 24, cached_tokens=shared, wait_for=1)
    batch = batch_of(writer, follower)
    assert joined(run(batch, 1)) == []
    run(batch, 2, copied=[10, 11], failed=[11])
    assert [one.request.arrival for one in updates(batch)[0].retried] == [1, 2]
    late = sequence(3, 24, cached_tokens=shared, wait_for=1)
    batch.admit(late)
    assert late.leave_reason is LeaveReason.RESTARTED


def test_a_follower_of_an_onloading_sequence_starts_with_it() -> None:
    batch = batch_of(onloading(1, prompt=24), sequence(2, 24, cached_tokens=4 * BLOCK, wait_for=1))
    run(batch, 1, copied=[10, 11])
    assert joined(run(batch, 2)) == [1, 2]


def test_a_late_sequence_restarts_with_the_blocks_on_the_device() -> None:
    batch = batch_of(onloading(1, onload_deadline=5.0), onloading(2, onload_deadline=6.0))
    run(batch, 1, copied=[10])
    batch.restart_late(4.9)
    assert not updates(batch)[0].late
    batch.restart_late(5.0)
    tokens, update = updates(batch)
    assert (tokens.late, update.released) == ([1], [1])
    assert tokens.retried[0].lowest_tier is Tier.DEVICE
    # A late block is ignored.
    run(batch, 2, copied=[11, 20, 21])
    assert joined(run(batch, 3)) == [2]


def test_a_sequence_that_has_joined_is_not_late() -> None:
    batch = batch_of(onloading(1, onload_deadline=5.0))
    run(batch, 1, copied=[10, 11])
    batch.restart_late(6.0)
    assert joined(run(batch, 2)) == [1]


def test_unsent_onloads_of_a_sequence_that_leaves_are_cancelled_and_its_offloads_go_on() -> None:
    batch = batch_of(onloading(1, down(1), up(2), within(3, 102)), sequence(2))
    batch.cancel(1)
    assert updates(batch)[1].cancelled_tickets == [2, 3]
    assert run(batch, 1).copy_tickets == [1]
    assert not batch.copies.waiting


def test_sent_copies_are_not_cancelled() -> None:
    batch = batch_of(onloading(1))
    run(batch, 1)
    batch.cancel(1)
    update = updates(batch)[1]
    assert update.released == [1]
    assert update.cancelled_tickets == []


def test_copies_are_cancelled_when_the_lost_executor_may_lack_them() -> None:
    batch = batch_of(onloading(1), sequence(2, copies=(within(9),)))
    run(batch, 1)
    batch.apply(synced(down(30)))
    _, flight = send(batch, 2)
    batch.apply(synced(down(31)))
    batch.restart_all(executor_lost=True, in_flight=[flight])
    update = updates(batch)[1]
    assert sorted(update.released) == [1, 2]
    assert update.cancelled_tickets == [30, 31]
    assert not batch.copies.waiting
    assert not batch.copies.unsent


def test_no_copy_of_a_lost_manager_is_sent() -> None:
    batch = batch_of(onloading(1))
    batch.apply(synced(down(30)))
    batch.restart_all(executor_lost=False)
    assert not batch.copies.unsent


def test_an_offload_for_an_extension_is_sent_before_its_slots_are_written() -> None:
    batch = batch_of(sequence(1, 8, blocks=2))
    run(batch, 1)
    batch.apply(SyncAnswer([(1, 0, [77])], [], 0, [], [], copies=(down(30, 77),)))
    message = run(batch, 2)
    assert message.copy_tickets == [30]
    assert message.table_slots == [77]


def test_copies_of_another_session_are_never_sent() -> None:
    batch = RunningBatch()
    batch.admit(onloading(1), valid=False)
    batch.apply(synced(down(30)), valid=False)
    assert updates(batch)[1].cancelled_tickets == [10, 11, 30]
    assert not batch.copies.unsent
    assert not batch.copies.waiting


def test_a_preempted_onloading_sequence_frees_blocks_when_its_copies_have_ended() -> None:
    first, second, victim = sequence(1, 8, blocks=2), sequence(2, 8, blocks=2), onloading(3, blocks=3)
    batch = batch_of(first, second, victim)
    run(batch, 1)
    batch.apply(synced(missing_blocks=1))
    _, flight = send(batch, 2)
    assert victim.leave_reason is LeaveReason.PREEMPTED
    tokens = updates(batch)[0]
    assert tokens.preempted == [3]
    assert tokens.retried[0].preempted
    # The manager still has no block: they are under copy.
    batch.apply(synced(released=[3], missing_blocks=1))
    answer(batch, flight)
    run(batch, 3, copied=[31])
    assert updates(batch)[0].preempted == []
    run(batch, 4, copied=[30])
    # The next sync says how many blocks are missing.
    run(batch, 5)
    assert updates(batch)[0].preempted == []
    batch.apply(synced(missing_blocks=1))
    run(batch, 6)
    assert updates(batch)[0].preempted == [2]


def test_an_onloading_sequence_is_not_planned() -> None:
    assert plan_step([onloading(1)], 64).compute == []
