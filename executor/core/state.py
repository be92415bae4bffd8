"""The sequences of the running batch."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from executor.batch import SequenceState
from executor.step import NewSequence
from protos.rpc import tracing


class SequenceTable:
    """All sequences by handle, in the order in which they joined; allocates rows of the device's state."""

    def __init__(self) -> None:
        self._sequences: dict[int, SequenceState] = {}
        self._free_rows: list[int] = []
        self.rows = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._sequences.values())

    def get(self, handle: int) -> SequenceState:
        return self._sequences[handle]

    def clear(self) -> None:
        for sequence in self:
            _end(sequence, error="SESSION_ENDED")
        self._sequences.clear()
        self._free_rows.clear()
        self.rows = 0

    def remove(self, handle: int) -> None:
        sequence = self._sequences.pop(handle)
        self._free_rows.append(sequence.row)
        _end(sequence)

    def add(self, new: NewSequence, adapter: Any = None) -> SequenceState:
        if self._free_rows:
            row = self._free_rows.pop()
        else:
            row = self.rows
            self.rows += 1
        sequence = SequenceState.of(new, row, adapter)
        sequence.span = tracing.join("execution.v1.ExecutorService/StreamSteps", new.traceparent)
        self._sequences[new.sequence] = sequence
        return sequence

    def grow(self, handle: int, group: int, slots: Sequence[int]) -> None:
        """Appends slots to the block table of a layer group."""
        tables = self._sequences[handle].tables
        tables[group] = np.concatenate([tables[group], np.asarray(slots, dtype=np.int32)])


def _end(sequence: SequenceState, *, error: str = "") -> None:
    attributes = {
        "kvkeep.prompt_tokens": sequence.num_prompt,
        "kvkeep.cached_tokens": sequence.cached,
        "kvkeep.computed_tokens": sequence.computed - sequence.cached,
        "kvkeep.sampled_tokens": sequence.known - len(sequence.tokens),
    }
    sequence.span.end(attributes, error=error)
