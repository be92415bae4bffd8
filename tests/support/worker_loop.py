"""A worker driven like by the scheduler: at most two steps in flight; an output lets the step after the next go."""

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

    turn_seconds: from the output of a step until the step after the next one arrives.
    """

    runner: Runner
    turn_seconds: float = 0.0015

    def run(self, steps: int, **first: Any) -> Sequence[StepOutput]:
        """Outputs of `steps` steps; `first` are the changes of the first step."""
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        worker = Worker(self.runner, Outbox(NoConfirmations(), {}), lambda: None)
        session = Session(answers.put)
        worker.start()
        worker.open(session)
        begin = answers.get(timeout=ANSWER_SECONDS)
        assert isinstance(begin, int)
        worker.submit(session, Step(begin, **first))
        worker.submit(session, Step(begin + 1))
        outputs = []
        for number in range(begin, begin + steps):
            output = answers.get(timeout=ANSWER_SECONDS)
            assert isinstance(output, StepOutput), output
            outputs.append(output)
            if number + 2 < begin + steps:
                time.sleep(self.turn_seconds)
                worker.submit(session, Step(number + 2))
        assert worker.stop()
        return outputs
