import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from protos.execution.v1 import execution_pb2 as _execution_pb2
from protos.kvcommon.v1 import kvcommon_pb2 as _kvcommon_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class CacheBreakpoint(_message.Message):
    __slots__ = ("content_end", "retention_priority", "retention_duration")
    CONTENT_END_FIELD_NUMBER: _ClassVar[int]
    RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RETENTION_DURATION_FIELD_NUMBER: _ClassVar[int]
    content_end: int
    retention_priority: int
    retention_duration: _duration_pb2.Duration
    def __init__(self, content_end: _Optional[int] = ..., retention_priority: _Optional[int] = ..., retention_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "cache_breakpoints", "name", "reasoning")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_BREAKPOINTS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    cache_breakpoints: _containers.RepeatedCompositeFieldContainer[CacheBreakpoint]
    name: str
    reasoning: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., cache_breakpoints: _Optional[_Iterable[_Union[CacheBreakpoint, _Mapping]]] = ..., name: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "num_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    num_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., num_logprobs: _Optional[int] = ...) -> None: ...

class CacheOptions(_message.Message):
    __slots__ = ("salt", "retention_ranges", "decode_retention_priority", "no_read", "no_store", "decode_retention_duration", "session_id", "tenant_id", "kv_hints", "onload_timeout")
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
    def __init__(self, salt: _Optional[str] = ..., retention_ranges: _Optional[_Iterable[_Union[_kvcommon_pb2.RetentionRange, _Mapping]]] = ..., decode_retention_priority: _Optional[int] = ..., no_read: _Optional[bool] = ..., no_store: _Optional[bool] = ..., decode_retention_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., session_id: _Optional[str] = ..., tenant_id: _Optional[str] = ..., kv_hints: _Optional[_Union[_kvcommon_pb2.KvHints, _Mapping]] = ..., onload_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("request_id", "model", "text", "chat", "token_ids", "max_tokens", "sampling", "stop", "stop_token_ids", "ignore_eos", "priority", "cache", "n", "eviction_policy")
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
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., priority: _Optional[int] = ..., cache: _Optional[_Union[CacheOptions, _Mapping]] = ..., n: _Optional[int] = ..., eviction_policy: _Optional[_Union[_kvcommon_pb2.EvictionPolicy, _Mapping]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "queue_time", "time_to_first_token", "total_time", "retention_receipts", "hint_answers", "eviction", "host_tokens", "disk_tokens")
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
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., time_to_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., retention_receipts: _Optional[_Iterable[_Union[_kvcommon_pb2.RetentionReceipt, _Mapping]]] = ..., hint_answers: _Optional[_Iterable[_Union[_kvcommon_pb2.HintAnswer, _Mapping]]] = ..., eviction: _Optional[_Union[EvictionReport, _Mapping]] = ..., host_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ...) -> None: ...

class StreamGenerateResponse(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "logprobs", "finish_reason", "usage", "sample_index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: FinishReason
    usage: Usage
    sample_index: int
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., sample_index: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("model", "max_model_tokens", "vocab_size", "dtype")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    model: str
    max_model_tokens: int
    vocab_size: int
    dtype: str
    def __init__(self, model: _Optional[str] = ..., max_model_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class GetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadsResponse(_message.Message):
    __slots__ = ("running_requests", "waiting_requests", "max_waiting_requests", "steps", "preemptions", "max_running_requests", "queued_prompt_tokens", "prompt_token_time", "step_time", "host_block_time", "disk_block_time")
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
    def __init__(self, running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., max_waiting_requests: _Optional[int] = ..., steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., queued_prompt_tokens: _Optional[int] = ..., prompt_token_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., step_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., host_block_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., disk_block_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetEngineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEngineResponse(_message.Message):
    __slots__ = ("engine_id", "model", "executor", "cachemgr_admin_address")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    CACHEMGR_ADMIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    model: _execution_pb2.GetModelResponse
    executor: _execution_pb2.GetExecutorResponse
    cachemgr_admin_address: str
    def __init__(self, engine_id: _Optional[str] = ..., model: _Optional[_Union[_execution_pb2.GetModelResponse, _Mapping]] = ..., executor: _Optional[_Union[_execution_pb2.GetExecutorResponse, _Mapping]] = ..., cachemgr_admin_address: _Optional[str] = ...) -> None: ...

class StreamRequestsRequest(_message.Message):
    __slots__ = ("start", "cancel")
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    start: StartRequest
    cancel: CancelRequest
    def __init__(self, start: _Optional[_Union[StartRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ...) -> None: ...

class StartRequest(_message.Message):
    __slots__ = ("request", "output_token_ids", "expected_cached_tokens", "traceparent")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request: StreamGenerateRequest
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    expected_cached_tokens: int
    traceparent: str
    def __init__(self, request: _Optional[_Union[StreamGenerateRequest, _Mapping]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., expected_cached_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class StreamRequestsResponse(_message.Message):
    __slots__ = ("outputs", "failures", "loads", "obstacle")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[StreamGenerateResponse]
    failures: _containers.RepeatedCompositeFieldContainer[RequestFailure]
    loads: GetLoadsResponse
    obstacle: str
    def __init__(self, outputs: _Optional[_Iterable[_Union[StreamGenerateResponse, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[RequestFailure, _Mapping]]] = ..., loads: _Optional[_Union[GetLoadsResponse, _Mapping]] = ..., obstacle: _Optional[str] = ...) -> None: ...

class RequestFailure(_message.Message):
    __slots__ = ("request_id", "status")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    status: bytes
    def __init__(self, request_id: _Optional[str] = ..., status: _Optional[bytes] = ...) -> None: ...

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
