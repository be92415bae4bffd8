"""The angles of rotary embeddings by their definition; the executor takes the angles of its model."""

from __future__ import annotations

import torch
from torch import Tensor


def frequencies(head_dim: int, theta: float) -> Tensor:
    """[D / 2] float32, radians per position: theta^(-2j / D) (Su et al. 2021, RoFormer, section 3.2.2).

    Raises ValueError for an odd size of a head and for a theta that is not positive.
    """
    if head_dim < 1 or head_dim % 2:
        raise ValueError(f"head_dim must be even and positive, not {head_dim}")
    if not theta > 0:
        raise ValueError(f"theta must be positive, not {theta}")
    return (theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)).float()
