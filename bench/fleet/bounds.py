"""The same requests on engines that cost nothing to run: what a placement gives where only the devices limit.

Every device takes its steps as a stub executor does, prompts in order of arrival, and keeps what was used last.
`placed` knows the future: each group or conversation has one engine, and engines get equally many requests, as nearly
as that goes. It says what there is to win; no policy can know it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.fleet.client import Answer
from bench.fleet.workload import Request

PLACED, IN_TURN = "placed (simulated)", "in turn (simulated)"

# The engine of a request.
Placement = Callable[[Request], int]


@dataclass(frozen=True)
class Device:
    """What an engine has: see the stub executor's settings and the scheduler's."""

    step_seconds: float
    prefill_rate: float
    pool_tokens: int
    max_batched_tokens: int
    max_running: int
    max_waiting: int


def in_turn(_requests: Sequence[Request], engines: int) -> Placement:
    """One engine after the other."""
    numbers = itertools.cycle(range(engines))
    return lambda _request: next(numbers)


def placed(requests: Sequence[Request], engines: int) -> Placement:
    """All requests of a group go to one engine; the largest groups choose first, the emptiest engine."""
    sizes = Counter(request.group for request in requests)
    loads = [(0, engine) for engine in range(engines)]
    chosen: dict[str, int] = {}
    for group, size in sizes.most_common():
        load, chosen[group] = loads[0]
        heapq.heapreplace(loads, (load + size, chosen[group]))
    return lambda request: chosen[request.group]


PLACEMENTS: dict[str, Callable[[Sequence[Request], int], Placement]] = {PLACED: placed, IN_TURN: in_turn}


class Cache:
    """The parts of prompts in a pool, by their last use; parts of requests that run stay."""

    def __init__(self, tokens: int) -> None:
        self._room = tokens
        self._parts: OrderedDict[int, int] = OrderedDict()
        self._users: Counter[int] = Counter()

    @property
    def used_tokens(self) -> int:
        """Tokens of requests that run; those of parts that several have count once."""
        return sum(self._parts[content] for content in self._users)

    @property
    def kept_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(self._parts.values())

    def admit(self, request: Request) -> int | None:
        """Admits a prompt; returns its cached tokens, at most one less than it has. None: too few blocks are free."""
        new = sum(max(0, count - self._used(content)) for content, count in request.contents)
        if self._users and self.used_tokens + new > self._room:
            return None
        cached = self._cached(request)
        self._users.update(content for content, _ in request.contents)
        # The end of a prompt is used no later than its beginning.
        for content, count in reversed(request.contents):
            self._parts[content] = max(count, self._parts.pop(content, 0))
        excess = self.kept_tokens - self._room
        for content in [one for one in self._parts if one not in self._users]:
            if excess <= 0:
                break
            excess -= self._parts.pop(content)
        return cached

    def release(self, request: Request) -> None:
        """A request has ended; its parts stay until they are evicted for others."""
        for content, _ in request.contents:
            self._users[content] -= 1
            if not self._users[content]:
                del self._users[content]

    def _used(self, content: int) -> int:
        return self._parts[content] if content in self._users else 0

    def _cached(self, request: Request) -> int:
        found = 0
        for content, count in request.contents:
            known = min(count, self._parts.get(content, 0))
            found += known
            if known < count:
                break
        return min(found, request.prompt_tokens - 1)


@dataclass
class Engine:
    """A device with a queue. Times go on from stage to stage; the cache stays."""

    device: Device
    cache: Cache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = Cache(self.device.pool_tokens)

    def run(self, requests: Sequence[tuple[Request, Answer]], until: tuple[float, float]) -> None:
        """Answers all of them, in order of arrival, from an idle device on. until: the measured time."""
        arriving, waiting = deque(requests), deque[tuple[Request, Answer]]()
        running: list[_Running] = []
        now, device = 0.0, self.device
        while arriving or waiting or running:
            if not running and not waiting:
                now = max(now, arriving[0][0].at)
            while arriving and arriving[0][0].at <= now:
                request, answer = arriving.popleft()
                if len(waiting) >= device.max_waiting:
                    answer.code = "RESOURCE_EXHAUSTED"
                else:
                    waiting.append((request, answer))
            while waiting and len(running) < device.max_running and (one := self._admit(*waiting[0])) is not None:
                waiting.popleft()
                running.append(one)
            now = self._step(running, now, until)
            for ended in [one for one in running if not one.output]:
                running.remove(ended)
                self.cache.release(ended.request)

    def _admit(self, request: Request, answer: Answer) -> _Running | None:
        # What is still computed for another request counts as cached: it is not computed again.
        cached = self.cache.admit(request)
        if cached is None:
            return None
        answer.prompt_tokens, answer.cached_tokens = request.prompt_tokens, cached
        return _Running(request, answer, request.prompt_tokens - cached, request.output_tokens)

    def _step(self, running: list[_Running], now: float, until: tuple[float, float]) -> float:
        """Runs one step; returns when it ends."""
        device, prompt = self.device, 0
        sampling = []
        room = device.max_batched_tokens
        for one in running:
            count = min(one.prompt, room)
            if one.prompt and not count:
                continue
            one.prompt -= count
            prompt += count
            room -= count
            if not one.prompt:
                sampling.append(one)
        now += max(device.step_seconds, prompt / device.prefill_rate)
        for one in sampling:
            one.sample(now, until)
        return now


@dataclass
class _Running:
    """A request that runs: tokens of its prompt still to be computed, tokens of its output still to come."""

    request: Request
    answer: Answer
    prompt: int
    output: int

    def sample(self, now: float, until: tuple[float, float]) -> None:
        """A token has come."""
        answer = self.answer
        answer.first = now if answer.first is None else answer.first
        answer.last = now
        answer.output_tokens += 1
        answer.counted += until[0] <= now <= until[1]
        self.output -= 1


class Simulation:
    """A fleet of such devices with one placement."""

    def __init__(self, device: Device, engines: int, placement: Placement) -> None:
        self._device = device
        self._count = engines
        self._placement = placement
        self.purge()

    def purge(self) -> None:
        """Empties the caches."""
        self._engines = [Engine(self._device) for _ in range(self._count)]

    def run(self, requests: Sequence[Request], until: tuple[float, float]) -> list[Answer]:
        """One stage."""
        answers = [Answer(one.at, self._placement(one)) for one in requests]
        for number, engine in enumerate(self._engines):
            pairs = zip(requests, answers, strict=True)
            engine.run([(one, answer) for one, answer in pairs if answer.target == number], until)
        return answers
