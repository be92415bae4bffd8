"""What callers get: OpenAI's answers, with what became of the extensions."""

import time
from collections.abc import Iterable
from typing import Any, Literal, NotRequired

from google.protobuf.json_format import MessageToDict
from typing_extensions import TypedDict

from protos.generation.v1 import generation_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from scheduler.frontend.model_info import ModelInfo

# Stands for the logarithm of a probability of zero, which JSON cannot express.
LEAST_LOGPROB = -9999.0

FinishReason = Literal["stop", "length", "tool_calls", "abort"]
_FINISH: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}


class PromptTokensDetails(TypedDict):
    """Prompt tokens that were cached, and prompt tokens that the request left in the cache.

    host_tokens and disk_tokens: tokens whose blocks were copied to the device from a lower tier, output included.
    """

    cached_tokens: int
    cache_write_tokens: int
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
    """One entry per token in each list; a token of an echoed prompt may have null for its log-probabilities."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(TypedDict):
    """A token of a prompt, or an alternative to it, in vLLM's shape.

    prompt_logprobs has the token and its alternatives by id, for each token of the prompt; null for the first token.
    """

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


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


class FunctionCall(TypedDict):
    """arguments: JSON text, as far as the model has written it."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(TypedDict):
    """The output. content: null if there are only calls or reasoning. reasoning: the same as reasoning_content."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One sample."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    eviction: NotRequired[Eviction]
    token_ids: NotRequired[list[int]]


class CompletionChoice(TypedDict):
    """One sample, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    eviction: NotRequired[Eviction]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class PromptCacheDiagnostics(TypedDict):
    """OpenAI's words for a comparison with an earlier response. Only a miss has a reason and numbers of tokens."""

    type: Literal["cache_hit", "cache_miss", "comparison_response_not_found", "unavailable"]
    reason: NotRequired[str]
    cache_missed_tokens: NotRequired[int]
    comparison_reusable_tokens: NotRequired[int]


class CacheMissReason(TypedDict):
    """Anthropic's words for what has changed."""

    type: Literal[
        "model_changed",
        "system_changed",
        "tools_changed",
        "messages_changed",
        "previous_message_not_found",
        "unavailable",
    ]
    cache_missed_input_tokens: NotRequired[int]


class Diagnostics(TypedDict):
    """Anthropic's shape of a comparison."""

    cache_miss_reason: CacheMissReason


class FirstMiss(TypedDict):
    """The first whole block of the prompt that was not cached. token: position of its first token in the prompt.

    removed_seconds_ago, priority: of a block that was removed. for_request: the caller's own request that got the slot.
    """

    token: int
    cause: str
    tier: str | None
    removed_seconds_ago: float | None
    priority: int | None
    for_own_request: bool
    for_request: str | None


class CacheReport(TypedDict):
    """What the owner of the blocks knows about a comparison. first_miss: null when no whole block was missing."""

    reason: str | None
    cache_missed_tokens: int
    comparison_reusable_tokens: int
    common_tokens: int
    cached_tokens: int
    host_tokens: int
    disk_tokens: int
    first_miss: FirstMiss | None


class Answer(TypedDict):
    """Common fields of all responses. retention: outcomes of retention requests, or of rules. kv_hints: of hints."""

    id: str
    object: str
    created: int
    model: str
    usage: NotRequired[Usage | None]
    retention: NotRequired[list[Receipt]]
    kv_hints: NotRequired[Hints]
    prompt_cache_diagnostics: NotRequired[PromptCacheDiagnostics]
    diagnostics: NotRequired[Diagnostics | None]
    kvkeep: NotRequired[CacheReport]


class ChatCompletion(Answer):
    """Answer of /v1/chat/completions."""

    choices: list[ChatChoice]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


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
    parent: str | None


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


class TokenizerInfo(TypedDict):
    """Answer of /tokenizer_info. A special token or a chat template that the model does not have is null."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    model_max_length: int
    vocab_size: int


class Aborted(TypedDict):
    """Answer of /abort_request: the number of requests that end."""

    aborted_requests: int


class Load(TypedDict):
    """Answer of /load: samples that run and wait."""

    server_load: int


class EngineState(TypedDict):
    """The load of the engine, or of the router's engines together."""

    running_requests: int
    waiting_requests: int
    queued_prompt_tokens: int


class ModelConfig(TypedDict):
    """What vLLM calls the model's configuration."""

    model: str
    served_model_name: str
    max_model_len: int
    dtype: str


class CacheConfig(TypedDict):
    """What vLLM calls the cache's configuration."""

    block_size: int
    cache_dtype: str


class SchedulerConfig(TypedDict):
    """What vLLM calls the scheduler's configuration."""

    max_num_seqs: int


class VllmConfig(TypedDict):
    """The parts of vLLM's configuration that are known here."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig


class ServerInfo(TypedDict):
    """Answer of /server_info: SGLang's names, and in vllm_config those of vLLM. context_length: prompt and output."""

    model_path: str
    served_model_name: str
    tokenizer_path: str
    context_length: int
    vocab_size: int
    page_size: int
    dtype: str
    kv_cache_dtype: str
    max_running_requests: int
    max_queued_requests: int
    internal_states: list[EngineState]
    version: str
    vllm_config: VllmConfig


class ModelPath(TypedDict):
    """Answer of /model_info. The paths are the name of the model."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: Literal[True]


class Prompt(TypedDict):
    """Answer of /detokenize."""

    prompt: str


class Version(TypedDict):
    """Answer of /version."""

    version: str


def model_card(model: ModelInfo, created: int, parent: ModelInfo | None = None) -> ModelCard:
    """created: start of the process, in seconds since 1970. parent: an adapter's model, None for the model itself."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "kvkeep",
        "max_model_len": model.max_tokens,
        "parent": None if parent is None else parent.name,
    }


def tokenizer_info(model: ModelInfo) -> TokenizerInfo:
    special = model.special_tokens
    return {
        "bos_token": special.get("bos_token"),
        "eos_token": special.get("eos_token"),
        "pad_token": special.get("pad_token"),
        "unk_token": special.get("unk_token"),
        "chat_template": model.chat_template or None,
        "model_max_length": model.max_tokens,
        "vocab_size": model.vocab_size,
    }


def model_path(model: ModelInfo) -> ModelPath:
    return {
        "model_path": model.name,
        "tokenizer_path": model.name,
        "served_model_name": model.name,
        "is_generation": True,
    }


def server_info(model: ModelInfo, loads: pb.GetLoadsResponse, version: str) -> ServerInfo:
    """version: of kvkeep."""
    return {
        "model_path": model.name,
        "served_model_name": model.name,
        "tokenizer_path": model.name,
        "context_length": model.max_tokens,
        "vocab_size": model.vocab_size,
        "page_size": model.layout.block_size,
        "dtype": model.dtype,
        "kv_cache_dtype": model.kv_cache_dtype,
        "max_running_requests": loads.max_running_requests,
        "max_queued_requests": loads.max_waiting_requests,
        "internal_states": [
            {
                "running_requests": loads.running_requests,
                "waiting_requests": loads.waiting_requests,
                "queued_prompt_tokens": loads.queued_prompt_tokens,
            }
        ],
        "version": version,
        "vllm_config": {
            "model_config": {
                "model": model.name,
                "served_model_name": model.name,
                "max_model_len": model.max_tokens,
                "dtype": model.dtype,
            },
            "cache_config": {"block_size": model.layout.block_size, "cache_dtype": model.kv_cache_dtype},
            "scheduler_config": {"max_num_seqs": loads.max_running_requests},
        },
    }


def usage(usages: Iterable[pb.Usage]) -> Usage:
    """Returns the usage of all samples of a request."""
    usages = list(usages)
    prompt, output = (sum(getattr(item, name) for item in usages) for name in ("prompt_tokens", "output_tokens"))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {
            "cached_tokens": sum(item.cached_tokens for item in usages),
            "cache_write_tokens": sum(item.cache_write_tokens for item in usages),
            "host_tokens": sum(item.host_tokens for item in usages),
            "disk_tokens": sum(item.disk_tokens for item in usages),
        },
    }


def outcomes(answer: dict[str, Any], ended: pb.Usage) -> None:
    """Adds the outcomes of a prompt's retention requests and hints, which only its first sample's usage has."""
    if ended.retention_receipts:
        answer.setdefault("retention", []).extend(map(_receipt, ended.retention_receipts))
    if ended.hint_answers:
        answer.setdefault("kv_hints", {"actions": []})["actions"].extend(map(_hint, ended.hint_answers))


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
    """Returns the report, with the field names of requests."""
    policy = MessageToDict(report.policy, preserving_proto_field_name=True)
    for part, name, prefix in (
        (policy, "kind", "EVICTION_KIND_"),
        (policy, "positions", "EVICTION_POSITIONS_"),
        (policy.get("kvcrush", {}), "anchor", "KV_CRUSH_ANCHOR_"),
    ):
        if name in part:
            part[name] = part[name].removeprefix(prefix).lower()
    # MessageToDict writes 64-bit numbers as text.
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


def prompt_logprob(model: ModelInfo, token_id: int, scored: pb.TokenLogprobs) -> dict[str, PromptLogprob]:
    """Returns a token of a prompt and its alternatives, by their ids."""
    found = [(top.token_id, top.logprob, rank) for rank, top in enumerate(scored.top, 1)]
    if token_id not in {known for known, _, _ in found}:
        found.append((token_id, scored.logprob, scored.rank))
    return {
        str(known): {"logprob": max(logprob, LEAST_LOGPROB), "rank": rank, "decoded_token": model.token_text(known)}
        for known, logprob, rank in found
    }


def finish_reason(reason: int) -> FinishReason | None:
    """Returns None before the sample ends."""
    return _FINISH.get(reason)


def now() -> int:
    """Returns the seconds since 1970."""
    return int(time.time())
