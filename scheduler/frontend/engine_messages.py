"""Samples as messages to engines in other processes, and the messages that these send back."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from protos.execution.v1 import execution_pb2
from protos.generation.v1 import generation_pb2 as pb
from scheduler.bridge import Admission, RequestUpdates, TokenMeta
from scheduler.frontend.requests import RequestTable
from scheduler.request import AdmissionAttempt, CacheOptions


@dataclass(slots=True, eq=False, kw_only=True)
class SentSample:
    """A sample that an engine runs, by its name there. token_ids: of its prompt, and of its output so far.

    introduced: whether the engine has said how many tokens were cached. usage: the engine's last count.
    """

    name: str
    attempt: AdmissionAttempt
    token_ids: array[int]
    introduced: bool = False
    usage: pb.Usage | None = None

    @property
    def arrival(self) -> int:
        return self.attempt.request.arrival

    @property
    def has_new_tokens(self) -> bool:
        """Whether this attempt has brought output."""
        return len(self.token_ids) > len(self.attempt.token_ids)

    def take(self, chunk: pb.StreamGenerateResponse, updates: RequestUpdates, requests: RequestTable) -> None:
        """Adds the chunk's new output to the updates; reports the sample's admission to the table at once."""
        # A sample that is aborted before its first token was never admitted, as far as is known.
        if chunk.HasField("usage") and (chunk.token_ids or self.introduced):
            self._take_usage(chunk.usage, updates, requests)
        if chunk.prompt_logprobs:
            scored = [_logprobs(one, position) for position, one in enumerate(chunk.prompt_logprobs, 1)]
            updates.prompt_logprobs.append((self.arrival, scored))
        is_aborted = chunk.finish_reason == pb.FINISH_REASON_ABORT
        if is_aborted:
            updates.aborted.append(self.arrival)
        last = len(chunk.token_ids) - 1
        for index, token_id in enumerate(chunk.token_ids):
            finished = index == last and not is_aborted and chunk.finish_reason != pb.FINISH_REASON_UNSPECIFIED
            is_first = not self.has_new_tokens
            logprobs = _logprobs(chunk.logprobs[index]) if chunk.logprobs else None
            meta = None
            if is_first or finished or logprobs:
                stopped = finished and chunk.finish_reason == pb.FINISH_REASON_STOP
                meta = TokenMeta(0, stopped, finished, logprobs)
            self.token_ids.append(token_id)
            updates.outputs.append((self.arrival, token_id, meta))

    def _take_usage(self, usage: pb.Usage, updates: RequestUpdates, requests: RequestTable) -> None:
        """Takes a usage: the first says how the sample was admitted, the last what it has cost."""
        before, self.usage = self.usage or pb.Usage(), usage
        if not self.introduced:
            self.introduced = True
            policy = usage.eviction.policy if usage.HasField("eviction") else None
            admission = Admission(
                usage.cached_tokens,
                False,
                usage.retention_receipts,
                usage.hint_answers,
                policy,
                written_tokens=usage.cache_write_tokens,
                miss=usage.prefix_miss if usage.HasField("prefix_miss") else None,
                diagnosis=usage.cache_diagnosis if usage.HasField("cache_diagnosis") else None,
            )
            requests.admitted(self.attempt, admission)
            # The time from the sample's first step to its first token.
            prefill = usage.time_to_first_token.ToNanoseconds() - usage.queue_time.ToNanoseconds()
            requests.receive(RequestUpdates(started=[self.arrival], at=updates.at - prefill / 1e9))
        updates.preempted.extend([self.arrival] * (usage.preemptions - before.preemptions))
        host, disk = usage.host_tokens - before.host_tokens, usage.disk_tokens - before.disk_tokens
        if host or disk:
            updates.onloaded.append((self.arrival, host, disk))
        if evicted := usage.eviction.evicted_tokens - before.eviction.evicted_tokens:
            mass = usage.eviction.kept_mass if usage.eviction.HasField("kept_mass") else -1.0
            updates.evicted.append((self.arrival, evicted, mass))
        if usage.eviction.peak_cache_tokens:
            updates.most_kept[self.arrival] = usage.eviction.peak_cache_tokens


def _logprobs(logprobs: pb.TokenLogprobs, position: int = 0) -> execution_pb2.TokenLogprobs:
    return execution_pb2.TokenLogprobs(
        index=position,
        rank=logprobs.rank,
        logprob=logprobs.logprob,
        top_token_ids=[top.token_id for top in logprobs.top],
        top_logprobs=[top.logprob for top in logprobs.top],
    )


def start_request(
    attempt: AdmissionAttempt, name: str, expected: int, eos: Sequence[int], *, compares: bool = False
) -> pb.StartRequest:
    """Builds the message that starts a sample under a name.

    expected: cached tokens that are expected. eos: ids that end outputs unless a request ignores them. compares:
    whether the engine itself compares the request with earlier responses.
    """
    request = attempt.request
    prompt = len(request.prompt_ids)
    stop_ids = set(request.sampling.stop_token_ids)
    ignores_eos = not stop_ids.issuperset(eos)
    asked = pb.StreamGenerateRequest(
        request_id=name,
        model="" if request.adapter is None else request.adapter.name,
        token_ids=pb.TokenIds(token_ids=request.prompt_ids),
        max_tokens=request.max_tokens,
        sampling=_sampling(request.sampling),
        stop_token_ids=sorted(stop_ids if ignores_eos else stop_ids.difference(eos)),
        ignore_eos=ignores_eos,
        priority=request.priority,
        cache=_cache(request.cache),
        eviction_policy=request.cache.eviction_policy,
    )
    if request.sampling.HasField("structured_output"):
        asked.structured_output.CopyFrom(request.sampling.structured_output)
    if math.isfinite(request.onload_timeout):
        asked.cache.onload_timeout.FromNanoseconds(int(request.onload_timeout * 1e9))
    if compares:
        asked.cache.parts.CopyFrom(pb.PromptParts(request_id=request.request_id, **request.parts._asdict()))
        if request.cache.comparison_id is not None:
            asked.cache.comparison_request_id = request.cache.comparison_id
    return pb.StartRequest(
        request=asked,
        output_token_ids=attempt.token_ids[prompt:],
        expected_cached_tokens=expected,
        traceparent=request.traceparent,
        is_follower=bool(request.sample_index),
        adapter_id=request.adapter_id,
        caller_request_id=request.caller_id,
        header_request_id=request.header_id,
    )


def _sampling(sampling: execution_pb2.SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
        num_prompt_logprobs=sampling.num_prompt_logprobs if sampling.HasField("num_prompt_logprobs") else None,
        logit_bias=sampling.logit_bias,
        min_tokens=sampling.min_tokens,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_token_ids=[pb.TokenIds(token_ids=run.token_ids) for run in sampling.bad_token_ids],
    )


def _cache(options: CacheOptions) -> pb.CacheOptions:
    message = pb.CacheOptions(
        salt=options.salt,
        no_read=options.no_read,
        no_store=options.no_store,
        session_id=options.session_id,
        tenant_id=options.tenant_id,
        kv_hints=options.hints,
        explain_miss=options.explain_miss,
        store_tokens=options.store_tokens,
    )
    if (retention := options.retention) is not None:
        message.retention_ranges.extend(retention.ranges)
        if retention.HasField("decode_retention_priority"):
            message.decode_retention_priority = retention.decode_retention_priority
        if retention.HasField("decode_retention_duration"):
            message.decode_retention_duration.CopyFrom(retention.decode_retention_duration)
    return message
