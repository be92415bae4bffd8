"""What passes between front end, step loop and cache client: commands in, updates out, attempts that wait for blocks.

The step loop runs on a separate thread, the other two on the asyncio loop.
"""

import queue
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from protos.execution.v1 import execution_pb2
from protos.generation.v1 import generation_pb2
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import ServiceError
from scheduler.request import AdapterChange, AdmissionAttempt
from scheduler.sequence import Copy, Progress, Sequence


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence has its blocks. From now on the step loop owns it."""

    sequence: Sequence
    # Session with the executor in which the blocks were requested.
    session: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """A sample needs its blocks no longer, whatever the reason; the loop ignores a sample that it does not know."""

    arrival: int


@dataclass(frozen=True, slots=True)
class SyncAnswer:
    """The cache manager's answer to a sync, with what that sync had reported."""

    # Handle, layer group, slots to append.
    extensions: Seq[tuple[int, int, list[int]]]
    void_handles: Seq[int]
    missing_blocks: int
    released: Seq[int]
    trimmed: Seq[int]
    # Sequences that the sync reported as moved to their private blocks. Then, for each sequence that may evict now: its
    # handle, its private blocks (none if it keeps its blocks), and the adaptive window that it has blocks for (else 0).
    relocated: Seq[int] = ()
    private_blocks: Seq[tuple[int, list[int], int]] = ()
    # The longest adaptive window, in tokens, that each sequence may have from now on, by handle. Then the handles whose
    # windows the sync named: requests for longer windows, and windows that had become shorter.
    windows: Mapping[int, int] = field(default_factory=dict)
    asked_windows: Collection[int] = ()
    # Copies that empty or fill the slots above, and the session with the executor that the slots belong to.
    copies: Seq[Copy] = ()
    session: int = 0


@dataclass(frozen=True, slots=True)
class ManagerLost:
    """The cache manager forgot every sequence: the loop gives up all of them and reports `all_given_up`."""


@dataclass(frozen=True, slots=True)
class ManagerFound:
    """The scheduler has registered with a cache manager's process: later sequences have their blocks from it."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session with the executor is over: a sleeping loop checks whether it was the open session."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The loop ends."""


Command = Admitted | Cancel | SyncAnswer | ManagerLost | ManagerFound | SessionEnded | Stop


class CommandQueue:
    """Commands for the step loop, from any thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def put(self, command: Command) -> None:
        """Queues a command; never blocks."""
        self._queue.put(command)

    def take(self) -> list[Command]:
        """All queued commands; never blocks."""
        commands: list[Command] = []
        while True:
            try:
                commands.append(self._queue.get_nowait())
            except queue.Empty:
                return commands

    def wait(self, seconds: float | None = None) -> list[Command]:
        """Blocks until there is a command, for at most `seconds`; returns all queued commands."""
        try:
            first = self._queue.get(timeout=seconds)
        except queue.Empty:
            return []
        return [first, *self.take()]


@dataclass(frozen=True, slots=True)
class TokenMeta:
    """Present for the first token of an attempt, the last token of an output, and tokens with log-probabilities."""

    # Handle of its sequence; 0 if an engine in another process runs the sample.
    sequence: int
    # Whether the token is a stop id.
    stopped: bool = False
    finished: bool = False
    logprobs: execution_pb2.TokenLogprobs | None = None


# A new token: the arrival of its request, its id, and the metadata that few tokens have. A plain tuple, because there
# are very many.
Output = tuple[int, int, TokenMeta | None]


@dataclass(slots=True)
class RequestUpdates:
    """What answered steps, or messages of engines, mean for requests, which are named by their arrival.

    The step loop publishes all updates of a turn together.
    """

    # Answered steps.
    steps: int = field(default=0, compare=False)
    outputs: list[Output] = field(default_factory=list)
    # Arrival, and log-probabilities of prompt tokens.
    prompt_logprobs: list[tuple[int, Seq[execution_pb2.TokenLogprobs]]] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    # For each eviction: arrival, evicted tokens, and the kept share of the scores, which is negative without scores.
    evicted: list[tuple[int, int, float]] = field(default_factory=list)
    # For requests with an eviction policy, by arrival: the most tokens kept at once.
    most_kept: dict[int, int] = field(default_factory=dict, compare=False)
    preempted: list[int] = field(default_factory=list)
    # Drafted tokens that were computed, and how many of them were accepted.
    drafted: int = 0
    accepted: int = 0
    # Arrival, and the tokens that came from host memory and from disk.
    onloaded: list[tuple[int, int, int]] = field(default_factory=list)
    # Arrivals whose onloads came too late.
    late: list[int] = field(default_factory=list)
    retried: list[AdmissionAttempt] = field(default_factory=list)
    # Arrivals that make the executor fail: these are not admitted again.
    given_up: list[int] = field(default_factory=list)
    # Arrivals whose output's form became too complex to be followed.
    failed_forms: list[int] = field(default_factory=list)
    # Arrivals that were aborted at their engine.
    aborted: list[int] = field(default_factory=list)
    # Whether the executor answers in time; None when that has not changed.
    executor_answers: bool | None = None
    # Differences between the adapters that requests may name and the executor's, found at the opening of a session.
    adapters: list[AdapterChange] = field(default_factory=list)
    # Time of the updates, in seconds of the monotonic clock.
    at: float = field(default=0.0, compare=False)


class CopySpeed(NamedTuple):
    """Recent durations, in seconds: of a block's copy to the device, and of a prompt token. None: not measured."""

    host_block: float | None = None
    disk_block: float | None = None
    prompt_token: float | None = None


@dataclass(slots=True)
class CacheUpdate:
    """What the cache client needs to know of answered steps. Sequences are named by their handle."""

    # Number of the last answered step.
    step: int = field(default=0, compare=False)
    progress: dict[int, Progress] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)
    cancelled_tickets: list[int] = field(default_factory=list)
    # The capacity that a sequence keeps, in tokens.
    trimmed: dict[int, int] = field(default_factory=dict)
    # Sequences that skip steps for lack of blocks, with their computed tokens.
    starving: dict[int, int] = field(default_factory=dict)
    # Sequences that need private blocks to evict tokens, with whether they ask for the first time.
    evicting: dict[int, bool] = field(default_factory=dict)
    # The adaptive windows that the evicting sequences ask for.
    evicting_windows: dict[int, int] = field(default_factory=dict)
    # Adaptive windows that sequences ask for, or that have become shorter.
    windows: dict[int, int] = field(default_factory=dict)
    # Sequences that have moved to their private blocks, with the tokens that were computed before.
    relocated: dict[int, int] = field(default_factory=dict)
    # None when no copy has ended.
    speed: CopySpeed | None = None
    # Session with the executor, not positive while there is none; None when it has not changed.
    session: int | None = None
    all_given_up: bool = False

    @property
    def is_urgent(self) -> bool:
        """Whether to report the update at once. Starvation and repeated requests for private blocks can wait."""
        news = self.progress or self.released or self.trimmed or self.cancelled_tickets or self.relocated
        return bool(news or self.windows) or any(self.evicting.values())

    def merge(self, update: "CacheUpdate") -> None:
        """Adds a later update's news for the cache manager."""
        self.step = max(self.step, update.step)
        for handle, progress in update.progress.items():
            mine = self.progress.setdefault(handle, Progress(0))
            mine.computed = progress.computed
            mine.token_ids += progress.token_ids
        self.released += update.released
        self.cancelled_tickets += update.cancelled_tickets
        self.trimmed.update(update.trimmed)
        self.starving.update(update.starving)
        for handle, is_first in update.evicting.items():
            self.evicting[handle] = is_first or self.evicting.get(handle, False)
        self.evicting_windows.update(update.evicting_windows)
        self.windows.update(update.windows)
        self.relocated.update(update.relocated)
        for handle in update.released:
            self.trimmed.pop(handle, None)
            self.starving.pop(handle, None)
            self.evicting.pop(handle, None)
            self.windows.pop(handle, None)


class UpdateListener(Protocol):
    """Receives the step loop's updates, on its thread."""

    def publish(self, updates: RequestUpdates | None, cache: CacheUpdate | None) -> None:
        """None stands for an empty update. Must not block."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The part of the cache manager's answer to an admission that callers receive."""

    cached_tokens: int
    # Whether blocks come from lower tiers.
    has_onloads: bool
    receipts: Seq[common.RetentionReceipt]
    hint_answers: Seq[common.HintAnswer]
    # As the cache manager resolved it; None if no token is evicted.
    eviction_policy: common.EvictionPolicy | None
    # Tokens of the prompt that the request is to compute for the cache.
    written_tokens: int = 0
    # The first missing block; None if no block is missing, or the request did not ask.
    miss: common.PrefixMiss | None = None
    # The comparison that the request asked for, if the engine itself has made it; otherwise None.
    diagnosis: generation_pb2.CacheDiagnosis | None = None


class AdmissionListener(Protocol):
    """Receives the outcomes of admission attempts, on the asyncio loop."""

    def admitted(self, attempt: AdmissionAttempt, admission: Admission) -> None:
        """The attempt has its blocks."""

    def refused(self, attempt: AdmissionAttempt, error: ServiceError, *, was_taken: bool = True) -> None:
        """No attempt of this request will ever have blocks. was_taken: False if an engine did not even queue it."""


class AdmissionQueue(Protocol):
    """The attempts that wait for blocks. On the asyncio loop."""

    # Samples that hold blocks.
    num_running: int

    def __len__(self) -> int: ...

    def push(self, attempt: AdmissionAttempt) -> None:
        """Queues an attempt by rank."""

    def remove(self, arrival: int) -> bool:
        """Removes a request; returns False if it does not wait."""
