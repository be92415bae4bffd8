"""What engines send, as the request table takes it."""

from __future__ import annotations

import time

import structlog
from google.rpc import status_pb2

from protos.execution.v1 import execution_pb2
from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.errors import PassedOnError, from_status
from scheduler.bridge import Admission, TokenBatch, TokenMeta
from scheduler.frontend.engine import EngineListener
from scheduler.request import MAX_FAILURES
from scheduler.router.engine_link import EngineLink
from scheduler.router.fleet import Fleet, Routed
from scheduler.router.metrics import RouterMetrics
from scheduler.router.notes import NOTE_SECONDS

# The statuses of an engine that takes no requests: another engine may.
_AWAY = 14

log = structlog.get_logger()


class EngineReports:
    """Listens to engines, and tells the request table."""

    def __init__(self, fleet: Fleet, listener: EngineListener, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._listener = listener
        self._metrics = metrics

    def opened(self, _link: EngineLink) -> None:
        """An engine takes requests."""
        self._fleet.start_waiting()

    def received(self, link: EngineLink, response: pb.StreamRequestsResponse) -> None:
        """An engine has sent output, failures or its load."""
        batch = TokenBatch(steps=int(bool(response.outputs)), at=time.monotonic())
        for chunk in response.outputs:
            if routed := self._fleet.find(chunk.request_id):
                self._take(routed, chunk, batch)
        for failure in response.failures:
            if routed := self._fleet.find(failure.request_id):
                self._fail(link, routed, failure, batch)
        if response.HasField("loads") and not link.obstacle:
            self._fleet.start_waiting()
        self._listener.receive(batch)

    def lost(self, link: EngineLink) -> None:
        """An engine is lost: its samples go on elsewhere."""
        batch = TokenBatch(at=time.monotonic())
        running = self._fleet.on(link)
        log.warning("engine lost", address=link.address, executor=link.executor_id, requests=len(running))
        for routed in running:
            self._move(routed, batch, lost=True)
        self._listener.receive(batch)

    def _move(self, routed: Routed, batch: TokenBatch, *, lost: bool) -> None:
        attempt = self._fleet.next_attempt(routed, lost=lost)
        if attempt.failures < MAX_FAILURES:
            batch.retried.append(attempt)
        else:
            batch.given_up.append(routed.arrival)

    def _fail(self, link: EngineLink, routed: Routed, failure: pb.RequestFailure, batch: TokenBatch) -> None:
        status = status_pb2.Status.FromString(failure.status)
        if status.code == _AWAY:
            link.avoid(time.monotonic())
            self._move(routed, batch, lost=False)
        else:
            self._fleet.end(routed)
            self._listener.refused(routed.attempt, PassedOnError(from_status(status)))

    def _take(self, routed: Routed, chunk: pb.StreamGenerateResponse, batch: TokenBatch) -> None:
        if chunk.HasField("usage"):
            self._take_usage(routed, chunk.usage, batch)
        last = len(chunk.token_ids) - 1
        for index, token_id in enumerate(chunk.token_ids):
            finished = index == last and chunk.finish_reason != pb.FINISH_REASON_UNSPECIFIED
            is_first = not routed.has_new_tokens
            logprobs = _logprobs(chunk.logprobs[index]) if chunk.logprobs else None
            meta = None
            if is_first or finished or logprobs:
                stopped = finished and chunk.finish_reason == pb.FINISH_REASON_STOP
                meta = TokenMeta(0, stopped, finished, logprobs)
            routed.token_ids.append(token_id)
            batch.outputs.append((routed.arrival, token_id, meta))
        if chunk.finish_reason:
            routed.link.ended(batch.at - routed.started_at)
            self._fleet.end(routed)

    def _take_usage(self, routed: Routed, usage: pb.Usage, batch: TokenBatch) -> None:
        """The first usage says how the sample was admitted, the last one what it has cost."""
        before, routed.usage = routed.usage or pb.Usage(), usage
        if not routed.introduced:
            routed.introduced = True
            if routed.note is not None:
                routed.note.until = batch.at + NOTE_SECONDS
            self._metrics.regret_tokens.inc(max(0, routed.expected - usage.cached_tokens))
            policy = usage.eviction.policy if usage.HasField("eviction") else None
            admission = Admission(usage.cached_tokens, False, usage.retention_receipts, usage.hint_answers, policy)
            self._listener.admitted(routed.attempt, admission)
            # Its first step was so long before its first token.
            prefill = usage.time_to_first_token.ToNanoseconds() - usage.queue_time.ToNanoseconds()
            self._listener.receive(TokenBatch(started=[routed.arrival], at=batch.at - prefill / 1e9))
        batch.preempted.extend([routed.arrival] * (usage.preemptions - before.preemptions))
        host, disk = usage.host_tokens - before.host_tokens, usage.disk_tokens - before.disk_tokens
        if host or disk:
            batch.onloaded.append((routed.arrival, host, disk))
        if evicted := usage.eviction.evicted_tokens - before.eviction.evicted_tokens:
            mass = usage.eviction.kept_mass if usage.eviction.HasField("kept_mass") else -1.0
            batch.evicted.append((routed.arrival, evicted, mass))
        if usage.eviction.peak_cache_tokens:
            batch.most_kept[routed.arrival] = usage.eviction.peak_cache_tokens


def _logprobs(logprobs: pb.TokenLogprobs) -> execution_pb2.TokenLogprobs:
    return execution_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_token_ids=[top.token_id for top in logprobs.top],
        top_logprobs=[top.logprob for top in logprobs.top],
    )
