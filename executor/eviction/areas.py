"""Eviction of whole blocks between a start and a recent area, as in OpenVINO GenAI's cache eviction.

KVCrush (Jha et al. 2025; as in OpenVINO GenAI) keeps some blocks for their diversity: a block is represented by the
pattern of its important tokens. Of the blocks about to be evicted, it spares some at different distances from one
pattern, the anchor.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.eviction.base import Evictor, KvShape, KvView
from executor.eviction.scoring import SlotScores, complement, generator, share
from executor.transfer import sent
from kernels.scores import ScoreAccumulator, SequenceScores
from protos.kvcommon.eviction import Anchor, Kind, KvCrush, Policy

# Tokens over which the maximum of scores is taken.
POOLED = 7


class Blocks(Evictor):
    """Evicts blocks, in each layer separately. The start area is never evicted, so its tokens have the first slots."""

    ordered: ClassVar[bool] = True

    def __init__(self, policy: Policy, shape: KvShape, pooled: int = POOLED) -> None:
        """pooled: tokens over which the maximum of scores is taken."""
        super().__init__(policy, shape)
        self.pooled = pooled
        self._slots = 0

    def evictable(self, slots: int) -> range:
        """Returns the evictable blocks of `slots` slots: outside the start and recent areas, and not partly filled."""
        size = self.policy.block_size
        return range(self.policy.start // size, slots // size - self.policy.recent // size)

    def keep(self, view: KvView, count: int) -> Tensor:
        """[L, 1, count] int64, ascending. Raises ValueError for anything but whole evictable blocks."""
        slots, size = view.positions.shape[-1], self.policy.block_size
        blocks, more = divmod(slots - count, size)
        area = self.evictable(slots)
        if more or blocks > len(area):
            raise ValueError(f"cannot evict {slots - count} tokens in blocks of {size} out of {len(area)} blocks")
        self._slots = slots
        gone = torch.empty(self.shape.layers, 0, dtype=torch.int64, device=self.shape.device)
        if blocks:
            gone = area.start + self.least(view, area, blocks)
        return without(gone, slots, size)[:, None]

    def kept_mass(self, index: Tensor) -> Tensor | None:
        """[] float64: the share of the scores that the slots `index` have, without the start area; after `keep`."""
        return share(self.scores(self._slots)[:, None], index)

    @abstractmethod
    def scores(self, slots: int) -> Tensor:
        """[L, slots] float32, pooled; 0 in the start area."""
        ...

    @abstractmethod
    def least(self, view: KvView, area: range, count: int) -> Tensor:
        """[L, count] int64: the evicted blocks of the area, as their numbers within it."""
        ...

    def tracked(self, scores: SequenceScores) -> Tensor:
        """[L, 1, n] float32: attention of a layer to the n tokens after the start area, summed over heads."""
        return scores.weights[..., self.policy.start :].sum(1, keepdim=True)

    def of_blocks(self, values: Tensor, area: range) -> Tensor:
        """[L, blocks of the area, B] of values [L, slots]."""
        size = self.policy.block_size
        return values[:, area.start * size : area.stop * size].reshape(-1, len(area), size)


class Areas(Blocks):
    """Ranks blocks by summed attention (SUM), or by this sum per query that saw a token (NORM_SUM)."""

    def __init__(self, policy: Policy, shape: KvShape, pooled: int = POOLED) -> None:
        super().__init__(policy, shape, pooled)
        self._sums = SlotScores(shape, 1)
        # Position of the first scored query; all later queries are scored.
        self._first: int | None = None

    def accumulator(self, slots: int) -> ScoreAccumulator:
        """The sums, which are pooled."""
        return ScoreAccumulator(self._sums.at_least(slots), self.policy.start, max(1, self.pooled))

    def observe(self, scores: SequenceScores | None, new: int) -> None:
        """Adds the step's scores, pooled, unless the forward pass has added them by `accumulator`."""
        del new
        if scores is None:
            return
        if self._first is None:
            if not scores.rows:
                return
            # No token was evicted before the first scored query, so slots are positions.
            self._first = scores.weights.shape[-1] - scores.rows
        if scores.accumulator is None:
            self._sums.add(pool(self.tracked(scores), self.pooled), self.policy.start)

    def reindex(self, index: Tensor) -> None:
        self._sums.reindex(index[:, :1])

    def scores(self, slots: int) -> Tensor:
        """[L, slots] float32."""
        return self._sums.values(slots)[:, 0]

    def counts(self, view: KvView) -> Tensor:
        """[L, T] int64: scored queries that saw each token."""
        return view.computed - view.positions[:, 0].clamp(min=self._first or 0)

    def least(self, view: KvView, area: range, count: int) -> Tensor:
        """[L, count] int64: the lowest-scored blocks that KVCrush does not spare; of equal scores, the first."""
        scores = self.scores(view.positions.shape[-1])
        values = scores / self.counts(view) if self.policy.kind is Kind.NORM_SUM else scores
        order = self.of_blocks(values, area).sum(-1).sort(dim=-1, stable=True).indices
        crush = self.policy.crush
        if crush is None:
            return order[:, :count]
        going = order[:, : count + crush.budget].sort(dim=-1).values
        return self._crushed(going, self.of_blocks(scores, area), crush, view.computed)

    def _crushed(self, going: Tensor, scores: Tensor, crush: KvCrush, computed: int) -> Tensor:
        """[L, n - budget]: which of the blocks `going` [L, n] are evicted, ascending. scores: [L, N, B]."""
        bits = important(scores.flatten(1)).view_as(scores)
        anchor = anchor_of(crush.anchor, bits, generator(self.policy, computed))
        kept = spared(distances(bits, anchor).gather(-1, going), crush.budget)
        return going.gather(-1, complement(kept, going.shape[-1]))


def pool(values: Tensor, width: int) -> Tensor:
    """[L, 1, n]: the largest of values [L, 1, n] at a slot and the width - 1 slots after it, across blocks."""
    if width < 2 or not values.shape[-1]:
        return values
    return F.max_pool1d(F.pad(values, (0, width - 1), value=-torch.inf), width, stride=1)


def without(gone: Tensor, slots: int, size: int) -> Tensor:
    """[.., slots - n * size] int64, ascending: the slots that stay when blocks `gone` [.., n] are evicted.

    The last block may be partly filled. On a CPU, raises RuntimeError for a block that does not exist.
    """
    blocks = complement(gone, slots // size)
    kept = (blocks[..., None] * size + torch.arange(size, device=gone.device)).flatten(-2)
    tail = torch.arange(slots - slots % size, slots, device=gone.device)
    return torch.cat([kept, tail.expand(*kept.shape[:-1], -1)], dim=-1)


def important(scores: Tensor) -> Tensor:
    """[L, n] bool: the half of the tokens with the higher scores, [L, n]; of equal scores, the later."""
    order = scores.sort(dim=-1, stable=True).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., scores.shape[-1] // 2 :], True)


def anchor_of(kind: Anchor, bits: Tensor, generator: torch.Generator) -> Tensor:
    """[L, B] bool: the pattern that blocks are compared with. bits: [L, N, B] bool, a pattern per block."""
    shape, device = (bits.shape[0], bits.shape[-1]), bits.device
    match kind:
        case Anchor.ZEROS:
            return torch.zeros(shape, dtype=torch.bool, device=device)
        case Anchor.ONES:
            return torch.ones(shape, dtype=torch.bool, device=device)
        case Anchor.ALTERNATING:
            return (torch.arange(shape[1], device=device) % 2 == 1).expand(shape)
        case Anchor.MEAN:
            return bits.float().mean(1) > 0.5
        case Anchor.RANDOM:
            return sent(torch.rand(shape, generator=generator) < 0.5, device)


def distances(bits: Tensor, anchor: Tensor) -> Tensor:
    """[L, N] int64: Hamming distance, in tokens, of each block of bits [L, N, B] from the anchor [L, B]."""
    return (bits != anchor[:, None]).sum(-1)


def spared(apart: Tensor, budget: int) -> Tensor:
    """[L, min(budget, n)] int64: which of n blocks stay: every n // budget-th by distance [L, n], from the first on."""
    count = apart.shape[-1]
    budget = min(budget, count)
    return apart.sort(dim=-1, stable=True).indices[..., :: count // budget][..., :budget]
