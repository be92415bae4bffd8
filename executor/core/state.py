"""The running set: which sequences are there, how far each is, and which slots it has."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from executor.step import Joining, Sampling, Step
from protos.kvcommon.eviction import Policy
from protos.rpc import tracing

Slots = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(eq=False)
class Running:
    """One sequence. Four lengths: kept <= computed <= known, and what the tables have room for.

    tokens: the ids it joined with, [joined] int64; later ones are on the device only.
    known: tokens that exist, sampled ones included. computed: leading tokens whose K and V were computed.
    kept: those of them that were not evicted: so many slots are in use, the first ones. hole: a gap among them that the
    next token fills. row: where the device keeps its last token. tables: slots per layer group.
    cached: tokens that were computed when it joined. span: from then until it leaves.
    policy: how it evicts tokens; evicts: whether it may by now; compacted: whether what is kept numbers new ones.
    """

    handle: int
    tokens: np.ndarray[tuple[int], np.dtype[np.int64]]
    num_prompt: int
    computed: int
    known: int
    row: int
    tables: list[Slots]
    sampling: Sampling
    policy: Policy | None = None
    kept: int = 0
    evicts: bool = False
    compacted: bool = False
    hole: int | None = None
    stopped: bool = False
    cached: int = 0
    span: tracing.Span = tracing.OFF


def tokens_due(step: Step, handle: int, *, computed: int, known: int, stopped: bool) -> int:
    """Tokens of a sequence that a step computes: what a chunk grants, else the last known one if only that is left."""
    if stopped or handle in step.idle:
        return 0
    return step.chunks.get(handle, 1 if known - computed == 1 else 0)


class RunningSet:
    """All sequences by handle, in the order in which they joined; hands out rows of the device's state."""

    def __init__(self) -> None:
        self._sequences: dict[int, Running] = {}
        self._free_rows: list[int] = []
        self.rows = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Running]:
        return iter(self._sequences.values())

    def get(self, handle: int) -> Running | None:
        """The sequence, or None."""
        return self._sequences.get(handle)

    def clear(self) -> None:
        """Forgets all sequences."""
        for sequence in self:
            _end(sequence, error="SESSION_ENDED")
        self._sequences.clear()
        self._free_rows.clear()
        self.rows = 0

    def remove(self, handle: int) -> None:
        """Forgets one."""
        sequence = self._sequences.pop(handle)
        self._free_rows.append(sequence.row)
        _end(sequence)

    def add(self, joining: Joining) -> Running:
        """Takes one in."""
        if self._free_rows:
            row = self._free_rows.pop()
        else:
            row = self.rows
            self.rows += 1
        sequence = Running(
            handle=joining.sequence,
            tokens=np.asarray(joining.token_ids, dtype=np.int64),
            num_prompt=joining.num_prompt_tokens,
            computed=joining.num_computed_tokens,
            known=len(joining.token_ids),
            row=row,
            tables=[np.asarray(slots, dtype=np.int32) for slots in joining.tables],
            sampling=joining.sampling,
            policy=joining.policy,
            compacted=joining.policy is not None and joining.policy.compacted,
            kept=joining.num_computed_tokens,
            cached=joining.num_computed_tokens,
            span=tracing.join("execution.v1.ExecutorService/StreamSteps", joining.traceparent),
        )
        self._sequences[joining.sequence] = sequence
        return sequence

    def grow(self, handle: int, group: int, slots: Sequence[int]) -> None:
        """Appends slots to a table."""
        tables = self._sequences[handle].tables
        tables[group] = np.concatenate([tables[group], np.asarray(slots, dtype=np.int32)])


def _end(sequence: Running, *, error: str = "") -> None:
    attributes = {
        "kvkeep.prompt_tokens": sequence.num_prompt,
        "kvkeep.cached_tokens": sequence.cached,
        "kvkeep.computed_tokens": sequence.computed - sequence.cached,
        "kvkeep.sampled_tokens": sequence.known - len(sequence.tokens),
    }
    sequence.span.end(attributes, error=error)
