"""Keys that differ (Park et al. 2025, KeyDiff, section 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.eviction.policy import Contents
from executor.eviction.ranked import Ranked


class DistinctKeys(Ranked):
    """Evicts the tokens whose keys point most in the direction of the mean of all normalised keys."""

    def scores(self, contents: Contents) -> Tensor:
        """[L, Hkv, T] float32: minus the cosine."""
        keys = F.normalize(contents.keys().float(), dim=-1)
        # In float64, so that the order of the slots does not matter.
        mean = F.normalize(keys.mean(-2, keepdim=True, dtype=torch.float64), dim=-1).float()
        return -(keys * mean).sum(-1)
