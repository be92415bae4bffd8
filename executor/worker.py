"""The thread that owns the runner. Everything reaches it through one queue."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from executor import metrics
from executor.errors import ExecutorError, StepFailedError
from executor.runner import Pending, Runner
from executor.step import Outcome, Step
from protos.rpc.errors import ServiceError

log = structlog.get_logger()

# Answers of a session: the number of its first step, then outcomes; an error or None as the last one.
Answer = int | Outcome | ServiceError | None


@dataclass(eq=False)
class Session:
    """One scheduler's stream. `deliver` may be called from any thread; after `closed` no step is run."""

    deliver: Callable[[Answer], None]
    closed: bool = False

    def end(self, error: ServiceError) -> None:
        """Ends it with an error, once."""
        if not self.closed:
            self.closed = True
            self.deliver(error)


@dataclass(frozen=True)
class _Open:
    session: Session


@dataclass(frozen=True)
class _Run:
    session: Session
    step: Step


@dataclass(frozen=True)
class _Close:
    session: Session


@dataclass(frozen=True)
class _Zero:
    # (ticket, group, slot)
    slots: tuple[tuple[int, int, int], ...]


class _Stop:
    pass


class Worker:
    """Runs steps strictly in order; on a device that runs ahead, step n+1 is launched before n is waited for.

    On others the outcome of step n is told when step n+1 begins to compute, as telling it takes the interpreter that
    prepares the next step; at once if there is no next step.

    `confirm(done, failed)` takes the copy tickets of steps; `device_lost` is called when nothing can run any more.
    """

    def __init__(
        self,
        runner: Runner,
        confirm: Callable[[tuple[int, ...], tuple[int, ...]], None],
        device_lost: Callable[[], None],
    ) -> None:
        self.runner = runner
        self._confirm = confirm
        self._device_lost = device_lost
        self._queue: queue.SimpleQueue[_Open | _Run | _Close | _Zero | _Stop] = queue.SimpleQueue()
        # Launched and not waited for; computed and not told.
        self._pending: tuple[Session, Pending] | None = None
        self._outcome: tuple[Session, Outcome] | None = None
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Finishes what was submitted and ends the thread."""
        self._queue.put(_Stop())
        self._thread.join()

    def open(self, session: Session) -> None:
        """Empties the running set for a session; delivers the number that its first step must carry."""
        self._queue.put(_Open(session))

    def submit(self, session: Session, step: Step) -> None:
        """Queues a step."""
        self._queue.put(_Run(session, step))

    def close(self, session: Session) -> None:
        """Delivers None when all that was submitted before is answered."""
        self._queue.put(_Close(session))

    def zero(self, slots: tuple[tuple[int, int, int], ...]) -> None:
        """Overwrites slots, (ticket, group, slot) each, behind all steps submitted before, and confirms."""
        self._queue.put(_Zero(slots))

    def give_up(self, tickets: tuple[int, ...]) -> None:
        """Reports copies that will not run. From any thread."""
        if tickets:
            self._confirm((), tickets)

    def _work(self) -> None:
        if self.runner.overlaps:
            # A thread's own choice; Triton launches where it points.
            torch.cuda.set_device(self.runner.model.device)
        while True:
            try:
                job = self._queue.get_nowait() if self._pending or self._outcome else self._queue.get()
            except queue.Empty:
                self._finish()
                continue
            match job:
                case _Run(session, step):
                    self._run(session, step)
                case _Open(session):
                    self._finish()
                    self.runner.clear()
                    session.deliver(self.runner.last_step + 1)
                case _Close(session):
                    self._finish()
                    session.deliver(None)
                case _Zero(slots):
                    self._finish()
                    for _, group, slot in slots:
                        self.runner.pools.zero(group, slot, self.runner.last_step)
                    self._confirm(tuple(ticket for ticket, _, _ in slots), ())
                case _Stop():
                    self._finish()
                    return

    def _run(self, session: Session, step: Step) -> None:
        if session.closed:
            self.give_up(step.tickets)
            return
        try:
            launched = self.runner.launch(step, self._tell)
        except ExecutorError as error:
            self._finish()
            session.end(error)
            self.give_up(step.tickets)
            return
        except Exception as error:  # The thread's outermost border: one bad step must not take the process with it.
            self._finish()
            self._fail(session, step.number, error)
            self.give_up(step.tickets)
            return
        self._finish()
        self._pending = (session, launched)
        if not self.runner.overlaps:
            self._collect()

    def _finish(self) -> None:
        """Waits for what was launched and tells it."""
        self._collect()
        self._tell()

    def _collect(self) -> None:
        if self._pending is None:
            return
        (session, launched), self._pending = self._pending, None
        try:
            outcome = launched.result()
        except Exception as error:  # As above: errors of an asynchronous device surface here.
            self._fail(session, launched.number, error)
            self.give_up(launched.tickets)
            return
        self._outcome = (session, outcome)

    def _tell(self) -> None:
        if self._outcome is None:
            return
        (session, outcome), self._outcome = self._outcome, None
        metrics.STEP_SECONDS.observe(outcome.compute_time)
        metrics.IDLE_SECONDS.inc(max(outcome.idle_time, 0))
        metrics.TOKENS.inc(outcome.num_tokens)
        metrics.SAMPLED.inc(len(outcome.sampled))
        if not session.closed:
            session.deliver(outcome)
        if outcome.tickets:
            self._confirm(outcome.tickets, ())

    def _fail(self, session: Session, step: int, error: Exception) -> None:
        metrics.FAILED_STEPS.inc()
        log.error("step failed", step=step, exc_info=error)
        session.end(StepFailedError(f"the model failed on step {step}; the executor's log says why"))
        self.runner.clear()
        if self.runner.overlaps:
            try:
                torch.cuda.synchronize(self.runner.model.device)
            except RuntimeError:
                log.exception("device lost")
                self._device_lost()
