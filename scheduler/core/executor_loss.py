"""What the loss of the executor means for requests: all start again, but a request that crashes executors fails.

`StepLoop` notices the loss, and `RunningBatch.restart_all` ends all sequences.
"""

from scheduler.core.step_message import InFlightStep
from scheduler.request import MAX_FAILURES, AdmissionAttempt
from scheduler.sequence import Sequence


class Suspects:
    """Sequences that computed at more than one loss of the executor, without a new token since."""

    def __init__(self) -> None:
        self._by_handle: dict[int, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence if it is a suspect."""
        if sequence.is_suspect:
            self._by_handle[sequence.handle] = sequence

    def discard(self, sequence: Sequence) -> None:
        self._by_handle.pop(sequence.handle, None)

    def max_prefills(self) -> int | None:
        """The limit on prefills per step: 1 while there are suspects, so that a loss shows the cause; else None."""
        for sequence in list(self._by_handle.values()):
            if not sequence.is_suspect:
                self.discard(sequence)
        return 1 if self._by_handle else None


def next_attempt(sequence: Sequence) -> AdmissionAttempt | None:
    """Returns the request with all its tokens so far, to be admitted again; None after MAX_FAILURES failures."""
    attempt = sequence.next_attempt()
    return attempt if attempt.failures < MAX_FAILURES else None


def blame(step: InFlightStep) -> None:
    """Adds a failure to each sequence of the step during which the executor was lost, unless it has new tokens."""
    accused = [sequence for sequence, _, _ in step.compute if not sequence.has_new_tokens]
    for sequence in accused:
        # For a suspect, count only failures that no other sequence could have caused.
        if not sequence.is_suspect or len(accused) == 1:
            sequence.failures += 1
