"""Positions without gaps: how far keys turn when tokens before them are evicted."""

from __future__ import annotations

from torch import Tensor


def turns(angles: Tensor) -> tuple[Tensor, Tensor]:
    """What the keys that stay are to be rotated to, and by how many places towards smaller ones; both as `angles`.

    angles: [.., n] int64, the positions that they are rotated to now; any order, no two equal.
    """
    after = angles.argsort(-1).argsort(-1)
    return after, angles - after
