"""Copies on their way to the executor, and sequences that wait for blocks from lower tiers."""

from collections.abc import Sequence as Seq

import pytest

from protos.execution.v1 import execution_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2
from scheduler.bridge import SyncAnswer
from scheduler.cache.tier_costs import Tier
from scheduler.core.batch import RunningSet
from scheduler.core.planner import plan_step
from scheduler.core.step_message import Flight, build_step
from scheduler.sequence import Copy, Exit, Sequence
from tests.unit.scheduler.test_planner import BLOCK, admitted, sequence


def within(ticket: int, target: int = 101) -> Copy:
    """From a device block to another."""
    return Copy(ticket, 0, 5, target)


def up(ticket: int, target: int = 101, tier: Tier = Tier.HOST) -> Copy:
    """A block that comes to the device."""
    return Copy(ticket, 0, 7, target, tier, Tier.DEVICE, BLOCK)


def down(ticket: int, source: int = 101) -> Copy:
    """A block that makes room."""
    return Copy(ticket, 0, source, 9, Tier.DEVICE, Tier.HOST, BLOCK)


def onboarding(handle: int, *copies: Copy, **fields: object) -> Sequence:
    """A sequence whose first two blocks come from below, unless said otherwise."""
    fields = {"cached_tokens": 2 * BLOCK} | fields
    return sequence(handle, copies=copies or (up(10 * handle), up(10 * handle + 1)), **fields)


def synced(*copies: Copy, released: Seq[int] = (), blocks_short: int = 0, session: int = 1) -> SyncAnswer:
    """A sync's answer."""
    return SyncAnswer([], [], blocks_short, released, [], copies=copies, session=session)


def send(running: RunningSet, number: int) -> tuple[pb.Step, Flight]:
    """Plans and builds a step as the loop does."""
    plan = running.plan(64)
    message, flight = build_step(number, plan, running.removed, running.copies.take())
    running.removed = []
    return message, flight


def answer(running: RunningSet, flight: Flight, copied: Seq[int] = (), failed: Seq[int] = ()) -> None:
    """Answers a step with token 1 for whoever samples."""
    samples = [item.handle for item, _, samples in flight.compute if samples and not item.stopped]
    result = pb.StepResult(step=flight.step, copied_tickets=copied, failed_tickets=failed)
    result.sequences.extend(samples)
    result.token_ids.extend([1] * len(samples))
    result.stopped.extend([False] * len(samples))
    running.commit(flight, result)


def run(running: RunningSet, number: int, copied: Seq[int] = (), failed: Seq[int] = ()) -> pb.Step:
    """Sends a step and answers it."""
    message, flight = send(running, number)
    answer(running, flight, copied, failed)
    return message


def joined(message: pb.Step) -> list[int]:
    """Who begins with a step."""
    return [new.sequence for new in message.new_sequences]


def test_tiers_have_the_numbers_of_both_protocols() -> None:
    for tier in Tier:
        assert getattr(pb, f"STEP_TIER_{tier.name}") == getattr(kvcache_pb2, f"TIER_{tier.name}") == tier


def test_copies_within_the_device_travel_once_with_the_next_step_and_say_nothing_of_tiers() -> None:
    running = admitted(sequence(1, cached_tokens=6, copies=(within(9),)))
    message = run(running, 1)
    assert (message.copy_tickets, message.copy_source_slots, message.copy_target_slots) == ([9], [5], [101])
    assert not message.copy_source_tiers
    assert not message.copy_target_tiers
    assert message.new_sequences[0].num_computed_tokens == 6
    assert not run(running, 2).copy_tickets


def test_a_sequence_joins_when_all_its_blocks_are_there_and_the_others_go_on() -> None:
    other, waiting = sequence(1), onboarding(2, down(20), up(21), within(22, 102), up(23, 103, Tier.DISK))
    running = admitted(other, waiting)
    message = run(running, 1)
    assert joined(message) == [1]
    assert message.copy_tickets == [20, 21, 22, 23]
    assert message.copy_source_tiers == [pb.STEP_TIER_DEVICE, pb.STEP_TIER_HOST, pb.STEP_TIER_DEVICE, pb.STEP_TIER_DISK]
    assert message.copy_target_tiers == [pb.STEP_TIER_HOST, *[pb.STEP_TIER_DEVICE] * 3]
    assert joined(run(running, 2, copied=[21])) == []
    assert running.take_report().onboarded == []
    assert joined(run(running, 3, copied=[23, 99])) == []
    assert running.take_report().onboarded == [(2, BLOCK, BLOCK)]
    message = run(running, 4)
    assert joined(message) == [2]
    assert not message.copy_tickets
    assert not running.copies.waiting
    assert not running.copies.onboarding
    assert other.computed == 10 + 3


def test_a_sequence_whose_block_did_not_come_begins_again_without_that_tier() -> None:
    for tier, usable in ((Tier.HOST, Tier.DEVICE), (Tier.DISK, Tier.HOST)):
        running = admitted(onboarding(1, up(1), up(2, 102, tier), up(3, 103)))
        run(running, 1, copied=[2], failed=[2])
        report = running.take_report()
        assert report.released == [1]
        [again] = report.again
        assert (again.lowest_tier, again.preempted, again.sequence_id) == (usable, False, "r1#1.1")
        assert report.cancelled_tickets == []
        run(running, 2, copied=[1, 3])
        assert not running.copies.waiting


def test_a_block_that_fails_and_is_not_said_to_have_ended_has_not_come_either() -> None:
    running = admitted(onboarding(1))
    run(running, 1, copied=[11], failed=[10])
    assert running.take_report().released == [1]


@pytest.mark.parametrize("shared", [BLOCK, 4 * BLOCK])
def test_who_shares_blocks_of_an_onboarding_sequence_waits_for_them_and_falls_back_with_it(shared: int) -> None:
    writer = onboarding(1, prompt=24)
    follower = sequence(2, 24, cached_tokens=shared, wait_for=1)
    running = admitted(writer, follower)
    assert joined(run(running, 1)) == []
    run(running, 2, copied=[10, 11], failed=[11])
    assert [one.request.arrival for one in running.take_report().again] == [1, 2]
    late = sequence(3, 24, cached_tokens=shared, wait_for=1)
    running.admit(late)
    assert late.exit is Exit.RESTARTED


def test_who_shares_blocks_of_an_onboarding_sequence_starts_with_it() -> None:
    running = admitted(onboarding(1, prompt=24), sequence(2, 24, cached_tokens=4 * BLOCK, wait_for=1))
    run(running, 1, copied=[10, 11])
    assert joined(run(running, 2)) == [1, 2]


def test_a_sequence_that_waits_too_long_begins_again_with_what_is_on_the_device() -> None:
    running = admitted(onboarding(1, onboard_by=5.0), onboarding(2, onboard_by=6.0))
    run(running, 1, copied=[10])
    running.restart_late(4.9)
    assert not running.take_report().late
    running.restart_late(5.0)
    report = running.take_report()
    assert (report.late, report.released) == ([1], [1])
    assert report.again[0].lowest_tier is Tier.DEVICE
    # Its block comes after all, and concerns nobody.
    run(running, 2, copied=[11, 20, 21])
    assert joined(run(running, 3)) == [2]


def test_nobody_is_late_who_has_joined() -> None:
    running = admitted(onboarding(1, onboard_by=5.0))
    run(running, 1, copied=[10, 11])
    running.restart_late(6.0)
    assert joined(run(running, 2)) == [1]


def test_what_was_to_come_to_a_sequence_that_leaves_is_called_off_and_what_it_displaced_goes_its_way() -> None:
    running = admitted(onboarding(1, down(1), up(2), within(3, 102)), sequence(2))
    running.cancel(1)
    assert running.take_report().cancelled_tickets == [2, 3]
    assert run(running, 1).copy_tickets == [1]
    assert not running.copies.waiting


def test_copies_that_were_sent_are_not_called_off() -> None:
    running = admitted(onboarding(1))
    run(running, 1)
    running.cancel(1)
    report = running.take_report()
    assert report.released == [1]
    assert report.cancelled_tickets == []


def test_of_copies_to_an_executor_that_is_gone_only_those_are_cancelled_that_it_may_not_have() -> None:
    running = admitted(onboarding(1), sequence(2, copies=(within(9),)))
    run(running, 1)
    running.apply(synced(down(30)))
    _, flight = send(running, 2)
    running.apply(synced(down(31)))
    running.restart_all(executor_lost=True, in_flight=[flight])
    report = running.take_report()
    assert sorted(report.released) == [1, 2]
    assert report.cancelled_tickets == [30, 31]
    assert not running.copies.waiting
    assert not running.copies.unsent


def test_nothing_that_an_earlier_manager_asked_for_is_sent_once_all_is_given_up() -> None:
    running = admitted(onboarding(1))
    running.apply(synced(down(30)))
    running.restart_all(executor_lost=False)
    assert not running.copies.unsent


def test_what_makes_room_for_an_extension_is_sent_before_the_slots_are_written() -> None:
    running = admitted(sequence(1, 8, blocks=2))
    run(running, 1)
    running.apply(SyncAnswer([(1, 0, [77])], [], 0, [], [], copies=(down(30, 77),)))
    message = run(running, 2)
    assert message.copy_tickets == [30]
    assert message.table_slots == [77]


def test_copies_of_another_session_are_never_sent() -> None:
    running = RunningSet()
    running.admit(onboarding(1), valid=False)
    running.apply(synced(down(30)), valid=False)
    assert running.take_report().cancelled_tickets == [10, 11, 30]
    assert not running.copies.unsent
    assert not running.copies.waiting


def test_a_preempted_onboarding_sequence_gives_room_when_its_copies_have_ended() -> None:
    first, second, victim = sequence(1, 8, blocks=2), sequence(2, 8, blocks=2), onboarding(3, blocks=3)
    running = admitted(first, second, victim)
    run(running, 1)
    running.apply(synced(blocks_short=1))
    _, flight = send(running, 2)
    assert victim.exit is Exit.PREEMPTED
    report = running.take_report()
    assert report.preempted == [3]
    assert report.again[0].preempted
    # The manager still has no block: they are under copy.
    running.apply(synced(released=[3], blocks_short=1))
    answer(running, flight)
    run(running, 3, copied=[31])
    assert running.take_report().preempted == []
    run(running, 4, copied=[30])
    # Only the next sync tells what is short by now.
    run(running, 5)
    assert running.take_report().preempted == []
    running.apply(synced(blocks_short=1))
    run(running, 6)
    assert running.take_report().preempted == [2]


def test_an_onboarding_sequence_is_not_planned() -> None:
    assert plan_step([onboarding(1)], 64).compute == []
