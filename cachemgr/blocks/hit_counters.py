"""Prefix hits in tokens: over time, and per salt within a bounded set."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

# Salts with a separate entry; all other salts share one entry.
MAX_SALTS = 100
# When salts compete for entries, a lookup of this age counts half.
HALF_LIFE_SECONDS = 600.0
BUCKET_SECONDS = 10.0
MAX_WINDOW_SECONDS = 3600.0


class TokenCount(NamedTuple):
    """Prompt tokens looked up, and the cached tokens among them."""

    queried: int = 0
    hit: int = 0


class TokenMeter:
    """Counts lookups of one pool.

    `salts` has the most recently active salts, each with its lookups since it got its entry; `others` has all other
    lookups. This is the space-saving algorithm with a half-life: a salt without an entry takes the entry and the weight
    of the least active salt. So a salt with more than 1 / MAX_SALTS of the discounted tokens always has an entry.
    """

    __slots__ = ("_buckets", "_halved_at", "_weights", "others", "salts", "total")

    def __init__(self) -> None:
        self.total = TokenCount()
        self.salts: dict[str | None, TokenCount] = {}
        self.others = TokenCount()
        # By salt with an entry: tokens looked up, discounted by age, plus the weight that came with the entry.
        self._weights: dict[str | None, float] = {}
        self._halved_at = 0.0
        # (begin of the bucket, counts), oldest first.
        self._buckets: deque[tuple[float, TokenCount]] = deque(maxlen=int(MAX_WINDOW_SECONDS / BUCKET_SECONDS) + 1)

    def add(self, now: float, salt: str | None, queried: int, hit: int) -> None:
        self.total = _sum(self.total, queried, hit)
        self._add_to_salt(now, salt, queried, hit)
        begin = now - now % BUCKET_SECONDS
        if self._buckets and self._buckets[-1][0] >= begin:
            self._buckets[-1] = (self._buckets[-1][0], _sum(self._buckets[-1][1], queried, hit))
        else:
            self._buckets.append((begin, TokenCount(queried, hit)))

    def _add_to_salt(self, now: float, salt: str | None, queried: int, hit: int) -> None:
        if now - self._halved_at >= HALF_LIFE_SECONDS:
            share = 0.5 ** ((now - self._halved_at) // HALF_LIFE_SECONDS)
            self._weights = {known: weight * share for known, weight in self._weights.items()}
            self._halved_at = now
        weight = self._weights.get(salt, 0.0)
        if salt not in self.salts and len(self.salts) >= MAX_SALTS:
            least = min(self._weights, key=self._weights.__getitem__)
            weight = self._weights.pop(least)
            self.others = _sum(self.others, *self.salts.pop(least))
        self._weights[salt] = weight + queried
        self.salts[salt] = _sum(self.salts.get(salt, TokenCount()), queried, hit)

    def since(self, begin: float) -> TokenCount:
        """Returns the lookups since about this time, given in seconds."""
        found = [count for start, count in self._buckets if start + BUCKET_SECONDS > begin]
        return TokenCount(sum(count.queried for count in found), sum(count.hit for count in found))


def _sum(count: TokenCount, queried: int, hit: int) -> TokenCount:
    return TokenCount(count.queried + queried, count.hit + hit)
