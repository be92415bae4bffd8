import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from protos.kvcommon.v1 import kvcommon_pb2 as _kvcommon_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StepTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_TIER_UNSPECIFIED: _ClassVar[StepTier]
    STEP_TIER_DEVICE: _ClassVar[StepTier]
    STEP_TIER_HOST: _ClassVar[StepTier]
    STEP_TIER_DISK: _ClassVar[StepTier]
STEP_TIER_UNSPECIFIED: StepTier
STEP_TIER_DEVICE: StepTier
STEP_TIER_HOST: StepTier
STEP_TIER_DISK: StepTier

class Adapter(_message.Message):
    __slots__ = ("name", "adapter_id", "rank", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    adapter_id: int
    rank: int
    path: str
    def __init__(self, name: _Optional[str] = ..., adapter_id: _Optional[int] = ..., rank: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

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
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "validate_only")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    name: str
    validate_only: bool
    def __init__(self, name: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

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

class CompileGrammarRequest(_message.Message):
    __slots__ = ("structured_output",)
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    structured_output: _kvcommon_pb2.StructuredOutput
    def __init__(self, structured_output: _Optional[_Union[_kvcommon_pb2.StructuredOutput, _Mapping]] = ...) -> None: ...

class CompileGrammarResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model", "vocab_size", "max_positions", "eos_token_ids", "tokenizer_json", "chat_template", "special_tokens", "dtype", "kv_cache_dtype", "hub_id")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    HUB_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    vocab_size: int
    max_positions: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokenizer_json: bytes
    chat_template: str
    special_tokens: _containers.ScalarMap[str, str]
    dtype: str
    kv_cache_dtype: str
    hub_id: str
    def __init__(self, model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_positions: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., tokenizer_json: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ..., dtype: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., hub_id: _Optional[str] = ...) -> None: ...

class GetExecutorRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetExecutorResponse(_message.Message):
    __slots__ = ("executor_id", "executor_epoch", "device", "block_size", "max_tokens", "last_step", "num_sequences", "num_groups", "attention_windows", "plain_rotary", "scheduler_epoch", "model_digest", "drafts", "adapters", "max_adapters", "weight_version", "weight_path")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_ROTARY_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_PATH_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    executor_epoch: int
    device: str
    block_size: int
    max_tokens: int
    last_step: int
    num_sequences: int
    num_groups: int
    attention_windows: _containers.RepeatedScalarFieldContainer[int]
    plain_rotary: bool
    scheduler_epoch: int
    model_digest: bytes
    drafts: bool
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    max_adapters: int
    weight_version: str
    weight_path: str
    def __init__(self, executor_id: _Optional[str] = ..., executor_epoch: _Optional[int] = ..., device: _Optional[str] = ..., block_size: _Optional[int] = ..., max_tokens: _Optional[int] = ..., last_step: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_groups: _Optional[int] = ..., attention_windows: _Optional[_Iterable[int]] = ..., plain_rotary: _Optional[bool] = ..., scheduler_epoch: _Optional[int] = ..., model_digest: _Optional[bytes] = ..., drafts: _Optional[bool] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., max_adapters: _Optional[int] = ..., weight_version: _Optional[str] = ..., weight_path: _Optional[str] = ...) -> None: ...

class StreamStepsRequest(_message.Message):
    __slots__ = ("open", "step", "registered")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    open: OpenSession
    step: Step
    registered: SchedulerRegistered
    def __init__(self, open: _Optional[_Union[OpenSession, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., registered: _Optional[_Union[SchedulerRegistered, _Mapping]] = ...) -> None: ...

class StreamStepsResponse(_message.Message):
    __slots__ = ("opened", "result")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    opened: SessionOpened
    result: StepResult
    def __init__(self, opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("scheduler_id", "scheduler_epoch", "executor_epoch", "manager_epoch")
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MANAGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    scheduler_id: str
    scheduler_epoch: int
    executor_epoch: int
    manager_epoch: int
    def __init__(self, scheduler_id: _Optional[str] = ..., scheduler_epoch: _Optional[int] = ..., executor_epoch: _Optional[int] = ..., manager_epoch: _Optional[int] = ...) -> None: ...

class SchedulerRegistered(_message.Message):
    __slots__ = ("manager_epoch",)
    MANAGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    manager_epoch: int
    def __init__(self, manager_epoch: _Optional[int] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("first_step", "max_batched_tokens")
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    first_step: int
    max_batched_tokens: int
    def __init__(self, first_step: _Optional[int] = ..., max_batched_tokens: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop_token_ids", "num_logprobs", "structured_output", "logit_bias", "min_tokens", "bad_token_ids", "allowed_token_ids", "num_prompt_logprobs")
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
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BAD_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_logprobs: int
    structured_output: _kvcommon_pb2.StructuredOutput
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    bad_token_ids: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., num_logprobs: _Optional[int] = ..., structured_output: _Optional[_Union[_kvcommon_pb2.StructuredOutput, _Mapping]] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., bad_token_ids: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., num_prompt_logprobs: _Optional[int] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StepBlockTable(_message.Message):
    __slots__ = ("group", "slots")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    group: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ...) -> None: ...

class NewSequence(_message.Message):
    __slots__ = ("sequence", "token_ids", "num_prompt_tokens", "num_computed_tokens", "block_tables", "sampling", "eviction_policy", "traceparent", "continuation_token_ids", "adapter_id")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_tables: _containers.RepeatedCompositeFieldContainer[StepBlockTable]
    sampling: SamplingParams
    eviction_policy: _kvcommon_pb2.EvictionPolicy
    traceparent: str
    continuation_token_ids: _containers.RepeatedScalarFieldContainer[int]
    adapter_id: int
    def __init__(self, sequence: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., block_tables: _Optional[_Iterable[_Union[StepBlockTable, _Mapping]]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., eviction_policy: _Optional[_Union[_kvcommon_pb2.EvictionPolicy, _Mapping]] = ..., traceparent: _Optional[str] = ..., continuation_token_ids: _Optional[_Iterable[int]] = ..., adapter_id: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("step", "removed_sequences", "new_sequences", "chunk_sequences", "chunk_tokens", "idle_sequences", "table_sequences", "table_groups", "table_counts", "table_slots", "copy_tickets", "copy_groups", "copy_source_slots", "copy_target_slots", "evicting_sequences", "evicting_counts", "evicting_slots", "copy_source_tiers", "copy_target_tiers", "awaits_copies", "draft_sequences", "draft_tokens", "window_sequences", "window_tokens", "looking_sequences")
    STEP_FIELD_NUMBER: _ClassVar[int]
    REMOVED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NEW_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TABLE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TABLE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    TABLE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TABLE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    COPY_TICKETS_FIELD_NUMBER: _ClassVar[int]
    COPY_GROUPS_FIELD_NUMBER: _ClassVar[int]
    COPY_SOURCE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    COPY_TARGET_SLOTS_FIELD_NUMBER: _ClassVar[int]
    EVICTING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    EVICTING_COUNTS_FIELD_NUMBER: _ClassVar[int]
    EVICTING_SLOTS_FIELD_NUMBER: _ClassVar[int]
    COPY_SOURCE_TIERS_FIELD_NUMBER: _ClassVar[int]
    COPY_TARGET_TIERS_FIELD_NUMBER: _ClassVar[int]
    AWAITS_COPIES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    step: int
    removed_sequences: _containers.RepeatedScalarFieldContainer[int]
    new_sequences: _containers.RepeatedCompositeFieldContainer[NewSequence]
    chunk_sequences: _containers.RepeatedScalarFieldContainer[int]
    chunk_tokens: _containers.RepeatedScalarFieldContainer[int]
    idle_sequences: _containers.RepeatedScalarFieldContainer[int]
    table_sequences: _containers.RepeatedScalarFieldContainer[int]
    table_groups: _containers.RepeatedScalarFieldContainer[int]
    table_counts: _containers.RepeatedScalarFieldContainer[int]
    table_slots: _containers.RepeatedScalarFieldContainer[int]
    copy_tickets: _containers.RepeatedScalarFieldContainer[int]
    copy_groups: _containers.RepeatedScalarFieldContainer[int]
    copy_source_slots: _containers.RepeatedScalarFieldContainer[int]
    copy_target_slots: _containers.RepeatedScalarFieldContainer[int]
    evicting_sequences: _containers.RepeatedScalarFieldContainer[int]
    evicting_counts: _containers.RepeatedScalarFieldContainer[int]
    evicting_slots: _containers.RepeatedScalarFieldContainer[int]
    copy_source_tiers: _containers.RepeatedScalarFieldContainer[StepTier]
    copy_target_tiers: _containers.RepeatedScalarFieldContainer[StepTier]
    awaits_copies: bool
    draft_sequences: _containers.RepeatedScalarFieldContainer[int]
    draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    window_sequences: _containers.RepeatedScalarFieldContainer[int]
    window_tokens: _containers.RepeatedScalarFieldContainer[int]
    looking_sequences: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., removed_sequences: _Optional[_Iterable[int]] = ..., new_sequences: _Optional[_Iterable[_Union[NewSequence, _Mapping]]] = ..., chunk_sequences: _Optional[_Iterable[int]] = ..., chunk_tokens: _Optional[_Iterable[int]] = ..., idle_sequences: _Optional[_Iterable[int]] = ..., table_sequences: _Optional[_Iterable[int]] = ..., table_groups: _Optional[_Iterable[int]] = ..., table_counts: _Optional[_Iterable[int]] = ..., table_slots: _Optional[_Iterable[int]] = ..., copy_tickets: _Optional[_Iterable[int]] = ..., copy_groups: _Optional[_Iterable[int]] = ..., copy_source_slots: _Optional[_Iterable[int]] = ..., copy_target_slots: _Optional[_Iterable[int]] = ..., evicting_sequences: _Optional[_Iterable[int]] = ..., evicting_counts: _Optional[_Iterable[int]] = ..., evicting_slots: _Optional[_Iterable[int]] = ..., copy_source_tiers: _Optional[_Iterable[_Union[StepTier, str]]] = ..., copy_target_tiers: _Optional[_Iterable[_Union[StepTier, str]]] = ..., awaits_copies: _Optional[bool] = ..., draft_sequences: _Optional[_Iterable[int]] = ..., draft_tokens: _Optional[_Iterable[int]] = ..., window_sequences: _Optional[_Iterable[int]] = ..., window_tokens: _Optional[_Iterable[int]] = ..., looking_sequences: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("index", "logprob", "top_token_ids", "top_logprobs", "rank")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    index: int
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    rank: int
    def __init__(self, index: _Optional[int] = ..., logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., rank: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("sequence", "logprobs")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, sequence: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step", "sequences", "token_ids", "stopped", "logprobs", "compute_time", "idle_time", "num_tokens", "evicted_sequences", "evicted_tokens", "kept_masses", "copied_tickets", "failed_tickets", "host_block_time", "disk_block_time", "num_drafts", "draft_sequences", "draft_tokens", "window_sequences", "window_tokens", "prompt_logprobs", "failed_sequences")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_TIME_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIME_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEPT_MASSES_FIELD_NUMBER: _ClassVar[int]
    COPIED_TICKETS_FIELD_NUMBER: _ClassVar[int]
    FAILED_TICKETS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCK_TIME_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCK_TIME_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FAILED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    step: int
    sequences: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    stopped: _containers.RepeatedScalarFieldContainer[bool]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    compute_time: _duration_pb2.Duration
    idle_time: _duration_pb2.Duration
    num_tokens: int
    evicted_sequences: _containers.RepeatedScalarFieldContainer[int]
    evicted_tokens: _containers.RepeatedScalarFieldContainer[int]
    kept_masses: _containers.RepeatedScalarFieldContainer[float]
    copied_tickets: _containers.RepeatedScalarFieldContainer[int]
    failed_tickets: _containers.RepeatedScalarFieldContainer[int]
    host_block_time: _duration_pb2.Duration
    disk_block_time: _duration_pb2.Duration
    num_drafts: int
    draft_sequences: _containers.RepeatedScalarFieldContainer[int]
    draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    window_sequences: _containers.RepeatedScalarFieldContainer[int]
    window_tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    failed_sequences: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., sequences: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., stopped: _Optional[_Iterable[bool]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., compute_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., idle_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., num_tokens: _Optional[int] = ..., evicted_sequences: _Optional[_Iterable[int]] = ..., evicted_tokens: _Optional[_Iterable[int]] = ..., kept_masses: _Optional[_Iterable[float]] = ..., copied_tickets: _Optional[_Iterable[int]] = ..., failed_tickets: _Optional[_Iterable[int]] = ..., host_block_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., disk_block_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., num_drafts: _Optional[int] = ..., draft_sequences: _Optional[_Iterable[int]] = ..., draft_tokens: _Optional[_Iterable[int]] = ..., window_sequences: _Optional[_Iterable[int]] = ..., window_tokens: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., failed_sequences: _Optional[_Iterable[int]] = ...) -> None: ...
