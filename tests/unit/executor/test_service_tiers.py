"""What a scheduler and the cache manager hear of copies to and from lower tiers."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from executor.core import worker
from executor.models.forward import Model
from executor.step import Tier
from protos.execution.v1 import execution_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2 as kv
from tests.support.patience import patience
from tests.unit.executor.running_stack import Stack, Stream, join, refused, running
from tests.unit.executor.tiers.gates import Gate
from tests.unit.executor.tiers.world import block

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
NEVER = (1 << 64) - 1


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
async def stack(tiny: Model, gate: Gate, tmp_path: Path) -> AsyncIterator[Stack]:
    async with running(tiny, tmp_path, lambda pools: gate.tiers(pools, tmp_path / "host")) as stack:
        yield stack
        gate.open.set()


def copies(*entries: tuple[int, Tier, int, Tier, int]) -> dict[str, Any]:
    """Columns of (ticket, source tier, source slot, target tier, target slot)."""
    tickets, source_tiers, sources, target_tiers, targets = (list(column) for column in zip(*entries, strict=True))
    return {
        "copy_tickets": tickets,
        "copy_groups": [0] * len(tickets),
        "copy_source_tiers": source_tiers,
        "copy_source_slots": sources,
        "copy_target_tiers": target_tiers,
        "copy_target_slots": targets,
    }


async def results(stream: Stream, count: int) -> pb.StepResult:
    """Steps without work until N = `count` copies have ended; returns all that the steps reported about copies."""
    total = pb.StepResult()
    async with asyncio.timeout(patience(10)):
        while len(total.copied_tickets) + len(total.failed_tickets) < count:
            result = await stream.run(awaits_copies=True)
            total.copied_tickets.extend(result.copied_tickets)
            total.failed_tickets.extend(result.failed_tickets)
    return total


async def test_onloads_are_reported_to_the_scheduler_and_all_copies_to_the_manager(stack: Stack) -> None:
    async with stack.session() as stream:
        first = await stream.run(**join(0))
        assert not first.HasField("host_block_time")
        pools, before = stack.runner.pools, block(stack.runner.pools, 0, 1)
        await stream.run(removed_sequences=[0], **copies((7, DEVICE, 1, HOST, 3), (8, DEVICE, 1, DEVICE, 150)))
        await stream.send(**copies((9, HOST, 3, DEVICE, 100), (10, HOST, 4, DEVICE, 101)))
        result = (await stream.read()).result
        told = await results(stream, 2 - len(result.copied_tickets) - len(result.failed_tickets))
        assert sorted([*result.copied_tickets, *told.copied_tickets]) == [9]
        # The slot that it should come from has never been filled.
        assert sorted([*result.failed_tickets, *told.failed_tickets]) == [10]
        assert block(pools, 0, 100) == block(pools, 0, 150) == before
        last = await stream.run()
        assert (list(last.copied_tickets), list(last.failed_tickets)) == ([], [])
        assert last.host_block_time.ToTimedelta().total_seconds() > 0
        assert not last.HasField("disk_block_time")
        await stack.manager.until(lambda: len(stack.manager.confirmed) == 4)
        assert sorted(stack.manager.confirmed) == [(7, True), (8, True), (9, True), (10, False)]


async def test_an_empty_step_is_answered_when_a_copy_has_ended(
    stack: Stack, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stack.session() as stream:
        await stream.run(**copies((1, DEVICE, 1, HOST, 1)))
        with monkeypatch.context() as patch:
            # Longer than the stream waits for an answer: these steps wait for no copy, as none comes to the device.
            patch.setattr(worker, "AWAIT_SECONDS", 60)
            for _ in range(10):
                await stream.run(awaits_copies=True)
        gate.open.clear()
        await stream.send(**copies((2, HOST, 1, DEVICE, 2)))
        await stream.read()
        begin = time.monotonic()
        # It returns without an answer, so that the loop reads its queue.
        result = await stream.run(awaits_copies=True)
        assert time.monotonic() - begin > 0.015
        assert not gate.open.is_set()
        assert not result.copied_tickets
        # Longer than the results are waited for: it is the end of the copy that has the step answered.
        monkeypatch.setattr(worker, "AWAIT_SECONDS", 60)
        asyncio.get_running_loop().call_later(0.005, gate.open.set)
        assert list((await results(stream, 1)).copied_tickets) == [2]


async def test_a_later_session_hears_nothing_of_the_copies_of_an_earlier_one(stack: Stack, gate: Gate) -> None:
    async with stack.session() as stream:
        await stream.run(**copies((1, DEVICE, 1, HOST, 1)))
        await stack.manager.until(lambda: stack.manager.confirmed == [(1, True)])
        gate.open.clear()
        await stream.run(**copies((2, HOST, 1, DEVICE, 2), (3, DEVICE, 1, HOST, 2)))
    async with stack.session() as stream:
        gate.open.set()
        await stack.manager.until(lambda: len(stack.manager.confirmed) == 3)
        told = [await stream.run(awaits_copies=True) for _ in range(3)]
        assert not any(result.copied_tickets or result.failed_tickets for result in told)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no source tiers": ({"copy_target_tiers": [2]}, "copy_source_tiers"),
    "no target tiers": ({"copy_source_tiers": [2]}, "copy_target_tiers"),
    "too many": ({"copy_source_tiers": [1], "copy_target_tiers": [2, 2]}, "copy_target_tiers"),
    "a tier that is not said": ({"copy_source_tiers": [0], "copy_target_tiers": [2]}, "copy_source_tiers"),
    "a tier of a later version": ({"copy_source_tiers": [1], "copy_target_tiers": [9]}, "copy_target_tiers"),
    "a tier that is not here": ({"copy_source_tiers": [1], "copy_target_tiers": [3]}, "copy_target_tiers"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_tier_is_named_and_its_copy_reported_as_failed(name: str, stack: Stack) -> None:
    changes, field = BAD[name]
    async with stack.session() as stream:
        with refused(field=field):
            await stream.run(copy_tickets=[5], copy_groups=[0], copy_source_slots=[1], copy_target_slots=[1], **changes)
    await stack.manager.until(lambda: stack.manager.confirmed == [(5, False)])


async def test_copies_of_a_step_on_which_the_model_fails_are_reported_once(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stack.session() as stream:
        await stream.run(**join(0))
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "embedding", lambda *_, **__: torch.empty(1, 2) @ torch.empty(1, 2))
            with refused():
                await stream.run(**copies((1, DEVICE, 1, HOST, 1), (2, DEVICE, 1, DEVICE, 9), (3, DEVICE, 2, HOST, 2)))
    await stack.manager.until(lambda: len(stack.manager.confirmed) == 3)
    assert sorted(stack.manager.confirmed) == [(1, True), (2, False), (3, True)]


def transfer(ticket: int, source: tuple[Tier, int] | None, target: tuple[Tier, int], group: int = 0) -> kv.Transfer:
    """As the manager asks for it with a renewal."""
    return kv.Transfer(
        ticket=ticket,
        group=group,
        source_tier=(target if source is None else source)[0].value,  # type: ignore[arg-type]
        source_slot=0 if source is None else source[1],
        target_tier=target[0].value,  # type: ignore[arg-type]
        target_slot=target[1],
    )


async def test_what_the_manager_asks_for_is_begun_once_however_often_it_asks(stack: Stack, gate: Gate) -> None:
    manager, pools = stack.manager, stack.runner.pools
    async with stack.session() as stream:
        await stream.run(**join(0))
        before = block(pools, 0, 1)
        gate.open.clear()
        manager.transfers = [
            transfer(20, (DEVICE, 1), (HOST, 2)),
            transfer(21, (HOST, 2), (DEVICE, 100)),
            transfer(23, None, (HOST, 1)),
            transfer(24, (DEVICE, 1), (DISK, 1)),
            transfer(25, None, (DEVICE, 0)),
            transfer(26, None, (DEVICE, 120)),
        ]
        # The others are confirmed, and with two more renewals these are asked for again.
        await manager.until(lambda: [transfer.ticket for transfer in manager.transfers] == [20, 21, 23])
        count = manager.renewals
        await manager.until(lambda: manager.renewals > count + 1)
        assert [transfer.ticket for transfer in manager.transfers] == [20, 21, 23]
        # One with a smaller number can come later.
        manager.transfers.insert(0, transfer(15, None, (DEVICE, 121)))
        await manager.until(lambda: (15, True) in manager.confirmed)
        gate.open.set()
        await manager.until(lambda: not manager.transfers)
        count = manager.renewals
        await manager.until(lambda: manager.renewals > count + 2)
    expected = [(15, True), (20, True), (21, True), (23, True), (24, False), (25, False), (26, True)]
    assert sorted(manager.confirmed) == expected
    assert block(pools, 0, 100) == before
    assert not any(block(pools, 0, 120))


async def test_a_session_ends_with_the_lease_of_its_scheduler_before_its_slots_are_written_for_others(
    stack: Stack, gate: Gate
) -> None:
    gate.open.set()
    manager = stack.manager

    async def renewed() -> None:
        count = manager.renewals
        await manager.until(lambda: manager.renewals > count + 1)

    manager.scheduler_ids = ["s"]
    await renewed()
    async with stack.session() as stream:
        await stream.run(**join(0))
        # The lease has ended: what the scheduler has asked for counts no more, and its slot is for another copy.
        manager.scheduler_ids = []
        manager.transfers = [
            kv.Transfer(ticket=9, source_slot=1, target_slot=3, source_tier=kv.TIER_DEVICE, target_tier=kv.TIER_HOST)
        ]
        await manager.until(lambda: (9, True) in manager.confirmed)
        kept = stack.runner.tiers.snapshot().generations(Tier.HOST, 0).tolist()
        # Also when the scheduler has registered again: it may have made the step before.
        manager.scheduler_ids = ["s"]
        await renewed()
        await stream.send(removed_sequences=[0], **copies((7, DEVICE, 2, HOST, 3)))
        with refused("SCHEDULER_LEFT", code=grpc.StatusCode.ABORTED):
            await stream.read()
        await manager.until(lambda: (7, False) in manager.confirmed)
        assert stack.runner.tiers.snapshot().generations(Tier.HOST, 0).tolist() == kept
    # It has dropped all when it opens its session again.
    async with stack.session() as stream:
        await stream.run(**join(0))


async def test_a_registration_reports_what_lower_tiers_hold_for_good(stack: Stack, gate: Gate) -> None:
    manager = stack.manager
    await manager.until(lambda: bool(manager.registrations))
    pool = manager.registrations[0].pools[0]
    assert (pool.host_blocks, pool.disk_blocks) == (6, 0)
    assert (list(pool.host_generations), list(pool.disk_generations)) == ([0] * 6, [])
    async with stack.session() as stream:
        await stream.run(**join(0))
        await stream.run(**copies((7, DEVICE, 1, HOST, 2), (8, DEVICE, 2, HOST, 3)))
        await manager.until(lambda: len(manager.confirmed) == 2)
        gate.open.clear()
        # On their way: into a slot in memory and one on the device, asked for by a step and by the manager.
        await stream.run(**copies((9, DEVICE, 1, HOST, 3), (10, HOST, 2, DEVICE, 50)))
        manager.transfers = [transfer(11, (DEVICE, 1), (HOST, 2)), transfer(12, (HOST, 3), (DEVICE, 51))]
        count = manager.renewals
        await manager.until(lambda: manager.renewals > count + 1)
        manager.restart()
        await manager.until(lambda: len(manager.registrations) == 2)
        pool = manager.registrations[1].pools[0]
        assert list(pool.host_generations) == [0] * 6
        steps = list(pool.last_write_steps)
        assert (steps[0], steps[49], steps[50], steps[51]) == (1, NEVER, NEVER, 0)
        gate.open.set()
        await manager.until(lambda: len(manager.confirmed) == 6)
        manager.restart()
        await manager.until(lambda: len(manager.registrations) == 3)
        pool = manager.registrations[2].pools[0]
        assert list(pool.host_generations) == [0, 11, 9, 0, 0, 0]
        assert NEVER not in pool.last_write_steps


async def test_copies_that_wait_behind_a_long_step_are_reported_as_changing(stack: Stack, gate: Gate) -> None:
    manager = stack.manager
    async with stack.session() as stream:
        await stream.run(**join(0))
        await stream.run(**copies((7, DEVICE, 1, HOST, 2)))
        await manager.until(lambda: len(manager.confirmed) == 1)
        gate.open.clear()
        await stream.run(**copies((8, DEVICE, 3, HOST, 4)))
        # This step waits for the copy before, and what the manager asks for waits for this step.
        await stream.send(removed_sequences=[0], **join(1, block_tables=[pb.StepBlockTable(slots=range(3, 13))]))
        manager.transfers = [transfer(9, (DEVICE, 2), (HOST, 2))]
        count = manager.renewals
        await manager.until(lambda: manager.renewals > count + 1)
        manager.restart()
        await manager.until(lambda: len(manager.registrations) == 2)
        assert list(manager.registrations[1].pools[0].host_generations) == [0] * 6
        gate.open.set()
        await stream.read()


async def test_stopping_finishes_copies_and_keeps_what_they_brought(tiny: Model, tmp_path: Path) -> None:
    gate = Gate()
    async with (
        running(tiny, tmp_path, lambda pools: gate.tiers(pools, tmp_path / "host")) as stack,
        stack.session() as stream,
    ):
        await stream.run(**join(0))
        gate.opens_late(stack.runner.tiers, 0.1)
        await stream.run(**copies((5, DEVICE, 1, HOST, 4)))
    (tmp_path / "m.sock").unlink(missing_ok=True)
    (tmp_path / "e.sock").unlink(missing_ok=True)
    async with running(tiny, tmp_path, lambda pools: gate.tiers(pools, tmp_path / "host")) as stack:
        await stack.manager.until(lambda: bool(stack.manager.registrations))
        assert list(stack.manager.registrations[0].pools[0].host_generations) == [0, 0, 0, 5, 0, 0]
