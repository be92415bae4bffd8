"""Blocks that are kept for their difference (Jha et al. 2025, KVCrush; as OpenVINO GenAI does it).

A block is the pattern of tokens in it that matter. Of the blocks about to go, some are spared that lie at different
distances from one pattern, the anchor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protos.kvcommon.eviction import Anchor


def important(scores: Tensor) -> Tensor:
    """[L, n] bool: the half of the tokens with the higher scores, [L, n]; of equal ones the later."""
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
            return (torch.rand(shape, generator=generator) < 0.5).to(device)


def distances(bits: Tensor, anchor: Tensor) -> Tensor:
    """[L, N] int64: in how many tokens each block of bits [L, N, B] differs from the anchor [L, B] (Hamming)."""
    return (bits != anchor[:, None]).sum(-1)


def spared(apart: Tensor, budget: int) -> Tensor:
    """[L, min(budget, n)] int64: which of n blocks stay, spread over their distances [L, n] from the first on."""
    count = apart.shape[-1]
    budget = min(budget, count)
    return apart.sort(dim=-1, stable=True).indices[..., :: count // budget][..., :budget]
