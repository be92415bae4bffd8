"""Bootstrap intervals over text windows. Windows vary more than policies, so policies are compared within windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000
_SEED = 1


@dataclass(frozen=True)
class Interval:
    """A figure and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def mean(values: Sequence[float]) -> Interval:
    """The mean over windows, with its bootstrap interval. Lists of equal length use the same resamples."""
    known = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(_SEED).integers(len(known), size=(RESAMPLES, len(known)))
    low, high = np.percentile(known[drawn].mean(axis=1), (2.5, 97.5))
    return Interval(float(known.mean()), float(low), float(high))


def ratio(losses: Sequence[float], others: Sequence[float]) -> Interval:
    """The ratio of two perplexities, from mean negative log likelihoods of the same windows.

    Both are resampled together (paired bootstrap). Raises ValueError for different numbers of windows.
    """
    paired = mean([one - other for one, other in zip(losses, others, strict=True)])
    return Interval(*(float(np.exp(value)) for value in (paired.value, paired.low, paired.high)))
