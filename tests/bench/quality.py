"""How near a text is to another."""

from __future__ import annotations

import itertools
import re
from collections import Counter


def rouge_2(expected: str, found: str) -> float:
    """ROUGE-2: the F1 measure of pairs of neighbouring words that both texts have; 1 for two texts without any."""
    one, other = _pairs(expected), _pairs(found)
    if not one and not other:
        return 1.0
    return 2 * (one & other).total() / (one.total() + other.total())


def _pairs(text: str) -> Counter[tuple[str, str]]:
    return Counter(itertools.pairwise(re.findall(r"\w+", text.lower())))
