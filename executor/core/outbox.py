"""What the device's thread reports: step outputs to a scheduler's session, ended copies to the cache manager."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from executor import metrics
from executor.step import Copy, StepOutput, Tier
from protos.rpc.errors import ServiceError

# Steps whose times are kept.
KEPT_STEPS = 64

# Answers of a session: the number of its first step, then step outputs; an error or None as the last answer.
Answer = int | StepOutput | ServiceError | None


class OnloadTracker:
    """The onloads that a session asked for: how many are in flight, and which have ended. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._copied: list[int] = []
        self._failed: list[int] = []
        self._in_flight = 0

    def expect(self, count: int) -> None:
        """Counts onloads that are about to begin."""
        with self._changed:
            self._in_flight += count

    def ended(self, ticket: int, good: bool) -> None:
        """Notes that an onload has ended."""
        with self._changed:
            (self._copied if good else self._failed).append(ticket)
            self._in_flight -= 1
            self._changed.notify_all()

    def take(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the tickets of onloads that have ended since the last call: first the copied, then the failed."""
        if not self._copied and not self._failed:
            return (), ()
        with self._changed:
            taken = tuple(self._copied), tuple(self._failed)
            self._copied.clear()
            self._failed.clear()
            return taken

    def wait(self, seconds: float) -> None:
        """Waits until an ended onload can be taken or none is in flight, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._copied or self._failed or self._in_flight <= 0, seconds)


@dataclass(eq=False)
class Session:
    """One scheduler's stream. `deliver` may be called from any thread; after `closed` no step is run."""

    deliver: Callable[[Answer], None]
    closed: bool = False
    onloads: OnloadTracker = field(default_factory=OnloadTracker)

    def end(self, error: ServiceError) -> None:
        """Ends the session with an error; does nothing the second time."""
        if not self.closed:
            self.closed = True
            self.deliver(error)


class Confirmations(Protocol):
    """Takes the tickets of ended copies for the cache manager."""

    def confirm(self, done: tuple[int, ...], failed: tuple[int, ...]) -> None:
        """Takes tickets of finished and of failed copies; from any thread."""
        ...


class Outbox:
    """Holds back the last step output until the worker has it delivered, and reports every ended copy."""

    def __init__(self, confirmations: Confirmations, block_times: Mapping[Tier, float]) -> None:
        """block_times: seconds to copy a block from a lower tier to the device; changes over time."""
        self._confirmations = confirmations
        self._block_times = block_times
        self._held: tuple[Session, StepOutput] | None = None
        # The sessions that wait for onloads, by ticket.
        self._waiting: dict[int, Session] = {}
        self._step_seconds: deque[float] = deque(maxlen=KEPT_STEPS)

    @property
    def session(self) -> Session | None:
        """The session whose output is held; None if no output is held."""
        return self._held and self._held[0]

    @property
    def longest_step(self) -> float | None:
        """Seconds of the longest of the last steps; None before the first step. From any thread."""
        return max(self._step_seconds.copy(), default=None)

    def hold(self, session: Session, output: StepOutput) -> None:
        """Takes a step's output; no other output may be held."""
        assert self._held is None
        self._held = session, output

    def deliver(self) -> None:
        """Delivers the held output, if there is one."""
        if self._held is None:
            return
        (session, output), self._held = self._held, None
        metrics.STEP_SECONDS.observe(output.compute_time)
        if output.num_tokens:
            self._step_seconds.append(output.compute_time)
        metrics.IDLE_SECONDS.inc(max(output.idle_time, 0))
        metrics.TOKENS.inc(output.num_tokens)
        metrics.SAMPLED.inc(len(output.sampled))
        if not session.closed:
            session.deliver(self._with_onloads(session, output))
        if output.tickets:
            self._confirmations.confirm(output.tickets, ())

    def expect(self, session: Session, copies: Iterable[Copy]) -> None:
        """Notes which onloads a session is about to begin."""
        onloads = [copy.ticket for copy in copies if copy.is_onload]
        self._waiting.update(dict.fromkeys(onloads, session))
        session.onloads.expect(len(onloads))

    def copy_ended(self, copy: Copy, good: bool) -> None:
        """Reports a copy; from any thread."""
        session = self._waiting.pop(copy.ticket, None)
        if session is not None:
            session.onloads.ended(copy.ticket, good)
        self._confirmations.confirm((copy.ticket,) if good else (), () if good else (copy.ticket,))

    def give_up(self, tickets: tuple[int, ...]) -> None:
        """Reports copies that will not run; from any thread."""
        for ticket in tickets:
            self._waiting.pop(ticket, None)
        if tickets:
            self._confirmations.confirm((), tickets)

    def _with_onloads(self, session: Session, output: StepOutput) -> StepOutput:
        (copied, failed), times = session.onloads.take(), self._block_times
        if not copied and not failed and not times:
            return output
        return replace(output, copied=copied, failed=failed, block_times=dict(times))
