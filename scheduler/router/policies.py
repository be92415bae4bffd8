"""How an engine is chosen: five policies behind one interface. Pure: no clock, no I/O."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from scheduler.router.expected_seconds import Candidate, seconds_of_streams, seconds_to_compute, seconds_to_first_token

# Costs that are this close count as equal: a share of the smaller cost, plus seconds. Measurements are not more exact.
TIE_SHARE, TIE_SECONDS = 0.02, 0.002
# Extra weight of a prompt token's cost to other requests, scaled by the share of busy engines: the token delays later
# prompts, and evicts a token that has to be computed again. Found with `python -m bench fleet`.
TOKEN_COSTS_OTHERS = 2.0
# The policy `prefix` follows a prefix of at least this share of the prompt, until the loads differ by more than
# IMBALANCE samples and by IMBALANCE_FACTOR. The bounds are those of routers without events.
PREFIX_SHARE, IMBALANCE, IMBALANCE_FACTOR = 0.5, 32, 1.5
# Blocks that the policy `prefix` remembers of each engine, and sessions that the policy `cost` remembers.
REMEMBERED_BLOCKS = 1 << 16


class Prompt(NamedTuple):
    """What a policy sees of a request. keys: those of its full blocks, in order. session: empty for none.

    output_tokens: how many tokens it is expected to generate.
    """

    keys: Sequence[int]
    num_tokens: int
    session: str = ""
    output_tokens: float = 0.0


class Policy(Protocol):
    """Chooses among at least one candidate."""

    # Whether the policy considers what engines have cached.
    reads_caches: bool

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Candidate: ...


class RoundRobin:
    """Chooses each engine in turn."""

    reads_caches = False

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, _prompt: Prompt, candidates: Sequence[Candidate]) -> Candidate:
        self._turn += 1
        return candidates[self._turn % len(candidates)]


class LeastLoad:
    """Chooses the engine with the fewest samples; of several, the one with the fewest prompt tokens to compute."""

    reads_caches = False

    def choose(self, _prompt: Prompt, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=_load)


class SessionAffinity:
    """Chooses one engine for all requests of a session, by a hash that moves few sessions when engines come or go.

    Source: Thaler and Ravishankar, "A name-based mapping scheme for rendezvous" (1996). Requests without a session
    are sent by load.
    """

    reads_caches = False

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Candidate:
        if not prompt.session:
            return min(candidates, key=_load)
        session = prompt.session.encode()
        return max(candidates, key=lambda one: hashlib.sha256(session + b"\0" + one.name.encode()).digest())


class Prefix:
    """Chooses the engine that got the longest prefix of the prompt, going by this router's own decisions alone.

    If that prefix is short, or the loads differ much, chooses by load.
    """

    reads_caches = False

    def __init__(self) -> None:
        # Keys in the order of their last use.
        self._given: dict[str, OrderedDict[int, None]] = {}

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Candidate:
        loads = [candidate.load for candidate in candidates]
        chosen = min(candidates, key=_load)
        if max(loads) - min(loads) <= IMBALANCE or max(loads) <= IMBALANCE_FACTOR * min(loads):
            best = max(candidates, key=lambda one: (self._blocks(one.name, prompt.keys), -one.load))
            if self._blocks(best.name, prompt.keys) * best.block_size >= PREFIX_SHARE * prompt.num_tokens:
                chosen = best
        given = self._given.setdefault(chosen.name, OrderedDict())
        for key in prompt.keys:
            given[key] = None
            given.move_to_end(key)
        while len(given) > REMEMBERED_BLOCKS:
            given.popitem(last=False)
        if len(self._given) > 2 * len(candidates):
            # Most of the remembered engines are gone: engines in a cluster get a new address with each start.
            names = {one.name for one in candidates}
            self._given = {name: keys for name, keys in self._given.items() if name in names}
        return chosen

    def _blocks(self, name: str, keys: Sequence[int]) -> int:
        given: Mapping[int, None] = self._given.get(name, {})
        return next((index for index, key in enumerate(keys) if key not in given), len(keys))


class Cost:
    """Chooses the engine where the prompt costs the least time: until its own first token, and of other requests.

    A prompt that delays nobody goes where its first token comes soonest. The busier the engines are, the longer it
    waits for an engine with its prefix: computing the prefix elsewhere would help this prompt but slow down all. Its
    output lengthens the steps of all streams on its engine: so streams spread, even if they share a cached prefix. Ties
    go to the session's last engine, then to the engine with more of the prompt, then to the engine that was given a
    prompt of which it had nothing cached longest ago: so all caches fill evenly.
    """

    reads_caches = True

    def __init__(self) -> None:
        # The engine of each session, in order of last use.
        self._homes: OrderedDict[str, str] = OrderedDict()

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Candidate:
        busy = sum(candidate.queued_tokens > 0 for candidate in candidates) / len(candidates)
        costs = [
            seconds_to_first_token(one, prompt.num_tokens)
            + TOKEN_COSTS_OTHERS * busy * seconds_to_compute(one, prompt.num_tokens)
            + seconds_of_streams(one, prompt.output_tokens)
            for one in candidates
        ]
        bound = min(costs) * (1 + TIE_SHARE) + TIE_SECONDS
        equal = [one for one, cost in zip(candidates, costs, strict=True) if cost <= bound]
        home = self._homes.pop(prompt.session, "")
        chosen = min(equal, key=lambda one: (one.name != home, -one.match.blocks, one.cold_at, one.load))
        if prompt.session:
            self._homes[prompt.session] = chosen.name
            while len(self._homes) > REMEMBERED_BLOCKS:
                self._homes.popitem(last=False)
        return chosen


def _load(candidate: Candidate) -> tuple[int, float, float]:
    return candidate.load, candidate.queued_tokens, candidate.cold_at


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "cost": Cost,
    "prefix": Prefix,
    "session": SessionAffinity,
    "least-load": LeastLoad,
    "round-robin": RoundRobin,
}
