"""Scores per slot, and the choice of slots by score."""

from __future__ import annotations

import torch
from torch import Tensor

from executor.eviction.base import KvShape
from executor.step import uniform
from protos.kvcommon.eviction import Policy

_LEAST_SLOTS = 64


class SlotScores:
    """Attention that slots have gathered, [L, H, T] float32; 0 for slots that nothing was added to."""

    def __init__(self, shape: KvShape, heads: int) -> None:
        # Longer than needed, filled with 0: a step adds in place, and new slots need no call.
        self._held = torch.zeros(shape.layers, heads, _LEAST_SLOTS, dtype=torch.float32, device=shape.device)

    def at_least(self, slots: int) -> Tensor:
        """[L, H, at least slots] contiguous: the sums themselves, valid until a call for more slots."""
        held = self._held.shape[-1]
        if slots > held:
            longer = self._held.new_zeros(*self._held.shape[:-1], max(slots, 2 * held))
            longer[..., :held] = self._held
            self._held = longer
        return self._held

    def values(self, slots: int) -> Tensor:
        """[L, H, slots]: a view, valid until a call for more slots."""
        return self.at_least(slots)[..., :slots]

    def add(self, values: Tensor, first: int = 0) -> None:
        """values: [L, H, n] for the n slots from `first` on."""
        self.values(first + values.shape[-1])[..., first:].add_(values)

    def clear(self) -> None:
        self._held.zero_()

    def halve(self) -> None:
        self._held.mul_(0.5)

    def reindex(self, index: Tensor) -> None:
        """Slot i gets the value of slot index[..., i]; index: [L, H, T'] int64, below the slots of earlier calls."""
        kept = self._held.gather(-1, index)
        self._held.zero_()
        self._held[..., : kept.shape[-1]] = kept

    def share(self, index: Tensor) -> Tensor:
        """[] float64: the share of the total of slots `index`, [1 or L, 1 or H, T'] int64; NaN if all are 0."""
        return share(self._held, index)


def share(scores: Tensor, index: Tensor) -> Tensor:
    """[] float64: the share of scores [L, H, T] of slots `index`, [1 or L, 1 or H, T'] int64; NaN if all are 0."""
    kept = scores.gather(-1, index.expand(*scores.shape[:-1], -1))
    return kept.sum().double() / scores.sum().double()


def lowest(scores: Tensor, positions: Tensor, count: int) -> Tensor:
    """[.., count] int64: the slots with the lowest scores, in no order; of equal scores, those of earlier tokens.

    scores: [.., T] float32 without NaN; positions: [.., T] int64, below 2^32.
    """
    # Integers that are ordered like the floats leave bits for the position below: one comparison decides, and
    # the order of equal numbers on a device does not matter.
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return ((ordered << 32) + positions).topk(count, dim=-1, largest=False, sorted=False).indices


def complement(gone: Tensor, total: int) -> Tensor:
    """[.., total - n] int64, ascending: the numbers below total that are not in gone, [.., n], all different."""
    shape, count = gone.shape[:-1], total - gone.shape[-1]
    stays = torch.ones(*shape, total, dtype=torch.bool, device=gone.device).scatter_(-1, gone, False)
    # Every number that stays gets its own index; the others share the index after the last of these.
    places = torch.where(stays, stays.cumsum(-1) - 1, count)
    numbers = torch.arange(total, device=gone.device).expand_as(places)
    return torch.empty(*shape, count + 1, dtype=torch.int64, device=gone.device).scatter_(-1, places, numbers)[..., :-1]


def generator(policy: Policy, computed: int) -> torch.Generator:
    """Returns a generator on the CPU that depends only on the policy's seed and the number of computed tokens."""
    # The generator uses 32 bits of a seed, but all 64 bits of the policy's seed must count.
    return torch.Generator().manual_seed(int(uniform(policy.seed, computed) * (1 << 32)))
