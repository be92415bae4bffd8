"""A comparison with an earlier response, in the words of OpenAI, of Anthropic and of the cache."""

from collections.abc import Collection
from typing import Any

from protos.generation.v1 import generation_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from scheduler.frontend.openai.responses import (
    CacheMissReason,
    CacheReport,
    Diagnostics,
    FirstMiss,
    PromptCacheDiagnostics,
)

# OpenAI has no adapters, and no salt except its cache key. Any change of the prefix counts as changed input.
_OPENAI = {
    pb.CACHE_MISS_REASON_MODEL_CHANGED: "model_changed",
    pb.CACHE_MISS_REASON_WEIGHTS_CHANGED: "model_changed",
    pb.CACHE_MISS_REASON_SALT_CHANGED: "prompt_cache_key_changed",
    pb.CACHE_MISS_REASON_TOOLS_CHANGED: "tools_changed",
    pb.CACHE_MISS_REASON_SYSTEM_CHANGED: "input_changed",
    pb.CACHE_MISS_REASON_TEMPLATE_CHANGED: "input_changed",
    pb.CACHE_MISS_REASON_INPUT_CHANGED: "input_changed",
}
# Anthropic says "unavailable" for other parameters that change the prompt.
_ANTHROPIC = {
    pb.CACHE_MISS_REASON_MODEL_CHANGED: "model_changed",
    pb.CACHE_MISS_REASON_WEIGHTS_CHANGED: "model_changed",
    pb.CACHE_MISS_REASON_TOOLS_CHANGED: "tools_changed",
    pb.CACHE_MISS_REASON_SYSTEM_CHANGED: "system_changed",
    pb.CACHE_MISS_REASON_INPUT_CHANGED: "messages_changed",
}


def prompt_cache_diagnostics(diagnosis: pb.CacheDiagnosis) -> PromptCacheDiagnostics:
    """Returns OpenAI's shape, which has no reason for an unchanged, uncached prompt: such a miss is "unavailable"."""
    if diagnosis.outcome == pb.CACHE_OUTCOME_COMPARISON_NOT_FOUND:
        return {"type": "comparison_response_not_found"}
    if diagnosis.outcome == pb.CACHE_OUTCOME_HIT:
        return {"type": "cache_hit"}
    reason = _OPENAI.get(diagnosis.reason)
    if reason is None:
        return {"type": "unavailable"}
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": diagnosis.missed_tokens,
        "comparison_reusable_tokens": diagnosis.reusable_tokens,
    }


def diagnostics(diagnosis: pb.CacheDiagnosis) -> Diagnostics | None:
    """Returns Anthropic's shape, which only compares requests: None if they agree, even if blocks were not cached."""
    if diagnosis.outcome == pb.CACHE_OUTCOME_COMPARISON_NOT_FOUND:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    if diagnosis.reason in (pb.CACHE_MISS_REASON_UNSPECIFIED, pb.CACHE_MISS_REASON_NOT_CACHED):
        return None
    changed = _ANTHROPIC.get(diagnosis.reason)
    if changed is None:
        return {"cache_miss_reason": {"type": "unavailable"}}
    reason: CacheMissReason = {
        "type": changed,  # type: ignore[typeddict-item]
        "cache_missed_input_tokens": diagnosis.missed_tokens,
    }
    return {"cache_miss_reason": reason}


def add(answer: dict[str, Any], usage: pb.Usage, shapes: Collection[str], block_size: int) -> None:
    """Adds the comparison to an answer in the requested shapes, and a report. usage: of the first sample.

    Only the first sample has a comparison. Without a comparison, Anthropic's shape is null.
    """
    if usage.HasField("cache_diagnosis"):
        if "prompt_cache_diagnostics" in shapes:
            answer["prompt_cache_diagnostics"] = prompt_cache_diagnostics(usage.cache_diagnosis)
        if "diagnostics" in shapes:
            answer["diagnostics"] = diagnostics(usage.cache_diagnosis)
        answer["kvkeep"] = report(usage, block_size)
    elif "diagnostics" in shapes:
        answer["diagnostics"] = None


def report(usage: pb.Usage, block_size: int) -> CacheReport:
    """Returns the comparison with what only the cache manager knows. reason: why the first missed token was missed."""
    diagnosis = usage.cache_diagnosis
    miss = _first_miss(usage, block_size) if usage.HasField("prefix_miss") else None
    reason: str | None
    if diagnosis.outcome == pb.CACHE_OUTCOME_COMPARISON_NOT_FOUND:
        reason = "comparison_not_found"
    elif not diagnosis.missed_tokens:
        reason = None
    elif miss is not None and miss["token"] < diagnosis.common_tokens:
        reason = miss["cause"]
    else:
        reason = _lower(pb.CacheMissReason.Name(diagnosis.reason), "CACHE_MISS_REASON_")
    return {
        "reason": reason,
        "cache_missed_tokens": diagnosis.missed_tokens,
        "comparison_reusable_tokens": diagnosis.reusable_tokens,
        "common_tokens": diagnosis.common_tokens,
        "cached_tokens": usage.cached_tokens,
        "host_tokens": usage.host_tokens,
        "disk_tokens": usage.disk_tokens,
        "first_miss": miss,
    }


def _first_miss(usage: pb.Usage, block_size: int) -> FirstMiss:
    miss = usage.prefix_miss
    return {
        "token": usage.cached_tokens // block_size * block_size,
        "cause": _lower(common.MissCause.Name(miss.cause), "MISS_CAUSE_"),
        "tier": miss.tier or None,
        "removed_seconds_ago": miss.removed_ago.ToNanoseconds() / 1e9 if miss.HasField("removed_ago") else None,
        "priority": miss.retention_priority if miss.HasField("retention_priority") else None,
        "for_own_request": miss.for_own_request,
        "for_request": miss.for_id or None,
    }


def _lower(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()
