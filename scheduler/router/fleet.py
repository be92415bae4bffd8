"""Several engines as one: chooses an engine for each sample, and starts it elsewhere when that one is lost."""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from protos.generation.v1 import generation_pb2 as pb
from scheduler.frontend.engine import Loads
from scheduler.metrics import StepLoad
from scheduler.request import AdmissionAttempt
from scheduler.router.engine_link import EngineLink
from scheduler.router.messages import start_request
from scheduler.router.metrics import RouterMetrics
from scheduler.router.notes import Note, Notes
from scheduler.router.policies import Policy, Prompt
from scheduler.router.score import Candidate, Match, filled
from scheduler.router.view import CacheView

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Routed:
    """A sample that an engine runs, by its name there. token_ids: of its prompt, and of its output so far.

    expected: cached tokens that the router knows of. introduced: whether the engine has said how many there are.
    usage: what the engine has last counted.
    """

    name: str
    attempt: AdmissionAttempt
    link: EngineLink
    token_ids: array[int]
    expected: int
    note: Note | None
    started_at: float
    introduced: bool = False
    usage: pb.Usage | None = None

    @property
    def arrival(self) -> int:
        return self.attempt.request.arrival

    @property
    def has_new_tokens(self) -> bool:
        """Whether this attempt has brought output."""
        return len(self.token_ids) > len(self.attempt.token_ids)


class Fleet:
    """An Engine that is several engines. On the asyncio loop."""

    def __init__(self, view: CacheView, policy: Policy, metrics: RouterMetrics, router_id: str) -> None:
        """router_id: begins the names of samples at engines."""
        self.links: dict[str, EngineLink] = {}
        self._view = view
        self._policy = policy
        self._metrics = metrics
        # Names of an earlier process with this id may still run.
        self._prefix = f"{router_id}-{secrets.token_hex(3)}"
        self._notes = Notes()
        self._by_name: dict[str, Routed] = {}
        self._by_arrival: dict[int, Routed] = {}
        # Samples that no engine takes at the moment, by arrival.
        self._waiting: dict[int, AdmissionAttempt] = {}

    @property
    def loads(self) -> Loads:
        bounds = sum(link.loads.max_running_requests for link in self.links.values() if link.is_open)
        return Loads(len(self._by_name), len(self._waiting), bounds, StepLoad())

    @property
    def obstacle(self) -> str:
        """Why no engine takes requests, in words; empty when one does."""
        now = time.monotonic()
        if any(link.takes_requests(now) for link in self.links.values()):
            return ""
        return "no engine takes requests: " + (
            "; ".join(f"{link.address}: {link.obstacle or 'it was not ready'}" for link in self.links.values())
            or "none was found"
        )

    def find(self, name: str) -> Routed | None:
        """A sample by its name at an engine."""
        return self._by_name.get(name)

    def on(self, link: EngineLink) -> list[Routed]:
        """The samples that an engine runs."""
        return [routed for routed in self._by_name.values() if routed.link is link]

    def start(self, attempt: AdmissionAttempt) -> None:
        """Sends a sample to an engine; it waits while none takes requests."""
        now = time.monotonic()
        links = [link for link in self.links.values() if link.takes_requests(now)]
        if not links:
            self._waiting[attempt.request.arrival] = attempt
            return
        begin = time.perf_counter()
        link, match, expected, keys = self._choose(attempt, links, now)
        self._metrics.decision.observe(time.perf_counter() - begin)
        prompt = len(attempt.token_ids)
        routed = Routed(
            name=f"{self._prefix}-{attempt.request.arrival}.{attempt.number}",
            attempt=attempt,
            link=link,
            token_ids=attempt.token_ids[:],
            expected=expected,
            note=self._notes.add(link.address, keys),
            started_at=now,
        )
        self._by_name[routed.name] = self._by_arrival[routed.arrival] = routed
        self._metrics.requests.labels(link.address).inc()
        self._metrics.routed_tokens.inc(prompt)
        self._metrics.expected_tokens.inc(expected)
        if not match.blocks:
            link.cold_at = now
        link.start(start_request(attempt, routed.name, expected, link.engine.model.eos_token_ids), prompt - expected)

    def start_waiting(self) -> None:
        """An engine takes requests again."""
        waiting, self._waiting = self._waiting, {}
        for attempt in waiting.values():
            self.start(attempt)

    def cancel(self, arrival: int) -> None:
        self._waiting.pop(arrival, None)
        if routed := self._by_arrival.get(arrival):
            routed.link.cancel(routed.name)
            self.end(routed)

    def end(self, routed: Routed) -> None:
        """An engine no longer runs a sample."""
        self._by_name.pop(routed.name, None)
        self._by_arrival.pop(routed.arrival, None)
        if routed.note is not None and routed.note.until is None:
            self._notes.remove(routed.note)

    def next_attempt(self, routed: Routed, *, lost: bool) -> AdmissionAttempt:
        """Ends a sample for another engine: it goes on behind its output. lost: whether its engine was lost over it."""
        self.end(routed)
        self._metrics.continued.inc()
        failures = 0 if routed.has_new_tokens else routed.attempt.failures
        return AdmissionAttempt(
            routed.attempt.request,
            routed.token_ids,
            number=routed.attempt.number + 1,
            failures=failures + lost,
        )

    def _choose(
        self, attempt: AdmissionAttempt, links: Sequence[EngineLink], now: float
    ) -> tuple[EngineLink, Match, int, Sequence[int]]:
        """The engine for a sample, what it has of the prompt, the cached tokens to expect, and the prompt's keys."""
        request, tokens = attempt.request, len(attempt.token_ids)
        # An engine whose queue is full would refuse it.
        links = [link for link in links if link.has_room] or links
        if request.sample_index:
            # It shares the prompt of the first sample.
            running = [one for one in self._by_name.values() if one.attempt.request.request_id == request.request_id]
            links = [one.link for one in running if one.link in links][:1] or links
        keys: Sequence[int] = ()
        matches: dict[str, Match] = {}
        if not request.cache.no_read:
            keys = self._view.keys(links[0].executor_id, attempt.token_ids, request.cache.salt)
            matches = self._view.match([link.executor_id for link in links], keys)
        candidates = []
        for link, rates in zip(links, filled([link.rates for link in links]), strict=True):
            match = matches.get(link.executor_id, Match())
            noted = self._notes.match(link.address, keys, now)
            if noted > match.blocks:
                match = match._replace(device=match.device + noted - match.blocks)
            candidates.append(
                Candidate(
                    name=link.address,
                    block_size=link.engine.executor.block_size,
                    match=match,
                    queued_tokens=link.queued_tokens(now),
                    load=link.load,
                    max_running=link.loads.max_running_requests,
                    rates=rates,
                    cold_at=link.cold_at,
                )
            )
        session = request.cache.session_id or ""
        chosen = self._policy.choose(Prompt(keys, tokens, session), candidates)
        link = next(link for link in links if link.address == chosen.name)
        return link, chosen.match, chosen.cached_tokens(tokens), keys
