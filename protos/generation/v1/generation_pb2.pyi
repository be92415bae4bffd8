import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from protos.execution.v1 import execution_pb2 as _execution_pb2
from protos.kvcommon.v1 import kvcommon_pb2 as _kvcommon_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolChoice(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_CHOICE_UNSPECIFIED: _ClassVar[ToolChoice]
    TOOL_CHOICE_NONE: _ClassVar[ToolChoice]
    TOOL_CHOICE_REQUIRED: _ClassVar[ToolChoice]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class CacheOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_OUTCOME_UNSPECIFIED: _ClassVar[CacheOutcome]
    CACHE_OUTCOME_HIT: _ClassVar[CacheOutcome]
    CACHE_OUTCOME_MISS: _ClassVar[CacheOutcome]
    CACHE_OUTCOME_COMPARISON_NOT_FOUND: _ClassVar[CacheOutcome]

class CacheMissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_MISS_REASON_UNSPECIFIED: _ClassVar[CacheMissReason]
    CACHE_MISS_REASON_MODEL_CHANGED: _ClassVar[CacheMissReason]
    CACHE_MISS_REASON_WEIGHTS_CHANGED: _ClassVar[CacheMissReason]
    CACHE_MISS_REASON_SALT_CHANGED: _ClassVar[CacheMissReason]
    CACHE_MISS_REASON_TOOLS_CHANGED: _ClassVar[CacheMissReason]
    CACHE_MISS_REASON_SYSTEM_CHANGED: _ClassVar[CacheMissReason]
    CACHE_MISS_REASON_TEMPLATE_CHANGED: _ClassVar[CacheMissReason]
    CACHE_MISS_REASON_INPUT_CHANGED: _ClassVar[CacheMissReason]
    CACHE_MISS_REASON_NOT_CACHED: _ClassVar[CacheMissReason]
TOOL_CHOICE_UNSPECIFIED: ToolChoice
TOOL_CHOICE_NONE: ToolChoice
TOOL_CHOICE_REQUIRED: ToolChoice
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
CACHE_OUTCOME_UNSPECIFIED: CacheOutcome
CACHE_OUTCOME_HIT: CacheOutcome
CACHE_OUTCOME_MISS: CacheOutcome
CACHE_OUTCOME_COMPARISON_NOT_FOUND: CacheOutcome
CACHE_MISS_REASON_UNSPECIFIED: CacheMissReason
CACHE_MISS_REASON_MODEL_CHANGED: CacheMissReason
CACHE_MISS_REASON_WEIGHTS_CHANGED: CacheMissReason
CACHE_MISS_REASON_SALT_CHANGED: CacheMissReason
CACHE_MISS_REASON_TOOLS_CHANGED: CacheMissReason
CACHE_MISS_REASON_SYSTEM_CHANGED: CacheMissReason
CACHE_MISS_REASON_TEMPLATE_CHANGED: CacheMissReason
CACHE_MISS_REASON_INPUT_CHANGED: CacheMissReason
CACHE_MISS_REASON_NOT_CACHED: CacheMissReason

class CacheBreakpoint(_message.Message):
    __slots__ = ("content_end", "retention_priority", "retention_duration")
    CONTENT_END_FIELD_NUMBER: _ClassVar[int]
    RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RETENTION_DURATION_FIELD_NUMBER: _ClassVar[int]
    content_end: int
    retention_priority: int
    retention_duration: _duration_pb2.Duration
    def __init__(self, content_end: _Optional[int] = ..., retention_priority: _Optional[int] = ..., retention_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class FunctionCall(_message.Message):
    __slots__ = ("name", "arguments")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments: str
    def __init__(self, name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "function")
    ID_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    id: str
    function: FunctionCall
    def __init__(self, id: _Optional[str] = ..., function: _Optional[_Union[FunctionCall, _Mapping]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "cache_breakpoints", "name", "reasoning", "tool_calls", "tool_call_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_BREAKPOINTS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    cache_breakpoints: _containers.RepeatedCompositeFieldContainer[CacheBreakpoint]
    name: str
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., cache_breakpoints: _Optional[_Iterable[_Union[CacheBreakpoint, _Mapping]]] = ..., name: _Optional[str] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages", "tools", "tool_choice", "tool_name", "single_tool_call", "add_generation_prompt", "continue_final_message", "template_arguments")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOOL_NAME_FIELD_NUMBER: _ClassVar[int]
    SINGLE_TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedScalarFieldContainer[str]
    tool_choice: ToolChoice
    tool_name: str
    single_tool_call: bool
    add_generation_prompt: bool
    continue_final_message: bool
    template_arguments: _struct_pb2.Struct
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[str]] = ..., tool_choice: _Optional[_Union[ToolChoice, str]] = ..., tool_name: _Optional[str] = ..., single_tool_call: _Optional[bool] = ..., add_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ..., template_arguments: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PromptTruncation(_message.Message):
    __slots__ = ("max_tokens", "keep_first")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIRST_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    keep_first: bool
    def __init__(self, max_tokens: _Optional[int] = ..., keep_first: _Optional[bool] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "num_logprobs", "logit_bias", "min_tokens", "bad_words", "allowed_token_ids", "bad_token_ids", "num_prompt_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    num_logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_token_ids: _containers.RepeatedCompositeFieldContainer[TokenIds]
    num_prompt_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., num_logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., bad_words: _Optional[_Iterable[str]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_token_ids: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., num_prompt_logprobs: _Optional[int] = ...) -> None: ...

class CacheOptions(_message.Message):
    __slots__ = ("salt", "retention_ranges", "decode_retention_priority", "no_read", "no_store", "decode_retention_duration", "session_id", "tenant_id", "kv_hints", "onload_timeout", "comparison_request_id", "explain_miss", "store_marked_only", "store_tokens", "parts")
    SALT_FIELD_NUMBER: _ClassVar[int]
    RETENTION_RANGES_FIELD_NUMBER: _ClassVar[int]
    DECODE_RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NO_READ_FIELD_NUMBER: _ClassVar[int]
    NO_STORE_FIELD_NUMBER: _ClassVar[int]
    DECODE_RETENTION_DURATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    KV_HINTS_FIELD_NUMBER: _ClassVar[int]
    ONLOAD_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    COMPARISON_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_MISS_FIELD_NUMBER: _ClassVar[int]
    STORE_MARKED_ONLY_FIELD_NUMBER: _ClassVar[int]
    STORE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    salt: str
    retention_ranges: _containers.RepeatedCompositeFieldContainer[_kvcommon_pb2.RetentionRange]
    decode_retention_priority: int
    no_read: bool
    no_store: bool
    decode_retention_duration: _duration_pb2.Duration
    session_id: str
    tenant_id: str
    kv_hints: _kvcommon_pb2.KvHints
    onload_timeout: _duration_pb2.Duration
    comparison_request_id: str
    explain_miss: bool
    store_marked_only: bool
    store_tokens: int
    parts: PromptParts
    def __init__(self, salt: _Optional[str] = ..., retention_ranges: _Optional[_Iterable[_Union[_kvcommon_pb2.RetentionRange, _Mapping]]] = ..., decode_retention_priority: _Optional[int] = ..., no_read: _Optional[bool] = ..., no_store: _Optional[bool] = ..., decode_retention_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., session_id: _Optional[str] = ..., tenant_id: _Optional[str] = ..., kv_hints: _Optional[_Union[_kvcommon_pb2.KvHints, _Mapping]] = ..., onload_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., comparison_request_id: _Optional[str] = ..., explain_miss: _Optional[bool] = ..., store_marked_only: _Optional[bool] = ..., store_tokens: _Optional[int] = ..., parts: _Optional[_Union[PromptParts, _Mapping]] = ...) -> None: ...

class PromptParts(_message.Message):
    __slots__ = ("request_id", "tools", "system", "template")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tools: int
    system: int
    template: int
    def __init__(self, request_id: _Optional[str] = ..., tools: _Optional[int] = ..., system: _Optional[int] = ..., template: _Optional[int] = ...) -> None: ...

class EvictionReport(_message.Message):
    __slots__ = ("policy", "evicted_tokens", "kept_mass", "tainted", "peak_cache_tokens")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    EVICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEPT_MASS_FIELD_NUMBER: _ClassVar[int]
    TAINTED_FIELD_NUMBER: _ClassVar[int]
    PEAK_CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    policy: _kvcommon_pb2.EvictionPolicy
    evicted_tokens: int
    kept_mass: float
    tainted: bool
    peak_cache_tokens: int
    def __init__(self, policy: _Optional[_Union[_kvcommon_pb2.EvictionPolicy, _Mapping]] = ..., evicted_tokens: _Optional[int] = ..., kept_mass: _Optional[float] = ..., tainted: _Optional[bool] = ..., peak_cache_tokens: _Optional[int] = ...) -> None: ...

class StreamGenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "chat", "token_ids", "max_tokens", "sampling", "stop", "stop_token_ids", "ignore_eos", "priority", "cache", "n", "eviction_policy", "structured_output", "include_stop_text", "keep_special_tokens", "prompt_truncation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_TEXT_FIELD_NUMBER: _ClassVar[int]
    KEEP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    chat: ChatInput
    token_ids: TokenIds
    max_tokens: int
    sampling: SamplingParams
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    priority: int
    cache: CacheOptions
    n: int
    eviction_policy: _kvcommon_pb2.EvictionPolicy
    structured_output: _kvcommon_pb2.StructuredOutput
    include_stop_text: bool
    keep_special_tokens: bool
    prompt_truncation: PromptTruncation
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., priority: _Optional[int] = ..., cache: _Optional[_Union[CacheOptions, _Mapping]] = ..., n: _Optional[int] = ..., eviction_policy: _Optional[_Union[_kvcommon_pb2.EvictionPolicy, _Mapping]] = ..., structured_output: _Optional[_Union[_kvcommon_pb2.StructuredOutput, _Mapping]] = ..., include_stop_text: _Optional[bool] = ..., keep_special_tokens: _Optional[bool] = ..., prompt_truncation: _Optional[_Union[PromptTruncation, _Mapping]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top", "rank")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    rank: int
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., rank: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "queue_time", "time_to_first_token", "total_time", "retention_receipts", "hint_answers", "eviction", "host_tokens", "disk_tokens", "cache_write_tokens", "prefix_miss", "cache_diagnosis")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TIME_FIELD_NUMBER: _ClassVar[int]
    RETENTION_RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    HINT_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    EVICTION_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_WRITE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_MISS_FIELD_NUMBER: _ClassVar[int]
    CACHE_DIAGNOSIS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    queue_time: _duration_pb2.Duration
    time_to_first_token: _duration_pb2.Duration
    total_time: _duration_pb2.Duration
    retention_receipts: _containers.RepeatedCompositeFieldContainer[_kvcommon_pb2.RetentionReceipt]
    hint_answers: _containers.RepeatedCompositeFieldContainer[_kvcommon_pb2.HintAnswer]
    eviction: EvictionReport
    host_tokens: int
    disk_tokens: int
    cache_write_tokens: int
    prefix_miss: _kvcommon_pb2.PrefixMiss
    cache_diagnosis: CacheDiagnosis
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., time_to_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., retention_receipts: _Optional[_Iterable[_Union[_kvcommon_pb2.RetentionReceipt, _Mapping]]] = ..., hint_answers: _Optional[_Iterable[_Union[_kvcommon_pb2.HintAnswer, _Mapping]]] = ..., eviction: _Optional[_Union[EvictionReport, _Mapping]] = ..., host_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., cache_write_tokens: _Optional[int] = ..., prefix_miss: _Optional[_Union[_kvcommon_pb2.PrefixMiss, _Mapping]] = ..., cache_diagnosis: _Optional[_Union[CacheDiagnosis, _Mapping]] = ...) -> None: ...

class CacheDiagnosis(_message.Message):
    __slots__ = ("outcome", "reason", "reusable_tokens", "missed_tokens", "common_tokens")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REUSABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMMON_TOKENS_FIELD_NUMBER: _ClassVar[int]
    outcome: CacheOutcome
    reason: CacheMissReason
    reusable_tokens: int
    missed_tokens: int
    common_tokens: int
    def __init__(self, outcome: _Optional[_Union[CacheOutcome, str]] = ..., reason: _Optional[_Union[CacheMissReason, str]] = ..., reusable_tokens: _Optional[int] = ..., missed_tokens: _Optional[int] = ..., common_tokens: _Optional[int] = ...) -> None: ...

class StreamGenerateResponse(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "logprobs", "finish_reason", "usage", "sample_index", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: FinishReason
    usage: Usage
    sample_index: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., sample_index: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenizePromptRequest(_message.Message):
    __slots__ = ("text", "chat")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: ChatInput
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ...) -> None: ...

class TokenizePromptResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model", "max_model_tokens", "vocab_size", "dtype", "kv_cache_dtype", "adapters")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    max_model_tokens: int
    vocab_size: int
    dtype: str
    kv_cache_dtype: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., max_model_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., dtype: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortRequestRequest(_message.Message):
    __slots__ = ("request_id", "tenant_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant_id: str
    def __init__(self, request_id: _Optional[str] = ..., tenant_id: _Optional[str] = ...) -> None: ...

class AbortRequestResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadsResponse(_message.Message):
    __slots__ = ("running_requests", "waiting_requests", "max_waiting_requests", "steps", "preemptions", "max_running_requests", "queued_prompt_tokens", "prompt_token_time", "step_time", "host_block_time", "disk_block_time", "sequence_time")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_TIME_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCK_TIME_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCK_TIME_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_TIME_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    waiting_requests: int
    max_waiting_requests: int
    steps: int
    preemptions: int
    max_running_requests: int
    queued_prompt_tokens: int
    prompt_token_time: _duration_pb2.Duration
    step_time: _duration_pb2.Duration
    host_block_time: _duration_pb2.Duration
    disk_block_time: _duration_pb2.Duration
    sequence_time: _duration_pb2.Duration
    def __init__(self, running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., max_waiting_requests: _Optional[int] = ..., steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., queued_prompt_tokens: _Optional[int] = ..., prompt_token_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., step_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., host_block_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., disk_block_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., sequence_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetEngineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEngineResponse(_message.Message):
    __slots__ = ("engine_id", "model", "executor", "cachemgr_admin_address", "cachemgr_address", "executor_address")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    CACHEMGR_ADMIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CACHEMGR_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    model: _execution_pb2.GetModelResponse
    executor: _execution_pb2.GetExecutorResponse
    cachemgr_admin_address: str
    cachemgr_address: str
    executor_address: str
    def __init__(self, engine_id: _Optional[str] = ..., model: _Optional[_Union[_execution_pb2.GetModelResponse, _Mapping]] = ..., executor: _Optional[_Union[_execution_pb2.GetExecutorResponse, _Mapping]] = ..., cachemgr_admin_address: _Optional[str] = ..., cachemgr_address: _Optional[str] = ..., executor_address: _Optional[str] = ...) -> None: ...

class ListEnginesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListEnginesResponse(_message.Message):
    __slots__ = ("engines", "policy", "waiting_requests")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[RoutedEngine]
    policy: str
    waiting_requests: int
    def __init__(self, engines: _Optional[_Iterable[_Union[RoutedEngine, _Mapping]]] = ..., policy: _Optional[str] = ..., waiting_requests: _Optional[int] = ...) -> None: ...

class RoutedEngine(_message.Message):
    __slots__ = ("address", "engine_id", "executor_id", "cachemgr_admin_address", "cachemgr_address", "ready", "obstacle", "loads", "request_time", "routed_requests", "routed_tokens", "expected_cached_tokens", "view_complete", "adapters", "executor_address")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    CACHEMGR_ADMIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CACHEMGR_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_TIME_FIELD_NUMBER: _ClassVar[int]
    ROUTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VIEW_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    engine_id: str
    executor_id: str
    cachemgr_admin_address: str
    cachemgr_address: str
    ready: bool
    obstacle: str
    loads: GetLoadsResponse
    request_time: _duration_pb2.Duration
    routed_requests: int
    routed_tokens: int
    expected_cached_tokens: int
    view_complete: bool
    adapters: _containers.RepeatedCompositeFieldContainer[_execution_pb2.Adapter]
    executor_address: str
    def __init__(self, address: _Optional[str] = ..., engine_id: _Optional[str] = ..., executor_id: _Optional[str] = ..., cachemgr_admin_address: _Optional[str] = ..., cachemgr_address: _Optional[str] = ..., ready: _Optional[bool] = ..., obstacle: _Optional[str] = ..., loads: _Optional[_Union[GetLoadsResponse, _Mapping]] = ..., request_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., routed_requests: _Optional[int] = ..., routed_tokens: _Optional[int] = ..., expected_cached_tokens: _Optional[int] = ..., view_complete: _Optional[bool] = ..., adapters: _Optional[_Iterable[_Union[_execution_pb2.Adapter, _Mapping]]] = ..., executor_address: _Optional[str] = ...) -> None: ...

class StreamRequestsRequest(_message.Message):
    __slots__ = ("start", "cancel")
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    start: StartRequest
    cancel: CancelRequest
    def __init__(self, start: _Optional[_Union[StartRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ...) -> None: ...

class StartRequest(_message.Message):
    __slots__ = ("request", "output_token_ids", "expected_cached_tokens", "traceparent", "is_follower", "adapter_id", "caller_request_id", "header_request_id")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    IS_FOLLOWER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    CALLER_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HEADER_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request: StreamGenerateRequest
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    expected_cached_tokens: int
    traceparent: str
    is_follower: bool
    adapter_id: int
    caller_request_id: str
    header_request_id: str
    def __init__(self, request: _Optional[_Union[StreamGenerateRequest, _Mapping]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., expected_cached_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ..., is_follower: _Optional[bool] = ..., adapter_id: _Optional[int] = ..., caller_request_id: _Optional[str] = ..., header_request_id: _Optional[str] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class StreamRequestsResponse(_message.Message):
    __slots__ = ("outputs", "failures", "loads", "obstacle", "executor_silent", "cachemgr_silent", "adapters", "executor_silence", "cachemgr_silence")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_SILENT_FIELD_NUMBER: _ClassVar[int]
    CACHEMGR_SILENT_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_SILENCE_FIELD_NUMBER: _ClassVar[int]
    CACHEMGR_SILENCE_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[StreamGenerateResponse]
    failures: _containers.RepeatedCompositeFieldContainer[RequestFailure]
    loads: GetLoadsResponse
    obstacle: str
    executor_silent: bool
    cachemgr_silent: bool
    adapters: _containers.RepeatedCompositeFieldContainer[_execution_pb2.Adapter]
    executor_silence: _duration_pb2.Duration
    cachemgr_silence: _duration_pb2.Duration
    def __init__(self, outputs: _Optional[_Iterable[_Union[StreamGenerateResponse, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[RequestFailure, _Mapping]]] = ..., loads: _Optional[_Union[GetLoadsResponse, _Mapping]] = ..., obstacle: _Optional[str] = ..., executor_silent: _Optional[bool] = ..., cachemgr_silent: _Optional[bool] = ..., adapters: _Optional[_Iterable[_Union[_execution_pb2.Adapter, _Mapping]]] = ..., executor_silence: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., cachemgr_silence: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RequestFailure(_message.Message):
    __slots__ = ("request_id", "status", "is_refused")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    IS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    status: bytes
    is_refused: bool
    def __init__(self, request_id: _Optional[str] = ..., status: _Optional[bytes] = ..., is_refused: _Optional[bool] = ...) -> None: ...

class SetDrainingRequest(_message.Message):
    __slots__ = ("draining", "validate_only")
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    validate_only: bool
    def __init__(self, draining: _Optional[bool] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class SetDrainingResponse(_message.Message):
    __slots__ = ("running_requests", "waiting_requests")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    waiting_requests: int
    def __init__(self, running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "max_adapters")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[ServedAdapter]
    max_adapters: int
    def __init__(self, adapters: _Optional[_Iterable[_Union[ServedAdapter, _Mapping]]] = ..., max_adapters: _Optional[int] = ...) -> None: ...

class ServedAdapter(_message.Message):
    __slots__ = ("adapter", "running_requests", "leaving")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    adapter: _execution_pb2.Adapter
    running_requests: int
    leaving: bool
    def __init__(self, adapter: _Optional[_Union[_execution_pb2.Adapter, _Mapping]] = ..., running_requests: _Optional[int] = ..., leaving: _Optional[bool] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: _execution_pb2.Adapter
    def __init__(self, adapter: _Optional[_Union[_execution_pb2.Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "validate_only")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    name: str
    validate_only: bool
    def __init__(self, name: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("running_requests",)
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    def __init__(self, running_requests: _Optional[int] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("weight_version", "path")
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    weight_version: str
    path: str
    def __init__(self, weight_version: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("other_blocks",)
    OTHER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    other_blocks: int
    def __init__(self, other_blocks: _Optional[int] = ...) -> None: ...

class AbortRequestsRequest(_message.Message):
    __slots__ = ("request_id", "all", "tenant_id", "validate_only")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    all: bool
    tenant_id: str
    validate_only: bool
    def __init__(self, request_id: _Optional[str] = ..., all: _Optional[bool] = ..., tenant_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class AbortRequestsResponse(_message.Message):
    __slots__ = ("aborted_requests",)
    ABORTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    aborted_requests: int
    def __init__(self, aborted_requests: _Optional[int] = ...) -> None: ...
