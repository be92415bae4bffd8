"""ROUGE of one text against another (Lin 2004): F1 over words between blanks, lower case, nothing stemmed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence


def _f1(common: int, candidate: int, reference: int) -> float:
    return 2 * common / (candidate + reference) if common else 0.0


def _pairs(words: Sequence[str]) -> Counter[tuple[str, str]]:
    return Counter(itertools.pairwise(words))


def rouge_2(candidate: str, reference: str) -> float:
    """Pairs of neighbouring words that both have; 0 where there are none."""
    ours, theirs = _pairs(candidate.lower().split()), _pairs(reference.lower().split())
    return _f1((ours & theirs).total(), ours.total(), theirs.total())


def rouge_l(candidate: str, reference: str) -> float:
    """The longest sequence of words that both have in this order, with others between; 0 where there is none."""
    ours, theirs = candidate.lower().split(), reference.lower().split()
    longest = [0] * (len(theirs) + 1)
    for word in ours:
        before = 0
        for place, other in enumerate(theirs, start=1):
            kept = longest[place]
            longest[place] = before + 1 if word == other else max(kept, longest[place - 1])
            before = kept
    return _f1(longest[-1], len(ours), len(theirs))
