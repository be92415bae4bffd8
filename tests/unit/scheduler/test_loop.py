"""The step loop on its own."""

from prometheus_client import CollectorRegistry

from protos.execution.v1 import execution_pb2 as pb
from scheduler.loop import StepLoop
from scheduler.mailbox import Mailbox, Report, Stop
from scheduler.metrics import StepTimes
from scheduler.pace import Pace
from tests.unit.scheduler.test_copies import down, synced


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
