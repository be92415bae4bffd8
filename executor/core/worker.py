"""The thread that owns the runner. All work reaches it through one queue."""

import queue
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from executor import metrics
from executor.core.outbox import Outbox, Session
from executor.core.runner import LaunchedStep, Runner
from executor.errors import ExecutorError, ModelError, OutOfMemoryError, StepFailedError
from executor.models.device_errors import check_device, is_out_of_memory
from executor.models.forward import Forward
from executor.step import Copy, Step
from protos.rpc.errors import ServiceError

log = structlog.get_logger()

# Longest time that a step that only waits for onloads may keep its scheduler waiting.
AWAIT_SECONDS = 0.02
# How often a device is polled while its thread waits for messages: a step's output is late by half of this on average.
LOOK_SECONDS = 2e-4
# How long a stopping process waits for copies in flight.
STOP_SECONDS = 5.0


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

    def carry_out(self) -> None:
        if self.error is None:
            self.session.deliver(None)
        else:
            self.session.end(self.error)


@dataclass(frozen=True)
class _Transfer:
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class _Use:
    forward: Forward
    adapters: Mapping[int, Any]
    done: Future[None]


@dataclass(frozen=True)
class _After:
    callback: Callable[[], object]


class _Stop:
    pass


_Job = _Open | _Run | _Close | _Transfer | _Use | _After | _Stop


class Worker:
    """Runs steps strictly in order; on a device that runs ahead, step n+1 is launched before waiting for step n.

    Its thread then waits for a message or for the device, whichever comes first. A step that arrives while the previous
    step computes is launched at once, to run after the previous step.
    On other devices, the output of step n is delivered at once without a next step, before step n+1 is prepared if the
    preparation may wait for copies, and otherwise once step n+1 is prepared.
    """

    def __init__(self, runner: Runner, outbox: Outbox, device_lost: Callable[[], None]) -> None:
        """outbox: also takes the runner's ended copies. device_lost: called if the device can run nothing more."""
        self.runner = runner
        self._outbox = outbox
        self._device_lost = device_lost
        self._queue: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        # The step that was launched but not yet waited for.
        self._launched: tuple[Session, LaunchedStep] | None = None
        # The number of the thread's turn, and its session; None while the thread waits for work or replaces weights.
        self._turn: tuple[int, Session | None] | None = None
        self._turns = 0
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)

    @property
    def last_step(self) -> int:
        """Number of the newest step that has begun. From any thread."""
        return self.runner.last_step

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> bool:
        """Finishes what was submitted, including copies if that is not too slow, and ends the thread.

        Returns False if the thread has made no progress for STOP_SECONDS: then nothing that it uses may be closed.
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
        """A number that changes with everything that the device's thread does. From any thread.

        None while the thread is idle or replaces weights.
        """
        turn = self._turn
        return None if turn is None else turn[0]

    @property
    def longest_step(self) -> float | None:
        """Seconds of the longest of the last steps; None before the first one. From any thread."""
        return self._outbox.longest_step

    @property
    def is_abandoned(self) -> bool:
        """Whether the session that the device's thread works for has ended. From any thread."""
        turn = self._turn
        return turn is not None and turn[1] is not None and turn[1].closed

    def open(self, session: Session) -> None:
        """Removes all sequences for a new session; delivers the number that its first step must carry."""
        self._queue.put(_Open(session))

    def submit(self, session: Session, step: Step) -> None:
        self._queue.put(_Run(session, step))

    def close(self, session: Session, error: ServiceError | None = None) -> None:
        """Delivers None, or ends the session with an error, once all that was submitted earlier is answered."""
        self._queue.put(_Close(session, error))

    def transfer(self, copies: tuple[Copy, ...]) -> None:
        """Begins copies that no session asked for, after all steps submitted earlier; confirms each ended copy."""
        self._queue.put(_Transfer(copies))

    def use(self, forward: Forward, adapters: Mapping[int, Any]) -> Future[None]:
        """Removes all sequences and computes with other weights, after all that was submitted earlier.

        The future is done once the weights are replaced. If this fails, the future has the error, and the previous
        weights stay.
        """
        done = Future[None]()
        self._queue.put(_Use(forward, adapters, done))
        return done

    def after(self, callback: Callable[[], object]) -> None:
        """Calls back, on the device's thread, once nothing that was submitted earlier still runs."""
        self._queue.put(_After(callback))

    def give_up(self, tickets: tuple[int, ...]) -> None:
        """Reports copies that will not run. From any thread."""
        self._outbox.give_up(tickets)

    def _work(self) -> None:
        if self.runner.model.device.type == "cuda":
            # This is set per thread; Triton launches on this device.
            torch.cuda.set_device(self.runner.model.device)
        while True:
            waiting = self._launched[0] if self._launched is not None else self._outbox.session
            if waiting is None:
                self._turn = None
            job = self._queue.get() if waiting is None else self._next()
            if job is None:
                self._begin(None, waiting)
                self._finish()
                continue
            self._begin(job, waiting)
            match job:
                case _Run(session, step):
                    self._run(session, step)
                case _Open(session):
                    self._finish()
                    self.runner.clear()
                    session.deliver(self.runner.last_step + 1)
                case _Close():
                    self._finish()
                    job.carry_out()
                case _Transfer(copies):
                    self._finish()
                    self._transfer(copies)
                case _Use():
                    self._finish()
                    self._use(job)
                case _After(callback):
                    self._finish()
                    callback()
                case _Stop():
                    self._finish()
                    return
            # Refused weights must not stay in memory until the next message.
            del job

    def _next(self) -> _Job | None:
        """Returns the next message; None if no launched step still runs and no message has come."""
        while self._launched is not None and not self._launched[1].is_over:
            try:
                return self._queue.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def _begin(self, job: _Job | None, waiting: Session | None) -> None:
        self._turns += 1
        # Capturing graphs may take arbitrarily long, and no session waits for it.
        self._turn = None if isinstance(job, _Use) else (self._turns, job.session if isinstance(job, _Run) else waiting)

    def _run(self, session: Session, step: Step) -> None:
        if session.closed:
            self.give_up(step.tickets)
            return
        self._outbox.expect(session, step.copies)
        try:
            if step.copies or self.runner.tiers.busy:
                # Preparing the step may wait for copies.
                self._outbox.deliver()
            prepared = self.runner.prepare(step)
            # Held back until here: delivering an output needs the GIL, which preparing a step needs first.
            self._outbox.deliver()
            launched = self.runner.launch(prepared)
        except ExecutorError as error:
            self._finish()
            session.end(error)
            self.give_up(step.tickets)
            return
        except Exception as error:  # Outermost level of the thread: one bad step must not end the process.
            self._finish()
            self._fail(session, step.number, error)
            # The runner reports the other copies.
            self.give_up(step.tickets_within_device)
            return
        self._finish()
        self._launched = (session, launched)
        if step.awaits_copies and not launched.num_tokens:
            session.onloads.wait(AWAIT_SECONDS)
        if not self.runner.overlaps:
            self._collect()

    def _transfer(self, copies: tuple[Copy, ...]) -> None:
        try:
            self.runner.transfer(copies)
        except Exception:  # As in _run; the runner has reported all copies.
            log.exception("copies failed")

    def _use(self, job: _Use) -> None:
        self.runner.clear()
        try:
            self.runner.use(job.forward, job.adapters)
        except Exception as error:  # As in _run: the error goes to whoever asked.
            job.done.set_exception(error)
        else:
            job.done.set_result(None)

    def _finish(self) -> None:
        """Waits for the launched step and delivers its output."""
        self._collect()
        self._outbox.deliver()

    def _collect(self) -> None:
        if self._launched is None:
            return
        (session, launched), self._launched = self._launched, None
        try:
            output = launched.result()
        except Exception as error:  # As in _run: an asynchronous device's errors surface here.
            step = launched.scheduled.step
            self._fail(session, step.number, error)
            self.give_up(step.tickets_within_device)
            return
        self._outbox.hold(session, output)

    def _fail(self, session: Session, step: int, error: Exception) -> None:
        metrics.FAILED_STEPS.inc()
        log.error("step failed", step=step, exc_info=error)
        no_memory = is_out_of_memory(error)
        if no_memory:
            # Its frames keep the tensors of the step.
            traceback.clear_frames(error.__traceback__)
            session.end(OutOfMemoryError(f"there was no memory for step {step}; the executor's log says for what"))
        else:
            session.end(StepFailedError(f"the model failed on step {step}; the executor's log says why"))
        self.runner.clear()
        try:
            check_device(self.runner.model.device)
        except ModelError as lost:
            log.error("device lost", cause=str(lost))
            self._device_lost()
            return
        if no_memory:
            torch.cuda.empty_cache()
