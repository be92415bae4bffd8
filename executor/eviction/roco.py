"""Attention that varies (Ren and Zhu 2024, On the Efficacy of Eviction Policy for Key-Value Constrained Generative
Language Model Inference, section 4: RoCo)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from executor.eviction.policy import Attention, Contents, Space
from executor.eviction.ranked import Watching, lowest
from executor.eviction.scores import Sums
from protos.kvcommon.eviction import Policy


class VaryingAttention(Watching):
    """Evicts, of the tokens whose attention varies least over the queries that saw them, those with the lowest mean.

    As many tokens are kept for how much they vary as for being recent: in the paper they take the recent ones' place.
    """

    uses_squares: ClassVar[bool] = True

    def __init__(self, policy: Policy, space: Space) -> None:
        super().__init__(policy, space)
        self._squares = Sums(space, space.kv_heads)
        self._query_heads: Tensor | None = None

    def observe(self, attention: Attention | None, new: int) -> None:
        """Adds weights and squares. Raises ValueError without squares."""
        super().observe(attention, new)
        if attention is None:
            return
        if attention.squares is None:
            raise ValueError("attention has no squares, which this policy needs")
        self._squares.add(attention.squares)
        if self._query_heads is None:
            # All weights of a query head and row sum to 1.
            layers, kv_heads, _ = attention.weights.shape
            self._query_heads = (attention.weights.sum() / (attention.rows * layers * kv_heads)).round()

    def scores(self, contents: Contents) -> Tensor:
        """[L, Hkv, T] float32: the mean over queries and query heads, but for a factor that is the same for all."""
        return super().scores(contents) / (contents.computed - contents.positions)

    def worth(self, contents: Contents, scores: Tensor, protected: Tensor, evicted: int) -> Tensor:
        """[L, Hkv, T] float32: the score where a token varies little, else infinite."""
        slots = scores.shape[-1]
        variation = self._variation(contents, scores).masked_fill(protected, torch.inf)
        steady = lowest(variation, contents.positions, max(evicted, slots - self.policy.start - 2 * self.policy.recent))
        return torch.full_like(scores, torch.inf).scatter_(-1, steady, scores.gather(-1, steady))

    def follow(self, index: Tensor) -> None:
        """Takes sums and squares along."""
        super().follow(index)
        self._squares.follow(index)

    def _variation(self, contents: Contents, means: Tensor) -> Tensor:
        """[L, Hkv, T] float32: what orders tokens as the standard deviation does."""
        squares = self._squares.values(means.shape[-1]) / (contents.computed - contents.positions)
        if self._query_heads is None:
            return squares
        # With G query heads, squares / G - (means / G)^2, times G^2.
        return squares * self._query_heads - means * means
