"""A worker driven like by the scheduler: a few steps are in flight, and each output lets one more step go."""

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from executor.core.outbox import Answer, Outbox, Session
from executor.core.runner import Runner
from executor.core.worker import Worker
from executor.step import Step, StepOutput
from tests.support.patience import patience

# The longest that a step may take.
ANSWER_SECONDS = patience(30)


class NoConfirmations:
    """Takes the place of the cache manager."""

    def confirm(self, done: tuple[int, ...], failed: tuple[int, ...]) -> None:
        pass


@dataclass
class WorkerLoop:
    """Steps of a runner through a separate worker.

    turn_seconds: from the output of a step until one more step arrives. in_flight: number of steps that were sent and
    are not answered.
    """

    runner: Runner
    turn_seconds: float = 0.0015
    in_flight: int = 2

    def run(self, steps: int, **first: Any) -> Sequence[StepOutput]:
        """Outputs of `steps` steps; `first` are the changes of the first step."""
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        worker = Worker(self.runner, Outbox(NoConfirmations(), {}), lambda: None)
        session = Session(answers.put)
        worker.start()
        worker.open(session)
        begin = answers.get(timeout=ANSWER_SECONDS)
        assert isinstance(begin, int)
        for number in range(begin, begin + self.in_flight):
            worker.submit(session, Step(number, **(first if number == begin else {})))
        outputs = []
        for number in range(begin, begin + steps):
            output = answers.get(timeout=ANSWER_SECONDS)
            assert isinstance(output, StepOutput), output
            outputs.append(output)
            if number + self.in_flight < begin + steps:
                time.sleep(self.turn_seconds)
                worker.submit(session, Step(number + self.in_flight))
        assert worker.stop()
        return outputs
