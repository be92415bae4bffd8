"""Which tokens the prompts and outputs of sequences have, on the device: what penalties need."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from executor.transfer import to_device


class TokenCounts:
    """The counts of all sequences with penalties. A step changes and reads all of them by few calls of the device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        # [N, V] each: whether a prompt has a token, and how often an output has the token.
        self._prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._output = torch.zeros(0, vocab_size, dtype=torch.float32, device=device)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, handle: int) -> bool:
        return handle in self._rows

    def join(self, handle: int, tokens: Sequence[int] | np.ndarray, num_prompt: int) -> None:
        """Counts the tokens of a sequence, of which the first `num_prompt` are the prompt's."""
        if not self._free:
            self._grow()
        row = self._rows[handle] = self._free.pop()
        ids = to_device(tokens, self._device)
        self._prompt[row].zero_().index_fill_(0, ids[:num_prompt], True)
        ones = torch.ones(len(ids) - num_prompt, device=self._device)
        self._output[row].zero_().index_add_(0, ids[num_prompt:], ones)

    def leave(self, handle: int) -> None:
        """Forgets a sequence, if there are counts of it. Without sequences, the memory is released."""
        if (row := self._rows.pop(handle, None)) is None:
            return
        self._free.append(row)
        if not self._rows:
            self.clear()

    def clear(self) -> None:
        """Forgets all sequences, and releases the memory."""
        self._rows.clear()
        self._free.clear()
        self._prompt, self._output = (counts.new_zeros(0, counts.shape[1]) for counts in (self._prompt, self._output))

    def add(self, handles: Sequence[int], tokens: Tensor) -> None:
        """Counts one more token of the output for each entry. tokens: [N] int64."""
        if handles:
            where = self._places(handles), tokens
            self._output.index_put_(where, torch.ones_like(tokens, dtype=torch.float32), accumulate=True)

    def of(self, handles: Sequence[int], drafted: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Returns the counts of sequences, [P, V] bool and float32, with more tokens of the output for each entry."""
        places = self._places(handles)
        output = self._output[places]
        more = [(index, token) for index, tokens in enumerate(drafted) for token in tokens]
        if more:
            where = to_device([index for index, _ in more], self._device), to_device([t for _, t in more], self._device)
            output.index_put_(where, torch.ones(len(more), device=self._device), accumulate=True)
        return self._prompt[places], output

    def _places(self, handles: Sequence[int]) -> Tensor:
        return to_device([self._rows[handle] for handle in handles], self._device)

    def _grow(self) -> None:
        rows, more = len(self._output), max(1, len(self._output))
        self._prompt, self._output = (
            torch.cat([counts, counts.new_zeros(more, counts.shape[1])]) for counts in (self._prompt, self._output)
        )
        self._free.extend(reversed(range(rows, rows + more)))
