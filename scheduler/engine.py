"""All requests, from their acceptance to their end: what the service talks to. On the asyncio loop."""

import asyncio
import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from protos.kvcache.v1 import kvcache_pb2
from protos.rpc.errors import ServiceError
from scheduler.cache_client import CacheClient
from scheduler.errors import DrainingError, QueueFullError, RequestExistsError, StepLoopError
from scheduler.generation import Generation, Stream
from scheduler.mailbox import Cancel, Mailbox, Output, Report
from scheduler.metrics import RequestMetrics
from scheduler.request import Candidate, Request
from scheduler.tokenizer import Model
from scheduler.waiting_queue import WaitingQueue

RETRY_SECONDS = 1.0
# Every stream gets a message as often as one such time for each stream has passed: with few streams that is for every
# token, with very many for several at once, or writing would leave no time for anything else.
MESSAGE_SECONDS = 1e-4


class Engine:
    """Knows every live request; the step loop and the cache client report to it."""

    def __init__(
        self, model: Model, queue: WaitingQueue, mailbox: Mailbox, metrics: RequestMetrics, *, max_waiting: int
    ) -> None:
        self.model = model
        self.max_waiting = max_waiting
        self.preemptions = 0
        self.steps = 0
        self._queue = queue
        self._arriving = 0
        self._mailbox = mailbox
        self._metrics = metrics
        # By arrival.
        self._live: dict[int, Generation] = {}
        self._request_ids: set[str] = set()
        self._cache: CacheClient | None = None
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        # Who has tokens that are not announced, when all were told last, and what will tell them.
        self._unannounced: set[Generation] = set()
        self._announced_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, cache: CacheClient) -> None:
        """Names the cache client, which is built around this object."""
        self._cache = cache

    @property
    def num_running(self) -> int:
        """Samples that hold blocks."""
        return self._cache.live if self._cache else 0

    @property
    def num_waiting(self) -> int:
        """Samples that wait for blocks, and requests that are not tokenized yet."""
        return len(self._queue) + self._arriving

    @contextlib.contextmanager
    def arriving(self, request_id: str) -> Iterator[None]:
        """Counts a request as waiting while it is checked and tokenized. Raises when it would not be taken now."""
        self._check_id(request_id)
        if self.num_waiting >= self.max_waiting:
            raise QueueFullError(
                f"{self.max_waiting} requests wait already, which is the bound", retry_after=RETRY_SECONDS
            )
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    def _check_id(self, request_id: str) -> None:
        if self._draining:
            raise DrainingError("the scheduler is stopping")
        if request_id in self._request_ids:
            raise RequestExistsError(
                "a running request has this request_id", fields={"request_id": "is in use by a running request"}
            )

    @contextlib.contextmanager
    def submit(self, samples: Seq[Request]) -> Iterator[Stream]:
        """Queues a request that was counted as arriving. Leaving the block frees all that it held, however it ended."""
        first = samples[0]
        self._check_id(first.request_id)
        stream = Stream(samples, self.model)
        self._live.update((generation.request.arrival, generation) for generation in stream.generations)
        self._request_ids.add(first.request_id)
        self._idle.clear()
        self._queue.push(Candidate(first, first.prompt_ids))
        self._touch()
        try:
            yield stream
        finally:
            self._drop(samples)

    def receive(self, report: Report) -> None:
        """Takes what a step brought: one call per step for all requests."""
        assert self._cache is not None
        self.steps += report.steps
        self._note(report)
        for output in report.outputs:
            if (generation := self._live.get(output.arrival)) and not generation.finished:
                self._publish(generation, output, report.at)
        self._metrics.output_tokens.inc(len(report.outputs))
        self._announce()
        if report.only_outputs:
            return
        for candidate in report.again:
            if (generation := self._live.get(candidate.request.arrival)) and not generation.finished:
                self._queue.push(candidate)
        if report.failed:
            for generation in self._live.values():
                generation.fail(StepLoopError("the step loop ended with an error of its own; the log says which"))
        self._cache.receive(report)
        self._touch()

    def _note(self, report: Report) -> None:
        """What is only counted and told at the end."""
        for arrival in report.started:
            if (generation := self._live.get(arrival)) and generation.started_at is None:
                generation.started_at = report.at
        for arrival in report.preempted:
            self.preemptions += 1
            self._metrics.preemptions.inc()
            if generation := self._live.get(arrival):
                generation.preemptions += 1
        for arrival, tokens, mass in report.evicted:
            self._metrics.evicted_tokens.inc(tokens)
            if generation := self._live.get(arrival):
                generation.evict(tokens, mass)
        for arrival, tokens in report.most_kept.items():
            if generation := self._live.get(arrival):
                generation.most_kept = max(generation.most_kept, tokens)

    async def drain(self, seconds: float) -> None:
        """Takes no more requests and waits for the running ones, at most so long."""
        self._draining = True
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
        if generation.cached_tokens is None and not candidate.request.sample_index:
            generation.cached_tokens = answer.cached_tokens
            generation.receipts = tuple(answer.receipts)
            generation.hint_answers = tuple(answer.hint_answers)
            self._metrics.prompt_tokens.inc(len(candidate.request.prompt_ids))
            self._metrics.cached_tokens.inc(answer.cached_tokens)

    def refused(self, candidate: Candidate, error: ServiceError) -> None:
        """A candidate will never have blocks."""
        if generation := self._live.get(candidate.request.arrival):
            generation.fail(error)

    def _publish(self, generation: Generation, output: Output, now: float) -> None:
        previous, first = generation.last_token_at, generation.first_token_at is None
        generation.feed(output, now)
        (self._metrics.first_token if first else self._metrics.inter_token).observe(now - previous)
        if generation.finished and not output.finished:
            # A stop string: the step loop does not know of it.
            self._mailbox.put(Cancel(output.arrival))
        if first or generation.finished:
            generation.announce()
        else:
            self._unannounced.add(generation)
        # A token says that the prompt is computed.
        # One that evicts has blocks of its own, and scores that nobody else can know.
        parent = 0 if generation.policy else output.sequence
        for request in generation.followers:
            self._queue.push(Candidate(request, request.prompt_ids, parent=parent))
        generation.followers = ()

    def _announce(self) -> None:
        """Announces what is not announced, or sees to it that it will be."""
        if not self._unannounced or self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        left = self._announced_at + MESSAGE_SECONDS * len(self._live) - loop.time()
        if left > 0:
            self._timer = loop.call_later(left, self._announce_all)
        else:
            self._announce_all()

    def _announce_all(self) -> None:
        self._timer = None
        self._announced_at = asyncio.get_running_loop().time()
        for generation in self._unannounced:
            generation.announce()
        self._unannounced.clear()

    def _drop(self, samples: Seq[Request]) -> None:
        self._request_ids.remove(samples[0].request_id)
        for request in samples:
            del self._live[request.arrival]
            if not self._queue.remove(request.arrival):
                self._mailbox.put(Cancel(request.arrival))
        if not self._live:
            self._idle.set()
        self._touch()

    def _touch(self) -> None:
        assert self._cache is not None
        self._cache.wake()
        self._metrics.running.set(self.num_running)
        self._metrics.waiting.set(self.num_waiting)
