"""Expected times of a prompt on each engine, from what the engines have measured themselves: parts of a score.

`policies.Cost` adds the parts up. Pure: no clock, no I/O.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

# Used before anything is measured: typical of an engine on a CPU. Equal for all engines, so that load decides.
PROMPT_TOKEN_SECONDS, HOST_BLOCK_SECONDS, DISK_BLOCK_SECONDS = 1e-3, 1e-3, 1e-2
# Rates of engines that differ by less than this factor count as equal.
ALIKE = 1.5
# Half-life of measurements: this long after an engine's time of a prompt token was measured, half of its difference
# from the other engines' median counts.
HALF_LIFE_SECONDS = 10.0


class Match(NamedTuple):
    """Blocks of a prompt's cached prefix on one engine, by the highest tier that holds each."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def blocks(self) -> int:
        return self.device + self.host + self.disk


class Rates(NamedTuple):
    """Measured times of an engine, in seconds; None: not measured.

    prompt_token: of a prefill's token, at the present speed of prefills. host_block, disk_block: of a block's copy to
    the device. request: from the start of a request to its end. step: of a step that only decodes. sequence: what one
    more sequence adds to such a step.
    """

    prompt_token: float | None = None
    host_block: float | None = None
    disk_block: float | None = None
    request: float | None = None
    step: float | None = None
    sequence: float | None = None


def levelled(rates: Sequence[Rates], ages: Sequence[float]) -> list[Rates]:
    """Replaces rates that are missing or close to the median by the median of all engines.

    Measurements depend on what was computed: an idle engine that computes few and short parts of prompts looks slower
    than a busy engine that computes long parts. ages: for each engine, seconds since it measured the time of a prompt
    token. The older a measurement, the closer the time is moved to the other engines' median. Otherwise, an engine that
    was slow once would get no more prompts, and could not show that it is fast again.
    """
    tokens = [one.prompt_token for one in rates]
    ordered = sorted(token for token in tokens if token is not None)
    faded = [None if token is None else _faded(token, ordered, age) for token, age in zip(tokens, ages, strict=True)]
    kept = [one._replace(prompt_token=token) for one, token in zip(rates, faded, strict=True)]
    columns = [[value for value in column if value is not None] for column in zip(*kept, strict=True)]
    medians = [median(column) if column else None for column in columns]
    return [Rates(*map(_level, one, medians)) for one in kept]


def _faded(value: float, ordered: Sequence[float], age: float) -> float:
    """Moves one of the values closer to the median of the others. ordered: all values, the lowest first."""
    if len(ordered) == 1:
        return value
    middle, weight = _median_of_others(value, ordered), float(0.5 ** (age / HALF_LIFE_SECONDS))
    return middle + (value - middle) * weight


def _median_of_others(value: float, ordered: Sequence[float]) -> float:
    """Returns the median of at least two ordered values without one value.

    Sorting the other values for each engine would take quadratic time.
    """
    without, count = bisect_left(ordered, value), len(ordered) - 1
    lower, upper = (ordered[at + (at >= without)] for at in ((count - 1) // 2, count // 2))
    return (lower + upper) / 2


def _level(value: float | None, middle: float | None) -> float | None:
    if value is None or middle is None or middle / ALIKE <= value <= middle * ALIKE:
        return middle
    return value


@dataclass(slots=True)
class Candidate:
    """An engine that can take a request, at the moment of a decision.

    queued_tokens: prompt tokens that the engine computes before those of the request. load: samples that run or wait on
    the engine. max_running: limit on its running batch; 0 if it is not known. cold_at: when the engine last got a
    prompt of which it had nothing cached.
    """

    name: str
    block_size: int
    match: Match
    queued_tokens: float
    load: int
    max_running: int
    rates: Rates
    cold_at: float

    def cached_tokens(self, prompt_tokens: int) -> int:
        """Returns how many tokens of the prompt need not be computed; the last token always must."""
        return max(0, min(self.match.blocks * self.block_size, prompt_tokens - 1))

    @property
    def token_seconds(self) -> float:
        """Time of a prompt token."""
        return self.rates.prompt_token or PROMPT_TOKEN_SECONDS


def seconds_to_compute(candidate: Candidate, prompt_tokens: int) -> float:
    """Returns the seconds to compute the tokens of the prompt that the engine has not cached."""
    return (prompt_tokens - candidate.cached_tokens(prompt_tokens)) * candidate.token_seconds


def seconds_of_streams(candidate: Candidate, output_tokens: float) -> float:
    """Returns the seconds by which a new sample and the samples of an engine delay each other's decoding, added up.

    Each token of the new sample is delayed by what the other samples add to a step, and each of their tokens by what
    the new sample adds. Until `Rates.sequence` is measured, a sequence in a decode step counts as a prompt token: a
    step computes one row for either.
    """
    sequence = candidate.token_seconds if candidate.rates.sequence is None else candidate.rates.sequence
    others = min(candidate.load, max(0, candidate.max_running - 1)) if candidate.max_running else candidate.load
    return 2 * output_tokens * others * sequence


def seconds_to_first_token(candidate: Candidate, prompt_tokens: int) -> float:
    """Returns the expected time to first token, in seconds: queue, prefill, onloading, other samples, admission.

    Running and waiting samples decode between the parts of the prefill: one step of each counts.
    """
    rates, block, token = candidate.rates, candidate.block_size, candidate.token_seconds
    # An engine computes a block, instead of onloading it, where computing is faster.
    host = min(rates.host_block or HOST_BLOCK_SECONDS, token * block)
    disk = min(rates.disk_block or DISK_BLOCK_SECONDS, token * block)
    onloading = candidate.match.host * host + candidate.match.disk * disk
    queue = candidate.queued_tokens * token
    others = candidate.load * (rates.step or 0.0)
    return queue + seconds_to_compute(candidate, prompt_tokens) + onloading + others + _wait(candidate)


def _wait(candidate: Candidate) -> float:
    """Returns the seconds until a full running batch has a place: places become free evenly as requests end."""
    ahead = candidate.load + 1 - candidate.max_running
    if not candidate.max_running or ahead <= 0:
        return 0.0
    return ahead * (candidate.rates.request or 0.0) / candidate.max_running
