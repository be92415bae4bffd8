"""Samples as messages to engines."""

import math
from collections.abc import Sequence

from protos.execution.v1 import execution_pb2
from protos.generation.v1 import generation_pb2 as pb
from scheduler.request import AdmissionAttempt, CacheOptions


def start_request(attempt: AdmissionAttempt, name: str, expected: int, eos: Sequence[int]) -> pb.StartRequest:
    """A sample under a name. expected: its cached tokens. eos: ids that end outputs unless a request ignores them."""
    request = attempt.request
    prompt = len(request.prompt_ids)
    stop_ids = set(request.sampling.stop_token_ids)
    ignores_eos = not stop_ids.issuperset(eos)
    asked = pb.StreamGenerateRequest(
        request_id=name,
        token_ids=pb.TokenIds(token_ids=request.prompt_ids),
        max_tokens=request.max_tokens,
        sampling=_sampling(request.sampling),
        stop_token_ids=sorted(stop_ids if ignores_eos else stop_ids.difference(eos)),
        ignore_eos=ignores_eos,
        priority=request.priority,
        cache=_cache(request.cache),
        eviction_policy=request.cache.eviction_policy,
    )
    if math.isfinite(request.onload_timeout):
        asked.cache.onload_timeout.FromNanoseconds(int(request.onload_timeout * 1e9))
    return pb.StartRequest(
        request=asked,
        output_token_ids=attempt.token_ids[prompt:],
        expected_cached_tokens=expected,
        traceparent=request.traceparent,
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
    )


def _cache(options: CacheOptions) -> pb.CacheOptions:
    message = pb.CacheOptions(
        salt=options.salt,
        no_read=options.no_read,
        no_store=options.no_store,
        session_id=options.session_id,
        tenant_id=options.tenant_id,
        kv_hints=options.hints,
    )
    if (retention := options.retention) is not None:
        message.retention_ranges.extend(retention.ranges)
        if retention.HasField("decode_retention_priority"):
            message.decode_retention_priority = retention.decode_retention_priority
        if retention.HasField("decode_retention_duration"):
            message.decode_retention_duration.CopyFrom(retention.decode_retention_duration)
    return message
