"""The stub executor with tokens that depend on every token before them: `python -m tests.support.exact_stub`."""

import zlib
from collections.abc import Iterator, Sequence

from bench import stub_executor
from protos.execution.v1 import execution_pb2 as pb

# Ids of tokens that are characters of ASCII begin at 1.
_CHARACTERS = 94


def _hash(token_ids: Sequence[int], before: int = 0) -> int:
    return zlib.crc32(b"".join(token.to_bytes(4, "little") for token in token_ids), before)


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """The answer of every engine to a prompt."""
    state, tokens = _hash(prompt), []
    for _ in range(count):
        tokens.append(1 + state % _CHARACTERS)
        state = _hash(tokens[-1:], state)
    return tokens


class ExactRunningSet(stub_executor.RunningSet):
    """Sequences with a hash of all their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._states: dict[int, int] = {}

    def remove(self, handles: Iterator[int]) -> None:
        """These leave."""
        leaving = list(handles)
        super().remove(iter(leaving))
        for handle in leaving:
            del self._states[handle]

    def run(self, step: pb.Step) -> pb.StepResult:
        """The tokens that the step samples."""
        for new in step.new_sequences:
            self._states[new.sequence] = _hash(new.token_ids)
        result = super().run(step)
        for row, handle in enumerate(result.sequences):
            result.token_ids[row] = 1 + self._states[handle] % _CHARACTERS
            self._states[handle] = _hash([result.token_ids[row]], self._states[handle])
        return result


if __name__ == "__main__":
    stub_executor.main(ExactRunningSet)
