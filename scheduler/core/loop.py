"""The step loop: plans the next steps while the executor runs one, and waits for nothing but the executor."""

import contextlib
import time
from collections import deque
from typing import Any, assert_never

import structlog

from protos.execution.v1 import execution_pb2
from protos.rpc import tracing
from scheduler.bridge import (
    Admitted,
    Cancel,
    Command,
    CommandQueue,
    CopySpeed,
    ManagerFound,
    ManagerLost,
    SessionEnded,
    Stop,
    SyncAnswer,
    UpdateListener,
)
from scheduler.core.batch import RunningBatch
from scheduler.core.executor_client import ExecutorClient
from scheduler.core.planner import StepPlan
from scheduler.core.prefill_budget import PrefillBudget
from scheduler.core.step_message import InFlightStep, build_step
from scheduler.errors import ExecutorLostError
from scheduler.metrics import StepLoad, StepTimes, StepTiming

RECONNECT_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
# Most steps, and most seconds of work, that are queued at the executor after the step that it runs: more would delay
# sequences that join or leave.
MOST_AHEAD, AHEAD_SECONDS = 3, 0.015
# How long the loop waits for the executor before it reads commands again.
TURN_SECONDS = 0.05
# A step that takes longer than both LATE_SECONDS and LATE_TIMES its expected duration is late, and the scheduler does
# not serve. Beyond the second pair of bounds, the executor is lost.
LATE_SECONDS, LATE_TIMES = 5.0, 5
LOST_SECONDS, LOST_TIMES = 30.0, 20
# The expected duration of a step before any has been measured, in seconds: at first, devices compile and load.
FIRST_STEP_SECONDS = 15.0
# A turn counts as no more than this: during a longer turn, this process itself was stalled.
LONGEST_TURN_SECONDS = 1.0
# How long a stopping loop waits for steps in flight.
FINISH_SECONDS = 1.5

log = structlog.get_logger()


class StepLoop:
    """Runs on a separate plain thread. Commands come in; updates and times go out; nothing else is shared."""

    def __init__(
        self,
        executor: ExecutorClient,
        commands: CommandQueue,
        listener: UpdateListener,
        times: StepTimes,
        *,
        max_batched_tokens: int,
        budget: PrefillBudget,
    ) -> None:
        self._executor = executor
        self._commands = commands
        self._listener = listener
        self._times = times
        # The limit on tokens of a step: this loop's own, and the present session's.
        self._own_limit = self._max_tokens = max_batched_tokens
        times.max_tokens.set(max_batched_tokens)
        self._budget = budget
        self._batch = RunningBatch()
        self._in_flight: deque[InFlightStep] = deque()
        self._next_step = 0
        # Sessions opened so far, negated while none is open.
        self._session = 0
        # Sessions lost with a step in flight since a step was last answered.
        self._failed_sessions = 0
        self._giving_up = False
        self._stopping = False
        self._timing = StepTiming()
        # Seconds since the executor last answered, as far as the loop waited for it, and whether that was reported.
        self._silence = 0.0
        self._silent = False
        # Like `_silence`, but time during which this process itself was stalled hardly counts.
        self._hesitation = 0.0

    def run(self) -> None:
        """The thread's main function; returns after Stop. Raises ExecutorChangedError."""
        while not self._stopping:
            try:
                self._connect()
                while not self._stopping:
                    self.step()
            except ExecutorLostError as error:
                log.warning("executor lost", cause=str(error), sequences=len(self._batch))
                # With fewer tokens in a step, all requests may succeed: so none is to blame yet.
                harmless = error.is_planned or (error.is_out_of_memory and self._halve_steps())
                self._restart(is_planned=harmless)
        self._finish()

    def dump(self) -> dict[str, Any]:
        """Returns the loop's state for a log, without prompts and outputs. An error leaves this state unchanged."""
        return {
            "next_step": self._next_step,
            "in_flight": [
                (step.number, [(sequence.handle, count, samples) for sequence, count, samples in step.compute])
                for step in self._in_flight
            ],
            "sequences": [sequence.dump() for sequence in self._batch.ranked],
        }

    def step(self) -> None:
        """Takes a turn: reads commands, plans and sends a step, commits the oldest answer. Raises ExecutorLostError."""
        self._read(self._commands.take())
        if not self._in_flight:
            # Raises if the session is over. The command that says so may be among those just read.
            self._executor.receive()
        plan = self._plan()
        if plan is not None:
            self._send(plan)
        self._wait_for_answer(sent=plan is not None)
        self._publish()

    def _read(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Admitted(sequence, session):
                    # Blocks of an earlier session may lie in the memory of a lost executor.
                    self._batch.admit(sequence, valid=session == self._session)
                case Cancel(arrival):
                    self._batch.cancel(arrival)
                case SyncAnswer():
                    self._batch.apply(command, valid=command.session == self._session > 0)
                case ManagerLost():
                    self._giving_up = True
                case ManagerFound(epoch):
                    self._executor.registered(epoch)
                case SessionEnded():
                    # The command wakes the loop, which checks the session before its next step.
                    pass
                case Stop():
                    self._stopping = True
                case _:
                    assert_never(command)
        if self._giving_up and not self._in_flight:
            self._batch.restart_all(executor_lost=False)
            self._batch.cache_update.all_given_up = True
            self._giving_up = False

    def _plan(self) -> StepPlan | None:
        """Plans the next step; None if enough steps are in flight, or there is nothing to compute, copy or end."""
        if self._batch.copies.onloading:
            self._batch.restart_late(time.monotonic())
        if self._giving_up or not self._wants_more():
            return None
        started = time.perf_counter()
        plan = self._batch.plan(self._max_tokens, self._budget)
        if plan.is_empty and not self._needs_empty_step():
            return None
        self._timing.planning += time.perf_counter() - started
        return plan

    def _needs_empty_step(self) -> bool:
        """Whether a step without tokens is due."""
        copies = self._batch.copies
        if copies.unsent:
            return True
        if self._in_flight:
            return False
        # The executor ends the trace spans of removed sequences only when it gets the next step.
        return bool(copies.waiting) or (bool(self._batch.removed) and tracing.is_on())

    def _wants_more(self) -> bool:
        """Whether to send one more step before the running step is answered."""
        ahead = list(self._in_flight)[1:]
        if not ahead:
            return True
        # If blocks are missing, more steps ahead would delay their release.
        if self._batch.missing_blocks or len(ahead) >= MOST_AHEAD:
            return False
        return sum(self._budget.seconds(len(step.decodes), step.prefill_tokens) for step in ahead) < AHEAD_SECONDS

    def _send(self, plan: StepPlan) -> None:
        started = time.perf_counter()
        copies = self._batch.copies
        self._batch.updates.started.extend(s.request.arrival for s, _ in plan.prefills if not s.started)
        message, step = build_step(
            self._next_step,
            plan,
            self._batch.removed,
            copies.take() if copies.unsent else (),
            awaits_copies=plan.is_empty and bool(copies.waiting) and not self._in_flight,
        )
        self._batch.removed = []
        self._next_step += 1
        self._executor.send(message)
        self._in_flight.append(step)
        self._timing.sending += time.perf_counter() - started

    def _wait_for_answer(self, *, sent: bool) -> None:
        """Waits for the oldest answer unless more steps are to be sent; with no step in flight, waits for a command."""
        if self._in_flight and not (sent and self._wants_more()):
            self._receive()
        elif not sent and not self._stopping:
            self._wait()

    def _receive(self) -> None:
        """Applies the answer to the oldest step in flight; returns without an answer if the loop is to stop."""
        started = time.perf_counter()
        step = self._in_flight[0]
        expected = self._budget.estimate(len(step.decodes), step.prefill_tokens)
        expected = FIRST_STEP_SECONDS if expected is None else expected
        answer = self._answer(expected, f"step {step.number} was not answered")
        if answer is None:
            return
        result = answer.result
        self._failed_sessions = 0
        self._timing.waiting_for_executor = time.perf_counter() - started
        self._timing.executor_idle = result.idle_time.ToTimedelta().total_seconds()
        self._in_flight.popleft()
        onloaded = bool(self._batch.copies.waiting) and len(result.copied_tickets) > 0
        self._batch.apply_result(step, result, time.monotonic())
        # After a stop there may be no token to compute, which says nothing about the time of decodes.
        if result.num_drafts:
            self._budget.note_drafts()
        elif result.num_tokens:
            self._budget.observe(len(step.decodes), step.prefill_tokens, result.compute_time.ToNanoseconds() / 1e9)
        speed = _speed(result, self._budget)
        if onloaded:
            self._batch.cache_update.speed = speed
        self._times.load = StepLoad(
            self._batch.prefill_tokens,
            self._budget.decode_step_seconds,
            prompt_token=self._budget.prefill_token_seconds,
            host_block=speed.host_block,
            disk_block=speed.disk_block,
            sequence=self._budget.sequence_seconds,
        )
        self._times.add(self._timing)
        self._timing = StepTiming()

    def _answer(self, expected: float, failure: str) -> execution_pb2.StreamStepsResponse | None:
        """Returns the executor's answer, None if the loop is to stop. Until then, reads commands and publishes.

        expected: duration in seconds. Raises ExecutorLostError if the session is over or the answer takes far longer.
        """
        bound, waited = max(LOST_SECONDS, LOST_TIMES * expected), 0.0
        while True:
            begun = time.monotonic()
            answer = self._executor.receive(TURN_SECONDS)
            if answer is not None:
                self._silence = self._hesitation = self._times.executor_silence = 0.0
                if self._silent:
                    self._silent = False
                    self._batch.updates.executor_answers = True
                    log.info("the executor answers again")
                return answer
            waited += self._count_silence(time.monotonic() - begun, expected)
            if waited >= bound:
                raise ExecutorLostError(f"{failure} within {bound:.0f} seconds")
            self._read(self._commands.take())
            self._publish()
            if self._stopping:
                return None

    def _count_silence(self, seconds: float, expected: float = 0.0) -> float:
        """Adds seconds during which the executor did not answer; returns how many of them count.

        expected: seconds that a step usually takes.
        """
        self._hesitation += min(seconds, 2 * TURN_SECONDS)
        self._times.executor_silence = max(0.0, self._hesitation - LATE_TIMES * expected)
        seconds, bound = min(seconds, LONGEST_TURN_SECONDS), max(LATE_SECONDS, LATE_TIMES * expected)
        self._silence += seconds
        if self._silence >= bound and not self._silent:
            self._silent = True
            self._batch.updates.executor_answers = False
            log.warning("the executor does not answer", seconds=round(self._silence, 1), sequences=len(self._batch))
        return seconds

    def _wait(self) -> None:
        """Sleeps until there is a command: nothing can be planned and no step is in flight."""
        self._publish(everything=True)
        started, live = time.perf_counter(), len(self._batch)
        commands = self._commands.wait()
        if live:
            # No live sequence can compute: only the cache manager can change that.
            self._timing.waiting_for_cachemgr += time.perf_counter() - started
        self._read(commands)

    def _publish(self, *, everything: bool = False) -> None:
        updates, cache = self._batch.take_updates(everything=everything)
        if updates is not None:
            updates.at = time.monotonic()
        if updates is not None or cache is not None:
            self._listener.publish(updates, cache)

    def _connect(self) -> None:
        """Opens a session; until then the loop only reads commands."""
        # An executor that dies during its first step will do so again: the two processes must not spin.
        if self._failed_sessions > 1:
            self._pause(min(RECONNECT_SECONDS * 2**self._failed_sessions, LONGEST_PAUSE_SECONDS))
        logged = ""
        while not self._stopping:
            try:
                begun = time.monotonic()
                self._executor.open()
                answer = self._answer(0.0, "the session was not opened")
            except ExecutorLostError as error:
                if str(error) != logged:
                    logged = str(error)
                    log.info("waiting for the executor", cause=logged)
                self._count_silence(time.monotonic() - begun)
                self._pause(RECONNECT_SECONDS)
            else:
                if answer is None:
                    return
                self._next_step = answer.opened.first_step
                self._limit_steps(answer.opened.max_batched_tokens)
                log.info("session with the executor opened", first_step=self._next_step)
                self._batch.updates.adapters += self._executor.adapter_changes
                self._report_session(1 - self._session)
                self._publish()
                return

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stopping and (left := until - time.monotonic()) > 0:
            begun = time.monotonic()
            self._read(self._commands.wait(left))
            self._count_silence(time.monotonic() - begun)
            self._publish()

    def _report_session(self, session: int) -> None:
        self._session = self._batch.cache_update.session = session

    def _halve_steps(self) -> bool:
        """Halves the limit on tokens of a step, after a step that was too large; returns False for a single token."""
        tokens = self._in_flight[0].num_tokens if self._in_flight else 0
        limit = min(tokens, self._max_tokens) // 2
        if not limit:
            return False
        log.warning("the executor has no memory for a step; steps are shorter now", tokens=tokens, max_tokens=limit)
        self._own_limit = self._max_tokens = limit
        self._times.max_tokens.set(limit)
        return True

    def _limit_steps(self, max_batched_tokens: int) -> None:
        """Limits steps of this session to what the executor keeps memory for. max_batched_tokens: 0 without a bound."""
        self._max_tokens = min(self._own_limit, max_batched_tokens or self._own_limit)
        self._times.max_tokens.set(self._max_tokens)
        if self._max_tokens < self._own_limit:
            log.warning(
                "the executor keeps memory for fewer tokens of a step than this scheduler's limit",
                max_tokens=self._max_tokens,
                max_batched_tokens=self._own_limit,
            )

    def _restart(self, *, is_planned: bool) -> None:
        if not is_planned:
            # Reported at once, so that a router moves the requests to another engine without waiting for a silence.
            self._silent = True
            self._batch.updates.executor_answers = False
            # A session that ends with no step in flight predicts nothing about the next session.
            self._failed_sessions += bool(self._in_flight)
        self._executor.close()
        self._batch.restart_all(executor_lost=True, in_flight=self._in_flight, is_planned=is_planned)
        self._in_flight.clear()
        self._report_session(-abs(self._session))
        self._publish()

    def _finish(self) -> None:
        """Takes the answers that still arrive, and releases all blocks."""
        with contextlib.suppress(ExecutorLostError):
            while self._in_flight and self._silence < FINISH_SECONDS:
                self._receive()
        self._batch.restart_all(executor_lost=True, in_flight=self._in_flight)
        # Without a session no request is admitted again.
        self._report_session(-abs(self._session))
        self._publish()
        self._executor.close()


def _speed(result: execution_pb2.StepResult, budget: PrefillBudget) -> CopySpeed:
    """Returns the executor's copy times together with the time of a prompt token."""
    host = result.host_block_time.ToNanoseconds() / 1e9 if result.HasField("host_block_time") else None
    disk = result.disk_block_time.ToNanoseconds() / 1e9 if result.HasField("disk_block_time") else None
    return CopySpeed(host, disk, budget.prompt_token_seconds)
