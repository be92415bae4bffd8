"""How an executor warms up, and how its process ends."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from executor.cache.pool import KvPools
from executor.core.runner import Runner
from executor.errors import ModelError
from executor.models.forward import Model
from executor.parts import end_with, warm_up
from protos.rpc.server import StopSignals
from tests.support.patience import patience


class Full:
    """A forward pass on a device that the pools have filled."""

    def warmup(self, *_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nMore lines.")


def test_pools_that_leave_no_memory_name_their_setting(tiny: Model) -> None:
    model: Any = replace(tiny, forward=Full())  # type: ignore[arg-type]
    runner = Runner(model, KvPools(tiny.groups, 1, 16, torch.float32, tiny.device))
    with pytest.raises(ModelError) as caught:
        warm_up(runner)
    assert str(caught.value) == (
        "the pools leave no memory for steps on cpu: RuntimeError: CUDA error: out of memory; "
        "lower KVKEEP_EXECUTOR_FREE_MEMORY_FRACTION"
    )


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
