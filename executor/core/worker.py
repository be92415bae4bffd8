"""The thread that owns the runner. Everything reaches it through one queue."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import structlog
import torch

from executor import metrics
from executor.core.arrivals import Arrivals
from executor.core.runner import Pending, Runner
from executor.errors import ExecutorError, StepFailedError
from executor.step import Copy, Outcome, Step, Tier
from protos.rpc.errors import ServiceError

log = structlog.get_logger()

# How long an answer waits for copies to end: so long its scheduler hears nothing else.
AWAIT_SECONDS = 0.02
# And a process that stops for those that run.
STOP_SECONDS = 5.0
# Steps whose times are kept.
KEPT_STEPS = 64

# Answers of a session: the number of its first step, then outcomes; an error or None as the last one.
Answer = int | Outcome | ServiceError | None


@dataclass(eq=False)
class Session:
    """One scheduler's stream. `deliver` may be called from any thread; after `closed` no step is run."""

    deliver: Callable[[Answer], None]
    closed: bool = False
    arrivals: Arrivals = field(default_factory=Arrivals)

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
    error: ServiceError | None


@dataclass(frozen=True)
class _Transfer:
    copies: tuple[Copy, ...]


class _Stop:
    pass


class Worker:
    """Runs steps strictly in order; on a device that runs ahead, step n+1 is launched before n is waited for.

    On others the outcome of step n is told when step n+1 begins to compute, as telling it takes the interpreter that
    prepares the next step; at once if there is no next step.

    `confirm(done, failed)` takes the tickets of all copies, in any thread; `device_lost` is called when nothing can run
    any more.
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
        self._queue: queue.SimpleQueue[_Open | _Run | _Close | _Transfer | _Stop] = queue.SimpleQueue()
        # Launched and not waited for; computed and not told.
        self._pending: tuple[Session, Pending] | None = None
        self._outcome: tuple[Session, Outcome] | None = None
        # Which turn of its loop the thread is in, and for which session; None while it waits for work.
        self._turn: tuple[int, Session | None] | None = None
        self._turns = 0
        self._step_seconds: deque[float] = deque(maxlen=KEPT_STEPS)
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> bool:
        """Finishes what was submitted, copies too if that does not take too long, and ends the thread.

        False where the thread has stood still for STOP_SECONDS: nothing that it uses may be closed then.
        """
        self._queue.put(_Stop())
        before = None
        while self._thread.is_alive() and self._turns != before:
            before = self._turns
            self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            log.error("the device does not answer")
            return False
        self.runner.tiers.drain(STOP_SECONDS)
        return True

    @property
    def turn(self) -> int | None:
        """Changes with everything that the device's thread does; None while it has no work. From any thread."""
        turn = self._turn
        return None if turn is None else turn[0]

    @property
    def longest_step(self) -> float | None:
        """Seconds that the longest of the last steps took; None before the first one. From any thread."""
        return max(self._step_seconds.copy(), default=None)

    @property
    def is_abandoned(self) -> bool:
        """Whether the session that the device's thread works for has ended. From any thread."""
        turn = self._turn
        return turn is not None and turn[1] is not None and turn[1].closed

    def open(self, session: Session) -> None:
        """Empties the running set for a session; delivers the number that its first step must carry."""
        self._queue.put(_Open(session))

    def submit(self, session: Session, step: Step) -> None:
        """Queues a step."""
        self._queue.put(_Run(session, step))

    def close(self, session: Session, error: ServiceError | None = None) -> None:
        """Delivers None, or ends it with an error, when all that was submitted before is answered."""
        self._queue.put(_Close(session, error))

    def transfer(self, copies: tuple[Copy, ...]) -> None:
        """Begins copies of nobody's, behind all steps submitted before; confirms each when it has ended."""
        self._queue.put(_Transfer(copies))

    def give_up(self, tickets: tuple[int, ...]) -> None:
        """Reports copies that will not run. From any thread."""
        if tickets:
            self._confirm((), tickets)

    def _work(self) -> None:
        if self.runner.overlaps:
            # A thread's own choice; Triton launches where it points.
            torch.cuda.set_device(self.runner.model.device)
        while True:
            pending = self._pending or self._outcome
            if pending is None:
                self._turn = None
            try:
                job = self._queue.get() if pending is None else self._queue.get_nowait()
            except queue.Empty:
                self._begin(pending and pending[0])
                self._finish()
                continue
            self._begin(job.session if isinstance(job, _Run) else pending and pending[0])
            match job:
                case _Run(session, step):
                    self._run(session, step)
                case _Open(session):
                    self._finish()
                    self.runner.clear()
                    session.deliver(self.runner.last_step + 1)
                case _Close(session, None):
                    self._finish()
                    session.deliver(None)
                case _Close(session, ServiceError() as error):
                    self._finish()
                    session.end(error)
                case _Transfer(copies):
                    self._finish()
                    self._transfer(copies)
                case _Stop():
                    self._finish()
                    return

    def _begin(self, session: Session | None) -> None:
        self._turns += 1
        self._turn = self._turns, session

    def _run(self, session: Session, step: Step) -> None:
        if session.closed:
            self.give_up(step.tickets)
            return
        try:
            launched = self.runner.launch(step, self._tell, partial(self._ended, session))
        except ExecutorError as error:
            self._finish()
            session.end(error)
            self.give_up(step.tickets)
            return
        except Exception as error:  # The thread's outermost border: one bad step must not take the process with it.
            self._finish()
            self._fail(session, step.number, error)
            # The others are told of one by one.
            self.give_up(tuple(copy.ticket for copy in step.copies if copy.within_device))
            return
        self._finish()
        self._pending = (session, launched)
        if step.copies:
            session.arrivals.expect(sum(_arrives(copy) for copy in step.copies))
        if step.awaits_copies and not launched.num_tokens:
            session.arrivals.wait(AWAIT_SECONDS)
        if not self.runner.overlaps:
            self._collect()

    def _transfer(self, copies: tuple[Copy, ...]) -> None:
        try:
            self.runner.transfer(copies, partial(self._ended, None))
        except Exception:  # As in _run; all of them were told of.
            log.exception("copies failed")

    def _ended(self, session: Session | None, copy: Copy, good: bool) -> None:
        if session is not None and _arrives(copy):
            session.arrivals.ended(copy.ticket, good)
        self._confirm((copy.ticket,) if good else (), () if good else (copy.ticket,))

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
        if outcome.num_tokens:
            self._step_seconds.append(outcome.compute_time)
        metrics.IDLE_SECONDS.inc(max(outcome.idle_time, 0))
        metrics.TOKENS.inc(outcome.num_tokens)
        metrics.SAMPLED.inc(len(outcome.sampled))
        if not session.closed:
            session.deliver(self._with_arrivals(session, outcome))
        if outcome.tickets:
            self._confirm(outcome.tickets, ())

    def _with_arrivals(self, session: Session, outcome: Outcome) -> Outcome:
        (copied, failed), times = session.arrivals.take(), self.runner.tiers.block_times
        if not copied and not failed and not times:
            return outcome
        return replace(outcome, copied=copied, failed=failed, block_times=dict(times))

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


def _arrives(copy: Copy) -> bool:
    """Whether a session waits for it."""
    return copy.target_tier is Tier.DEVICE and not copy.within_device
