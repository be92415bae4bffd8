"""The step loop on its own."""

from collections import deque
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from protos.execution.v1 import execution_pb2 as pb
from scheduler.loop import StepLoop
from scheduler.mailbox import Admitted, Mailbox, Report, Stop
from scheduler.metrics import StepTimes
from scheduler.pace import Pace
from tests.unit.scheduler.test_copies import down, synced
from tests.unit.scheduler.test_planner import sequence


class OneStep:
    """An executor whose first answer ends the loop."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.steps: list[pb.Step] = []
        self._mailbox = mailbox

    def open(self) -> int:
        return 1

    def send(self, step: pb.Step) -> None:
        self.steps.append(step)

    def receive(self) -> pb.StepResult:
        self._mailbox.put(Stop())
        return pb.StepResult(step=self.steps[-1].step)

    def close(self) -> None:
        pass


def test_copies_asked_for_in_another_session_are_not_sent_and_others_are_without_anything_to_compute() -> None:
    mailbox = Mailbox()
    executor = OneStep(mailbox)
    reports: list[Report] = []
    mailbox.put(synced(down(30), session=1))
    for ticket, session in ((31, -1), (32, 0), (33, 2)):
        mailbox.put(synced(down(ticket), session=session))
    times = StepTimes(CollectorRegistry())
    StepLoop(executor, mailbox, reports.append, times, max_batched_tokens=64, pace=Pace()).run()  # type: ignore[arg-type]
    assert [list(step.copy_tickets) for step in executor.steps] == [[30]]
    assert [report.cancelled_tickets for report in reports if report.cancelled_tickets] == [[31, 32, 33]]


class Counted:
    """An executor that says how long its steps took, and counts those that it has when it answers one."""

    def __init__(self, mailbox: Mailbox, seconds: Sequence[float]) -> None:
        self.had: list[int] = []
        self._mailbox = mailbox
        self._seconds = seconds
        self._sent: deque[pb.Step] = deque()

    def open(self) -> int:
        self._mailbox.put(Admitted(sequence(1, 3, max_tokens=50, blocks=20), session=1))
        return 1

    def send(self, step: pb.Step) -> None:
        self._sent.append(step)

    def receive(self) -> pb.StepResult:
        self.had.append(len(self._sent))
        if len(self.had) == len(self._seconds):
            self._mailbox.put(Stop())
        result = pb.StepResult(
            step=self._sent.popleft().step, sequences=[1], token_ids=[7], stopped=[False], num_tokens=1
        )
        result.compute_time.FromNanoseconds(int(self._seconds[min(len(self.had), len(self._seconds)) - 1] * 1e9))
        return result

    def close(self) -> None:
        pass


def test_more_steps_are_sent_ahead_where_they_are_short() -> None:
    mailbox = Mailbox()
    executor = Counted(mailbox, [0.001] * 10 + [0.02] * 10 + [0.01] * 10)
    reports: list[Report] = []
    times = StepTimes(CollectorRegistry())
    StepLoop(executor, mailbox, reports.append, times, max_batched_tokens=64, pace=Pace()).run()  # type: ignore[arg-type]
    # The first two are sent before it is known how long they take.
    assert executor.had[:2] == [2, 2]
    # What they took changes the number when it is seen, and three are asked.
    assert executor.had[6:10] == [4] * 4
    assert executor.had[16:20] == [2] * 4
    assert executor.had[26:30] == [3] * 4
    assert sum(len(report.outputs) for report in reports) == len(executor.had)
