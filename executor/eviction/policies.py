"""Policies that rank single tokens by a score, and always keep the first and the last tokens.

`areas.py` and `rkv.py` have the policies that choose whole blocks.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.eviction.base import Evictor, KvShape, KvView
from executor.eviction.scoring import SlotScores, complement, generator, lowest
from executor.transfer import sent
from kernels.scores import ScoreAccumulator, SequenceScores
from protos.kvcommon.eviction import Policy

# The kernel size of SnapKV's experiments, section 5.
_KERNEL = 7


class Ranked(Evictor):
    """Evicts the tokens with the lowest scores, except the first and the last tokens; of equal scores, the earlier."""

    @abstractmethod
    def scores(self, view: KvView) -> Tensor:
        """[1 or L, 1 or Hkv, T] float32; a 1 if all layers or heads choose alike."""
        ...

    def keep(self, view: KvView, count: int) -> Tensor:
        """[1 or L, 1 or Hkv, count] int64, ascending."""
        scores = self.scores(view)
        layers, heads, slots = scores.shape
        positions = view.positions[:layers, :heads]
        last = view.computed - self.policy.recent
        protected = (positions < self.policy.start) | (positions >= last)
        worth = self.worth(view, scores, protected, slots - count)
        return complement(lowest(worth, positions, slots - count), slots)

    def worth(self, view: KvView, scores: Tensor, protected: Tensor, evicted: int) -> Tensor:
        """[.., T] float32: the tokens with the lowest values are evicted.

        protected: [.., T] bool, the tokens that always stay. evicted: the number of tokens to evict.
        """
        del view, evicted
        return scores.masked_fill(protected, torch.inf)


class AttentionRanked(Ranked):
    """Ranks by attention summed over all scored queries, separately for each KV head."""

    def __init__(self, policy: Policy, shape: KvShape) -> None:
        super().__init__(policy, shape)
        self.sums = SlotScores(shape, shape.kv_heads)

    def accumulator(self, slots: int) -> ScoreAccumulator | None:
        return ScoreAccumulator(self.sums.at_least(slots))

    def observe(self, scores: SequenceScores | None, new: int) -> None:
        """Adds the weights of a step, unless the forward pass has added them by `accumulator`."""
        del new
        if scores is not None and scores.accumulator is None:
            self.sums.add(scores.weights)

    def scores(self, view: KvView) -> Tensor:
        """[L, Hkv, T] float32."""
        return self.sums.values(view.positions.shape[-1])

    def reindex(self, index: Tensor) -> None:
        self.sums.reindex(index)

    def kept_mass(self, index: Tensor) -> Tensor | None:
        return self.sums.share(index)


class SlidingWindow(Ranked):
    """Keeps the first tokens and the newest ones.

    Xiao et al. 2023, StreamingLLM, section 3.2.
    """

    on_host: ClassVar[bool] = True

    def scores(self, view: KvView) -> Tensor:
        """[1, 1, T] float32: the positions. Of large positions that are equal as floats, the earlier is evicted."""
        return view.positions[:1, :1].to(torch.float32)


class AdaptiveWindow(AttentionRanked):
    """A sliding window that reaches as far back as recent queries attend to.

    The kept tokens are grouped by age, one period in each group. A group is worth keeping if its share of the attention
    is more than an eviction may lose. Shares leave out the first tokens, and each head has the same weight. Otherwise,
    a head that mostly attends to the first tokens would hardly count.
    """

    def scores(self, view: KvView) -> Tensor:
        """[1, 1, T] float32, as for a sliding window."""
        return view.positions[:1, :1].to(torch.float32)

    def wanted(self, view: KvView, *, evicts: bool) -> Tensor:
        """[] int64: tokens that the window is to have when the sequence evicts next, within its bounds.

        Halves the attention so far, so that older queries count less. evicts: whether the sequence has begun to evict;
        from then on, the window changes by at most one period.
        """
        policy, slots, positions = self.policy, view.positions.shape[-1], view.positions[0, 0]
        assert policy.bounds is not None
        assert policy.most_kept is not None
        # A token's group follows from its age at the next eviction. The first tokens may be older; they have no weight.
        ahead = max(0, policy.most_kept - slots)
        count = (slots + ahead) // policy.period + 1
        steps = ((view.computed - 1 + ahead - positions) // policy.period).clamp(max=count - 1)
        weights = self.sums.values(slots).masked_fill(positions < policy.start, 0.0)
        by_step = weights.new_zeros(*weights.shape[:-1], count).index_add_(-1, steps, weights)
        shares = by_step / by_step.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        is_needed = shares.mean((0, 1)) > 1 - policy.mass
        reach = (is_needed * torch.arange(1, count + 1, device=steps.device)).max() * policy.period
        self.sums.halve()
        if evicts:
            reach = reach.clamp(policy.window - policy.period, policy.window + policy.period)
        return reach.clamp(policy.bounds.least, policy.bounds.most)


class Last(SlidingWindow):
    """Keeps the newest token: a window of one token.

    Metel et al. 2025, Batch-Max, section 4.
    """


class H2O(AttentionRanked):
    """Keeps the newest tokens, by default half of the budget, and those with the most attention over all queries.

    Zhang et al. 2023, H2O, section 4.
    """


class AverageAttention(AttentionRanked):
    """Evicts the tokens with the lowest attention per query that could see them.

    Metel, Chen and Rezagholizadeh 2025, Batch-Max, algorithm 1.
    """

    def scores(self, view: KvView) -> Tensor:
        """[L, Hkv, T] float32."""
        return super().scores(view) / (view.computed - view.positions)


class SnapKV(AttentionRanked):
    """Keeps what the observation window attended to most, together with its neighbours.

    Li et al. 2024, SnapKV, section 4.

    Neighbours share the maximum, as in the paper's experiments. An average, as in other implementations, dilutes a
    single strong token, so that neither the token nor its neighbours may stay.
    """

    def scores(self, view: KvView) -> Tensor:
        """[L, Hkv, T] float32."""
        order = view.positions.argsort(-1)
        weights = super().scores(view).gather(-1, order)
        # The window always stays; its own weights would only lift the tokens before it.
        window = view.positions.gather(-1, order) >= view.computed - self.policy.score_window
        pooled = F.max_pool1d(weights.masked_fill(window, 0.0), _KERNEL, stride=1, padding=_KERNEL // 2)
        return torch.empty_like(pooled).scatter_(-1, order, pooled)


class Tova(Ranked):
    """Evicts what the last query attended to least, on average over all heads of a layer.

    Oren et al. 2024, Transformers are Multi-State RNNs, section 3.2: TOVA.

    `reindex` does nothing: the next step replaces the weights before they are read again.
    """

    def __init__(self, policy: Policy, shape: KvShape) -> None:
        super().__init__(policy, shape)
        self._weights = SlotScores(shape, 1)

    def observe(self, scores: SequenceScores | None, new: int) -> None:
        """Takes the step's last query in place of the previous one.

        Of a step that computes several output tokens again, after a preemption, all queries count together.
        """
        del new
        self._weights.clear()
        if scores is not None:
            # Sums over heads rank tokens as means do.
            self._weights.add(scores.weights.sum(1, keepdim=True))

    def scores(self, view: KvView) -> Tensor:
        """[L, 1, T] float32."""
        return self._weights.values(view.positions.shape[-1])

    def kept_mass(self, index: Tensor) -> Tensor | None:
        """[] float64: the share of the last query's weights."""
        return self._weights.share(index)


class H2OTova(AttentionRanked):
    """Keeps the tokens that the last query attends to most, like TOVA, and also those that H2O would keep.

    TOVA chooses half of the unprotected tokens that stay. The sum over all queries predicts best which tokens later
    text attends to; the last query shows which tokens the next words need. In a step with several tokens, all its
    queries count as the last query.
    """

    def __init__(self, policy: Policy, shape: KvShape) -> None:
        super().__init__(policy, shape)
        self._last = SlotScores(shape, shape.kv_heads)

    def accumulator(self, slots: int) -> ScoreAccumulator | None:
        """Returns None: the weights of each step are needed separately."""
        del slots
        return None

    def observe(self, scores: SequenceScores | None, new: int) -> None:
        """Adds the weights, and forgets the queries of the previous step."""
        super().observe(scores, new)
        self._last.clear()
        if scores is not None:
            self._last.add(scores.weights)

    def worth(self, view: KvView, scores: Tensor, protected: Tensor, evicted: int) -> Tensor:
        """[L, Hkv, T] float32: infinite for TOVA's tokens, too."""
        slots = scores.shape[-1]
        last = self._by_layer(view, self._last.values(slots)).masked_fill(protected, torch.inf)
        # The number of protected tokens, without waiting for the device.
        always = min(slots, self.policy.start + self.policy.recent)
        half = (slots - evicted - always) // 2
        spared = complement(lowest(last, view.positions, slots - always - half), slots)
        return scores.scatter(-1, spared, torch.inf)

    def _by_layer(self, view: KvView, values: Tensor) -> Tensor:
        """[L, Hkv, T] float32: each token's sum over the heads of its layer, which keep different tokens."""
        positions = view.positions.flatten(1)
        sums = values.new_zeros(values.shape[0], view.computed).scatter_add_(-1, positions, values.flatten(1))
        return sums.gather(-1, positions).view_as(values)


class RoCo(AttentionRanked):
    """Evicts the tokens with the lowest mean attention, but spares those whose attention varies most between queries.

    Ren and Zhu 2024, On the Efficacy of Eviction Policy, section 4: RoCo.

    As many varying tokens are spared as recent tokens are kept. In the paper, they take the place of recent tokens.
    """

    uses_squares: ClassVar[bool] = True

    def __init__(self, policy: Policy, shape: KvShape) -> None:
        super().__init__(policy, shape)
        self._squares = SlotScores(shape, shape.kv_heads)
        self._query_heads: Tensor | None = None

    def observe(self, scores: SequenceScores | None, new: int) -> None:
        """Adds weights and squares. Raises ValueError without squares."""
        super().observe(scores, new)
        if scores is None:
            return
        if scores.squares is None:
            raise ValueError("attention has no squares, which this policy needs")
        self._squares.add(scores.squares)
        if self._query_heads is None:
            # The weights of each query head and query sum to 1, so that their total counts the query heads.
            layers, kv_heads, _ = scores.weights.shape
            self._query_heads = (scores.weights.sum() / (scores.rows * layers * kv_heads)).round()

    def scores(self, view: KvView) -> Tensor:
        """[L, Hkv, T] float32: the mean over queries and query heads, up to a common factor."""
        return super().scores(view) / (view.computed - view.positions)

    def worth(self, view: KvView, scores: Tensor, protected: Tensor, evicted: int) -> Tensor:
        """[L, Hkv, T] float32: the score of a token that varies little, infinite for all others."""
        slots = scores.shape[-1]
        variation = self._variation(view, scores).masked_fill(protected, torch.inf)
        steady = lowest(variation, view.positions, max(evicted, slots - self.policy.start - 2 * self.policy.recent))
        return torch.full_like(scores, torch.inf).scatter_(-1, steady, scores.gather(-1, steady))

    def reindex(self, index: Tensor) -> None:
        super().reindex(index)
        self._squares.reindex(index)

    def _variation(self, view: KvView, means: Tensor) -> Tensor:
        """[L, Hkv, T] float32: values that order tokens like the standard deviation."""
        squares = self._squares.values(means.shape[-1]) / (view.computed - view.positions)
        if self._query_heads is None:
            return squares
        # With G query heads, squares / G - (means / G)^2, times G^2.
        return squares * self._query_heads - means * means


class KeyDiff(Ranked):
    """Evicts the tokens whose keys point most in the direction of the mean of all normalised keys.

    Park et al. 2025, KeyDiff, section 4.
    """

    def scores(self, view: KvView) -> Tensor:
        """[L, Hkv, T] float32: minus the cosine."""
        keys = F.normalize(view.keys().float(), dim=-1)
        # In float64, so that the order of the slots does not matter.
        mean = F.normalize(keys.mean(-2, keepdim=True, dtype=torch.float64), dim=-1).float()
        return -(keys * mean).sum(-1)


class Knorm(Ranked):
    """Evicts the tokens with the longest keys.

    Devoto et al. 2024, A Simple and Effective L2 Norm-Based Strategy, section 3.
    """

    def scores(self, view: KvView) -> Tensor:
        """[L, Hkv, T] float32: minus the norm."""
        norms: Tensor = torch.linalg.vector_norm(view.keys().float(), dim=-1)
        return -norms


class RandomTokens(Ranked):
    """Evicts random tokens, different ones in each KV head.

    Any other policy must do better.
    """

    def scores(self, view: KvView) -> Tensor:
        """[L, Hkv, T] float32; a token's number does not depend on its slot."""
        drawn = torch.rand(view.positions.shape, generator=generator(self.policy, view.computed))
        ranks = view.positions.argsort(-1).argsort(-1)
        return sent(drawn, ranks.device).gather(-1, ranks)
