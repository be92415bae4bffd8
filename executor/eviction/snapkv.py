"""What the end of the prompt attends to (Li et al. 2024, SnapKV, section 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.eviction.policy import Contents
from executor.eviction.ranked import Watching

# Of section 5's experiments.
_KERNEL = 7


class PromptEnd(Watching):
    """Keeps what the observation window attended to most, together with its neighbours.

    Neighbours share the maximum, as in the paper's experiments. An average, which other implementations take, spreads a
    single strong token thin, and then neither it nor what it stands in may stay.
    """

    def scores(self, contents: Contents) -> Tensor:
        """[L, Hkv, T] float32."""
        order = contents.positions.argsort(-1)
        weights = super().scores(contents).gather(-1, order)
        # The window always stays; its own weights would only lift the tokens before it.
        window = contents.positions.gather(-1, order) >= contents.computed - self.policy.score_window
        pooled = F.max_pool1d(weights.masked_fill(window, 0.0), _KERNEL, stride=1, padding=_KERNEL // 2)
        return torch.empty_like(pooled).scatter_(-1, order, pooled)
