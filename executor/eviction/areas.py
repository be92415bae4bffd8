"""Eviction of whole blocks between a start and a recent area, as in OpenVINO GenAI's cache eviction."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.eviction.kvcrush import anchor_of, distances, important, spared
from executor.eviction.policy import Attention, Contents, Evictor, Space
from executor.eviction.random_choice import source
from executor.eviction.ranked import rest
from executor.eviction.scores import Sums, share
from kernels.cpu_decoder.launch import Totals
from protos.kvcommon.eviction import Kind, KvCrush, Policy

# Tokens over which the maximum of scores is taken.
POOLED = 7


class Blocks(Evictor):
    """Evicts blocks, each layer its own. The start area is always there, so its tokens have the first slots."""

    ordered: ClassVar[bool] = True

    def __init__(self, policy: Policy, space: Space, pooled: int = POOLED) -> None:
        """pooled: tokens over which the maximum of scores is taken."""
        super().__init__(policy, space)
        self.pooled = pooled
        self._slots = 0

    def evictable(self, slots: int) -> range:
        """Blocks that may go of so many slots: neither start nor recent area, and never the partly filled last one."""
        size = self.policy.block_size
        return range(self.policy.start // size, slots // size - self.policy.recent // size)

    def keep(self, contents: Contents, count: int) -> Tensor:
        """[L, 1, count] int64, ascending. Raises ValueError for anything but whole evictable blocks."""
        slots, size = contents.positions.shape[-1], self.policy.block_size
        blocks, more = divmod(slots - count, size)
        area = self.evictable(slots)
        if more or blocks > len(area):
            raise ValueError(f"cannot evict {slots - count} tokens in blocks of {size} out of {len(area)} blocks")
        self._slots = slots
        gone = torch.empty(self.space.layers, 0, dtype=torch.int64, device=self.space.device)
        if blocks:
            gone = area.start + self.least(contents, area, blocks)
        return without(gone, slots, size)[:, None]

    def mass(self, index: Tensor) -> float | None:
        """Share of the scores behind the start area; of the slots that there were when `keep` was asked."""
        return share(self.scores(self._slots)[:, None], index)

    @abstractmethod
    def scores(self, slots: int) -> Tensor:
        """[L, slots] float32, pooled; 0 in the start area."""
        ...

    @abstractmethod
    def least(self, contents: Contents, area: range, count: int) -> Tensor:
        """[L, count] int64: which blocks of the area go, as their numbers within it."""
        ...

    def tracked(self, attention: Attention) -> Tensor:
        """[L, 1, n] float32: attention of a layer to the n tokens behind the start area, summed over heads."""
        return attention.weights[..., self.policy.start :].sum(1, keepdim=True)

    def of_blocks(self, values: Tensor, area: range) -> Tensor:
        """[L, blocks of the area, B] of values [L, slots]."""
        size = self.policy.block_size
        return values[:, area.start * size : area.stop * size].reshape(-1, len(area), size)


class Areas(Blocks):
    """Ranks blocks by attention, summed (SUM) and divided by the queries that saw a token (NORM_SUM)."""

    def __init__(self, policy: Policy, space: Space, pooled: int = POOLED) -> None:
        super().__init__(policy, space, pooled)
        self._sums = Sums(space, 1)
        # Place of the first query that counted; all later ones do.
        self._first: int | None = None

    def totals(self, slots: int) -> Totals:
        """The sums, which are pooled."""
        return Totals(self._sums.room(slots), self.policy.start, max(1, self.pooled))

    def observe(self, attention: Attention | None, new: int) -> None:
        """Adds the step's scores, pooled."""
        del new
        if attention is None:
            return
        if self._first is None:
            if not attention.rows:
                return
            # Nothing is evicted before, so slots are places.
            self._first = attention.weights.shape[-1] - attention.rows
        if not attention.added:
            self._sums.add(pool(self.tracked(attention), self.pooled), self.policy.start)

    def follow(self, index: Tensor) -> None:
        """Takes the sums along."""
        self._sums.follow(index[:, :1])

    def scores(self, slots: int) -> Tensor:
        """[L, slots] float32."""
        return self._sums.values(slots)[:, 0]

    def counts(self, contents: Contents) -> Tensor:
        """[L, T] int64: counted queries that saw each token."""
        return contents.computed - contents.positions[:, 0].clamp(min=self._first or 0)

    def least(self, contents: Contents, area: range, count: int) -> Tensor:
        """[L, count] int64: the blocks with the lowest scores; of equal ones the first."""
        scores = self.scores(contents.positions.shape[-1])
        values = scores / self.counts(contents) if self.policy.kind is Kind.NORM_SUM else scores
        order = self.of_blocks(values, area).sum(-1).sort(dim=-1, stable=True).indices
        crush = self.policy.crush
        if crush is None:
            return order[:, :count]
        going = order[:, : count + crush.budget].sort(dim=-1).values
        return self._crushed(going, self.of_blocks(scores, area), crush, contents.computed)

    def _crushed(self, going: Tensor, scores: Tensor, crush: KvCrush, computed: int) -> Tensor:
        """[L, n - budget]: what is left of the blocks about to go, [L, n] ascending. scores: [L, N, B]."""
        bits = important(scores.flatten(1)).view_as(scores)
        anchor = anchor_of(crush.anchor, bits, source(self.policy, computed))
        kept = spared(distances(bits, anchor).gather(-1, going), crush.budget)
        return going.gather(-1, rest(kept, going.shape[-1]))


def pool(values: Tensor, width: int) -> Tensor:
    """[L, 1, n]: the largest of values [L, 1, n] at a place and the width - 1 behind it, across blocks."""
    if width < 2 or not values.shape[-1]:
        return values
    return F.max_pool1d(F.pad(values, (0, width - 1), value=-torch.inf), width, stride=1)


def without(gone: Tensor, slots: int, size: int) -> Tensor:
    """[.., slots - n * size] int64, ascending: slots of what stays when whole blocks go, [.., n]; the last one may be
    partly filled. On a CPU, raises RuntimeError for a block that there is not."""
    blocks = rest(gone, slots // size)
    kept = (blocks[..., None] * size + torch.arange(size, device=gone.device)).flatten(-2)
    tail = torch.arange(slots - slots % size, slots, device=gone.device)
    return torch.cat([kept, tail.expand(*kept.shape[:-1], -1)], dim=-1)
