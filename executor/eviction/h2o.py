"""Heavy hitters (Zhang et al. 2023, H2O, section 4)."""

from __future__ import annotations

from executor.eviction.ranked import Watching


class HeavyHitters(Watching):
    """Keeps the tokens with the most attention, summed over all queries, beside a recent half."""
