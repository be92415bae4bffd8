"""Adaptive R-KV, as in OpenVINO GenAI (after Cai et al. 2025, R-KV, section 3)."""

from __future__ import annotations

from collections import deque

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.eviction.areas import POOLED, Blocks, pool
from executor.eviction.base import KvShape, KvView
from kernels.scores import SequenceScores
from protos.kvcommon.eviction import Policy


class AdaptiveRkv(Blocks):
    """Keeps blocks up to the share of the attention that the policy asks for, then by the diversity of their keys."""

    def __init__(self, policy: Policy, shape: KvShape, pooled: int = POOLED) -> None:
        super().__init__(policy, shape, pooled)
        self._recent: deque[Tensor] = deque(maxlen=policy.mass_steps)

    def observe(self, scores: SequenceScores | None, new: int) -> None:
        """Keeps the scores of the last steps."""
        del new
        if scores is not None:
            self._recent.append(self.tracked(scores))

    def reindex(self, index: Tensor) -> None:
        start = self.policy.start
        kept = index[:, :1, start:] - start
        tracked = self._slots - start
        for step, scores in enumerate(self._recent):
            self._recent[step] = F.pad(scores, (0, tracked - scores.shape[-1])).gather(-1, kept)

    def scores(self, slots: int) -> Tensor:
        """[L, slots] float32: the mean over the last `mass_steps` steps, 0 for tokens that came later."""
        start = self.policy.start
        total = torch.zeros(self.shape.layers, 1, max(slots, start), dtype=torch.float32, device=self.shape.device)
        for scores in self._recent:
            total[..., start : start + scores.shape[-1]] += scores
        total[..., start:] = pool(total[..., start:] / max(len(self._recent), 1), self.pooled)
        return total[:, 0, :slots]

    def least(self, view: KvView, area: range, count: int) -> Tensor:
        """[L, count] int64. Raises ValueError when there are not keys for all slots."""
        slots = view.positions.shape[-1]
        keys = view.keys()
        if keys.shape[-2] != slots:
            raise ValueError(f"there are keys for {keys.shape[-2]} of {slots} slots, and diversity needs all")
        size = self.policy.block_size
        among = slice(area.start * size, area.stop * size)
        # Layer by layer, because the intermediate result has a number for every pair of tokens.
        diversity = torch.stack([key_diversity(layer[:, among], size) for layer in keys])
        worth = self.of_blocks(self.scores(slots), area).sum(-1)
        return least_needed(worth, diversity, self.policy.mass, count)


def key_diversity(keys: Tensor, size: int) -> Tensor:
    """[n / size, n] float32: minus how alike the keys of a block are to each token's; keys: [H, n, D] of a layer."""
    normal = F.normalize(keys.float(), dim=-1)
    alike = normal @ normal.transpose(-1, -2)
    alike.diagonal(dim1=-2, dim2=-1).zero_()
    alike.masked_fill_(alike < alike.mean(-1, keepdim=True), 0.0)
    return -alike.mean(0).reshape(-1, size, alike.shape[-1]).sum(1)


def least_needed(worth: Tensor, diversity: Tensor, mass: float, count: int) -> Tensor:
    """[L, count] int64: the evicted blocks. worth: [L, N]; diversity: [L, N, N * B]."""
    certain = heaviest(worth, mass, worth.shape[-1] - count)
    return least_diverse(filtered(diversity, ~certain), certain, count)


def heaviest(worth: Tensor, mass: float, most: int) -> Tensor:
    """[L, N] bool: the fewest blocks with that share of all worth [L, N], at most `most`; of equal blocks the later."""
    order = worth.sort(dim=-1, stable=True).indices.flip(-1)
    ordered = worth.double().gather(-1, order)
    before = ordered.cumsum(-1) - ordered
    taken = before < mass * ordered.sum(-1, keepdim=True)
    taken[..., most:] = False
    return torch.zeros_like(taken).scatter_(-1, order, taken)


def filtered(diversity: Tensor, candidates: Tensor) -> Tensor:
    """[L, N] float32: a block's mean diversity [L, N, N * B] to the tokens of candidates only, [L, N] bool."""
    columns = candidates.repeat_interleave(diversity.shape[-1] // candidates.shape[-1], dim=-1)[:, None]
    return diversity.masked_fill(~columns, 0.0).sum(-1) / columns.sum(-1).clamp(min=1)


def least_diverse(diversity: Tensor, certain: Tensor, count: int) -> Tensor:
    """[L, count] int64: of the blocks that are not certain to stay, [L, N] bool, the least diverse; of equal ones the
    first. diversity: [L, N]."""
    return diversity.masked_fill(certain, torch.inf).sort(dim=-1, stable=True).indices[:, :count]
