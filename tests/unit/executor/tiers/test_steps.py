"""Steps and copies between tiers: no step reads a block before its onload, or overwrites one before its offload."""

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor.core.outbox import Answer, Outbox, Session
from executor.core.worker import Worker
from executor.errors import InvalidStepError
from executor.models.forward import Model
from executor.step import Copy, NewSequence, Step, StepOutput, Tier
from protos.kvcommon.eviction import Kind, parse
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.support.patience import patience
from tests.support.worker_loop import NoConfirmations
from tests.unit.executor.conftest import PATHS, Driver, load
from tests.unit.executor.tiers.gates import Gate, waited_seconds
from tests.unit.executor.tiers.world import Ends, block, down, make_tiers, shut, until_idle, up

HOST, DISK = Tier.HOST, Tier.DISK
PROMPT = [5, 60, 7, 80, 9, 10, 11, 3, 44]
OTHER = [1, 2, 3, 4, 5, 6, 7, 8, 9]
SHUT = 0.3


@pytest.fixture(scope="module", params=PATHS)
def tiny(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Model:
    return PATHS[request.param](model_folder("llama, compiled"))


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def slow(tiny: Model, gate: Gate, tmp_path: Path) -> Iterator[Driver]:
    """A driver whose host tier has a gate."""
    driver = Driver(tiny, tiers=lambda pools: gate.tiers(pools, tmp_path), copy_ended=Ends())
    yield driver
    gate.open.set()
    shut(driver.runner.tiers)


def ends_of(driver: Driver) -> dict[int, bool]:
    """How copies ended, by their tickets."""
    assert isinstance(driver.copy_ended, Ends)
    return driver.copy_ended.of


def offloaded(driver: Driver, prompt: list[int] = PROMPT) -> tuple[NewSequence, list[int]]:
    """Computes a prompt and leaves; what joined, and what it generates."""
    expected = [one.token_id for one in driver.generate(90, prompt, 8)]
    joining = driver.new_sequence(91, prompt)
    driver.step(new_sequences=(joining,), chunks={91: len(prompt)})
    driver.step(removed=(91,))
    return joining, expected


def tokens_from(driver: Driver, first: StepOutput, sequence: int, count: int) -> list[int]:
    """The tokens of a step, and of those that follow."""
    outcomes = [first] + [driver.step() for _ in range(count - 1)]
    return [one.token_id for outcome in outcomes for one in outcome.sampled if one.sequence == sequence]


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama, compiled"])
def test_a_block_that_went_down_and_came_up_continues_to_the_same_tokens(
    name: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = load(model_folder(name))
    driver = Driver(model, tiers=lambda pools: make_tiers(pools, tmp_path, host=6, disk=6), copy_ended=Ends())
    joining, expected = offloaded(driver)
    groups = range(len(model.groups))
    # The first block is offloaded to the host, the second to the disk; the same step overwrites both on the device.
    copies = [
        down(10 * group + index + 1, joining.tables[group][index], index + 1, tier, group)
        for group in groups
        for index, tier in enumerate((HOST, DISK))
    ]
    tables = tuple(table[:2] + new for table, new in zip(joining.tables, driver.blocks(40), strict=True))
    other = NewSequence(2, tuple(OTHER), len(OTHER), 0, tables)
    step = Step(driver.runner.last_step + 1, new_sequences=(other,), chunks={2: 9}, copies=tuple(copies))
    driver.run(step)
    fresh = driver.blocks(60)
    copies = [
        up(100 + copy.ticket, copy.target, fresh[copy.group][copy.target - 1], copy.target_tier, copy.group)
        for copy in copies
    ]
    # No other step waits for them than one that needs them.
    again = NewSequence(3, tuple(PROMPT), len(PROMPT), 8, fresh)
    first = driver.step(removed=(2,), copies=tuple(copies), new_sequences=(again,), chunks={3: 1})
    assert tokens_from(driver, first, 3, 8) == expected
    assert set(ends_of(driver).values()) == {True}
    assert first.tickets == ()
    shut(driver.runner.tiers)


def test_steps_go_on_while_copies_of_other_slots_run(slow: Driver, gate: Gate) -> None:
    joining, expected = offloaded(slow)
    gate.open.clear()
    step = Step(slow.runner.last_step + 1, copies=(down(1, joining.tables[0][0], 1),))
    slow.run(step)
    # It reads the slot that is being copied, and writes others.
    table = joining.tables[0][:2] + slow.blocks(60)[0]
    outcome = slow.step(new_sequences=(NewSequence(2, tuple(PROMPT), 9, 8, (table,)),))
    assert tokens_from(slow, outcome, 2, 8) == expected
    assert ends_of(slow) == {}
    assert slow.runner.tiers.busy


def test_a_step_does_not_overwrite_what_is_still_being_copied(slow: Driver, gate: Gate) -> None:
    joining, _ = offloaded(slow)
    slot, pools = joining.tables[0][0], slow.runner.pools
    before = block(pools, 0, slot)
    gate.opens_late(slow.runner.tiers, SHUT)
    other = NewSequence(2, tuple(OTHER), 9, 0, ((slot, *slow.blocks(40)[0]),))
    begin, waited = time.perf_counter(), waited_seconds()
    outcome = slow.step(copies=(down(1, slot, 1),), new_sequences=(other,), chunks={2: 9})
    took, waited = time.perf_counter() - begin, waited_seconds() - waited
    assert block(pools, 0, slot) != before
    # Time in which the device could not work is not the step's work.
    assert waited > SHUT / 2
    assert outcome.compute_time < took - SHUT / 2
    assert outcome.idle_time > SHUT / 2
    fresh = slow.blocks(4)[0][0]
    slow.step(copies=(up(2, 1, fresh),))
    slow.runner.tiers.wait(reads=[(Tier.DEVICE, 0, fresh)])
    assert block(pools, 0, fresh) == before


def test_a_sequence_that_joins_too_early_waits_for_its_blocks(slow: Driver, gate: Gate) -> None:
    joining, expected = offloaded(slow)
    slow.step(copies=(down(1, joining.tables[0][0], 1),))
    fresh = slow.blocks(60)[0]
    gate.opens_late(slow.runner.tiers, 0)
    slow.step(copies=(up(2, 1, fresh[0]),))
    table = (fresh[0], joining.tables[0][1], *fresh[1:])
    before = waited_seconds()
    outcome = slow.step(new_sequences=(NewSequence(2, tuple(PROMPT), 9, 8, (table,)),))
    assert tokens_from(slow, outcome, 2, 8) == expected
    assert waited_seconds() > before


@pytest.mark.parametrize("reads", [True, False])
def test_copies_within_the_device_keep_their_order(reads: bool, slow: Driver, gate: Gate) -> None:
    joining, pools = slow.new_sequence(1, PROMPT), slow.runner.pools
    slow.step(new_sequences=(joining,), chunks={1: 9})
    first, second, third = joining.tables[0][:3]
    before = [block(pools, 0, slot) for slot in (first, second)]
    gate.opens_late(slow.runner.tiers, 0)
    if reads:
        # The onloaded block is copied on.
        slow.step(copies=(down(1, first, 1), up(2, 1, second), Copy(3, 0, second, third)), idle=frozenset({1}))
        assert block(pools, 0, third) == before[0]
    else:
        # The offloaded block is overwritten by another, which is offloaded as well.
        copies = (down(1, first, 1), Copy(2, 0, second, first), down(3, first, 2), up(4, 1, second), up(5, 2, third))
        slow.step(copies=copies, idle=frozenset({1}))
        slow.runner.tiers.wait(reads=[(Tier.DEVICE, 0, slot) for slot in (second, third)])
        assert [block(pools, 0, slot) for slot in (second, first, third)] == [before[0], before[1], before[1]]


@pytest.mark.parametrize("moves", [True, False])
def test_what_evicts_tokens_does_not_overwrite_what_is_being_copied(
    moves: bool, gate: Gate, tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    driver = Driver(load(model_folder("llama")), tiers=lambda pools: gate.tiers(pools, tmp_path))
    asked = common.EvictionPolicy(
        kind=Kind.KNORM.value, max_cache_tokens=8, start_tokens=1, recent_tokens=2, period_tokens=4
    )
    policy = parse(asked, driver.runner.layout, "policy")
    joining = replace(driver.new_sequence(1, PROMPT * 2), policy=policy)
    driver.step(new_sequences=(joining,), chunks={1: 18})
    own = driver.blocks(40)[0] if moves else ()
    slots = own[:2] if moves else joining.tables[0][:2]
    before = [block(driver.runner.pools, 0, slot) for slot in slots]
    gate.opens_late(driver.runner.tiers, 0)
    outcome = driver.step(copies=tuple(down(1 + i, slot, 1 + i) for i, slot in enumerate(slots)), evicting={1: own})
    assert outcome.evicted[0].tokens > 0
    assert [block(driver.runner.pools, 0, slot) for slot in slots] != before
    fresh = driver.blocks(8)[0]
    driver.step(copies=tuple(up(10 + i, 1 + i, slot) for i, slot in enumerate(fresh)), idle=frozenset({1}))
    driver.runner.tiers.wait(reads=[(Tier.DEVICE, 0, slot) for slot in fresh])
    assert [block(driver.runner.pools, 0, slot) for slot in fresh] == before
    shut(driver.runner.tiers)


def test_slots_that_copies_fill_are_noted_as_written_by_their_step(slow: Driver) -> None:
    joining, _ = offloaded(slow)
    slow.step(copies=(down(1, joining.tables[0][0], 1),))
    step, fresh = slow.runner.last_step + 1, slow.blocks(4)[0][0]
    slow.step(copies=(up(2, 1, fresh),))
    assert int(slow.runner.pools.pools[0].last_write_steps[fresh]) == step
    # What the manager itself asks for can come when no step is planned.
    other = slow.blocks(4)[0][0]
    slow.runner.transfer((up(3, 1, fresh), Copy(4, 0, 0, other)))
    slow.runner.tiers.wait(reads=[(Tier.DEVICE, 0, fresh)])
    assert [int(slow.runner.pools.pools[0].last_write_steps[slot]) for slot in (fresh, other)] == [step + 1] * 2


def test_zeros_wait_for_what_is_being_copied(slow: Driver, gate: Gate) -> None:
    joining, _ = offloaded(slow)
    slot, pools = joining.tables[0][0], slow.runner.pools
    before = block(pools, 0, slot)
    gate.opens_late(slow.runner.tiers, 0)
    fresh = slow.blocks(4)[0][0]
    # In their order; a slot of a tier that is not here, and one beyond it, are reported at once.
    impossible = (Copy(4, 0, 0, 1, DISK, DISK), up(5, 7, fresh), Copy(6, 3, 0, 1))
    slow.runner.transfer((down(1, slot, 1), Copy(2, 0, 0, slot), up(3, 1, fresh), *impossible))
    assert not any(block(pools, 0, slot))
    slow.runner.tiers.wait(reads=[(Tier.DEVICE, 0, fresh)])
    assert block(pools, 0, fresh) == before
    until_idle(slow.runner.tiers)
    assert ends_of(slow) == {1: True, 2: True, 3: True, 4: False, 5: False, 6: False}


BAD_COPIES: dict[str, tuple[Copy, str]] = {
    "from a tier that is not here": (up(1, 1, 1, DISK), "copy_source_tiers"),
    "to a tier that is not here": (down(1, 1, 1, DISK), "copy_target_tiers"),
    "from a slot beyond its tier": (up(1, 7, 1), "copy_source_slots"),
    "to a slot beyond its tier": (down(1, 1, 7), "copy_target_slots"),
    "from no slot": (up(1, 0, 1), "copy_source_slots"),
    "of a group that is not here": (down(1, 1, 1, group=1), "copy_groups"),
    "onto itself": (Copy(1, 0, 2, 2, HOST, HOST), "copy_target_slots"),
}


@pytest.mark.parametrize("name", BAD_COPIES)
def test_a_copy_that_is_not_possible_names_its_field_and_changes_nothing(name: str, slow: Driver) -> None:
    copy, field = BAD_COPIES[name]
    with pytest.raises(InvalidStepError) as caught:
        slow.run(Step(1, copies=(down(9, 1, 1), copy)))
    assert list(caught.value.fields) == [field]
    assert (slow.runner.last_step, slow.runner.tiers.busy, ends_of(slow)) == (0, False, {})


def test_every_copy_is_reported_when_the_step_fails(slow: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the device says no")

    copies = (down(1, 1, 1), Copy(2, 0, 3, 4), down(3, 5, 2))
    with monkeypatch.context() as patch:
        patch.setattr("executor.core.runner.copy_blocks", broken)
        with pytest.raises(RuntimeError):
            slow.run(Step(1, copies=copies))
    until_idle(slow.runner.tiers)
    # The second is within the device: the launching thread knows of it.
    assert ends_of(slow) == {1: True, 3: False}


def test_the_output_of_a_step_is_delivered_before_the_next_step_waits_for_copies(slow: Driver, gate: Gate) -> None:
    joining, _ = offloaded(slow)
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    ended: list[dict[int, bool]] = []

    def deliver(answer: Answer) -> None:
        ended.append(dict(ends_of(slow)))
        answers.put(answer)

    worker, session = Worker(slow.runner, Outbox(NoConfirmations(), {}), lambda: None), Session(deliver)
    worker.start()
    worker.open(session)
    first = answers.get(timeout=patience(20))
    assert isinstance(first, int)
    gate.open.clear()
    other = NewSequence(2, tuple(OTHER), 9, 0, (joining.tables[0],))
    worker.submit(session, Step(first))
    copies = (down(1, joining.tables[0][0], 1),)
    worker.submit(session, Step(first + 1, copies=copies, new_sequences=(other,), chunks={2: 9}))
    for number in (first, first + 1):
        output = answers.get(timeout=patience(20))
        assert isinstance(output, StepOutput)
        assert output.number == number
        gate.open.set()
    assert worker.stop()
    # The copy had not ended when the first step was delivered, and the second step has waited for the copy.
    assert ended == [{}, {}, {1: True}]
