"""The same requests on engines without processes: the effect of a placement if only devices limit speed.

Every device takes steps as a stub executor does, takes prompts in order of arrival, and evicts by LRU. The policies are
the router's own, with exact and immediate knowledge of the engines' work and caches. `placed` knows the future: each
group or conversation has one engine, and the numbers of requests per engine are as equal as possible. `placed` shows
how much a policy could gain; no policy can know the future.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from bench.fleet.client import Answer
from bench.fleet.workload import Request
from scheduler.router.expected_seconds import Candidate, Match, Rates
from scheduler.router.policies import POLICIES, Policy, Prompt

PLACED = "placed (simulated)"
# Tokens that one key stands for.
_BLOCK = 16
# Weight of the newest request in the mean time of requests, as the router has it.
_WEIGHT = 0.1


@dataclass(frozen=True)
class Device:
    """Sizes and speed of an engine: see the settings of the stub executor and the scheduler."""

    step_seconds: float
    prefill_rate: float
    pool_tokens: int
    max_batched_tokens: int
    max_running: int
    max_waiting: int
    sequence_seconds: float = 0.0


class Cache:
    """The parts of prompts in a pool, by their last use; parts of running requests stay."""

    def __init__(self, tokens: int) -> None:
        self._room = tokens
        self._parts: OrderedDict[int, int] = OrderedDict()
        self._users: Counter[int] = Counter()

    @property
    def used_tokens(self) -> int:
        """Tokens of running requests; tokens of a shared part count once."""
        return sum(self._parts[content] for content in self._users)

    @property
    def kept_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(self._parts.values())

    def admit(self, request: Request) -> int | None:
        """Admits a prompt; returns its cached tokens, at most all but one. None: too few blocks are free."""
        new = sum(max(0, count - self._used(content)) for content, count in request.contents)
        if self._users and self.used_tokens + new > self._room:
            return None
        cached = self.cached(request)
        self._users.update(content for content, _ in request.contents)
        # The beginning of a prompt must count as used at least as late as its end.
        for content, count in reversed(request.contents):
            self._parts[content] = max(count, self._parts.pop(content, 0))
        excess = self.kept_tokens - self._room
        for content in [one for one in self._parts if one not in self._users]:
            if excess <= 0:
                break
            excess -= self._parts.pop(content)
        return cached

    def release(self, request: Request) -> None:
        """Ends a request; its parts stay until they are evicted for others."""
        for content, _ in request.contents:
            self._users[content] -= 1
            if not self._users[content]:
                del self._users[content]

    def _used(self, content: int) -> int:
        return self._parts[content] if content in self._users else 0

    def cached(self, request: Request) -> int:
        """Leading tokens of the prompt that need not be computed."""
        found = 0
        for content, count in request.contents:
            known = min(count, self._parts.get(content, 0))
            found += known
            if known < count:
                break
        return min(found, request.prompt_tokens - 1)


@dataclass
class Engine:
    """A device with a queue. Times count from the beginning of a stage; the cache stays from stage to stage.

    cold_at: the number of the last prompt sent to this engine of which the engine had nothing cached.
    """

    device: Device
    number: int
    cache: Cache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = Cache(self.device.pool_tokens)
        self.cold_at = 0
        self._request_seconds: float | None = None
        self.begin()

    def begin(self) -> None:
        """Begins a stage with an idle device."""
        self._now = 0.0
        self._waiting = deque[tuple[Request, Answer]]()
        self._running: list[_Running] = []

    def advance(self, to: float, until: tuple[float, float]) -> None:
        """Takes all steps that begin before this time. until: the measured time."""
        while self._now < to and (self._waiting or self._running):
            self._take_step(until)
        self._now = max(self._now, to)

    def finish(self, until: tuple[float, float]) -> None:
        """Takes steps until nothing is left."""
        while self._waiting or self._running:
            self._take_step(until)

    @property
    def has_room(self) -> bool:
        """Whether the queue has room for one more request."""
        return len(self._waiting) < self.device.max_waiting

    def offer(self, request: Request, answer: Answer) -> None:
        """Queues a request, or refuses it if the queue is full."""
        if self.has_room:
            self._waiting.append((request, answer))
        else:
            answer.code = "RESOURCE_EXHAUSTED"

    def candidate(self, request: Request) -> Candidate:
        """The engine as a policy sees it."""
        device = self.device
        queued = sum(one.prompt for one in self._running)
        cached = self.cache.cached(request)
        for other, _ in self._waiting:
            queued += other.prompt_tokens - self.cache.cached(other)
            cached = max(cached, _common(request, other))
        rates = Rates(
            1 / device.prefill_rate,
            request=self._request_seconds,
            step=device.step_seconds + device.sequence_seconds * len(self._running),
            sequence=device.sequence_seconds,
        )
        load = len(self._running) + len(self._waiting)
        match = Match(device=cached // _BLOCK)
        return Candidate(str(self.number), _BLOCK, match, queued, load, device.max_running, rates, self.cold_at)

    def _take_step(self, until: tuple[float, float]) -> None:
        waiting, running, device = self._waiting, self._running, self.device
        while waiting and len(running) < device.max_running and (one := self._admit(*waiting[0])) is not None:
            waiting.popleft()
            running.append(one)
        self._now = self._step(until)
        for ended in [one for one in running if not one.output]:
            running.remove(ended)
            self.cache.release(ended.request)
            seconds, mean = self._now - ended.answer.due, self._request_seconds
            self._request_seconds = seconds if mean is None else mean + _WEIGHT * (seconds - mean)

    def _admit(self, request: Request, answer: Answer) -> _Running | None:
        # Tokens that are being computed for another request count as cached: they are not computed again.
        cached = self.cache.admit(request)
        if cached is None:
            return None
        answer.prompt_tokens, answer.cached_tokens = request.prompt_tokens, cached
        return _Running(request, answer, request.prompt_tokens - cached, request.output_tokens)

    def _step(self, until: tuple[float, float]) -> float:
        """Runs one step; returns when it ends."""
        device, prompt = self.device, 0
        sampling, decoding = [], 0
        room = device.max_batched_tokens
        for one in self._running:
            count = min(one.prompt, room)
            if one.prompt and not count:
                continue
            decoding += not one.prompt
            one.prompt -= count
            prompt += count
            room -= count
            if not one.prompt:
                sampling.append(one)
        now = self._now + max(device.step_seconds, prompt / device.prefill_rate) + device.sequence_seconds * decoding
        for one in sampling:
            one.sample(now, until)
        return now


@dataclass
class _Running:
    """A running request. prompt: its prompt tokens to be computed. output: its output tokens to come."""

    request: Request
    answer: Answer
    prompt: int
    output: int

    def sample(self, now: float, until: tuple[float, float]) -> None:
        """Records a token."""
        answer = self.answer
        answer.first = now if answer.first is None else answer.first
        answer.last = now
        answer.output_tokens += 1
        answer.counted += until[0] <= now <= until[1]
        self.output -= 1


# Chooses the engine of a request from all engines, as they are when the request arrives.
Placement = Callable[[Request, Sequence[Engine]], int]


def placed(requests: Sequence[Request], engines: int) -> Placement:
    """Sends all requests of a group to one engine. The largest groups come first; each gets the emptiest engine."""
    sizes = Counter(request.group for request in requests)
    loads = [(0, engine) for engine in range(engines)]
    chosen: dict[str, int] = {}
    for group, size in sizes.most_common():
        load, chosen[group] = loads[0]
        heapq.heapreplace(loads, (load + size, chosen[group]))
    return lambda request, _engines: chosen[request.group]


def routed(policy: Policy) -> Placement:
    """The placement that a router's policy chooses."""
    # Only the order of these numbers matters to policies. Times would begin again with each stage.
    cold_prompts = itertools.count(1)

    def choose(request: Request, engines: Sequence[Engine]) -> int:
        prompt = Prompt(_keys(request), request.prompt_tokens, request.session, request.output_tokens)
        # As in the router, engines with a full queue are left out.
        open_ones = [engine for engine in engines if engine.has_room] or engines
        candidates = [engine.candidate(request) for engine in open_ones]
        chosen = policy.choose(prompt, candidates)
        engine = engines[int(chosen.name)]
        if not chosen.match.blocks:
            engine.cold_at = next(cold_prompts)
        return engine.number

    return choose


def simulated(policy: str) -> str:
    """The name of a simulated policy."""
    return f"{policy} (simulated)"


PLACEMENTS: dict[str, Callable[[Sequence[Request], int], Placement]] = {PLACED: placed}
for _name, _policy in POLICIES.items():
    PLACEMENTS[simulated(_name)] = partial(lambda policy, _requests, _engines: routed(policy()), _policy)


def _keys(request: Request) -> list[int]:
    """One key for each full block; each part begins with a new block."""
    return [content << 32 | index for content, count in request.contents for index in range(count // _BLOCK)]


def _common(one: Request, other: Request) -> int:
    """The number of leading tokens that two requests have in common."""
    found = 0
    for (content, count), (other_content, other_count) in zip(one.contents, other.contents, strict=False):
        if content != other_content:
            break
        found += min(count, other_count)
        if count != other_count:
            break
    return found


class Simulation:
    """A fleet of simulated engines with one placement."""

    def __init__(self, device: Device, engines: int, placement: Placement) -> None:
        self._placement = placement
        self._engines = [Engine(device, number) for number in range(engines)]

    def run(self, requests: Iterable[Request], until: tuple[float, float]) -> list[Answer]:
        """Runs one stage of requests in the order of arrival. until: the measured time."""
        for engine in self._engines:
            engine.begin()
        answers = []
        for request in requests:
            for engine in self._engines:
                engine.advance(request.at, until)
            answer = Answer(request.at, self._placement(request, self._engines))
            self._engines[answer.target].offer(request, answer)
            answers.append(answer)
        for engine in self._engines:
            engine.finish(until)
        return answers
