"""Average attention (Metel, Chen and Rezagholizadeh 2025, Batch-Max, algorithm 1)."""

from __future__ import annotations

from torch import Tensor

from executor.eviction.policy import Contents
from executor.eviction.ranked import Watching


class AverageAttention(Watching):
    """Evicts the tokens with the lowest attention per query that could see them."""

    def scores(self, contents: Contents) -> Tensor:
        """[L, Hkv, T] float32."""
        return super().scores(contents) / (contents.computed - contents.positions)
