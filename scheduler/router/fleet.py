"""Several engines as one: chooses an engine for each sample, and starts the sample elsewhere if the engine is lost."""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from scheduler.frontend.engine import Loads
from scheduler.frontend.engine_messages import SentSample, start_request
from scheduler.metrics import StepLoad
from scheduler.request import Adapter, AdmissionAttempt, Request
from scheduler.router.engine_link import HESITATION_SECONDS, EngineLink
from scheduler.router.expected_seconds import Candidate, Match, Rates, levelled
from scheduler.router.key_index import KeyIndex
from scheduler.router.key_space import KeySpace
from scheduler.router.metrics import RouterMetrics
from scheduler.router.notes import Note, Notes
from scheduler.router.policies import Policy, Prompt
from scheduler.router.view import CacheView, Owner

_NO_KEYS: array[int] = array("Q")

# Blocks of a prompt whose keys are computed at once: half a millisecond. Other tasks run in between.
BLOCKS_AT_ONCE = 512

# Seconds within which a router notices that the processes of a dead machine have ended.
NOTICED_SECONDS = 3.0

# Expected length of an output before any output has ended, and the weight of each output in the mean length.
FIRST_OUTPUT_TOKENS, _OUTPUT_WEIGHT = 128.0, 0.02

log = structlog.get_logger()


class Prepared(NamedTuple):
    """What is known of a prompt before an engine is chosen. matches: in caches that the view does not know."""

    matches: Mapping[Owner, Match] = {}
    keys: Mapping[KeySpace, array[int]] = {}


_NOTHING = Prepared()


@dataclass(slots=True, eq=False, kw_only=True)
class Routed(SentSample):
    """A sample and its engine. expected: cached tokens that the router knows of."""

    link: EngineLink
    expected: int
    note: Note | None
    started_at: float
    # When the sample last had output.
    heard_at: float
    # Whether the sample's prompt counts as queued at the engine.
    is_queued: bool = True

    @property
    def request_id(self) -> str:
        return self.attempt.request.request_id


class Fleet:
    """An Engine that consists of several engines. On the asyncio loop."""

    def __init__(
        self,
        view: CacheView,
        policy: Policy,
        metrics: RouterMetrics,
        router_id: str,
        index: KeyIndex | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """router_id: begins the names that samples have at engines. index: knows caches that the view does not know.

        on_failure: called when the router's own work has failed, so that a request would wait forever.
        """
        self.links: dict[str, EngineLink] = {}
        # By arrival: samples whose prompts are looked up in the index, or are so long that their keys take a while.
        self.preparing: dict[int, asyncio.Task[None]] = {}
        self._view = view
        self._index = index
        self._policy = policy
        self._metrics = metrics
        self._on_failure = on_failure
        # Samples named by an earlier process with this id may still run.
        self._prefix = f"{router_id}-{secrets.token_hex(3)}"
        self._notes = Notes()
        self._by_name: dict[str, Routed] = {}
        self._by_arrival: dict[int, Routed] = {}
        # Samples that engines run, by the id of their request.
        self._by_request: defaultdict[str, list[Routed]] = defaultdict(list)
        # Samples that no engine takes at the moment, by arrival.
        self._waiting: dict[int, AdmissionAttempt] = {}
        # Mean number of tokens in outputs that have ended.
        self._mean_output = FIRST_OUTPUT_TOKENS
        self._hashing = asyncio.Lock()
        # The prompt that was hashed last, and its keys.
        self._hashed: tuple[object, Mapping[KeySpace, array[int]]] = (None, {})

    @property
    def loads(self) -> Loads:
        bounds = sum(link.loads.max_running_requests for link in self.links.values() if link.is_open)
        return Loads(len(self._by_name), len(self._waiting) + len(self.preparing), bounds, StepLoad())

    @property
    def adapters(self) -> list[Adapter]:
        """The adapters that any engine serves, or served when last heard from; only one of each name."""
        return list({name: adapter for link in self.links.values() for name, adapter in link.adapters.items()}.values())

    def without_engine(self) -> list[AdmissionAttempt]:
        """Removes and returns the waiting samples whose adapter no engine has any more."""
        gone = [
            attempt
            for attempt in self._waiting.values()
            if not any(link.serves(attempt.request.adapter) for link in self.links.values())
        ]
        for attempt in gone:
            del self._waiting[attempt.request.arrival]
        return gone

    @property
    def obstacle(self) -> str:
        """Why no engine takes requests, in words for operators; empty if an engine does."""
        now = time.monotonic()
        obstacles = {link.address: link.obstacle_at(now) for link in self.links.values()}
        if not all(obstacles.values()):
            return ""
        why = (f"{address}: {obstacle}" for address, obstacle in obstacles.items())
        return "; ".join(why) or "none was found"

    def find(self, name: str) -> Routed | None:
        """Returns the sample with this name at an engine."""
        return self._by_name.get(name)

    def on(self, link: EngineLink) -> list[Routed]:
        """Returns the samples that an engine runs."""
        return [routed for routed in self._by_name.values() if routed.link is link]

    def stranded(self, link: EngineLink) -> list[Routed]:
        """Returns the samples that wait for something that does not answer, if another engine takes requests.

        If the cache manager is silent, the other engine must have a different cache manager: the engines of the same
        shard are avoided.
        """
        now, shard = time.monotonic(), link.engine.cachemgr_admin_address
        samples = self.on(link) if link.hesitates else []
        if not link.makes_no_progress:
            # Without the cache manager, samples go on as long as they have blocks.
            stuck = now - HESITATION_SECONDS if link.gets_no_blocks else 0.0
            samples = [routed for routed in samples if not routed.introduced or routed.heard_at < stuck]
        if not samples:
            return []
        others = [
            other
            for other in self.links.values()
            if other is not link and not other.obstacle_at(now) and not other.hesitates
        ]
        of_cachemgr = not link.makes_no_progress and not link.is_quiet
        same = [other for other in others if of_cachemgr and other.engine.cachemgr_admin_address == shard]
        if len(same) == len(others):
            return []
        for other in same:
            other.avoid(now)
        return samples

    def has_room_beside(self, link: EngineLink, routed: Routed) -> bool:
        """Returns whether another engine takes a sample that this engine has no room for."""
        now, adapter = time.monotonic(), routed.attempt.request.adapter
        others = (other for other in self.links.values() if other is not link)
        return any(other.has_room and other.serves(adapter) and not other.obstacle_at(now) for other in others)

    def start(self, attempt: AdmissionAttempt) -> None:
        """Sends a sample to an engine, at once unless preparing takes a while; waits while no engine takes requests."""
        unknown, spaces = self._to_look_up(attempt.request), self._to_hash(attempt)
        if (unknown or spaces) and self._links_for(attempt, time.monotonic()):
            task = asyncio.create_task(self._prepare(attempt, unknown, spaces))
            task.add_done_callback(self._prepared)
            self.preparing[attempt.request.arrival] = task
        else:
            self._send(attempt)

    def _to_look_up(self, request: Request) -> Mapping[str, Owner]:
        """Returns the executors that the index is to be asked about."""
        index = self._index
        may_ask = self._policy.reads_caches and not request.cache.no_read and not request.sample_index
        if index is None or not index.executors or not may_ask:
            return {}
        return {name: owner for name, owner in self.unknown_executors().items() if name in index.executors}

    def _to_hash(self, attempt: AdmissionAttempt) -> Collection[KeySpace]:
        """Returns the key spaces in which a prompt has many keys."""
        if attempt.request.cache.no_read:
            return ()
        spaces = {self._space(link.owner) for link in self.links.values() if link.is_open}
        tokens = len(attempt.token_ids)
        return [space for space in spaces if space is not None and tokens > BLOCKS_AT_ONCE * space.block_size]

    def unknown_executors(self) -> dict[str, Owner]:
        """Returns, by id, the executors of answering engines whose caches the view does not know.

        Omits executors whose id occurs in several shards: the index by key does not tell them apart.
        """
        owners = {link.owner for link in self.links.values() if link.is_open}
        counts = Counter(owner.executor_id for owner in owners)
        return {
            owner.executor_id: owner
            for owner in owners
            if counts[owner.executor_id] == 1 and self._view.find(owner) is None
        }

    async def _prepare(
        self, attempt: AdmissionAttempt, unknown: Mapping[str, Owner], spaces: Collection[KeySpace]
    ) -> None:
        prepared = _NOTHING
        try:
            matches = await self._look_up(attempt, unknown)
            # One prompt after the other: interleaving parts of all prompts would make turns long.
            async with self._hashing:
                prepared = Prepared(matches, await self._hash(attempt, spaces))
        except Exception:
            # The request must not wait forever.
            log.exception("the look-up of a prompt failed")
        del self.preparing[attempt.request.arrival]
        self._send(attempt, prepared)

    def _prepared(self, task: asyncio.Task[None]) -> None:
        """Reports a failed preparation to `on_failure`, because the request would wait forever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request could not be sent to an engine", exc_info=error)
            self._on_failure()

    async def _hash(self, attempt: AdmissionAttempt, spaces: Collection[KeySpace]) -> Mapping[KeySpace, array[int]]:
        """Returns a prompt's keys; reuses the last computed keys for an equal prompt, as of samples of one request."""
        cache = attempt.request.cache
        prompt = (cache.salt, attempt.request.adapter_id, frozenset(spaces), attempt.token_ids)
        if self._hashed[0] != prompt:
            self._hashed = (prompt, await hash_prompt(attempt, spaces))
        return self._hashed[1]

    async def _look_up(self, attempt: AdmissionAttempt, unknown: Mapping[str, Owner]) -> Mapping[Owner, Match]:
        """Returns what the index knows of a prompt in the caches of executors."""
        if self._index is None or not unknown:
            return {}
        request = attempt.request
        found = await self._index.match(unknown, attempt.token_ids, request.cache.salt, request.adapter_id)
        self._metrics.lookups.labels("found" if found else "nothing").inc()
        return {unknown[name]: match for name, match in found.items()}

    def _send(self, attempt: AdmissionAttempt, prepared: Prepared = _NOTHING) -> None:
        now = time.monotonic()
        links = self._links_for(attempt, now)
        if not links:
            self._waiting[attempt.request.arrival] = attempt
            return
        links = [link for link in links if not link.hesitates] or links
        begin = time.perf_counter()
        link, match, expected, keys = self._choose(attempt, links, now, prepared)
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
            heard_at=now,
        )
        self._by_name[routed.name] = self._by_arrival[routed.arrival] = routed
        self._by_request[routed.request_id].append(routed)
        self._metrics.requests.labels(link.address).inc()
        self._metrics.routed_tokens.inc(prompt)
        self._metrics.expected_tokens.inc(expected)
        if not match.blocks:
            link.cold_at = now
        message = start_request(attempt, routed.name, expected, link.engine.model.eos_token_ids)
        link.start(message, prompt, expected)

    def _links_for(self, attempt: AdmissionAttempt, now: float) -> list[EngineLink]:
        """Returns the engines that would take a sample."""
        adapter = attempt.request.adapter
        links = [link for link in self.links.values() if not link.obstacle_at(now) and link.serves(adapter)]
        if attempt.number:
            # The sample was accepted once, and must not be refused now.
            links = [link for link in links if link.has_room]
        if attempt.failures > 1:
            # A machine may have died with several engines: only an engine that is heard from again is surely there.
            links = [link for link in links if link.heard_at > attempt.failed_at + NOTICED_SECONDS]
        return links

    def start_waiting(self) -> None:
        """Sends the waiting samples, because an engine takes requests again."""
        waiting, self._waiting = self._waiting, {}
        for attempt in waiting.values():
            self.start(attempt)

    def cancel(self, arrival: int) -> None:
        self._waiting.pop(arrival, None)
        if preparing := self.preparing.pop(arrival, None):
            preparing.cancel()
        if routed := self._by_arrival.get(arrival):
            routed.link.cancel(routed.name)
            self.end(routed)

    def weight_version(self, arrival: int) -> str | None:
        """Returns the version of the weights as known to the cache manager of the sample's engine."""
        routed = self._by_arrival.get(arrival)
        executor = None if routed is None else self._view.find(routed.link.owner)
        return None if executor is None else executor.space.weight_version

    def note_computed(self, routed: Routed, now: float) -> None:
        """Notes that a sample has its first token: events will soon tell what its engine has cached."""
        self._leave_queue(routed)
        if routed.note is not None:
            self._notes.computed(routed.note, now)

    def _leave_queue(self, routed: Routed) -> None:
        if routed.is_queued:
            routed.is_queued = False
            routed.link.note_computed(routed.started_at, len(routed.attempt.token_ids) - routed.expected)

    def note_output(self, tokens: int) -> None:
        """Takes the number of output tokens of a sample that its engine has ended, to predict the length of outputs."""
        self._mean_output += _OUTPUT_WEIGHT * (tokens - self._mean_output)

    def end(self, routed: Routed) -> None:
        """Notes that an engine no longer runs a sample."""
        if self._by_name.pop(routed.name, None) is not None:
            self._leave_queue(routed)
            routed.link.note_end()
            samples = self._by_request[routed.request_id]
            samples.remove(routed)
            if not samples:
                del self._by_request[routed.request_id]
        self._by_arrival.pop(routed.arrival, None)
        if routed.note is not None and not routed.note.is_computed:
            self._notes.remove(routed.note)

    def next_attempt(self, routed: Routed, *, lost: bool) -> AdmissionAttempt:
        """Ends a sample, to continue after its output at another engine. lost: whether the sample may be to blame."""
        self.end(routed)
        self._metrics.continued.inc()
        failures = 0 if routed.has_new_tokens else routed.attempt.failures
        return AdmissionAttempt(
            routed.attempt.request,
            routed.token_ids,
            number=routed.attempt.number + 1,
            failures=failures + lost,
            failed_at=time.monotonic() if lost else routed.attempt.failed_at,
        )

    def _choose(
        self, attempt: AdmissionAttempt, links: Sequence[EngineLink], now: float, prepared: Prepared = _NOTHING
    ) -> tuple[EngineLink, Match, int, array[int]]:
        """Returns a sample's engine, the prompt's match there, the cached tokens to expect, and the keys for a note."""
        request, tokens = attempt.request, len(attempt.token_ids)
        links = self._suitable(request, links)
        owners = [link.owner for link in links]
        spaces = [None] * len(links) if request.cache.no_read else self._spaces(links, owners)
        known = sorted({space for space in spaces if space is not None})
        keys: dict[KeySpace | None, array[int]] = {None: _NO_KEYS}
        matches = dict(prepared.matches)
        for space in known:
            keys[space] = prepared.keys[space] if space in prepared.keys else self._keys(space, attempt)
            same = [owner for owner, its_space in zip(owners, spaces, strict=True) if its_space == space]
            # The view is newer than what the look-up found.
            matches |= self._view.match(same, keys[space])
        rates = levelled([link.rates for link in links], [link.age_of_rates(now) for link in links])
        candidates = [
            self._candidate(link, levelled_rates, matches.get(owner, Match()), keys[its_space], now)
            for link, owner, its_space, levelled_rates in zip(links, owners, spaces, rates, strict=True)
        ]
        # A policy that compares prompts always gets keys of the same space.
        left = request.max_tokens - (tokens - len(request.prompt_ids))
        output = min(float(left), self._mean_output)
        prompt = Prompt(keys[known[0] if known else None], tokens, request.cache.session_id or "", output)
        chosen = self._policy.choose(prompt, candidates)
        at = next(at for at, link in enumerate(links) if link.address == chosen.name)
        return links[at], chosen.match, chosen.cached_tokens(tokens), keys[spaces[at]]

    def _suitable(self, request: Request, links: Sequence[EngineLink]) -> Sequence[EngineLink]:
        """Returns the engines among which a policy chooses."""
        # An engine whose queue is full would refuse it.
        links = [link for link in links if link.has_room] or links
        if request.sample_index:
            # The sample shares the prompt of the first sample.
            running = self._by_request.get(request.request_id, ())
            links = [routed.link for routed in running if routed.link in links][:1] or links
        return links

    def _candidate(self, link: EngineLink, rates: Rates, match: Match, keys: Sequence[int], now: float) -> Candidate:
        noted = self._notes.match(link.address, keys, now)
        if noted > match.blocks:
            match = match._replace(device=match.device + noted - match.blocks)
        return Candidate(
            name=link.address,
            block_size=link.engine.executor.block_size,
            match=match,
            queued_tokens=link.queued_tokens(now),
            load=link.load,
            max_running=link.loads.max_running_requests,
            rates=rates,
            cold_at=link.cold_at,
        )

    def _spaces(self, links: Sequence[EngineLink], owners: Sequence[Owner]) -> list[KeySpace | None]:
        """Returns the key space of each engine, None if it is not known.

        An engine whose key space is not known yet gets that of an engine with the same block size, which is good enough
        for notes.
        """
        found = [self._space(owner) for owner in owners]
        by_size = {space.block_size: space for space in found if space is not None}
        return [own or by_size.get(link.engine.executor.block_size) for link, own in zip(links, found, strict=True)]

    def _space(self, owner: Owner) -> KeySpace | None:
        executor = self._view.find(owner)
        if executor is not None:
            return executor.space
        return None if self._index is None else self._index.find(owner.executor_id)

    def _keys(self, space: KeySpace, attempt: AdmissionAttempt) -> array[int]:
        return space.keys(attempt.token_ids, attempt.request.cache.salt, attempt.request.adapter_id)


async def hash_prompt(attempt: AdmissionAttempt, spaces: Iterable[KeySpace]) -> Mapping[KeySpace, array[int]]:
    """Returns the keys of a prompt in each of the spaces, computed in parts."""
    cache, adapter_id = attempt.request.cache, attempt.request.adapter_id
    found = {}
    for space in spaces:
        parts = space.keys_in_parts(attempt.token_ids, cache.salt, adapter_id, BLOCKS_AT_ONCE)
        keys = array("Q")
        for part in parts:
            keys += part
            await asyncio.sleep(0)
        found[space] = keys
    return found
