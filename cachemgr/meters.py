"""Prompt tokens looked up and found: over time, and per salt within a bounded set."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

# Per salt the first so many get an entry; all later ones are one together.
MAX_SALTS = 100
BUCKET_SECONDS = 10.0
MAX_WINDOW_SECONDS = 3600.0


class TokenCount(NamedTuple):
    """Prompt tokens looked up, and those of them that were found."""

    queried: int = 0
    hit: int = 0


class TokenMeter:
    """Counts lookups of one pool."""

    __slots__ = ("_buckets", "others", "salts", "total")

    def __init__(self) -> None:
        self.total = TokenCount()
        self.salts: dict[str | None, TokenCount] = {}
        self.others = TokenCount()
        # (begin of the bucket, counts), oldest first.
        self._buckets: deque[tuple[float, TokenCount]] = deque(maxlen=int(MAX_WINDOW_SECONDS / BUCKET_SECONDS) + 1)

    def add(self, now: float, salt: str | None, queried: int, hit: int) -> None:
        """A prompt was looked up."""
        self.total = _sum(self.total, queried, hit)
        if salt in self.salts or len(self.salts) < MAX_SALTS:
            self.salts[salt] = _sum(self.salts.get(salt, TokenCount()), queried, hit)
        else:
            self.others = _sum(self.others, queried, hit)
        begin = now - now % BUCKET_SECONDS
        if self._buckets and self._buckets[-1][0] >= begin:
            self._buckets[-1] = (self._buckets[-1][0], _sum(self._buckets[-1][1], queried, hit))
        else:
            self._buckets.append((begin, TokenCount(queried, hit)))

    def since(self, begin: float) -> TokenCount:
        """What was looked up from about this time on."""
        found = [count for start, count in self._buckets if start + BUCKET_SECONDS > begin]
        return TokenCount(sum(count.queried for count in found), sum(count.hit for count in found))


def _sum(count: TokenCount, queried: int, hit: int) -> TokenCount:
    return TokenCount(count.queried + queried, count.hit + hit)
