"""Sliding window, with or without sinks (Xiao et al. 2023, StreamingLLM, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from executor.eviction.policy import Contents
from executor.eviction.ranked import Ranked


class SlidingWindow(Ranked):
    """Keeps the first tokens and the newest ones."""

    def scores(self, contents: Contents) -> Tensor:
        """[1, 1, T] float32. Of positions that a float cannot tell apart the earlier goes all the same."""
        return contents.positions[:1, :1].to(torch.float32)
