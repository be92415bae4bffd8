"""All requests from their acceptance to their end: what the services talk to. On the asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.errors import ServiceError
from scheduler.bridge import Admission, TokenBatch, TokenMeta
from scheduler.errors import (
    DrainingError,
    ExecutorFailsError,
    QueueFullError,
    RequestExistsError,
    TenantBusyError,
)
from scheduler.frontend.engine import Engine
from scheduler.frontend.output import Generation, Stream, StreamFlusher
from scheduler.frontend.validation import RequestValidator
from scheduler.metrics import RequestMetrics
from scheduler.request import MAX_FAILURES, AdmissionAttempt

RETRY_SECONDS = 1.0
NO_TOKENS = array("I")


class Health(Protocol):
    """Where the process says whether it serves."""

    def set_serving(self, serving: bool) -> None:
        """Called with every change."""


class RequestTable:
    """Every live request. The engine reports to it."""

    def __init__(
        self,
        validator: RequestValidator,
        engine: Engine,
        metrics: RequestMetrics,
        health: Health,
        *,
        max_waiting: int,
        max_tenant_requests: int = 0,
    ) -> None:
        """max_tenant_requests: live requests of one tenant; 0 is no bound."""
        self.validator = validator
        self.model = validator.model
        self.metrics = metrics
        self.max_waiting = max_waiting
        self.preemptions = 0
        self.steps = 0
        self._max_tenant_requests = max_tenant_requests
        self._engine = engine
        self._arriving = 0
        self._health = health
        # By arrival.
        self._live: dict[int, Generation] = {}
        # Live and arriving requests by tenant.
        self._tenants: Counter[str] = Counter()
        # With the tenant: request ids of other tenants are secret.
        self._request_ids: set[tuple[str, str]] = set()
        self._is_open = False
        self._stopping = False
        # Asked for by an operator: no more requests are taken.
        self._draining = False
        # Neighbours that have not answered for a while, in words; new requests wait for them.
        self._silent: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._flusher = StreamFlusher()
        metrics.running.set_function(lambda: self.num_running)
        metrics.waiting.set_function(lambda: self.num_waiting)

    def open(self) -> None:
        """From here on requests are served, and health says so."""
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
        """Why a request would not be served now, but for a full queue; empty when nothing is in its way."""
        if self.is_draining:
            return "the scheduler drains: it takes no new requests"
        if self._silent:
            return f"the {' and the '.join(sorted(self._silent))} does not answer: new requests wait"
        return ""

    def set_answering(self, neighbour: str, answers: bool) -> bool:
        """Notes whether a neighbour, in words, answers in time; returns whether that is a change."""
        changed = answers == (neighbour in self._silent)
        (self._silent.discard if answers else self._silent.add)(neighbour)
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
        """Samples that hold blocks."""
        return self._engine.loads.running

    @property
    def num_waiting(self) -> int:
        """Samples that wait for blocks, and requests that are not tokenized yet."""
        return self._engine.loads.waiting + self._arriving

    def loads(self) -> pb.GetLoadsResponse:
        """The load, for callers and routers."""
        loads = self._engine.loads
        # What waits has no blocks yet, and what of it is cached is not known but from a router.
        waiting = sum(
            max(0, len(generation.request.prompt_ids) - generation.request.expected_cached_tokens)
            for generation in self._live.values()
            if not generation.admitted
        )
        answer = pb.GetLoadsResponse(
            running_requests=loads.running,
            waiting_requests=loads.waiting + self._arriving,
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
        )
        for duration, seconds in durations:
            if seconds is not None:
                duration.FromNanoseconds(int(seconds * 1e9))
        return answer

    @contextlib.contextmanager
    def arriving(self, request_id: str, tenant: str = "") -> Iterator[None]:
        """Counts a request as waiting while it is checked and tokenized. Raises when it would not be taken now."""
        self._check_id(tenant, request_id)
        if 0 < self._max_tenant_requests <= self._tenants[tenant]:
            raise TenantBusyError(
                f"{self._max_tenant_requests} requests of this tenant are live, which is the bound",
                retry_after=RETRY_SECONDS,
            )
        if self.num_waiting >= self.max_waiting:
            raise QueueFullError(
                f"{self.max_waiting} requests wait already, which is the bound", retry_after=RETRY_SECONDS
            )
        self._arriving += 1
        try:
            with self._counted(tenant):
                yield
        finally:
            self._arriving -= 1

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
    def submit(self, stream: Stream, output: array[int] = NO_TOKENS) -> Iterator[None]:
        """Starts a request that was counted as arriving. Leaving the context frees all that it held.

        output: ids that the first sample has generated elsewhere, behind which it goes on.
        """
        samples = [generation.request for generation in stream.generations]
        first = samples[0]
        name = (first.cache.tenant_id or "", first.request_id)
        self._check_id(*name)
        self._live.update((generation.request.arrival, generation) for generation in stream.generations)
        self._request_ids.add(name)
        self._idle.clear()
        self._engine.start(AdmissionAttempt(first, first.prompt_ids + output))
        try:
            with self._counted(name[0]):
                yield
        finally:
            self._request_ids.remove(name)
            for request in samples:
                generation = self._live.pop(request.arrival)
                if generation.first_token_at is not None:
                    self._flusher.remove(generation)
                self._engine.cancel(request.arrival)
            if not self._live:
                self._idle.set()

    def receive(self, batch: TokenBatch) -> None:
        """Takes what answered steps brought: one call for all requests."""
        self.steps += batch.steps
        self._note(batch)
        if batch.outputs:
            self._take_outputs(batch)
        if batch.executor_answers is not None:
            self.set_answering("executor", batch.executor_answers)
        for attempt in batch.retried:
            if (generation := self._live.get(attempt.request.arrival)) and not generation.finished:
                self._engine.start(attempt)
        for arrival in batch.given_up:
            if generation := self._live.get(arrival):
                generation.fail(ExecutorFailsError(f"the executor failed {MAX_FAILURES} times over this request"))

    def _take_outputs(self, batch: TokenBatch) -> None:
        published = 0
        # By the time of the token before: how many tokens came after it.
        earlier: Counter[float] = Counter()
        for arrival, token_id, meta in batch.outputs:
            generation = self._live.get(arrival)
            if generation is None or generation.finished:
                continue
            if generation.first_token_at is not None:
                earlier[generation.last_token_at] += 1
            if meta is None and not generation.has_stop_strings:
                generation.feed(token_id, batch.at)
            else:
                self._publish(generation, token_id, meta, batch.at)
            published += 1
        # Without the tokens that a step computed after the end of an output.
        self.metrics.output_tokens.inc(published)
        for at, tokens in earlier.items():
            self.metrics.inter_token.observe(batch.at - at, tokens)
        self._flusher.flush()

    def _note(self, batch: TokenBatch) -> None:
        """Counts what callers hear of at the end."""
        for arrival in batch.started:
            if (generation := self._live.get(arrival)) and generation.started_at is None:
                generation.started_at = batch.at
                if not generation.request.sample_index:
                    self.metrics.queue.observe(batch.at - generation.request.arrived_at)
                    self.metrics.prompt_tokens.inc(len(generation.request.prompt_ids))
                    self.metrics.cached_tokens.inc(generation.counted.cached_tokens)
        for arrival, host_tokens, disk_tokens in batch.onloaded:
            self.metrics.onloaded_tokens.labels("host").inc(host_tokens)
            self.metrics.onloaded_tokens.labels("disk").inc(disk_tokens)
            if generation := self._live.get(arrival):
                generation.counted.host_tokens += host_tokens
                generation.counted.disk_tokens += disk_tokens
        self.metrics.onload_timeouts.inc(len(batch.late))
        self.preemptions += len(batch.preempted)
        self.metrics.preemptions.inc(len(batch.preempted))
        for arrival in batch.preempted:
            if generation := self._live.get(arrival):
                generation.counted.preemptions += 1
        for arrival, tokens, mass in batch.evicted:
            self.metrics.evicted_tokens.inc(tokens)
            if generation := self._live.get(arrival):
                generation.evict(tokens, mass)
        for arrival, tokens in batch.most_kept.items():
            if generation := self._live.get(arrival):
                generation.most_kept = max(generation.most_kept, tokens)

    def fail_all(self, error: ServiceError) -> None:
        for generation in self._live.values():
            generation.fail(error)

    async def drain(self, seconds: float) -> None:
        """Takes no more requests and waits for the running ones, for at most so many seconds."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        self.fail_all(DrainingError("the scheduler is stopping and the request did not end in time"))

    def admitted(self, attempt: AdmissionAttempt, admission: Admission) -> None:
        generation = self._live[attempt.request.arrival]
        generation.admitted = True
        if admission.eviction_policy is not None:
            generation.policy = admission.eviction_policy
        if generation.started_at is None and not attempt.request.sample_index:
            # In place of those of an attempt that never started.
            counted = generation.counted
            counted.cached_tokens = admission.cached_tokens
            counted.ClearField("retention_receipts")
            counted.ClearField("hint_answers")
            counted.retention_receipts.extend(admission.receipts)
            counted.hint_answers.extend(admission.hint_answers)
        if attempt.preempted:
            if admission.has_onloads:
                self.metrics.swaps.inc()
            # Else its blocks were still cached, but for the last one.
            elif admission.cached_tokens + self.model.layout.block_size < len(attempt.token_ids):
                self.metrics.recomputations.inc()

    def refused(self, attempt: AdmissionAttempt, error: ServiceError) -> None:
        if generation := self._live.get(attempt.request.arrival):
            generation.fail(error)

    def _publish(self, generation: Generation, token_id: int, meta: TokenMeta | None, now: float) -> None:
        """A token that may begin or end an output, or has log-probabilities."""
        first = generation.first_token_at is None
        if first and not generation.request.sample_index:
            self.metrics.first_token.observe(now - generation.request.arrived_at)
        generation.feed(token_id, now, meta)
        if first:
            # A request that waits has no tokens to send.
            self._flusher.add(generation)
        if generation.finished and not (meta and meta.finished):
            # The engine does not know of stop strings.
            self._engine.cancel(generation.request.arrival)
        if first or generation.finished:
            generation.notify()
        # With its first token the prompt is computed and can be forked. A sequence that evicts has private blocks, and
        # scores that no other sequence can know.
        parent = meta.sequence if meta and not generation.policy else 0
        for request in generation.followers:
            self._engine.start(AdmissionAttempt(request, request.prompt_ids, parent=parent))
        generation.followers = ()


class RequestTableSource(Protocol):
    """A process that has a request table once its neighbours are there."""

    @property
    def requests(self) -> RequestTable:
        """Raises NotReadyError before that."""
