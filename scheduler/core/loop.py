"""The step loop: plans the next steps while the executor runs one, and waits for nobody else."""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, assert_never

import structlog

from protos.execution.v1 import execution_pb2
from protos.rpc import tracing
from scheduler.bridge import Admitted, Cancel, Mail, Mailbox, ManagerLost, Report, SessionEnded, Stop, SyncAnswer
from scheduler.cache.tier_costs import Speed
from scheduler.core.batch import RunningSet
from scheduler.core.executor_client import ExecutorClient
from scheduler.core.prefill_budget import Pace
from scheduler.core.step_message import Flight, build_step
from scheduler.errors import ExecutorLostError
from scheduler.metrics import StepTimes, Timing

RECONNECT_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
# Steps that wait at the executor while it runs one shall keep it busy for so long, in seconds, whatever delays the next
# one; at most so many, as who comes or leaves waits for them.
AHEAD_SECONDS, MOST_AHEAD = 0.015, 3
# How long the loop waits for the executor between two looks at its mail.
TURN_SECONDS = 0.05
# A step is late, and the scheduler does not serve, when it takes longer than so much, or so many times as long as it
# should. Beyond the second bound the executor is lost.
LATE_SECONDS, LATE_TIMES = 5.0, 5
LOST_SECONDS, LOST_TIMES = 30.0, 20
# What a step is thought to take, in seconds, before one has been measured: devices compile and load at first.
FIRST_STEP_SECONDS = 15.0
# A turn counts as no more than this: in a longer one this process itself did not run.
LONGEST_TURN_SECONDS = 1.0
# How long a loop that stops waits for steps under way.
FINISH_SECONDS = 1.5

log = structlog.get_logger()

T = TypeVar("T")


class StepLoop:
    """Runs on a plain thread of its own. Talks to the cache manager's side by mail and reports only."""

    def __init__(
        self,
        executor: ExecutorClient,
        mailbox: Mailbox,
        publish: Callable[[Report], None],
        times: StepTimes,
        *,
        max_batched_tokens: int,
        pace: Pace,
    ) -> None:
        self._executor = executor
        self._mailbox = mailbox
        self._publish = publish
        self._times = times
        self._budget = max_batched_tokens
        self._pace = pace
        self._running = RunningSet()
        self._in_flight: deque[Flight] = deque()
        self._next_step = 0
        # Sessions opened so far; its negative while there is none.
        self._session = 0
        # Sessions in a row that ended before a step was answered.
        self._barren = 0
        self._giving_up = False
        self._stopping = False
        self._timing = Timing()
        # Seconds in which the executor was waited for since it last answered, and whether that was told.
        self._silence = 0.0
        self._silent = False

    def run(self) -> None:
        """The thread's main function; returns after Stop."""
        while not self._stopping:
            try:
                self._connect()
                while not self._stopping:
                    self.step()
            except ExecutorLostError as error:
                log.warning("executor lost", cause=str(error), sequences=len(self._running))
                self._restart()
        self._finish()

    def dump(self) -> dict[str, Any]:
        """The loop's state for a log, without what callers wrote or were answered. After an error it stays as it is."""
        return {
            "next_step": self._next_step,
            "in_flight": [
                (flight.step, [(one.handle, count, samples) for one, count, samples in flight.compute])
                for flight in self._in_flight
            ],
            "sequences": [one.dump() for one in self._running.ranked],
        }

    def _finish(self) -> None:
        """Takes what is still answered, and gives all blocks back."""
        with contextlib.suppress(ExecutorLostError):
            while self._in_flight and self._silence < FINISH_SECONDS:
                self._receive()
        self._running.restart_all(executor_lost=True, in_flight=self._in_flight)
        # Nobody shall be admitted again.
        self._running.report.session = -abs(self._session)
        self._tell()
        self._executor.close()

    def step(self) -> None:
        """One turn: take mail, plan and send a step, take the oldest answer, tell everybody."""
        self._read(self._mailbox.take())
        if self._running.copies.onboarding:
            self._running.restart_late(time.monotonic())
        sent = self._wants_more() and self._send()
        if self._in_flight and not (sent and self._wants_more()):
            self._receive()
        elif not sent and not self._stopping:
            self._wait()
        self._tell()

    def _wants_more(self) -> bool:
        """Whether to send a step before the one that runs is answered."""
        waiting = list(self._in_flight)[1:]
        if not waiting:
            return True
        # Where blocks are short it counts how soon they are given back.
        if self._running.blocks_short or len(waiting) >= MOST_AHEAD:
            return False
        return sum(self._pace.seconds(len(one.decoding), one.prompt_tokens) for one in waiting) < AHEAD_SECONDS

    def _send(self) -> bool:
        """Plans the next step and sends it; False when there is nothing to compute, to copy, to wait for or to end."""
        if self._giving_up:
            return False
        started = time.perf_counter()
        plan = self._running.plan(self._budget, self._pace)
        planned = time.perf_counter()
        copies, awaits = self._running.copies, False
        if not plan.decoding and not plan.prompts:
            awaits = bool(copies.waiting) and not self._in_flight
            # Else the executor would hear of the last ones with the next step only, and their spans would not end.
            ends_spans = bool(self._running.removed) and not self._in_flight and tracing.is_on()
            if not awaits and not copies.unsent and not ends_spans:
                return False
        self._running.report.started.extend(s.request.arrival for s, _ in plan.prompts if not s.started)
        message, flight = build_step(
            self._next_step,
            plan,
            self._running.removed,
            copies.take() if copies.unsent else (),
            evicting=self._running.evicts,
        )
        if awaits:
            message.awaits_copies = True
        self._running.removed = []
        self._next_step += 1
        self._executor.send(message)
        self._in_flight.append(flight)
        self._timing.planning += planned - started
        self._timing.sending += time.perf_counter() - planned
        return True

    def _receive(self) -> None:
        """Takes the answer to the oldest step in flight. One that does not come is left when the loop is to stop."""
        started = time.perf_counter()
        first = self._in_flight[0]
        expected = self._pace.estimate(len(first.decoding), first.prompt_tokens)
        expected = FIRST_STEP_SECONDS if expected is None else expected
        result = self._answer(self._executor.receive, expected, f"step {first.step} was not answered")
        if result is None:
            return
        self._barren = 0
        self._timing.waiting_for_executor = time.perf_counter() - started
        self._timing.executor_idle = result.idle_time.ToTimedelta().total_seconds()
        flight = self._in_flight.popleft()
        copied = bool(self._running.copies.waiting) and len(result.copied_tickets) > 0
        self._running.commit(flight, result, time.monotonic())
        # Behind a stop there may be nothing to compute, which says nothing of what decoding takes.
        if result.num_tokens:
            self._pace.observe(len(flight.decoding), flight.prompt_tokens, result.compute_time.ToNanoseconds() / 1e9)
        if copied:
            self._running.report.speed = _speed(result, self._pace)
        self._times.add(self._timing)
        self._timing = Timing()

    def _answer(self, ask: Callable[[float], T | None], expected: float, what: str) -> T | None:
        """What the executor answers; None when the loop is to stop. Reads mail, and tells everybody, until it comes.

        expected: seconds that it should take. Raises ExecutorLostError when it takes far longer.
        """
        bound, waited = max(LOST_SECONDS, LOST_TIMES * expected), 0.0
        while True:
            begun = time.monotonic()
            answer = ask(TURN_SECONDS)
            if answer is not None:
                self._hear()
                return answer
            waited += self._miss(time.monotonic() - begun, max(LATE_SECONDS, LATE_TIMES * expected))
            if waited >= bound:
                raise ExecutorLostError(f"{what} within {bound:.0f} seconds")
            self._read(self._mailbox.take())
            self._tell()
            if self._stopping:
                return None

    def _hear(self) -> None:
        """The executor has answered."""
        self._silence = 0.0
        if self._silent:
            self._silent = False
            self._running.report.executor_answers = True
            log.info("the executor answers again")

    def _miss(self, seconds: float, bound: float = LATE_SECONDS) -> float:
        """The executor was waited for in vain; how many of these seconds count."""
        seconds = min(seconds, LONGEST_TURN_SECONDS)
        self._silence += seconds
        if self._silence >= bound and not self._silent:
            self._silent = True
            self._running.report.executor_answers = False
            log.warning("the executor does not answer", seconds=round(self._silence, 1), sequences=len(self._running))
        return seconds

    def _wait(self) -> None:
        """Nothing can be planned and nothing is in flight: sleep until there is mail."""
        self._tell(everything=True)
        started, live = time.perf_counter(), len(self._running)
        mails = self._mailbox.wait()
        if live:
            # There are sequences, and all of them sit out: only the cache manager can help.
            self._timing.waiting_for_cachemgr += time.perf_counter() - started
        self._read(mails)
        self._executor.check()

    def _read(self, mails: list[Mail]) -> None:
        for mail in mails:
            match mail:
                case Admitted(sequence, session):
                    # Blocks of an earlier session may lie in the memory of an executor that is gone.
                    self._running.admit(sequence, valid=session == self._session)
                case Cancel(arrival):
                    self._running.cancel(arrival)
                case SyncAnswer():
                    self._running.apply(mail, valid=mail.session == self._session > 0)
                case ManagerLost():
                    self._giving_up = True
                case SessionEnded():
                    # It wakes the loop, which looks.
                    pass
                case Stop():
                    self._stopping = True
                case _:
                    assert_never(mail)
        if not self._in_flight:
            self._give_up()

    def _give_up(self) -> None:
        if self._giving_up:
            self._running.restart_all(executor_lost=False)
            self._running.report.all_given_up = True
            self._giving_up = False

    def _tell(self, *, everything: bool = False) -> None:
        report = self._running.take_report(everything=everything)
        if not report.empty:
            report.at = time.monotonic()
            self._publish(report)

    def _connect(self) -> None:
        """Opens a session; while there is none, only mail is handled."""
        # What dies as soon as it is asked for something will do so again: two processes need not spin over it.
        if self._barren > 1:
            self._pause(min(RECONNECT_SECONDS * 2**self._barren, LONGEST_PAUSE_SECONDS))
        said = ""
        while not self._stopping:
            try:
                begun = time.monotonic()
                self._executor.open()
                first = self._answer(self._executor.first_step, 0.0, "the session was not opened")
            except ExecutorLostError as error:
                if str(error) != said:
                    said = str(error)
                    log.info("waiting for the executor", cause=said)
                self._miss(time.monotonic() - begun)
                self._pause(RECONNECT_SECONDS)
            else:
                if first is None:
                    return
                self._next_step = first
                log.info("session with the executor opened", first_step=self._next_step)
                self._session = 1 - self._session
                self._running.report.session = self._session
                self._tell()
                return

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stopping and (left := until - time.monotonic()) > 0:
            begun = time.monotonic()
            self._read(self._mailbox.wait(left))
            self._miss(time.monotonic() - begun)
            self._tell()

    def _restart(self) -> None:
        # A session that ends while nothing is asked of it says nothing of the next one.
        self._barren += bool(self._in_flight)
        self._executor.close()
        self._running.restart_all(executor_lost=True, in_flight=self._in_flight)
        self._in_flight.clear()
        self._session = -abs(self._session)
        self._running.report.session = self._session
        self._tell()


def _speed(result: execution_pb2.StepResult, pace: Pace) -> Speed:
    """What the executor tells of its copies, beside what it takes to compute."""
    host = result.host_block_time.ToNanoseconds() / 1e9 if result.HasField("host_block_time") else None
    disk = result.disk_block_time.ToNanoseconds() / 1e9 if result.HasField("disk_block_time") else None
    return Speed(host, disk, pace.prompt_token_seconds)
