"""All requests, from their acceptance to their end: what the service talks to. On the asyncio loop."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

from protos.kvcache.v1 import kvcache_pb2
from protos.rpc.errors import ServiceError
from scheduler.bridge import Cancel, Detail, Mailbox, Report
from scheduler.cache import answers
from scheduler.cache.client import CacheClient
from scheduler.cache.waiting_queue import WaitingQueue
from scheduler.core.batch import MAX_FAILURES
from scheduler.errors import (
    DrainingError,
    ExecutorFailsError,
    QueueFullError,
    RequestExistsError,
    TenantBusyError,
)
from scheduler.frontend.output import Generation, Stream
from scheduler.frontend.tokenizer import Model
from scheduler.frontend.turns import Turns
from scheduler.metrics import RequestMetrics
from scheduler.request import Candidate, Request

RETRY_SECONDS = 1.0


class Engine:
    """Knows every live request; the step loop and the cache client report to it."""

    def __init__(
        self,
        model: Model,
        queue: WaitingQueue,
        mailbox: Mailbox,
        metrics: RequestMetrics,
        *,
        max_waiting: int,
        max_tenant_requests: int = 0,
    ) -> None:
        """max_tenant_requests: that one tenant may have at a time; 0 is no bound."""
        self.model = model
        self.max_waiting = max_waiting
        self._max_tenant_requests = max_tenant_requests
        self.preemptions = 0
        self.steps = 0
        self._queue = queue
        self._arriving = 0
        self._mailbox = mailbox
        self.metrics = metrics
        # By arrival.
        self._live: dict[int, Generation] = {}
        # Live requests and those that arrive, by tenant.
        self._tenants: Counter[str] = Counter()
        # With the tenant: what others call their requests is nobody's business.
        self._request_ids: set[tuple[str, str]] = set()
        self._cache: CacheClient | None = None
        self._stopping = False
        # Told by `watch` whether requests are served, when that may have changed.
        self._on_serving: Callable[[bool], None] = lambda _serving: None
        # Asked for by an operator: no more requests are taken.
        self._draining = False
        # Neighbours that have not answered for a while, in words; new requests wait for them.
        self._silent: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._turns = Turns()

    def watch(self, on_serving: Callable[[bool], None]) -> None:
        """Has `on_serving` called, now and later, with whether requests are served."""
        self._on_serving = on_serving
        on_serving(not self.obstacle)

    def attach(self, cache: CacheClient) -> None:
        """Names the cache client, which is built around this object."""
        self._cache = cache

    @property
    def is_draining(self) -> bool:
        """Whether no more requests are taken."""
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
        """Whether a neighbour, in words, answers in the time that it should; returns whether that is a change."""
        changed = answers == (neighbour in self._silent)
        (self._silent.discard if answers else self._silent.add)(neighbour)
        if changed:
            self._on_serving(not self.obstacle)
        return changed

    def set_draining(self, draining: bool) -> bool:
        """Takes no more requests, or takes them again; whether that is a change."""
        changed, self._draining = self._draining != draining, draining
        self._on_serving(not self.obstacle)
        return changed

    @property
    def num_running(self) -> int:
        """Samples that hold blocks."""
        return self._cache.live if self._cache else 0

    @property
    def num_waiting(self) -> int:
        """Samples that wait for blocks, and requests that are not tokenized yet."""
        return len(self._queue) + self._arriving

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
    def submit(self, samples: Seq[Request]) -> Iterator[Stream]:
        """Queues a request that was counted as arriving. Leaving the block frees all that it held, however it ended."""
        first = samples[0]
        name = (first.wishes.tenant_id or "", first.request_id)
        self._check_id(*name)
        stream = Stream(samples, self.model)
        self._live.update((generation.request.arrival, generation) for generation in stream.generations)
        self._request_ids.add(name)
        self._idle.clear()
        self._queue.push(Candidate(first, first.prompt_ids))
        self._touch()
        try:
            with self._counted(name[0]):
                yield stream
        finally:
            self._request_ids.remove(name)
            self._drop(samples)

    def receive(self, report: Report) -> None:
        """Takes what a step brought: one call per step for all requests."""
        assert self._cache is not None
        self.steps += report.steps
        self._note(report)
        if report.outputs:
            self._take_outputs(report)
        if report.only_outputs:
            return
        if report.executor_answers is not None:
            self.set_answering("executor", report.executor_answers)
        for candidate in report.again:
            if (generation := self._live.get(candidate.request.arrival)) and not generation.finished:
                self._queue.push(candidate)
        for arrival in report.given_up:
            if generation := self._live.get(arrival):
                generation.fail(ExecutorFailsError(f"the executor failed {MAX_FAILURES} times over this request"))
        if report.failed is not None:
            for generation in self._live.values():
                generation.fail(report.failed)
        self._cache.receive(report)
        self._touch()

    def _take_outputs(self, report: Report) -> None:
        published = 0
        # When tokens came that have others behind them now, and how many came then.
        earlier: Counter[float] = Counter()
        for arrival, token_id, detail in report.outputs:
            generation = self._live.get(arrival)
            if generation is None or generation.finished:
                continue
            if generation.first_token_at is not None:
                earlier[generation.last_token_at] += 1
            if detail is None and not generation.stops:
                generation.feed(token_id, report.at)
            else:
                self._publish(generation, token_id, detail, report.at)
            published += 1
        # Not what a step computed behind the end of an output.
        self.metrics.output_tokens.inc(published)
        for at, tokens in earlier.items():
            self.metrics.inter_token.observe(report.at - at, tokens)
        self._turns.take()

    def _note(self, report: Report) -> None:
        """What is only counted and told at the end."""
        for arrival in report.started:
            if (generation := self._live.get(arrival)) and generation.started_at is None:
                generation.started_at = report.at
                if not generation.request.sample_index:
                    self.metrics.queue.observe(report.at - generation.request.arrived_at)
                    self.metrics.prompt_tokens.inc(len(generation.request.prompt_ids))
                    self.metrics.cached_tokens.inc(generation.cached_tokens)
        self._note_onboarding(report)
        for arrival in report.preempted:
            self.preemptions += 1
            self.metrics.preemptions.inc()
            if generation := self._live.get(arrival):
                generation.preemptions += 1
        for arrival, tokens, mass in report.evicted:
            self.metrics.evicted_tokens.inc(tokens)
            if generation := self._live.get(arrival):
                generation.evict(tokens, mass)
        for arrival, tokens in report.most_kept.items():
            if generation := self._live.get(arrival):
                generation.most_kept = max(generation.most_kept, tokens)

    def _note_onboarding(self, report: Report) -> None:
        for arrival, host_tokens, disk_tokens in report.onboarded:
            self.metrics.onboarded_tokens.labels("host").inc(host_tokens)
            self.metrics.onboarded_tokens.labels("disk").inc(disk_tokens)
            if generation := self._live.get(arrival):
                generation.host_tokens += host_tokens
                generation.disk_tokens += disk_tokens
        if report.late:
            self.metrics.onboarding_timeouts.inc(len(report.late))

    async def drain(self, seconds: float) -> None:
        """Takes no more requests and waits for the running ones, at most so long."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        for generation in self._live.values():
            generation.fail(DrainingError("the scheduler is stopping and the request did not end in time"))

    def admitted(self, candidate: Candidate, answer: kvcache_pb2.AdmitSequenceResponse) -> None:
        """A candidate has its blocks."""
        generation = self._live[candidate.request.arrival]
        if answer.HasField("eviction_policy"):
            generation.policy = answer.eviction_policy
        if generation.started_at is None and not candidate.request.sample_index:
            generation.cached_tokens = answer.cached_tokens
            generation.receipts = tuple(answer.receipts)
            generation.hint_answers = tuple(answer.hint_answers)
        if candidate.preempted:
            self._count_return(candidate, answer)

    def _count_return(self, candidate: Candidate, answer: kvcache_pb2.AdmitSequenceResponse) -> None:
        """A preempted sample is back: by copies, by computing again, or with blocks that nobody has taken yet."""
        if any(copy.onboards for copy in answers.copies(answer.transfers)):
            self.metrics.swaps.inc()
        elif answer.cached_tokens + self.model.layout.block_size < len(candidate.token_ids):
            self.metrics.recomputations.inc()

    def refused(self, candidate: Candidate, error: ServiceError) -> None:
        """A candidate will never have blocks."""
        if generation := self._live.get(candidate.request.arrival):
            generation.fail(error)

    def _publish(self, generation: Generation, token_id: int, detail: Detail | None, now: float) -> None:
        """A token of which there is more to say."""
        first = generation.first_token_at is None
        if first and not generation.request.sample_index:
            self.metrics.first_token.observe(now - generation.request.arrived_at)
        generation.feed(token_id, now, detail)
        if first:
            # Who waits has no tokens to be told of, and must not make others wait for their turns.
            self._turns.join(generation)
        if generation.finished and not (detail and detail.finished):
            # A stop string: the step loop does not know of it.
            self._mailbox.put(Cancel(generation.request.arrival))
        if first or generation.finished:
            generation.announce()
        # A token says that the prompt is computed.
        # One that evicts has blocks of its own, and scores that nobody else can know.
        parent = detail.sequence if detail and not generation.policy else 0
        for request in generation.followers:
            self._queue.push(Candidate(request, request.prompt_ids, parent=parent))
        generation.followers = ()

    def _drop(self, samples: Seq[Request]) -> None:
        for request in samples:
            generation = self._live.pop(request.arrival)
            if generation.first_token_at is not None:
                self._turns.leave(generation)
            if not self._queue.remove(request.arrival):
                self._mailbox.put(Cancel(request.arrival))
        if not self._live:
            self._idle.set()
        self._touch()

    def _touch(self) -> None:
        assert self._cache is not None
        self._cache.wake()
        self.metrics.running.set(self.num_running)
        self.metrics.waiting.set(self.num_waiting)
