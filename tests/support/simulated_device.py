"""A runner with a simulated device, which ends a step after the next step has been launched."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from executor.core.runner import Runner
from executor.step import Step, StepOutput
from tests.support.patience import patience
from tests.support.worker_loop import WorkerLoop


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
    model = SimpleNamespace(device=SimpleNamespace(type="simulated"))
    tiers = SimpleNamespace(busy=False, drain=lambda _: None)

    def __init__(self, steps: int) -> None:
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
