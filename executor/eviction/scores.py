"""Numbers that policies keep of every slot."""

from __future__ import annotations

import torch
from torch import Tensor

from executor.eviction.policy import Space

_LEAST_SLOTS = 64


class Sums:
    """Attention that slots have gathered, [L, H, T] float32; 0 for slots that nothing was added to."""

    def __init__(self, space: Space, heads: int) -> None:
        # Longer than what is used, and 0 there: a step adds in place, and no slot has to be announced.
        self._held = torch.zeros(space.layers, heads, _LEAST_SLOTS, device=space.device)

    def room(self, slots: int) -> Tensor:
        """[L, H, at least slots] contiguous: the sums themselves, until more slots are asked for."""
        room = self._held.shape[-1]
        if slots > room:
            longer = self._held.new_zeros(*self._held.shape[:-1], max(slots, 2 * room))
            longer[..., :room] = self._held
            self._held = longer
        return self._held

    def values(self, slots: int) -> Tensor:
        """[L, H, slots]: a view, until more slots are asked for."""
        return self.room(slots)[..., :slots]

    def add(self, values: Tensor, first: int = 0) -> None:
        """values: [L, H, n] for the n slots from `first` on."""
        self.values(first + values.shape[-1])[..., first:].add_(values)

    def clear(self) -> None:
        """Makes all of them 0."""
        self._held.zero_()

    def follow(self, index: Tensor) -> None:
        """Slot i has what slot index[..., i] had; [L, H, T'] int64, of slots that were asked for before."""
        kept = self._held.gather(-1, index)
        self._held.zero_()
        self._held[..., : kept.shape[-1]] = kept

    def share(self, index: Tensor) -> float | None:
        """What part of all there is belongs to slots index, [1 or L, 1 or H, T'] int64; None when there is nothing."""
        return share(self._held, index)


def share(scores: Tensor, index: Tensor) -> float | None:
    """What part of scores [L, H, T] belongs to slots index, [1 or L, 1 or H, T'] int64; None when all are 0."""
    total = float(scores.sum())
    kept = scores.gather(-1, index.expand(*scores.shape[:-1], -1))
    return float(kept.sum()) / total if total else None
