"""An executor that does not answer: requests wait, leave and restart, and health says so."""

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry

from scheduler.bridge import CommandQueue
from scheduler.core import loop
from scheduler.errors import ExecutorLostError
from scheduler.metrics import StepTimes
from tests.support.generation import generate
from tests.support.generation import greedy_request as request
from tests.support.patience import patience
from tests.support.scheduler.sequences import Updates
from tests.support.scheduler.stack import Stack
from tests.support.until import until


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are late at once, and lost soon."""
    monkeypatch.setattr(loop, "TURN_SECONDS", 0.01)
    monkeypatch.setattr(loop, "LATE_SECONDS", 0.05)
    monkeypatch.setattr(loop, "LOST_SECONDS", 0.3)
    monkeypatch.setattr(loop, "FIRST_STEP_SECONDS", 0.001)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_hanging_executor_is_reported_and_no_request_is_lost(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, soon: None, is_lost: bool
) -> None:
    """One that hangs too long is lost, and its requests restart."""
    if not is_lost:
        monkeypatch.setattr(loop, "LOST_SECONDS", 1e9)
    executor, service = stack.executor, stack.scheduler.service
    tasks = [asyncio.create_task(generate(stack.stub, request([i + 1, 2], 30), patience(30))) for i in range(4)]
    await executor.stepped(3)
    executor.gate.clear()
    await until(lambda: executor.sessions > 1 if is_lost else service.obstacle)
    executor.gate.set()
    for i, task in enumerate(tasks):
        assert (await task).token_ids == executor.expected([i + 1, 2], 30)
    assert not service.obstacle
    # On a busy machine it may be lost once more.
    assert (executor.sessions > 1) == is_lost


async def test_requests_leave_while_the_executor_hangs(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, soon: None
) -> None:
    monkeypatch.setattr(loop, "LOST_SECONDS", 1e9)
    executor, manager = stack.executor, stack.manager
    first = asyncio.create_task(generate(stack.stub, request([1, 2], 30), patience(30)))
    await executor.stepped(3)
    executor.gate.clear()
    await until(lambda: stack.scheduler.service.obstacle)
    # Admitted, and in none of the steps under way.
    others = [asyncio.create_task(generate(stack.stub, request([i + 5, 2], 30), patience(30))) for i in range(3)]
    await manager.admitted(4)
    for task in others:
        task.cancel()
    await until(lambda: len(manager.live) == 1)
    assert not first.done()
    executor.gate.set()
    assert (await first).token_ids == executor.expected([1, 2], 30)


class Hung:
    """An executor that opens sessions and answers nothing; every wait for it takes longer than was asked."""

    def __init__(self, pause: float) -> None:
        self.now = 0.0
        self.asked = 0
        self._pause = pause

    def receive(self, seconds: float) -> None:
        self.asked += 1
        self.now += self._pause


def test_a_pause_of_the_scheduler_is_no_silence_of_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped finds its clock far ahead: each wait counts for a second at most."""
    hung = Hung(pause=60.0)
    monkeypatch.setattr(time, "monotonic", lambda: hung.now)
    times = StepTimes(CollectorRegistry())
    steps = loop.StepLoop(hung, CommandQueue(), Updates(), times, max_batched_tokens=1, budget=None)  # type: ignore[arg-type]
    with pytest.raises(ExecutorLostError, match="within 30 seconds"):
        steps._answer(0.1, "step 1 was not answered")
    assert hung.asked == loop.LOST_SECONDS / loop.LONGEST_TURN_SECONDS
    # Routers, which move requests after a second already, hear of next to none of it.
    hesitation = hung.asked * 2 * loop.TURN_SECONDS - loop.LATE_TIMES * 0.1
    assert times.executor_silence == pytest.approx(hesitation)
