"""How an engine is chosen: five policies behind one interface. Pure: no clock, no I/O."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from scheduler.router.score import Candidate, seconds_to_first_token

# Costs that are this close are equal: a share of the smaller one, and seconds. Measured times are not better.
TIE_SHARE, TIE_SECONDS = 0.02, 0.002
# A session stays on its engine until another one is better by this share of the better cost, and these seconds.
STAY_SHARE, STAY_SECONDS = 0.25, 0.05
# The policy `prefix` follows a prefix of at least this share of the prompt, until the loads differ by more than so many
# samples and by this factor. These bounds are those of routers that know no events.
PREFIX_SHARE, IMBALANCE, IMBALANCE_FACTOR = 0.5, 32, 1.5
# Blocks that the policy `prefix` remembers of each engine.
REMEMBERED_BLOCKS = 1 << 16


class Prompt(NamedTuple):
    """What a policy sees of a request. keys: of its full blocks, in order. session: empty for none."""

    keys: Sequence[int]
    num_tokens: int
    session: str = ""


class Policy(Protocol):
    """Chooses among candidates, of which there is at least one."""

    # Whether it looks at what engines have cached.
    reads_caches: bool

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Candidate: ...


class RoundRobin:
    """Each engine in turn."""

    reads_caches = False

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, _prompt: Prompt, candidates: Sequence[Candidate]) -> Candidate:
        self._turn += 1
        return candidates[self._turn % len(candidates)]


class LeastLoad:
    """The engine with the fewest samples, and of these with the fewest prompt tokens to compute."""

    reads_caches = False

    def choose(self, _prompt: Prompt, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=_load)


class Session:
    """The same engine for all requests of a session, by a hash that moves few sessions when engines come or go.

    Source: Thaler and Ravishankar, "A name-based mapping scheme for rendezvous" (1996). Requests without a session go
    by load.
    """

    reads_caches = False

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Candidate:
        if not prompt.session:
            return min(candidates, key=_load)
        session = prompt.session.encode()
        return max(candidates, key=lambda one: hashlib.sha256(session + b"\0" + one.name.encode()).digest())


class Prefix:
    """The engine that was last given the longest prefix of the prompt, by this router's own decisions alone."""

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
        return chosen

    def _blocks(self, name: str, keys: Sequence[int]) -> int:
        given: Mapping[int, None] = self._given.get(name, {})
        return next((index for index, key in enumerate(keys) if key not in given), len(keys))


class Cost:
    """The engine with the shortest expected time to first token.

    Where engines are equally good, a prompt that none has cached goes to the engine that was given such a prompt
    longest ago: so all caches fill evenly. A session stays on its engine while that one is nearly as good.
    """

    reads_caches = True

    def __init__(self) -> None:
        # The engine of each session, in the order of the last use.
        self._homes: OrderedDict[str, str] = OrderedDict()

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Candidate:
        costs = [(seconds_to_first_token(candidate, prompt.num_tokens), candidate) for candidate in candidates]
        least = min(cost for cost, _ in costs)
        equal = [candidate for cost, candidate in costs if cost <= least * (1 + TIE_SHARE) + TIE_SECONDS]
        chosen = min(equal, key=lambda one: (-one.match.blocks, one.cold_at, one.load))
        if not prompt.session:
            return chosen
        home = self._homes.pop(prompt.session, "")
        bound = least * (1 + STAY_SHARE) + STAY_SECONDS
        chosen = next((one for cost, one in costs if one.name == home and cost <= bound), chosen)
        self._homes[prompt.session] = chosen.name
        while len(self._homes) > REMEMBERED_BLOCKS:
            self._homes.popitem(last=False)
        return chosen


def _load(candidate: Candidate) -> tuple[int, float, float]:
    return candidate.load, candidate.queued_tokens, candidate.cold_at


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "cost": Cost,
    "prefix": Prefix,
    "session": Session,
    "least-load": LeastLoad,
    "round-robin": RoundRobin,
}
