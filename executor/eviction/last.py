"""Extreme decode-only eviction (Metel et al. 2025, Batch-Max, section 4)."""

from __future__ import annotations

from executor.eviction.window import SlidingWindow


class Last(SlidingWindow):
    """Keeps the newest token: a window of one, that a sequence leaves again and again."""
