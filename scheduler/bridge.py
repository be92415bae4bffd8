"""What the step loop's thread and the server's asyncio loop tell each other. Nothing else passes between them."""

import queue
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from protos.execution.v1 import execution_pb2
from protos.rpc.errors import ServiceError
from scheduler.cache.tier_costs import Speed
from scheduler.request import Candidate
from scheduler.sequence import Copy, Progress, Sequence


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence has its blocks. From here on it belongs to the step loop."""

    sequence: Sequence
    # Session with the executor in which the blocks were asked for.
    session: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants the request's output any more."""

    arrival: int


@dataclass(frozen=True, slots=True)
class SyncAnswer:
    """Answer of the cache manager to a sync, with what that sync had reported."""

    # Handle, layer group, slots to append.
    extensions: Seq[tuple[int, int, list[int]]]
    void_handles: Seq[int]
    blocks_short: int
    released: Seq[int]
    trimmed: Seq[int]
    # Handles that moved into blocks of their own, and the blocks of those that may.
    moved: Seq[int] = ()
    own: Seq[tuple[int, list[int]]] = ()
    # What has to leave the slots that it brings, and the session with the executor in which these were given.
    copies: Seq[Copy] = ()
    session: int = 0


@dataclass(frozen=True, slots=True)
class ManagerLost:
    """The cache manager forgot every sequence: give all up and say `all_given_up`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The loop ends."""


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session with the executor is over: a loop that sleeps looks whether it is the open one."""


Mail = Admitted | Cancel | SyncAnswer | ManagerLost | SessionEnded | Stop


class Mailbox:
    """Mail for the step loop, from any thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Mail] = queue.SimpleQueue()

    def put(self, mail: Mail) -> None:
        """Delivers mail; never blocks."""
        self._queue.put(mail)

    def take(self) -> list[Mail]:
        """All mail that is there; never blocks."""
        mails: list[Mail] = []
        while True:
            try:
                mails.append(self._queue.get_nowait())
            except queue.Empty:
                return mails

    def wait(self, seconds: float | None = None) -> list[Mail]:
        """Blocks until there is mail, at most so long; returns all of it."""
        try:
            first = self._queue.get(timeout=seconds)
        except queue.Empty:
            return []
        return [first, *self.take()]


@dataclass(frozen=True, slots=True)
class Detail:
    """What there is to say of a new token beside its id: of an attempt's first and last ones, and of logprobs."""

    # Handle of its sequence.
    sequence: int
    # Whether the token is a stop id.
    stopped: bool = False
    finished: bool = False
    logprobs: execution_pb2.TokenLogprobs | None = None


# A new token: its request, its id, and what most tokens lack. Plain, for there are very many.
Output = tuple[int, int, Detail | None]


@dataclass(slots=True)
class Report:
    """What the step loop publishes, once per step for all requests. Requests are named by their arrival."""

    # Number of the last answered step, and steps answered since the last report.
    step: int = 0
    steps: int = 0
    outputs: list[Output] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    # By handle.
    progress: dict[int, Progress] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)
    cancelled_tickets: list[int] = field(default_factory=list)
    # Handle to the capacity it keeps, in tokens.
    trimmed: dict[int, int] = field(default_factory=dict)
    # Sequences that sit out for want of blocks, with their computed tokens.
    starving: dict[int, int] = field(default_factory=dict)
    # Sequences that want blocks of their own to evict tokens; whether they ask for the first time.
    evicting: dict[int, bool] = field(default_factory=dict)
    # Sequences that have moved into theirs, with the tokens that were computed before.
    moved: dict[int, int] = field(default_factory=dict)
    # Arrival, tokens and the share of the scores that stayed, of each eviction.
    evicted: list[tuple[int, int, float]] = field(default_factory=list)
    # Most tokens that each arrival with a policy has kept at once.
    most_kept: dict[int, int] = field(default_factory=dict)
    again: list[Candidate] = field(default_factory=list)
    # Those who are not admitted again: the executor fails over them.
    given_up: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    # Arrival and tokens that came for it from host memory and from disk; who waited for its blocks too long.
    onboarded: list[tuple[int, int, int]] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    # None when nothing was measured.
    speed: Speed | None = None
    # Session with the executor, not positive while there is none; None when it has not changed.
    session: int | None = None
    # Whether the executor answers in the time that it should; None when that has not changed.
    executor_answers: bool | None = None
    all_given_up: bool = False
    # Why the step loop has ended and all requests with it.
    failed: ServiceError | None = None
    # When it was published, on the monotonic clock.
    at: float = 0.0

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.outputs and self.only_outputs

    @property
    def only_outputs(self) -> bool:
        """Whether it concerns nobody but those who get tokens."""
        return not (
            self.started
            or self.progress
            or self.released
            or self.cancelled_tickets
            or self.trimmed
            or self.starving
            or self.evicting
            or self.moved
            or self.evicted
            or self.again
            or self.given_up
            or self.onboarded
            or self.speed is not None
            or self.session is not None
            or self.executor_answers is not None
            or self.all_given_up
            or self.failed is not None
        )
