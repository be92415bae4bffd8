"""All requests from their acceptance to their end, as the services see them. On the asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from protos.errors import InvalidField
from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.errors import ServiceError
from scheduler.bridge import Admission, RequestUpdates, TokenMeta
from scheduler.errors import (
    AdapterLostError,
    DrainingError,
    ExecutorFailsError,
    FormTooComplexError,
    QueueFullError,
    RequestExistsError,
    TenantBusyError,
)
from scheduler.frontend.comparisons import RecentResponses
from scheduler.frontend.engine import Engine
from scheduler.frontend.loader import ModelLoader
from scheduler.frontend.output import Generation, Stream, StreamFlusher
from scheduler.frontend.validation import MAX_SAMPLES, RequestValidator
from scheduler.metrics import RequestMetrics
from scheduler.request import MAX_FAILURES, AdapterChange, AdmissionAttempt, Request

RETRY_SECONDS = 1.0
NO_TOKENS = array("I")
# Obstacles.
EXECUTOR_SILENT, CACHE_MANAGER_SILENT = "the executor does not answer", "the cache manager does not answer"
# What is said instead of all obstacles while requests are refused.
DRAINS = "the scheduler drains: it takes no new requests"


class Health(Protocol):
    """Where the process reports whether it serves."""

    def set_serving(self, serving: bool) -> None:
        """Called when an obstacle or an operator's draining begins or ends, and possibly without a change."""


class Silences(NamedTuple):
    """Seconds for which a scheduler's neighbours have not answered; for the executor, beyond what its steps take."""

    executor: float = 0.0
    cachemgr: float = 0.0


class RequestTable:
    """Every live request. The engine reports outcomes to this table."""

    def __init__(
        self,
        validator: RequestValidator,
        engine: Engine,
        metrics: RequestMetrics,
        health: Health,
        loader: ModelLoader,
        *,
        max_waiting: int,
        max_tenant_requests: int = 0,
        message_seconds: float | None = None,
        compares: bool = True,
    ) -> None:
        """max_tenant_requests: most live and arriving requests of one tenant; 0 is no bound.

        message_seconds: as for StreamFlusher.

        compares: whether the table itself, not the engine, knows recent responses and compares requests with them.
        """
        self.validator = validator
        self.model = validator.model
        self.adapters = validator.adapters
        self.loader = loader
        self.metrics = metrics
        self.max_waiting = max_waiting
        self.preemptions = 0
        self.steps = 0
        # In a front end: the load that the engine of all front ends reports.
        self.reported_loads: pb.GetLoadsResponse | None = None
        self._max_tenant_requests = max_tenant_requests
        self._engine = engine
        self._arriving = 0
        # Samples that wait for the first token of their request's first sample, whose prompt they share.
        self._followers = 0
        self._health = health
        # Live samples by arrival.
        self._live: dict[int, Generation] = {}
        # Samples by the ids with which callers abort them.
        self._by_abort_id: dict[str, set[Generation]] = {}
        # Numbers of live and arriving requests by tenant.
        self._tenants: Counter[str] = Counter()
        # Pairs of tenant and request id. Request ids are unique per tenant: no error may reveal ids of other tenants.
        self._request_ids: set[tuple[str, str]] = set()
        self._is_open = False
        self._stopping = False
        # Whether an operator asked to take no more requests.
        self._draining = False
        # What new requests wait for, in words.
        self._obstacles: set[str] = set()
        # How long the neighbours have not answered.
        self.silences = Silences()
        self._idle = asyncio.Event()
        self._idle.set()
        self._flusher = StreamFlusher(message_seconds)
        self._responses = RecentResponses(self.model.layout.block_size) if compares else None
        metrics.running.set_function(lambda: self.num_running)
        metrics.waiting.set_function(lambda: self.num_waiting)

    def open(self) -> None:
        """Reports in health from now on whether requests are served."""
        self._is_open = True
        self._report_health()

    def _report_health(self) -> None:
        if self._is_open:
            self._health.set_serving(not self.obstacle)

    @property
    def is_draining(self) -> bool:
        return self._stopping or self._draining

    @property
    def obstacle(self) -> str:
        """Why requests are not served now, apart from a full queue or a busy tenant; empty if they are served."""
        if self.is_draining:
            return DRAINS
        if self._obstacles:
            return f"{' and '.join(sorted(self._obstacles))}: new requests wait"
        return ""

    def has_obstacle(self, obstacle: str) -> bool:
        """Returns whether an obstacle, named in words, makes new requests wait."""
        return obstacle in self._obstacles

    def set_obstacle(self, obstacle: str, is_there: bool) -> bool:
        """Notes whether an obstacle, named in words, makes new requests wait; returns whether that is a change."""
        changed = is_there != (obstacle in self._obstacles)
        (self._obstacles.add if is_there else self._obstacles.discard)(obstacle)
        if changed:
            self._report_health()
        return changed

    def set_draining(self, draining: bool) -> bool:
        """Takes no more requests, or takes them again; returns whether that is a change."""
        changed, self._draining = self._draining != draining, draining
        self._report_health()
        return changed

    @property
    def num_running(self) -> int:
        """Samples that hold blocks; in a router, samples that engines have; in a separate front end, 0."""
        return self._engine.loads.running

    @property
    def num_waiting(self) -> int:
        """Samples that wait for blocks, tokenization, their request's first token or, in a router, an engine."""
        return self._engine.loads.waiting + self._arriving + self._followers

    def loads(self) -> pb.GetLoadsResponse:
        """Returns the load, for callers and routers."""
        if self.reported_loads is not None:
            return self.reported_loads
        loads = self._engine.loads
        # Waiting samples have no blocks yet; only a router may know how many tokens of their prompts are cached.
        # Followers wait for the blocks of another sample.
        followers = {request.arrival for generation in self._live.values() for request in generation.followers}
        waiting = sum(
            max(0, len(generation.request.prompt_ids) - generation.request.expected_cached_tokens)
            for arrival, generation in self._live.items()
            if not generation.admitted and arrival not in followers
        )
        answer = pb.GetLoadsResponse(
            running_requests=loads.running,
            waiting_requests=loads.waiting + self._arriving + self._followers,
            max_waiting_requests=self.max_waiting,
            steps=self.steps,
            preemptions=self.preemptions,
            max_running_requests=loads.max_running,
            queued_prompt_tokens=loads.steps.prefill_tokens + waiting,
        )
        durations = (
            (answer.prompt_token_time, loads.steps.prompt_token),
            (answer.step_time, loads.steps.step),
            (answer.host_block_time, loads.steps.host_block),
            (answer.disk_block_time, loads.steps.disk_block),
            (answer.sequence_time, loads.steps.sequence),
        )
        for duration, seconds in durations:
            if seconds is not None:
                duration.FromNanoseconds(int(seconds * 1e9))
        return answer

    @contextlib.contextmanager
    def arriving(self, request_id: str, tenant: str = "", samples: int = 1) -> Iterator[None]:
        """Counts a request as waiting while it is checked and tokenized.

        samples: how many the request asks for; if nothing waits, this number may exceed the bound. Raises
        DrainingError, RequestExistsError, TenantBusyError and QueueFullError if the request would be refused now.
        """
        samples = max(1, min(samples, MAX_SAMPLES))
        self._check_id(tenant, request_id)
        if 0 < self._max_tenant_requests <= self._tenants[tenant]:
            raise TenantBusyError(
                f"{self._max_tenant_requests} requests of this tenant are live, which is the bound",
                retry_after=RETRY_SECONDS,
            )
        waiting = self.num_waiting
        if waiting and waiting + samples > self.max_waiting:
            raise QueueFullError(
                f"{waiting} samples wait already, and the bound is {self.max_waiting}", retry_after=RETRY_SECONDS
            )
        self._arriving += samples
        try:
            with self._counted(tenant):
                yield
        finally:
            self._arriving -= samples

    def check_samples(self, prompts: int, samples: int) -> None:
        """Raises InvalidField if a call with several prompts asks for more samples than may ever wait."""
        samples = max(1, min(samples, MAX_SAMPLES))
        if prompts > 1 and prompts * samples > self.max_waiting:
            raise InvalidField(
                "prompt", f"has {prompts} prompts with {samples} samples each: at most {self.max_waiting} may wait"
            )

    @contextlib.contextmanager
    def _counted(self, tenant: str) -> Iterator[None]:
        self._tenants[tenant] += 1
        try:
            yield
        finally:
            self._tenants[tenant] -= 1
            if not self._tenants[tenant]:
                del self._tenants[tenant]

    def _check_id(self, tenant: str, request_id: str) -> None:
        if self.is_draining:
            raise DrainingError(f"the scheduler is {'stopping' if self._stopping else 'draining'}")
        if (tenant, request_id) in self._request_ids:
            raise RequestExistsError(
                "a running request has this request_id", fields={"request_id": "is in use by a running request"}
            )

    @contextlib.contextmanager
    def submit(self, stream: Stream, output: array[int] = NO_TOKENS, *, is_follower: bool = False) -> Iterator[None]:
        """Starts a request that was counted as arriving. Leaving the context frees all that the request held.

        output: ids that another engine generated and that the first sample continues. is_follower: whether this is
        another sample of an accepted request, to which neither bounds nor draining apply. Raises DrainingError,
        RequestExistsError, and ModelNotFoundError if the adapter is no longer loaded.
        """
        samples = [generation.request for generation in stream.generations]
        first = samples[0]
        name = (_tenant(first), first.request_id)
        if not is_follower:
            self._check_id(*name)
        with self.adapters.using(first.adapter, len(samples)):
            self._live.update((generation.request.arrival, generation) for generation in stream.generations)
            self._request_ids.add(name)
            for abort_id in first.abort_ids:
                self._by_abort_id.setdefault(abort_id, set()).update(stream.generations)
            self._idle.clear()
            self._followers += len(stream.generations[0].followers)
            self._engine.start(AdmissionAttempt(first, first.prompt_ids + output))
            try:
                with contextlib.nullcontext() if is_follower else self._counted(name[0]):
                    yield
                if self._responses is not None and first.response_id and stream.is_complete:
                    self._responses.add(first, stream.generations[0].weight_version)
            finally:
                self._request_ids.remove(name)
                for abort_id in first.abort_ids:
                    self._by_abort_id[abort_id].difference_update(stream.generations)
                    if not self._by_abort_id[abort_id]:
                        del self._by_abort_id[abort_id]
                self._take_followers(stream.generations[0])
                for request in samples:
                    generation = self._live.pop(request.arrival)
                    if generation.first_token_at is not None and not generation.is_gathered:
                        self._flusher.remove(generation)
                    self._engine.cancel(request.arrival)
                if not self._live:
                    self._idle.set()

    def adapters_in_use(self) -> tuple[list[str], list[str]]:
        """Returns the names of adapters that running, and that waiting, requests use. May be called from any thread."""
        used = [
            (generation.request.adapter.name, generation.admitted)
            for generation in list(self._live.values())
            if generation.request.adapter is not None
        ]
        running, waiting = ({name for name, admitted in used if admitted is wanted} for wanted in (True, False))
        return sorted(running), sorted(waiting)

    def _change_adapters(self, changes: Sequence[AdapterChange]) -> None:
        """Applies changes of the adapters; fails requests whose adapter the executor no longer has."""
        self.adapters.change(changes)
        found = {adapter.adapter_id for adapter in self.adapters.all}
        for arrival, generation in self._live.items():
            adapter = generation.request.adapter
            if adapter is not None and adapter.adapter_id not in found and not generation.finished:
                generation.fail(AdapterLostError(f"the executor no longer has the adapter {adapter.name!r}"))
                # At once: the request must not be admitted in the session that is open now.
                self._engine.cancel(arrival)

    def receive(self, updates: RequestUpdates) -> None:
        """Takes the updates of answered steps: one call for all requests."""
        self.steps += updates.steps
        if updates.adapters:
            self._change_adapters(updates.adapters)
        self._note(updates)
        if updates.outputs or updates.prompt_logprobs:
            self._take_outputs(updates)
        if updates.executor_answers is not None:
            self.set_obstacle(EXECUTOR_SILENT, not updates.executor_answers)
            if not updates.executor_answers:
                self.validator.forget_grammars()
        for attempt in updates.retried:
            if (generation := self._live.get(attempt.request.arrival)) and not generation.finished:
                self._engine.start(attempt)
        for arrival in updates.aborted:
            self._aborted_elsewhere(arrival)
        for arrival in updates.failed_forms:
            if (generation := self._live.get(arrival)) and not generation.finished:
                generation.fail(FormTooComplexError(generation.output_tokens))
        for arrival in updates.given_up:
            if generation := self._live.get(arrival):
                generation.fail(ExecutorFailsError(f"the executor failed {MAX_FAILURES} times over this request"))

    def _take_outputs(self, updates: RequestUpdates) -> None:
        for arrival, logprobs in updates.prompt_logprobs:
            if generation := self._live.get(arrival):
                generation.score_prompt(logprobs)
        published = 0
        # Number of new tokens by the time of the previous token.
        earlier: Counter[float] = Counter()
        for arrival, token_id, meta in updates.outputs:
            generation = self._live.get(arrival)
            if generation is None or generation.finished:
                continue
            if generation.first_token_at is not None:
                earlier[generation.last_token_at] += 1
            if meta is None and not generation.has_stop_strings:
                generation.feed(token_id, updates.at)
                if generation.is_gathered:
                    generation.notify()
            else:
                self._publish(generation, token_id, meta, updates.at)
            published += not generation.request.is_prewarm
        # Excludes tokens that a step computed after the end of an output, and the tokens of prewarming requests.
        self.metrics.output_tokens.inc(published)
        for at, tokens in earlier.items():
            self.metrics.inter_token.observe(updates.at - at, tokens)
        self._flusher.flush()

    def _note(self, updates: RequestUpdates) -> None:
        """Counts events in the metrics and in the usage of samples."""
        for arrival in updates.started:
            if (generation := self._live.get(arrival)) and generation.started_at is None:
                generation.started_at = updates.at
                if not generation.request.sample_index:
                    self.metrics.queue.observe(updates.at - generation.request.arrived_at)
                    self.metrics.prompt_tokens.inc(len(generation.request.prompt_ids))
                    self.metrics.cached_tokens.inc(generation.counted.cached_tokens)
        for arrival, host_tokens, disk_tokens in updates.onloaded:
            self.metrics.onloaded_tokens.labels("host").inc(host_tokens)
            self.metrics.onloaded_tokens.labels("disk").inc(disk_tokens)
            if generation := self._live.get(arrival):
                generation.counted.host_tokens += host_tokens
                generation.counted.disk_tokens += disk_tokens
        self.metrics.onload_timeouts.inc(len(updates.late))
        self.metrics.draft_tokens.inc(updates.drafted)
        self.metrics.accepted_draft_tokens.inc(updates.accepted)
        self.preemptions += len(updates.preempted)
        self.metrics.preemptions.inc(len(updates.preempted))
        for arrival in updates.preempted:
            if generation := self._live.get(arrival):
                generation.counted.preemptions += 1
        for arrival, tokens, mass in updates.evicted:
            self.metrics.evicted_tokens.inc(tokens)
            if generation := self._live.get(arrival):
                generation.evict(tokens, mass)
        for arrival, tokens in updates.most_kept.items():
            if generation := self._live.get(arrival):
                generation.most_kept = max(generation.most_kept, tokens)

    def abort(self, message: pb.AbortRequestsRequest) -> int:
        """Ends live requests with their output so far, or only counts them with validate_only; returns their number."""
        named = self._live.values() if message.all else self._by_abort_id.get(message.request_id, ())
        found = [
            generation
            for generation in named
            if not generation.finished
            and (not message.HasField("tenant_id") or _tenant(generation.request) == message.tenant_id)
        ]
        if not message.validate_only:
            for generation in found:
                self._abort(generation)
        return len({(_tenant(generation.request), generation.request.caller_id) for generation in found})

    def _abort(self, generation: Generation) -> None:
        generation.abort()
        self._engine.cancel(generation.request.arrival)

    def _aborted_elsewhere(self, arrival: int) -> None:
        """Ends all samples of a request after its engine has aborted one of the samples."""
        if (aborted := self._live.get(arrival)) is not None:
            request = aborted.request
            self.abort(pb.AbortRequestsRequest(request_id=request.caller_id, tenant_id=_tenant(request)))

    def fail_all(self, error: ServiceError) -> None:
        for generation in self._live.values():
            generation.fail(error)

    async def drain(self, seconds: float) -> None:
        """Takes no more requests; waits at most `seconds` for live requests, and fails the rest with DrainingError."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        self.fail_all(DrainingError("the scheduler is stopping and the request did not end in time"))

    def admitted(self, attempt: AdmissionAttempt, admission: Admission) -> None:
        generation = self._live[attempt.request.arrival]
        generation.admitted = True
        generation.weight_version = self._engine.weight_version(attempt.request.arrival)
        if admission.eviction_policy is not None:
            generation.policy = admission.eviction_policy
        if generation.started_at is None and not attempt.request.sample_index:
            # Replaces the counts of an attempt that never started.
            counted = generation.counted
            counted.cached_tokens = admission.cached_tokens
            counted.ClearField("retention_receipts")
            counted.ClearField("hint_answers")
            counted.retention_receipts.extend(admission.receipts)
            counted.hint_answers.extend(admission.hint_answers)
            counted.cache_write_tokens = admission.written_tokens
            self._explain(generation, admission)
        if attempt.preempted:
            if admission.has_onloads:
                self.metrics.swaps.inc()
            # If fewer tokens are missing, all blocks but the last were still cached, and nothing counts.
            elif admission.cached_tokens + self.model.layout.block_size < len(attempt.token_ids):
                self.metrics.recomputations.inc()

    def _explain(self, generation: Generation, admission: Admission) -> None:
        """Adds what was missing in the cache, and the comparison."""
        request, counted = generation.request, generation.counted
        counted.ClearField("prefix_miss")
        counted.ClearField("cache_diagnosis")
        if admission.miss is not None:
            counted.prefix_miss.CopyFrom(admission.miss)
        if admission.diagnosis is not None:
            counted.cache_diagnosis.CopyFrom(admission.diagnosis)
        elif request.cache.comparison_id is not None and self._responses is not None:
            found = self._responses.diagnose(request, admission.cached_tokens, generation.weight_version)
            counted.cache_diagnosis.CopyFrom(found)

    def refused(self, attempt: AdmissionAttempt, error: ServiceError, *, was_taken: bool = True) -> None:
        if generation := self._live.get(attempt.request.arrival):
            generation.was_taken = was_taken
            generation.fail(error)

    def _publish(self, generation: Generation, token_id: int, meta: TokenMeta | None, now: float) -> None:
        """Takes a token that may begin or end an output, or has log-probabilities."""
        first = generation.first_token_at is None
        if first and not generation.request.sample_index:
            self.metrics.first_token.observe(now - generation.request.arrived_at)
        generation.feed(token_id, now, meta)
        if first and not generation.is_gathered:
            # A waiting request has no tokens to send.
            self._flusher.add(generation)
        if generation.finished and not (meta and meta.finished):
            # The engine does not know of stop strings.
            self._engine.cancel(generation.request.arrival)
        if first or generation.finished or generation.is_gathered:
            generation.notify()
        # At the first token of a sample, the prompt is computed, and other samples can fork the sequence. A sequence
        # that evicts has private blocks and scores, which no other sequence can share.
        parent = meta.sequence if meta and not generation.policy else 0
        for request in self._take_followers(generation):
            self._engine.start(AdmissionAttempt(request, request.prompt_ids, parent=parent))

    def _take_followers(self, generation: Generation) -> Sequence[Request]:
        """Removes and returns the other samples of the request, which have not been started."""
        followers, generation.followers = generation.followers, ()
        self._followers -= len(followers)
        return followers


def _tenant(request: Request) -> str:
    """Returns the tenant, empty for none."""
    return request.cache.tenant_id or ""


class RequestTableSource(Protocol):
    """A process that has a request table once its neighbours are available."""

    @property
    def requests(self) -> RequestTable:
        """Raises NotReadyError while the process has no request table."""
