"""How the process of an executor ends."""

import asyncio
from functools import partial

from executor.parts import end_with
from protos.rpc.server import StopSignals
from tests.support.patience import patience


async def test_a_task_that_fails_ends_the_process_once() -> None:
    async def fail() -> None:
        raise RuntimeError("a bug")

    broken, signals = asyncio.Event(), StopSignals()
    try:
        tasks = [asyncio.create_task(fail()) for _ in range(2)]
        for task in tasks:
            task.add_done_callback(partial(end_with, broken))
        await asyncio.wait_for(signals.first.wait(), patience(5))
        await asyncio.wait(tasks)
    finally:
        signals.close()
    assert broken.is_set()
    # A second signal would break off the drain.
    assert not signals.second.is_set()


async def test_a_task_that_was_cancelled_or_follows_a_fault_ends_nothing() -> None:
    async def give_up(broken: asyncio.Event) -> None:
        broken.set()

    broken, signals = asyncio.Event(), StopSignals()
    try:
        waits = asyncio.create_task(asyncio.Event().wait())
        waits.add_done_callback(partial(end_with, broken))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.wait({waits})
        assert not broken.is_set()
        ends = asyncio.create_task(give_up(broken))
        ends.add_done_callback(partial(end_with, broken))
        await asyncio.wait({ends})
        await asyncio.sleep(0.01)
    finally:
        signals.close()
    assert not signals.first.is_set()
