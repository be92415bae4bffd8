"""What policies that choose single tokens have in common: a score per token, and areas that always stay."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from executor.eviction.policy import Attention, Contents, Evictor, Space
from executor.eviction.scores import Sums
from kernels.cpu_decoder.launch import Totals
from protos.kvcommon.eviction import Policy


class Ranked(Evictor):
    """Evicts the tokens with the lowest scores, but for the first and the last ones; of equal ones the earlier."""

    @abstractmethod
    def scores(self, contents: Contents) -> Tensor:
        """[1 or L, 1 or Hkv, T] float32, alike where the choice is."""
        ...

    def keep(self, contents: Contents, count: int) -> Tensor:
        """[1 or L, 1 or Hkv, count] int64, ascending."""
        scores = self.scores(contents)
        layers, heads, slots = scores.shape
        positions = contents.positions[:layers, :heads]
        last = contents.computed - self.policy.recent
        protected = (positions < self.policy.start) | (positions >= last)
        worth = self.worth(contents, scores, protected, slots - count)
        return rest(lowest(worth, positions, slots - count), slots)

    def worth(self, contents: Contents, scores: Tensor, protected: Tensor, evicted: int) -> Tensor:
        """[.., T] float32: the `evicted` lowest go. protected: [.., T] bool, the tokens that always stay."""
        del contents, evicted
        return scores.masked_fill(protected, torch.inf)


class Watching(Ranked):
    """Ranks by attention that is summed up over all counted queries, each KV head on its own."""

    def __init__(self, policy: Policy, space: Space) -> None:
        super().__init__(policy, space)
        self.sums = Sums(space, space.kv_heads)

    def totals(self, slots: int) -> Totals | None:
        """The sums."""
        return Totals(self.sums.room(slots))

    def observe(self, attention: Attention | None, new: int) -> None:
        """Adds what was counted."""
        del new
        if attention is not None and not attention.added:
            self.sums.add(attention.weights)

    def scores(self, contents: Contents) -> Tensor:
        """[L, Hkv, T] float32."""
        return self.sums.values(contents.positions.shape[-1])

    def follow(self, index: Tensor) -> None:
        """Takes the sums along."""
        self.sums.follow(index)

    def mass(self, index: Tensor) -> float | None:
        """Share of the sums."""
        return self.sums.share(index)


def lowest(scores: Tensor, positions: Tensor, count: int) -> Tensor:
    """[.., count] int64: the slots with the lowest scores, in no order; of equal scores those of earlier tokens.

    scores: [.., T] float32 without NaN; positions: [.., T] int64, below 2^32.
    """
    # Integers that are ordered like the floats leave room for the position below: one comparison decides, and what a
    # device does with equal numbers plays no part.
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return ((ordered << 32) + positions).topk(count, dim=-1, largest=False, sorted=False).indices


def rest(gone: Tensor, total: int) -> Tensor:
    """[.., total - n] int64, ascending: the numbers below total that are not in gone, [.., n], all different."""
    shape, count = gone.shape[:-1], total - gone.shape[-1]
    stays = torch.ones(*shape, total, dtype=torch.bool, device=gone.device).scatter_(-1, gone, False)
    # Every number that stays has a place of its own; the others share one behind them.
    places = torch.where(stays, stays.cumsum(-1) - 1, count)
    numbers = torch.arange(total, device=gone.device).expand_as(places)
    return torch.empty(*shape, count + 1, dtype=torch.int64, device=gone.device).scatter_(-1, places, numbers)[..., :-1]
