"""The workload of a fleet: groups with a long prefix each, or a recorded trace; the same for every policy."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.trace_file import BLOCK_TOKENS, read

# Range of ids that take two bytes in a message.
_LEAST_ID, _MOST_ID = 128, (1 << 14) - 1
# The groups of bursts, one for each stage, begin with this word.
BURST = "burst"
BURST_SECONDS = 1.0
# First numbers of contents that only one request has, and of contents of a trace.
_OWN, _TRACED = 1_000_000, 1_000_000_000


@dataclass(frozen=True)
class Request:
    """A prompt, when it arrives, and how many tokens are to be generated.

    at: seconds after the stage begins. group: its requests have the same beginning. session: the user that asks.
    contents: the prompt's parts, each as a number that identifies its tokens, and their count.
    """

    at: float
    group: str
    session: str
    contents: tuple[tuple[int, int], ...]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(count for _, count in self.contents)

    def tokens(self) -> list[int]:
        """The prompt's ids."""
        return list(itertools.chain.from_iterable(itertools.starmap(_ids, self.contents)))


@functools.lru_cache(maxsize=1024)
def _ids(content: int, count: int) -> list[int]:
    """The first ids of a content: a longer part of it begins with a shorter one."""
    return random.Random(content).choices(range(_LEAST_ID, _MOST_ID), k=count)


@dataclass(frozen=True)
class Stage:
    """Requests that arrive one after the other, independently of earlier requests.

    rate: the name in tables. measured_from: seconds; earlier requests warm the caches and count separately.
    cold: the stage begins with empty caches and a new router.
    """

    rate: str
    requests: Sequence[Request]
    seconds: float
    measured_from: float = 0.0
    cold: bool = False


@dataclass(frozen=True)
class Groups:
    """Groups that each have a prefix, and users of each group who send a new prompt every time.

    burst: requests of one group, new in each stage, within a second in the stage's middle, each of a different user.
    """

    groups: int = 150
    users: int = 5
    prefix_tokens: int = 6_000
    question_tokens: int = 1_200
    output_tokens: int = 64
    seed: int = 1
    burst: int = 0

    def stages(self, rates: Iterable[float], seconds: float, cold_rate: float) -> Iterator[Stage]:
        """A cold start with about twice as many requests as groups, then a stage for each rate, with warm caches."""
        cold_seconds = 2 * self.groups / cold_rate
        yield Stage("cold", self._poisson(0, cold_rate, cold_seconds), cold_seconds, cold=True)
        for number, rate in enumerate(rates, 1):
            requests = self._poisson(number, rate, seconds)
            requests += self._burst(number, seconds / 2, len(requests))
            yield Stage(f"{rate:g}", sorted(requests, key=lambda one: one.at), seconds)

    def _poisson(self, stage: int, rate: float, seconds: float) -> list[Request]:
        rng = random.Random(f"{self.seed} {stage}")
        requests: list[Request] = []
        at = rng.expovariate(rate)
        while at < seconds:
            group, user = rng.randrange(self.groups), rng.randrange(self.users)
            question = _OWN * (stage + 1) + len(requests)
            contents = ((group, self.prefix_tokens), (question, self.question_tokens))
            name = f"group {group}"
            requests.append(Request(at, name, f"{name} user {user}", contents, self.output_tokens))
            at += rng.expovariate(rate)
        return requests

    def _burst(self, stage: int, begin: float, others: int) -> list[Request]:
        """Requests of a new group. others: the number of the other requests of the stage."""
        rng, name = random.Random(f"{self.seed} {BURST} {stage}"), f"{BURST} {stage}"
        prefix = (self.groups + stage, self.prefix_tokens)
        requests = []
        for number in range(self.burst):
            question = (_OWN * (stage + 1) + others + number, self.question_tokens)
            at = begin + rng.uniform(0, BURST_SECONDS)
            requests.append(Request(at, name, f"{name} user {number}", (prefix, question), self.output_tokens))
        return requests


@dataclass(frozen=True)
class Trace:
    """A recorded trace with lengths and times divided by `scale`, so that tokens per second stay the same.

    A conversation is a session. The first third of the window warms the caches.
    """

    path: Path
    scale: int = 4
    begin: float = 0.0

    def stages(self, speeds: Iterable[float], seconds: float) -> Iterator[Stage]:
        """The same requests at every speed, with an empty cache each time; at speed 1 they take `seconds`."""
        requests = []
        for request in read(self.path):
            at = (request.time - self.begin) / self.scale
            if not 0 <= at < seconds:
                continue
            size, length = BLOCK_TOKENS // self.scale, -(-request.input_length // self.scale)
            counts = (min(size, length - index * size) for index in range(len(request.hash_ids)))
            contents = tuple(
                (_TRACED + number, count) for number, count in zip(request.hash_ids, counts, strict=True) if count > 0
            )
            output = max(1, request.output_length // self.scale)
            name = f"conversation {request.conversation}"
            requests.append(Request(at, name, name, contents, output))
        for speed in speeds:
            faster = [replace(one, at=one.at / speed) for one in requests]
            yield Stage(f"{speed:g}x", faster, seconds / speed, seconds / speed / 3, cold=True)
