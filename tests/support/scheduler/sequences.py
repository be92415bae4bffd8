"""Sequences for tests of the step loop, and a running batch whose steps are answered by hand."""

from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from hypothesis import strategies as st

from protos.execution.v1 import execution_pb2 as pb
from scheduler.bridge import CacheUpdate, RequestUpdates, SyncAnswer
from scheduler.core.batch import RunningBatch
from scheduler.core.loop import MOST_AHEAD
from scheduler.core.planner import StepPlan
from scheduler.core.step_message import InFlightStep, build_step
from scheduler.request import AdmissionAttempt, Request
from scheduler.sequence import Copy, Sequence

BLOCK = 4
# The most steps in flight.
depths = st.integers(2, 1 + MOST_AHEAD)


def sequence(
    handle: int,
    prompt: int = 10,
    *,
    max_tokens: int = 5,
    priority: int = 0,
    blocks: int | None = None,
    arrived_at: float = 0.0,
    generated: int = 0,
    **fields: object,
) -> Sequence:
    """An admitted sequence, with blocks for its prompt and one more unless `blocks` says otherwise."""
    request = Request(
        f"r{handle}", array("I", range(prompt)), max_tokens, pb.SamplingParams(), handle, arrived_at, priority=priority
    )
    count = -(-prompt // BLOCK) + 1 if blocks is None else blocks
    fields.setdefault("cached_tokens", 0)
    return Sequence(
        AdmissionAttempt(request, request.prompt_ids + array("I", range(generated))),
        handle,
        tables=[[100 * handle + i for i in range(count)]],
        block_size=BLOCK,
        **fields,  # type: ignore[arg-type]
    )


def batch_of(*sequences: Sequence) -> RunningBatch:
    """A batch of these sequences."""
    batch = RunningBatch()
    for item in sequences:
        batch.admit(item)
    return batch


def updates(batch: RunningBatch, *, everything: bool = True) -> tuple[RequestUpdates, CacheUpdate]:
    """Takes the batch's updates."""
    taken, cache = batch.take_updates(everything=everything)
    return taken or RequestUpdates(), cache or CacheUpdate()


class Updates:
    """A listener that keeps everything."""

    def __init__(self) -> None:
        self.requests: list[RequestUpdates] = []
        self.cache: list[CacheUpdate] = []

    def publish(self, updates: RequestUpdates | None, cache: CacheUpdate | None) -> None:
        self.requests += [updates] if updates else []
        self.cache += [cache] if cache else []


def synced(*copies: Copy, released: Seq[int] = (), missing_blocks: int = 0, session: int = 1) -> SyncAnswer:
    """A sync's answer without blocks."""
    return SyncAnswer([], [], missing_blocks, released, [], copies=copies, session=session)


def send(batch: RunningBatch, number: int, max_tokens: int = 64) -> tuple[pb.Step, InFlightStep]:
    """Plans and builds a step as the loop does."""
    plan = batch.plan(max_tokens)
    message, step = build_step(number, plan, batch.removed, batch.copies.take())
    batch.removed = []
    return message, step


def result_of(
    step: InFlightStep, token_id: int = 1, *, stopped: bool = False, accept: Callable[[int], int] = lambda _: 0
) -> pb.StepResult:
    """The answer to a step: every sampling sequence samples this token, and again for each accepted draft.

    accept: the number of accepted drafts, by the number of drafts.
    """
    samples = [item.handle for item, _, samples in step.compute if samples and not item.stopped]
    for item, allowed in step.drafts:
        if not item.stopped:
            samples += [item.handle] * accept(allowed)
    many, drafts = len(samples), sum(allowed for _, allowed in step.drafts)
    columns = {"sequences": samples, "token_ids": [token_id] * many, "stopped": [stopped] * many}
    return pb.StepResult(step=step.number, num_drafts=drafts, **columns)


def answer(batch: RunningBatch, step: InFlightStep, copied: Seq[int] = (), failed: Seq[int] = ()) -> None:
    """Commits a step whose sequences sampled token 1. copied, failed: tickets of onloads that have ended."""
    result = result_of(step)
    result.copied_tickets.extend(copied)
    result.failed_tickets.extend(failed)
    batch.apply_result(step, result)


class Pipeline:
    """Sends steps of a batch ahead, like the loop: `depth` steps are in flight, and the oldest is answered."""

    def __init__(self, batch: RunningBatch, depth: int) -> None:
        self.sent = 0
        self._batch = batch
        self._depth = depth
        self._in_flight: deque[InFlightStep] = deque()

    @property
    def in_flight(self) -> tuple[InFlightStep, ...]:
        """The steps that are not answered yet."""
        return tuple(self._in_flight)

    def turn(self, plan: StepPlan) -> InFlightStep | None:
        """Sends a plan that computes something; returns the step to answer now, if there is one."""
        if plan.compute:
            self.sent += 1
            self._in_flight.append(build_step(self.sent, plan, self._batch.removed)[1])
            self._batch.removed = []
        is_due = len(self._in_flight) == self._depth or not plan.compute
        return self._in_flight.popleft() if self._in_flight and is_due else None


def run(batch: RunningBatch, number: int, copied: Seq[int] = (), failed: Seq[int] = ()) -> pb.Step:
    """Sends a step and answers it."""
    message, step = send(batch, number)
    answer(batch, step, copied, failed)
    return message


@st.composite
def traffic(draw: st.DrawFn, longest: int = 6) -> list[Sequence]:
    """Sequences with blocks for all their tokens; some wait for an earlier one's prefix. longest: output, in tokens."""
    sequences: list[Sequence] = []
    for handle in range(1, draw(st.integers(1, 12)) + 1):
        prompt, max_tokens = draw(st.integers(1, 40)), draw(st.integers(1, longest))
        writer = draw(st.sampled_from(sequences)) if sequences and draw(st.booleans()) else None
        shared = 0
        if writer is not None and prompt > BLOCK:
            shared = min(len(writer.token_ids), prompt - 1) // BLOCK * BLOCK
        sequences.append(
            sequence(
                handle,
                prompt,
                max_tokens=max_tokens,
                priority=draw(st.integers(-1, 1)),
                blocks=-(-(prompt + max_tokens) // BLOCK),
                cached_tokens=shared,
                wait_for=writer.handle if writer and shared else 0,
            )
        )
    return sequences
