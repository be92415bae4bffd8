"""ROUGE of two texts (Lin 2004): F1 over words between blanks, in lower case, without stemming."""

from __future__ import annotations

from bench.research.quality import pairs_f1


def rouge_2(candidate: str, reference: str) -> float:
    """F1 of pairs of neighbouring words that both texts have; 0 if there are none."""
    return pairs_f1(candidate.lower().split(), reference.lower().split(), neither=0.0)


def rouge_l(candidate: str, reference: str) -> float:
    """F1 of the longest common subsequence of words; 0 if there is none."""
    ours, theirs = candidate.lower().split(), reference.lower().split()
    longest = [0] * (len(theirs) + 1)
    for word in ours:
        before = 0
        for place, other in enumerate(theirs, start=1):
            kept = longest[place]
            longest[place] = before + 1 if word == other else max(kept, longest[place - 1])
            before = kept
    return 2 * longest[-1] / (len(ours) + len(theirs)) if longest[-1] else 0.0
