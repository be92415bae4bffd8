"""Which sequences may be why the executor was lost: a request that crashes the executor must not do so for ever."""

from scheduler.core.step_message import InFlightStep
from scheduler.sequence import Sequence


class Suspects:
    """Sequences that the executor was lost over more than once, without a new token in between."""

    def __init__(self) -> None:
        self._by_handle: dict[int, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence if it is a suspect."""
        if sequence.is_suspect:
            self._by_handle[sequence.handle] = sequence

    def discard(self, sequence: Sequence) -> None:
        self._by_handle.pop(sequence.handle, None)

    def max_prefills(self) -> int | None:
        """The limit on prefills per step: one while there are suspects, so that a loss shows which one causes it."""
        for sequence in list(self._by_handle.values()):
            if not sequence.is_suspect:
                self.discard(sequence)
        return 1 if self._by_handle else None


def blame(step: InFlightStep) -> None:
    """Counts a failure of each sequence without a new token in the step during which the executor was lost."""
    accused = [sequence for sequence, _, _ in step.compute if not sequence.has_new_tokens]
    for sequence in accused:
        # For a suspect, count only failures that no other sequence could have caused.
        if not sequence.is_suspect or len(accused) == 1:
            sequence.failures += 1
