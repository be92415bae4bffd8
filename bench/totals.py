"""The tokens that all requests keep in the cache together, computed from the times of their tokens."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

# Tokens kept of a sequence, by the number of its computed tokens.
Kept = Callable[[int], int]


@dataclass(frozen=True)
class Course:
    """One request: the length of its prompt, when each token of its output came, how often it was preempted."""

    prompt: int
    times: Sequence[float]
    preemptions: int = 0

    def waits(self) -> set[int]:
        """Tokens after which the request was preempted: the tokens with the longest waits, one for each preemption."""
        gaps = [after - before for before, after in itertools.pairwise(self.times)]
        return set(sorted(range(len(gaps)), key=gaps.__getitem__, reverse=True)[: self.preemptions])


def totals(courses: Sequence[Course], kept: Kept) -> list[tuple[float, int]]:
    """Tokens that all requests keep together, after each change: (time, tokens), in order of time.

    With its n-th token of output, a request has computed its prompt and n - 1 tokens more. A request that ends or is
    preempted keeps these tokens for half of the median time between tokens, because sequences that computed in the same
    step get their tokens one after the other, but have them in the cache together.
    """
    gaps = [after - before for course in courses for before, after in itertools.pairwise(course.times)]
    hold = statistics.median(gaps) / 2 if gaps else 0.0
    changes: list[tuple[float, int]] = []
    for course in courses:
        waits, has = course.waits(), 0
        for place, time in enumerate(course.times):
            now = kept(course.prompt + place)
            changes.append((time, now - has))
            has = now
            if place in waits or place == len(course.times) - 1:
                changes.append((time + hold, -has))
                has = 0
    total, found = 0, []
    for time, change in sorted(changes, key=itemgetter(0)):
        total += change
        found.append((time, total))
    return found


def largest(courses: Sequence[Course], kept: Kept) -> int:
    """The largest number of tokens that all requests keep together at any time."""
    return max(total for _, total in totals(courses, kept))


def agreement(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> float:
    """Share of all positions of all outputs that have the same token."""
    pairs = [pair for one, other in zip(expected, found, strict=True) for pair in zip(one, other, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)
