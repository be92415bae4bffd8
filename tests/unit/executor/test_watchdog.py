"""A device that makes no progress: health says so, and the process ends in time, or continues with the device."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from supervisor import is_serving

from executor.core import watchdog, worker
from executor.models.forward import Model
from scheduler.core import loop
from tests.support.patience import patience
from tests.unit.executor.running_stack import Stack, join, refused, running


class Hanging:
    """A forward pass that continues when it may."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.hangs = threading.Event()

    def warmup(self, *arguments: Any) -> None:
        self._forward.warmup(*arguments)

    def prepare(self, *arguments: Any) -> Any:
        forward = self._forward.prepare(*arguments)

        def run() -> Any:
            self.hangs.set()
            assert self.goes_on.wait(patience(20))
            return forward()

        return run


@pytest.fixture
def hanging(tiny: Model) -> Hanging:
    return Hanging(tiny.forward)


class Ticks:
    """The time of a watchdog, in place of its asyncio: it stands still but for the ticks that a test lets pass."""

    def __init__(self) -> None:
        # Ticks that have begun; all but the last are over.
        self.begun = 0
        self._may_end = asyncio.Semaphore(0)

    async def sleep(self, seconds: float) -> None:
        self.begun += 1
        await self._may_end.acquire()

    async def go_by(self, count: int) -> None:
        """Lets ticks pass; the watchdog has looked at each of them."""
        last = self.begun + count
        for _ in range(count):
            self._may_end.release()
        await until(lambda: self.begun == last)

    def end(self) -> None:
        """Lets one tick pass, after which none begins."""
        self._may_end.release()


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    ticks = Ticks()
    monkeypatch.setattr(watchdog, "asyncio", ticks)
    return ticks


@pytest.fixture
async def stack(tiny: Model, hanging: Hanging, ticks: Ticks, tmp_path: Path) -> AsyncIterator[Stack]:
    async with running(replace(tiny, forward=hanging), tmp_path) as stack:  # type: ignore[arg-type]
        yield stack
        hanging.goes_on.set()


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(patience(20)):
        while not await asyncio.to_thread(reached):
            await asyncio.sleep(0.001)


async def test_health_says_that_the_device_makes_no_progress_and_progress_again(
    stack: Stack, hanging: Hanging, ticks: Ticks, tmp_path: Path
) -> None:
    address = f"unix:{tmp_path}/e.sock"
    async with stack.session() as stream:
        await until(lambda: is_serving(address))
        hanging.goes_on.clear()
        await stream.send(**join(1))
        await until(hanging.hangs.is_set)
        # The first of these sees where the device is.
        await ticks.go_by(watchdog.FIRST_STEP_TICKS + 1)
        await until(lambda: not is_serving(address))
        hanging.goes_on.set()
        assert (await stream.read()).result.step == 1
        await ticks.go_by(2)
        await until(lambda: is_serving(address))
        # A device without work does not stand still. Its thread may still be about to find no work.
        await until(lambda: stack.worker.turn is None)
        await ticks.go_by(watchdog.STILL_TICKS * 2)
        assert await asyncio.to_thread(is_serving, address)
    assert not stack.given_up.is_set()


async def test_a_first_step_may_take_long(stack: Stack, hanging: Hanging, ticks: Ticks, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/e.sock"
    async with stack.session() as stream:
        await until(lambda: is_serving(address))
        hanging.goes_on.clear()
        await stream.send(**join(1))
        await until(hanging.hangs.is_set)
        await ticks.go_by(watchdog.STILL_TICKS * 2)
        assert await asyncio.to_thread(is_serving, address)
        hanging.goes_on.set()
        assert (await stream.read()).result.step == 1
        # From now on, the time of a step is known.
        assert stack.worker.longest_step is not None


def test_health_allows_a_step_what_the_scheduler_does() -> None:
    bounds = [watchdog.still_ticks(seconds) * watchdog.TICK_SECONDS for seconds in (None, 0.02, 2.0, 12.0)]
    assert bounds == [loop.LATE_TIMES * loop.FIRST_STEP_SECONDS, 10, 10, loop.LATE_TIMES * 12.0]


async def abandon_first_step(stack: Stack, hanging: Hanging, ticks: Ticks, waiting: int = 0) -> None:
    """Ends the session of a first step that hangs, after N = `waiting` ticks."""
    hanging.goes_on.clear()
    async with stack.session() as stream:
        await stream.send(**join(1))
        await until(hanging.hangs.is_set)
        await ticks.go_by(waiting)
        # A scheduler that still waits knows better how long a step may take.
        assert not stack.given_up.is_set()
    await until(lambda: stack.worker.is_abandoned)


async def test_a_device_that_its_scheduler_has_given_up_ends_the_process(
    stack: Stack, hanging: Hanging, ticks: Ticks
) -> None:
    await abandon_first_step(stack, hanging, ticks, waiting=watchdog.ABANDONED_TICKS * 2)
    await ticks.go_by(watchdog.ABANDONED_TICKS - 1)
    assert not stack.given_up.is_set()
    # With the last tick the watchdog ends.
    ticks.end()
    async with asyncio.timeout(patience(20)):
        await stack.given_up.wait()


async def test_a_long_first_step_does_not_end_the_process_when_its_scheduler_restarts(
    stack: Stack, hanging: Hanging, ticks: Ticks
) -> None:
    await abandon_first_step(stack, hanging, ticks)
    await ticks.go_by(watchdog.ABANDONED_TICKS * 2)
    assert not stack.given_up.is_set()
    hanging.goes_on.set()
    async with stack.session() as stream:
        await stream.send(**join(1))
        assert (await stream.read()).result.step == 2


async def test_a_process_whose_device_stands_still_ends_its_session_and_itself(
    stack: Stack, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging.goes_on.clear()
    async with stack.session() as stream:
        await stream.send(**join(1))
        await until(hanging.hangs.is_set)
        with monkeypatch.context() as patch:
            patch.setattr(worker, "STOP_SECONDS", 0.1)
            stack.servicer.stop()
            with refused("STOPPING"):
                await stream.read()
            assert not await asyncio.to_thread(stack.worker.stop)
