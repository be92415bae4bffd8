"""Simulated devices: a timeline of work beside the host, and a runner whose steps end once the next is launched."""

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

from executor.core.runner import Runner
from executor.step import Step, StepOutput
from tests.support.patience import patience
from tests.support.worker_loop import WorkerLoop


class Timeline:
    """The work of a device that computes beside the host, one piece after the other. Times are in seconds.

    now: the time of the host; sleep: lets time pass. idle: how long nothing was left to compute before each piece.
    """

    def __init__(self, now: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self.now = now
        self.sleep = sleep
        self.idle: list[float] = []
        self._free_at = now()

    def compute(self, seconds: float) -> None:
        """Launches work."""
        begin = self.reached()
        self.idle.append(begin - self._free_at)
        self._free_at = begin + seconds

    def reached(self) -> float:
        """When the device will have done what has been launched."""
        return max(self.now(), self._free_at)


class TimelineEvent:
    """An event of CUDA on a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._at = 0.0

    def record(self) -> None:
        self._at = self._timeline.reached()

    def query(self) -> bool:
        return self._timeline.now() >= self._at

    def synchronize(self) -> None:
        self._timeline.sleep(max(0.0, self._at - self._timeline.now()))

    def elapsed_time(self, end: "TimelineEvent") -> float:
        """Milliseconds from this event to a later one."""
        return (end._at - self._at) * 1e3


class SimulatedStep:
    """A step on the simulated device."""

    num_tokens = 1

    def __init__(self, number: int) -> None:
        self.number = number
        self.ended = threading.Event()

    @property
    def is_over(self) -> bool:
        return self.ended.is_set()

    def result(self) -> StepOutput:
        assert self.ended.wait(patience(5)), f"step {self.number} is waited for before the next one is launched"
        return StepOutput(self.number, (), 1, 0.0, 0.0)


class SimulatedRunner:
    """Takes the place of a Runner, for `steps` steps."""

    overlaps = True
    tiers = SimpleNamespace(busy=False, drain=lambda _: None)

    def __init__(self, steps: int) -> None:
        self.model = SimpleNamespace(device=SimpleNamespace(type="simulated"))
        self.last_step = 0
        self._steps = steps
        self._computing: SimulatedStep | None = None

    def prepare(self, step: Step) -> Step:
        return step

    def launch(self, step: Step) -> SimulatedStep:
        self.last_step = step.number
        if self._computing is not None:
            self._computing.ended.set()
        self._computing = SimulatedStep(step.number)
        if step.number == self._steps:
            self._computing.ended.set()
        return self._computing

    def clear(self) -> None:
        self._computing = None


def outputs_of(steps: int) -> Sequence[StepOutput]:
    """Outputs of steps on a simulated device, through a real worker."""
    runner = SimulatedRunner(steps)
    return WorkerLoop(cast(Runner, cast(Any, runner))).run(steps)
