"""Similarity of two texts."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence


def rouge_2(expected: str, found: str) -> float:
    """ROUGE-2 of words without punctuation; 1 for two texts without any pairs, as they do not differ."""
    return pairs_f1(_words(expected), _words(found), neither=1.0)


def pairs_f1(ours: Sequence[str], theirs: Sequence[str], *, neither: float) -> float:
    """F1 of pairs of neighbouring words, each counted as often as both texts have it. neither: F1 without any pair."""
    one, other = Counter(itertools.pairwise(ours)), Counter(itertools.pairwise(theirs))
    total = one.total() + other.total()
    return 2 * (one & other).total() / total if total else neither


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
