"""Short keys draw attention (Devoto et al. 2024, A Simple and Effective L2 Norm-Based Strategy, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from executor.eviction.policy import Contents
from executor.eviction.ranked import Ranked


class ShortKeys(Ranked):
    """Evicts the tokens with the longest keys."""

    def scores(self, contents: Contents) -> Tensor:
        """[L, Hkv, T] float32: minus the norm."""
        norms: Tensor = torch.linalg.vector_norm(contents.keys().float(), dim=-1)
        return -norms
