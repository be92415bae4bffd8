"""What callers get: OpenAI's answers, with what became of the extensions."""

import time
from collections.abc import Iterable
from typing import Any, Literal, NotRequired

from google.protobuf.json_format import MessageToDict
from typing_extensions import TypedDict

from protos.generation.v1 import generation_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from scheduler.frontend.model_info import ModelInfo

# Stands for a probability of zero, which JSON has no logarithm of.
LEAST_LOGPROB = -9999.0

FinishReason = Literal["stop", "length"]
_FINISH: dict[int, FinishReason] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class PromptTokensDetails(TypedDict):
    """Tokens of the prompt from the cache, and tokens of any kind copied to the device from host memory or disk."""

    cached_tokens: int
    host_tokens: int
    disk_tokens: int


class Usage(TypedDict):
    """Tokens of all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Alternative(TypedDict):
    """A candidate token. bytes: null for a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenToken(Alternative):
    """A token of the output."""

    top_logprobs: list[Alternative]


class ChatLogprobs(TypedDict):
    """One entry per token."""

    content: list[ChosenToken]


class CompletionLogprobs(TypedDict):
    """One entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Receipt(TypedDict):
    """The outcome of a retention request, named "ranges[0]", "decode" or "rule/<name>". duration: seconds or null."""

    request: str
    outcome: Literal["granted", "clipped", "rejected", "unspecified"]
    reason: str
    priority: int
    duration: float | None
    num_blocks: int


class HintOutcome(TypedDict):
    """The outcome of a hint."""

    action_id: str
    outcome: Literal["accepted", "clipped", "deferred", "rejected", "missing", "unspecified"]
    detail: str
    num_blocks: int


class Hints(TypedDict):
    """The outcome of each hint."""

    actions: list[HintOutcome]


class Eviction(TypedDict):
    """The evicted tokens. kept_mass: share of the scores that was kept; null without scores."""

    policy: dict[str, object]
    evicted_tokens: int
    kept_mass: float | None
    tainted: bool
    peak_cache_tokens: int


class AssistantMessage(TypedDict):
    """The output."""

    role: Literal["assistant"]
    content: str


class ChatChoice(TypedDict):
    """One sample."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    eviction: NotRequired[Eviction]


class CompletionChoice(TypedDict):
    """One sample, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    eviction: NotRequired[Eviction]


class Answer(TypedDict):
    """Common fields of all responses. retention and kv_hints: outcomes of the request's own."""

    id: str
    object: str
    created: int
    model: str
    usage: NotRequired[Usage | None]
    retention: NotRequired[list[Receipt]]
    kv_hints: NotRequired[Hints]


class ChatCompletion(Answer):
    """Answer of /v1/chat/completions."""

    choices: list[ChatChoice]


class Completion(Answer):
    """Answer of /v1/completions, and an event of its stream."""

    choices: list[CompletionChoice]


class ModelCard(TypedDict):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(TypedDict):
    """Answer of /tokenize. token_strs: the vocabulary's texts, where they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Prompt(TypedDict):
    """Answer of /detokenize."""

    prompt: str


class Version(TypedDict):
    """Answer of /version."""

    version: str


def model_card(model: ModelInfo, created: int) -> ModelCard:
    """created: start of the process, in seconds since 1970."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "kvkeep",
        "max_model_len": model.max_tokens,
    }


def usage(usages: Iterable[pb.Usage]) -> Usage:
    """Usage of all samples of a request."""
    usages = list(usages)
    prompt, output = (sum(getattr(item, name) for item in usages) for name in ("prompt_tokens", "output_tokens"))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {
            "cached_tokens": sum(item.cached_tokens for item in usages),
            "host_tokens": sum(item.host_tokens for item in usages),
            "disk_tokens": sum(item.disk_tokens for item in usages),
        },
    }


def outcomes(answer: dict[str, Any], ended: pb.Usage) -> None:
    """Adds the outcomes of retention requests and hints, which only the first sample's usage has."""
    if ended.retention_receipts:
        answer["retention"] = [_receipt(receipt) for receipt in ended.retention_receipts]
    if ended.hint_answers:
        answer["kv_hints"] = {"actions": [_hint(hint) for hint in ended.hint_answers]}


def _receipt(receipt: common.RetentionReceipt) -> Receipt:
    lasts = receipt.retention_duration.ToNanoseconds() / 1e9 if receipt.HasField("retention_duration") else None
    return {
        "request": receipt.request,
        "outcome": common.Outcome.Name(receipt.outcome).removeprefix("OUTCOME_").lower(),  # type: ignore[typeddict-item]
        "reason": receipt.reason,
        "priority": receipt.retention_priority,
        "duration": lasts,
        "num_blocks": receipt.num_blocks,
    }


def _hint(hint: common.HintAnswer) -> HintOutcome:
    outcome = common.HintOutcome.Name(hint.outcome).removeprefix("HINT_OUTCOME_").lower()
    return {
        "action_id": hint.action_id,
        "outcome": outcome,  # type: ignore[typeddict-item]
        "detail": hint.detail,
        "num_blocks": hint.num_blocks,
    }


def eviction(report: pb.EvictionReport) -> Eviction:
    """The report, with the names of the request."""
    policy = MessageToDict(report.policy, preserving_proto_field_name=True)
    for part, name, prefix in (
        (policy, "kind", "EVICTION_KIND_"),
        (policy, "positions", "EVICTION_POSITIONS_"),
        (policy.get("kvcrush", {}), "anchor", "KV_CRUSH_ANCHOR_"),
    ):
        if name in part:
            part[name] = part[name].removeprefix(prefix).lower()
    # MessageToDict writes 64 bits as a text.
    policy["seed"] = report.policy.seed
    return {
        "policy": policy,
        "evicted_tokens": report.evicted_tokens,
        "kept_mass": report.kept_mass if report.HasField("kept_mass") else None,
        "tainted": report.tainted,
        "peak_cache_tokens": report.peak_cache_tokens,
    }


def alternative(model: ModelInfo, token_id: int, logprob: float) -> Alternative:
    text = model.token_text(token_id)
    whole = "\N{REPLACEMENT CHARACTER}" not in text
    return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(text.encode()) if whole else None}


def finish_reason(reason: int) -> FinishReason | None:
    """None before the sample ends."""
    return _FINISH.get(reason)


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())
