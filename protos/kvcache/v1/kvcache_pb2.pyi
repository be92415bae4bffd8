import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from protos.kvcommon.v1 import kvcommon_pb2 as _kvcommon_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]

class GhostPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GHOST_POLICY_UNSPECIFIED: _ClassVar[GhostPolicy]
    GHOST_POLICY_RETENTION: _ClassVar[GhostPolicy]
    GHOST_POLICY_LRU: _ClassVar[GhostPolicy]
    GHOST_POLICY_SEGMENTED_LRU: _ClassVar[GhostPolicy]

class MissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_REASON_UNSPECIFIED: _ClassVar[MissReason]
    MISS_REASON_NEVER_STORED: _ClassVar[MissReason]
    MISS_REASON_REMOVED: _ClassVar[MissReason]
    MISS_REASON_OTHER_SALT: _ClassVar[MissReason]
    MISS_REASON_OTHER_ADAPTER: _ClassVar[MissReason]
    MISS_REASON_BEING_COMPUTED: _ClassVar[MissReason]
    MISS_REASON_OTHER_WEIGHTS: _ClassVar[MissReason]

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_CREATED: _ClassVar[EventKind]
    EVENT_KIND_STORED: _ClassVar[EventKind]
    EVENT_KIND_REMOVED: _ClassVar[EventKind]
    EVENT_KIND_UPDATED: _ClassVar[EventKind]
    EVENT_KIND_LEASE_GRANTED: _ClassVar[EventKind]
    EVENT_KIND_LEASE_EXPIRED: _ClassVar[EventKind]
    EVENT_KIND_LEASE_BROKEN: _ClassVar[EventKind]
    EVENT_KIND_EXECUTOR_REGISTERED: _ClassVar[EventKind]
    EVENT_KIND_EXECUTOR_LOST: _ClassVar[EventKind]

class RemovalCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REMOVAL_CAUSE_UNSPECIFIED: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_EVICTED: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_PURGED: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_EXECUTOR_LOST: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_COVERED: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_TRUNCATED: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_FORGOTTEN: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_OVERWRITTEN: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_COPY_FAILED: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_PARENT_EVICTED: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_POOL_SHRUNK: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_RULE_CHANGED: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_TOO_MANY_LEASES: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_WEIGHTS_UPDATED: _ClassVar[RemovalCause]
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_DISK: Tier
GHOST_POLICY_UNSPECIFIED: GhostPolicy
GHOST_POLICY_RETENTION: GhostPolicy
GHOST_POLICY_LRU: GhostPolicy
GHOST_POLICY_SEGMENTED_LRU: GhostPolicy
MISS_REASON_UNSPECIFIED: MissReason
MISS_REASON_NEVER_STORED: MissReason
MISS_REASON_REMOVED: MissReason
MISS_REASON_OTHER_SALT: MissReason
MISS_REASON_OTHER_ADAPTER: MissReason
MISS_REASON_BEING_COMPUTED: MissReason
MISS_REASON_OTHER_WEIGHTS: MissReason
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_CREATED: EventKind
EVENT_KIND_STORED: EventKind
EVENT_KIND_REMOVED: EventKind
EVENT_KIND_UPDATED: EventKind
EVENT_KIND_LEASE_GRANTED: EventKind
EVENT_KIND_LEASE_EXPIRED: EventKind
EVENT_KIND_LEASE_BROKEN: EventKind
EVENT_KIND_EXECUTOR_REGISTERED: EventKind
EVENT_KIND_EXECUTOR_LOST: EventKind
REMOVAL_CAUSE_UNSPECIFIED: RemovalCause
REMOVAL_CAUSE_EVICTED: RemovalCause
REMOVAL_CAUSE_PURGED: RemovalCause
REMOVAL_CAUSE_EXECUTOR_LOST: RemovalCause
REMOVAL_CAUSE_COVERED: RemovalCause
REMOVAL_CAUSE_TRUNCATED: RemovalCause
REMOVAL_CAUSE_FORGOTTEN: RemovalCause
REMOVAL_CAUSE_OVERWRITTEN: RemovalCause
REMOVAL_CAUSE_COPY_FAILED: RemovalCause
REMOVAL_CAUSE_PARENT_EVICTED: RemovalCause
REMOVAL_CAUSE_POOL_SHRUNK: RemovalCause
REMOVAL_CAUSE_RULE_CHANGED: RemovalCause
REMOVAL_CAUSE_TOO_MANY_LEASES: RemovalCause
REMOVAL_CAUSE_WEIGHTS_UPDATED: RemovalCause

class PoolSpec(_message.Message):
    __slots__ = ("group", "num_blocks", "attention_window", "num_layers", "num_kv_heads", "head_dim", "dtype", "block_bytes", "last_write_steps", "host_blocks", "disk_blocks", "host_generations", "disk_generations", "share_blocks")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_WINDOW_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_WRITE_STEPS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    DISK_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    SHARE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    group: int
    num_blocks: int
    attention_window: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_bytes: int
    last_write_steps: _containers.RepeatedScalarFieldContainer[int]
    host_blocks: int
    disk_blocks: int
    host_generations: _containers.RepeatedScalarFieldContainer[int]
    disk_generations: _containers.RepeatedScalarFieldContainer[int]
    share_blocks: int
    def __init__(self, group: _Optional[int] = ..., num_blocks: _Optional[int] = ..., attention_window: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., block_bytes: _Optional[int] = ..., last_write_steps: _Optional[_Iterable[int]] = ..., host_blocks: _Optional[int] = ..., disk_blocks: _Optional[int] = ..., host_generations: _Optional[_Iterable[int]] = ..., disk_generations: _Optional[_Iterable[int]] = ..., share_blocks: _Optional[int] = ...) -> None: ...

class RegisterExecutorRequest(_message.Message):
    __slots__ = ("executor_id", "executor_epoch", "model", "model_fingerprint", "block_size", "pools", "memory_bytes", "plain_rotary", "weight_version", "steps_manager_epoch")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLAIN_ROTARY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    STEPS_MANAGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    executor_epoch: int
    model: str
    model_fingerprint: bytes
    block_size: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolSpec]
    memory_bytes: int
    plain_rotary: bool
    weight_version: str
    steps_manager_epoch: int
    def __init__(self, executor_id: _Optional[str] = ..., executor_epoch: _Optional[int] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[bytes] = ..., block_size: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolSpec, _Mapping]]] = ..., memory_bytes: _Optional[int] = ..., plain_rotary: _Optional[bool] = ..., weight_version: _Optional[str] = ..., steps_manager_epoch: _Optional[int] = ...) -> None: ...

class RegisterExecutorResponse(_message.Message):
    __slots__ = ("manager_epoch", "lease_duration", "restored_blocks", "restored_lower_blocks")
    MANAGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    RESTORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_LOWER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    manager_epoch: int
    lease_duration: _duration_pb2.Duration
    restored_blocks: int
    restored_lower_blocks: int
    def __init__(self, manager_epoch: _Optional[int] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., restored_blocks: _Optional[int] = ..., restored_lower_blocks: _Optional[int] = ...) -> None: ...

class RenewExecutorRequest(_message.Message):
    __slots__ = ("executor_id", "executor_epoch", "manager_epoch")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MANAGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    executor_epoch: int
    manager_epoch: int
    def __init__(self, executor_id: _Optional[str] = ..., executor_epoch: _Optional[int] = ..., manager_epoch: _Optional[int] = ...) -> None: ...

class RenewExecutorResponse(_message.Message):
    __slots__ = ("manager_epoch", "lease_duration", "transfers", "scheduler_ids")
    MANAGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_IDS_FIELD_NUMBER: _ClassVar[int]
    manager_epoch: int
    lease_duration: _duration_pb2.Duration
    transfers: _containers.RepeatedCompositeFieldContainer[Transfer]
    scheduler_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, manager_epoch: _Optional[int] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., transfers: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ..., scheduler_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("executor_id", "executor_epoch", "weight_version")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    executor_epoch: int
    weight_version: str
    def __init__(self, executor_id: _Optional[str] = ..., executor_epoch: _Optional[int] = ..., weight_version: _Optional[str] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("other_blocks",)
    OTHER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    other_blocks: int
    def __init__(self, other_blocks: _Optional[int] = ...) -> None: ...

class RegisterSchedulerRequest(_message.Message):
    __slots__ = ("scheduler_id", "scheduler_epoch")
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    scheduler_id: str
    scheduler_epoch: int
    def __init__(self, scheduler_id: _Optional[str] = ..., scheduler_epoch: _Optional[int] = ...) -> None: ...

class RegisterSchedulerResponse(_message.Message):
    __slots__ = ("manager_epoch", "lease_duration")
    MANAGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    manager_epoch: int
    lease_duration: _duration_pb2.Duration
    def __init__(self, manager_epoch: _Optional[int] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RetentionConfig(_message.Message):
    __slots__ = ("ranges", "decode_retention_priority", "decode_retention_duration")
    RANGES_FIELD_NUMBER: _ClassVar[int]
    DECODE_RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DECODE_RETENTION_DURATION_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[_kvcommon_pb2.RetentionRange]
    decode_retention_priority: int
    decode_retention_duration: _duration_pb2.Duration
    def __init__(self, ranges: _Optional[_Iterable[_Union[_kvcommon_pb2.RetentionRange, _Mapping]]] = ..., decode_retention_priority: _Optional[int] = ..., decode_retention_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AdmitSequenceRequest(_message.Message):
    __slots__ = ("sequence_id", "scheduler_id", "scheduler_epoch", "executor_id", "token_ids", "salt", "adapter_id", "retention", "no_read", "no_store", "session_id", "request_id", "num_prompt_tokens", "tenant_id", "extra_keys", "hints", "eviction_policy", "lowest_tier", "traceparent", "max_continuation_tokens", "explain_miss", "store_tokens")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    NO_READ_FIELD_NUMBER: _ClassVar[int]
    NO_STORE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_FIELD_NUMBER: _ClassVar[int]
    LOWEST_TIER_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTINUATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_MISS_FIELD_NUMBER: _ClassVar[int]
    STORE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    scheduler_id: str
    scheduler_epoch: int
    executor_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    salt: str
    adapter_id: int
    retention: RetentionConfig
    no_read: bool
    no_store: bool
    session_id: str
    request_id: str
    num_prompt_tokens: int
    tenant_id: str
    extra_keys: _containers.RepeatedCompositeFieldContainer[ExtraKey]
    hints: _kvcommon_pb2.KvHints
    eviction_policy: _kvcommon_pb2.EvictionPolicy
    lowest_tier: Tier
    traceparent: str
    max_continuation_tokens: int
    explain_miss: bool
    store_tokens: int
    def __init__(self, sequence_id: _Optional[str] = ..., scheduler_id: _Optional[str] = ..., scheduler_epoch: _Optional[int] = ..., executor_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., salt: _Optional[str] = ..., adapter_id: _Optional[int] = ..., retention: _Optional[_Union[RetentionConfig, _Mapping]] = ..., no_read: _Optional[bool] = ..., no_store: _Optional[bool] = ..., session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., tenant_id: _Optional[str] = ..., extra_keys: _Optional[_Iterable[_Union[ExtraKey, _Mapping]]] = ..., hints: _Optional[_Union[_kvcommon_pb2.KvHints, _Mapping]] = ..., eviction_policy: _Optional[_Union[_kvcommon_pb2.EvictionPolicy, _Mapping]] = ..., lowest_tier: _Optional[_Union[Tier, str]] = ..., traceparent: _Optional[str] = ..., max_continuation_tokens: _Optional[int] = ..., explain_miss: _Optional[bool] = ..., store_tokens: _Optional[int] = ...) -> None: ...

class ExtraKey(_message.Message):
    __slots__ = ("start", "length", "digest")
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    start: int
    length: int
    digest: bytes
    def __init__(self, start: _Optional[int] = ..., length: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class BlockTable(_message.Message):
    __slots__ = ("group", "slots")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    group: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ...) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("ticket", "group", "source_tier", "source_slot", "target_tier", "target_slot", "num_tokens", "bytes")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TIER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SLOT_FIELD_NUMBER: _ClassVar[int]
    TARGET_TIER_FIELD_NUMBER: _ClassVar[int]
    TARGET_SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    group: int
    source_tier: Tier
    source_slot: int
    target_tier: Tier
    target_slot: int
    num_tokens: int
    bytes: int
    def __init__(self, ticket: _Optional[int] = ..., group: _Optional[int] = ..., source_tier: _Optional[_Union[Tier, str]] = ..., source_slot: _Optional[int] = ..., target_tier: _Optional[_Union[Tier, str]] = ..., target_slot: _Optional[int] = ..., num_tokens: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class AdmitSequenceResponse(_message.Message):
    __slots__ = ("manager_epoch", "admitted", "missing_blocks", "sequence_handle", "cached_tokens", "wait_for_handle", "capacity_tokens", "block_tables", "transfers", "receipts", "hint_answers", "eviction_policy", "full_account", "continuation_token_ids", "miss", "store_tokens")
    MANAGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    MISSING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FOR_HANDLE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    HINT_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_FIELD_NUMBER: _ClassVar[int]
    FULL_ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    STORE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    manager_epoch: int
    admitted: bool
    missing_blocks: int
    sequence_handle: int
    cached_tokens: int
    wait_for_handle: int
    capacity_tokens: int
    block_tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    transfers: _containers.RepeatedCompositeFieldContainer[Transfer]
    receipts: _containers.RepeatedCompositeFieldContainer[_kvcommon_pb2.RetentionReceipt]
    hint_answers: _containers.RepeatedCompositeFieldContainer[_kvcommon_pb2.HintAnswer]
    eviction_policy: _kvcommon_pb2.EvictionPolicy
    full_account: QuotaAccount
    continuation_token_ids: _containers.RepeatedScalarFieldContainer[int]
    miss: _kvcommon_pb2.PrefixMiss
    store_tokens: int
    def __init__(self, manager_epoch: _Optional[int] = ..., admitted: _Optional[bool] = ..., missing_blocks: _Optional[int] = ..., sequence_handle: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., wait_for_handle: _Optional[int] = ..., capacity_tokens: _Optional[int] = ..., block_tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., transfers: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ..., receipts: _Optional[_Iterable[_Union[_kvcommon_pb2.RetentionReceipt, _Mapping]]] = ..., hint_answers: _Optional[_Iterable[_Union[_kvcommon_pb2.HintAnswer, _Mapping]]] = ..., eviction_policy: _Optional[_Union[_kvcommon_pb2.EvictionPolicy, _Mapping]] = ..., full_account: _Optional[_Union[QuotaAccount, _Mapping]] = ..., continuation_token_ids: _Optional[_Iterable[int]] = ..., miss: _Optional[_Union[_kvcommon_pb2.PrefixMiss, _Mapping]] = ..., store_tokens: _Optional[int] = ...) -> None: ...

class AdmitSequencesRequest(_message.Message):
    __slots__ = ("admissions",)
    ADMISSIONS_FIELD_NUMBER: _ClassVar[int]
    admissions: _containers.RepeatedCompositeFieldContainer[AdmitSequenceRequest]
    def __init__(self, admissions: _Optional[_Iterable[_Union[AdmitSequenceRequest, _Mapping]]] = ...) -> None: ...

class AdmitSequencesResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[AdmitSequenceResponse]
    def __init__(self, answers: _Optional[_Iterable[_Union[AdmitSequenceResponse, _Mapping]]] = ...) -> None: ...

class SyncSequencesRequest(_message.Message):
    __slots__ = ("scheduler_id", "scheduler_epoch", "manager_epoch", "sync_number", "step", "handles", "computed_tokens", "new_token_counts", "new_token_ids", "released_handles", "trimmed_handles", "trimmed_capacity_tokens", "cancelled_tickets", "evicting_handles", "evicted_handles", "computed_tokens_before_eviction", "evicting_window_tokens", "window_handles", "window_tokens")
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MANAGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SYNC_NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_HANDLES_FIELD_NUMBER: _ClassVar[int]
    TRIMMED_HANDLES_FIELD_NUMBER: _ClassVar[int]
    TRIMMED_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_TICKETS_FIELD_NUMBER: _ClassVar[int]
    EVICTING_HANDLES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_HANDLES_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_BEFORE_EVICTION_FIELD_NUMBER: _ClassVar[int]
    EVICTING_WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_HANDLES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    scheduler_id: str
    scheduler_epoch: int
    manager_epoch: int
    sync_number: int
    step: int
    handles: _containers.RepeatedScalarFieldContainer[int]
    computed_tokens: _containers.RepeatedScalarFieldContainer[int]
    new_token_counts: _containers.RepeatedScalarFieldContainer[int]
    new_token_ids: _containers.RepeatedScalarFieldContainer[int]
    released_handles: _containers.RepeatedScalarFieldContainer[int]
    trimmed_handles: _containers.RepeatedScalarFieldContainer[int]
    trimmed_capacity_tokens: _containers.RepeatedScalarFieldContainer[int]
    cancelled_tickets: _containers.RepeatedScalarFieldContainer[int]
    evicting_handles: _containers.RepeatedScalarFieldContainer[int]
    evicted_handles: _containers.RepeatedScalarFieldContainer[int]
    computed_tokens_before_eviction: _containers.RepeatedScalarFieldContainer[int]
    evicting_window_tokens: _containers.RepeatedScalarFieldContainer[int]
    window_handles: _containers.RepeatedScalarFieldContainer[int]
    window_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, scheduler_id: _Optional[str] = ..., scheduler_epoch: _Optional[int] = ..., manager_epoch: _Optional[int] = ..., sync_number: _Optional[int] = ..., step: _Optional[int] = ..., handles: _Optional[_Iterable[int]] = ..., computed_tokens: _Optional[_Iterable[int]] = ..., new_token_counts: _Optional[_Iterable[int]] = ..., new_token_ids: _Optional[_Iterable[int]] = ..., released_handles: _Optional[_Iterable[int]] = ..., trimmed_handles: _Optional[_Iterable[int]] = ..., trimmed_capacity_tokens: _Optional[_Iterable[int]] = ..., cancelled_tickets: _Optional[_Iterable[int]] = ..., evicting_handles: _Optional[_Iterable[int]] = ..., evicted_handles: _Optional[_Iterable[int]] = ..., computed_tokens_before_eviction: _Optional[_Iterable[int]] = ..., evicting_window_tokens: _Optional[_Iterable[int]] = ..., window_handles: _Optional[_Iterable[int]] = ..., window_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class SyncSequencesResponse(_message.Message):
    __slots__ = ("manager_epoch", "extended_handles", "extended_groups", "extended_counts", "extended_slots", "void_handles", "unknown_handles", "missing_blocks", "free_blocks", "lease_duration", "transfers", "evicting_handles", "evicting_counts", "evicting_slots", "total_blocks", "evicting_window_tokens", "window_handles", "window_tokens")
    MANAGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXTENDED_HANDLES_FIELD_NUMBER: _ClassVar[int]
    EXTENDED_GROUPS_FIELD_NUMBER: _ClassVar[int]
    EXTENDED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    EXTENDED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    VOID_HANDLES_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_HANDLES_FIELD_NUMBER: _ClassVar[int]
    MISSING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    EVICTING_HANDLES_FIELD_NUMBER: _ClassVar[int]
    EVICTING_COUNTS_FIELD_NUMBER: _ClassVar[int]
    EVICTING_SLOTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTING_WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_HANDLES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    manager_epoch: int
    extended_handles: _containers.RepeatedScalarFieldContainer[int]
    extended_groups: _containers.RepeatedScalarFieldContainer[int]
    extended_counts: _containers.RepeatedScalarFieldContainer[int]
    extended_slots: _containers.RepeatedScalarFieldContainer[int]
    void_handles: _containers.RepeatedScalarFieldContainer[int]
    unknown_handles: _containers.RepeatedScalarFieldContainer[int]
    missing_blocks: int
    free_blocks: int
    lease_duration: _duration_pb2.Duration
    transfers: _containers.RepeatedCompositeFieldContainer[Transfer]
    evicting_handles: _containers.RepeatedScalarFieldContainer[int]
    evicting_counts: _containers.RepeatedScalarFieldContainer[int]
    evicting_slots: _containers.RepeatedScalarFieldContainer[int]
    total_blocks: int
    evicting_window_tokens: _containers.RepeatedScalarFieldContainer[int]
    window_handles: _containers.RepeatedScalarFieldContainer[int]
    window_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, manager_epoch: _Optional[int] = ..., extended_handles: _Optional[_Iterable[int]] = ..., extended_groups: _Optional[_Iterable[int]] = ..., extended_counts: _Optional[_Iterable[int]] = ..., extended_slots: _Optional[_Iterable[int]] = ..., void_handles: _Optional[_Iterable[int]] = ..., unknown_handles: _Optional[_Iterable[int]] = ..., missing_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., transfers: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ..., evicting_handles: _Optional[_Iterable[int]] = ..., evicting_counts: _Optional[_Iterable[int]] = ..., evicting_slots: _Optional[_Iterable[int]] = ..., total_blocks: _Optional[int] = ..., evicting_window_tokens: _Optional[_Iterable[int]] = ..., window_handles: _Optional[_Iterable[int]] = ..., window_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class TruncateSequenceRequest(_message.Message):
    __slots__ = ("sequence_id", "num_tokens", "scheduler_id", "scheduler_epoch")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    num_tokens: int
    scheduler_id: str
    scheduler_epoch: int
    def __init__(self, sequence_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., scheduler_id: _Optional[str] = ..., scheduler_epoch: _Optional[int] = ...) -> None: ...

class TruncateSequenceResponse(_message.Message):
    __slots__ = ("found", "freed_blocks")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    found: bool
    freed_blocks: int
    def __init__(self, found: _Optional[bool] = ..., freed_blocks: _Optional[int] = ...) -> None: ...

class ForkSequenceRequest(_message.Message):
    __slots__ = ("parent_sequence_id", "sequence_id", "num_tokens", "scheduler_id", "scheduler_epoch")
    PARENT_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    parent_sequence_id: str
    sequence_id: str
    num_tokens: int
    scheduler_id: str
    scheduler_epoch: int
    def __init__(self, parent_sequence_id: _Optional[str] = ..., sequence_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., scheduler_id: _Optional[str] = ..., scheduler_epoch: _Optional[int] = ...) -> None: ...

class ForkSequenceResponse(_message.Message):
    __slots__ = ("admitted", "missing_blocks", "sequence_handle", "block_tables", "transfers", "cached_tokens", "full_account")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    MISSING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FULL_ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    admitted: bool
    missing_blocks: int
    sequence_handle: int
    block_tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    transfers: _containers.RepeatedCompositeFieldContainer[Transfer]
    cached_tokens: int
    full_account: QuotaAccount
    def __init__(self, admitted: _Optional[bool] = ..., missing_blocks: _Optional[int] = ..., sequence_handle: _Optional[int] = ..., block_tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., transfers: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., full_account: _Optional[_Union[QuotaAccount, _Mapping]] = ...) -> None: ...

class HoldSequenceRequest(_message.Message):
    __slots__ = ("sequence_id", "owner", "duration", "scheduler_id", "scheduler_epoch")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    owner: str
    duration: _duration_pb2.Duration
    scheduler_id: str
    scheduler_epoch: int
    def __init__(self, sequence_id: _Optional[str] = ..., owner: _Optional[str] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., scheduler_id: _Optional[str] = ..., scheduler_epoch: _Optional[int] = ...) -> None: ...

class HoldSequenceResponse(_message.Message):
    __slots__ = ("held_blocks",)
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    held_blocks: int
    def __init__(self, held_blocks: _Optional[int] = ...) -> None: ...

class ConfirmTransfersRequest(_message.Message):
    __slots__ = ("executor_id", "executor_epoch", "tickets", "failed_tickets", "step")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    FAILED_TICKETS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    executor_epoch: int
    tickets: _containers.RepeatedScalarFieldContainer[int]
    failed_tickets: _containers.RepeatedScalarFieldContainer[int]
    step: int
    def __init__(self, executor_id: _Optional[str] = ..., executor_epoch: _Optional[int] = ..., tickets: _Optional[_Iterable[int]] = ..., failed_tickets: _Optional[_Iterable[int]] = ..., step: _Optional[int] = ...) -> None: ...

class ConfirmTransfersResponse(_message.Message):
    __slots__ = ("unknown_tickets",)
    UNKNOWN_TICKETS_FIELD_NUMBER: _ClassVar[int]
    unknown_tickets: int
    def __init__(self, unknown_tickets: _Optional[int] = ...) -> None: ...

class PreviewAdmissionRequest(_message.Message):
    __slots__ = ("admission", "max_new_tokens")
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    admission: AdmitSequenceRequest
    max_new_tokens: int
    def __init__(self, admission: _Optional[_Union[AdmitSequenceRequest, _Mapping]] = ..., max_new_tokens: _Optional[int] = ...) -> None: ...

class PreviewAdmissionResponse(_message.Message):
    __slots__ = ("admitted", "missing_blocks", "cached_tokens", "estimates")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    MISSING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATES_FIELD_NUMBER: _ClassVar[int]
    admitted: bool
    missing_blocks: int
    cached_tokens: int
    estimates: _containers.RepeatedCompositeFieldContainer[BlockEstimate]
    def __init__(self, admitted: _Optional[bool] = ..., missing_blocks: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., estimates: _Optional[_Iterable[_Union[BlockEstimate, _Mapping]]] = ...) -> None: ...

class BlockEstimate(_message.Message):
    __slots__ = ("group", "reusable_blocks", "next_step_blocks", "completion_blocks")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REUSABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    group: int
    reusable_blocks: int
    next_step_blocks: int
    completion_blocks: int
    def __init__(self, group: _Optional[int] = ..., reusable_blocks: _Optional[int] = ..., next_step_blocks: _Optional[int] = ..., completion_blocks: _Optional[int] = ...) -> None: ...

class SendHintsRequest(_message.Message):
    __slots__ = ("prefix", "hints", "session_id")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    prefix: PrefixSelector
    hints: _kvcommon_pb2.KvHints
    session_id: str
    def __init__(self, prefix: _Optional[_Union[PrefixSelector, _Mapping]] = ..., hints: _Optional[_Union[_kvcommon_pb2.KvHints, _Mapping]] = ..., session_id: _Optional[str] = ...) -> None: ...

class SendHintsResponse(_message.Message):
    __slots__ = ("answers", "transfers")
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[_kvcommon_pb2.HintAnswer]
    transfers: _containers.RepeatedCompositeFieldContainer[Transfer]
    def __init__(self, answers: _Optional[_Iterable[_Union[_kvcommon_pb2.HintAnswer, _Mapping]]] = ..., transfers: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ...) -> None: ...

class PrefixSelector(_message.Message):
    __slots__ = ("executor_id", "token_ids", "salt", "adapter_id", "extra_keys")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    salt: str
    adapter_id: int
    extra_keys: _containers.RepeatedCompositeFieldContainer[ExtraKey]
    def __init__(self, executor_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., salt: _Optional[str] = ..., adapter_id: _Optional[int] = ..., extra_keys: _Optional[_Iterable[_Union[ExtraKey, _Mapping]]] = ...) -> None: ...

class CheckPoolRequest(_message.Message):
    __slots__ = ("pool_id", "compare_with_store")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    COMPARE_WITH_STORE_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    compare_with_store: bool
    def __init__(self, pool_id: _Optional[str] = ..., compare_with_store: _Optional[bool] = ...) -> None: ...

class PoolViolation(_message.Message):
    __slots__ = ("pool_id", "slot", "message")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    slot: int
    message: str
    def __init__(self, pool_id: _Optional[str] = ..., slot: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class CheckPoolResponse(_message.Message):
    __slots__ = ("violations", "pools", "store_compared")
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    STORE_COMPARED_FIELD_NUMBER: _ClassVar[int]
    violations: _containers.RepeatedCompositeFieldContainer[PoolViolation]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    store_compared: bool
    def __init__(self, violations: _Optional[_Iterable[_Union[PoolViolation, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ..., store_compared: _Optional[bool] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("pool_id", "spec", "block_size", "total_blocks", "free_blocks", "used_blocks", "cached_blocks", "evicted_blocks", "queried_tokens", "hit_tokens", "lower_tiers", "etag")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOWER_TIERS_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    spec: PoolSpec
    block_size: int
    total_blocks: int
    free_blocks: int
    used_blocks: int
    cached_blocks: int
    evicted_blocks: int
    queried_tokens: int
    hit_tokens: int
    lower_tiers: _containers.RepeatedCompositeFieldContainer[TierUsage]
    etag: str
    def __init__(self, pool_id: _Optional[str] = ..., spec: _Optional[_Union[PoolSpec, _Mapping]] = ..., block_size: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., queried_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., lower_tiers: _Optional[_Iterable[_Union[TierUsage, _Mapping]]] = ..., etag: _Optional[str] = ...) -> None: ...

class TierUsage(_message.Message):
    __slots__ = ("tier", "total_blocks", "free_blocks", "used_blocks", "cached_blocks", "copy_blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    total_blocks: int
    free_blocks: int
    used_blocks: int
    cached_blocks: int
    copy_blocks: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., copy_blocks: _Optional[int] = ...) -> None: ...

class ListPoolsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListPoolsResponse(_message.Message):
    __slots__ = ("pools", "next_page_token")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    next_page_token: str
    def __init__(self, pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetPoolRequest(_message.Message):
    __slots__ = ("pool_id",)
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    def __init__(self, pool_id: _Optional[str] = ...) -> None: ...

class GetPoolResponse(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: Pool
    def __init__(self, pool: _Optional[_Union[Pool, _Mapping]] = ...) -> None: ...

class UpdatePoolRequest(_message.Message):
    __slots__ = ("pool", "update_mask", "validate_only")
    POOL_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    pool: Pool
    update_mask: _field_mask_pb2.FieldMask
    validate_only: bool
    def __init__(self, pool: _Optional[_Union[Pool, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class UpdatePoolResponse(_message.Message):
    __slots__ = ("pool", "degraded_hold_names", "offloaded_blocks", "dropped")
    POOL_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_HOLD_NAMES_FIELD_NUMBER: _ClassVar[int]
    OFFLOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    pool: Pool
    degraded_hold_names: _containers.RepeatedScalarFieldContainer[str]
    offloaded_blocks: int
    dropped: _containers.RepeatedCompositeFieldContainer[TierCount]
    def __init__(self, pool: _Optional[_Union[Pool, _Mapping]] = ..., degraded_hold_names: _Optional[_Iterable[str]] = ..., offloaded_blocks: _Optional[int] = ..., dropped: _Optional[_Iterable[_Union[TierCount, _Mapping]]] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("pool_id", "window")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    window: _duration_pb2.Duration
    def __init__(self, pool_id: _Optional[str] = ..., window: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("tiers", "tokens", "salts", "honoured_leases", "broken_leases")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SALTS_FIELD_NUMBER: _ClassVar[int]
    HONOURED_LEASES_FIELD_NUMBER: _ClassVar[int]
    BROKEN_LEASES_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    tokens: TokenStats
    salts: _containers.RepeatedCompositeFieldContainer[SaltStats]
    honoured_leases: int
    broken_leases: int
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., tokens: _Optional[_Union[TokenStats, _Mapping]] = ..., salts: _Optional[_Iterable[_Union[SaltStats, _Mapping]]] = ..., honoured_leases: _Optional[int] = ..., broken_leases: _Optional[int] = ...) -> None: ...

class GetGhostCachesRequest(_message.Message):
    __slots__ = ("executor_id", "window")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    window: _duration_pb2.Duration
    def __init__(self, executor_id: _Optional[str] = ..., window: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetGhostCachesResponse(_message.Message):
    __slots__ = ("caches", "tokens", "queried_blocks", "device_blocks", "tier_blocks", "sample_rate")
    CACHES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUERIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATE_FIELD_NUMBER: _ClassVar[int]
    caches: _containers.RepeatedCompositeFieldContainer[GhostCache]
    tokens: TokenStats
    queried_blocks: int
    device_blocks: int
    tier_blocks: int
    sample_rate: float
    def __init__(self, caches: _Optional[_Iterable[_Union[GhostCache, _Mapping]]] = ..., tokens: _Optional[_Union[TokenStats, _Mapping]] = ..., queried_blocks: _Optional[int] = ..., device_blocks: _Optional[int] = ..., tier_blocks: _Optional[int] = ..., sample_rate: _Optional[float] = ...) -> None: ...

class GhostCache(_message.Message):
    __slots__ = ("policy", "total_blocks", "hit_blocks", "hit_tokens")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    policy: GhostPolicy
    total_blocks: int
    hit_blocks: int
    hit_tokens: int
    def __init__(self, policy: _Optional[_Union[GhostPolicy, str]] = ..., total_blocks: _Optional[int] = ..., hit_blocks: _Optional[int] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("tier", "total_blocks", "free_blocks", "used_blocks", "cached_blocks", "evictable_blocks", "allocated_blocks", "removed", "offloaded_blocks", "onloaded_blocks", "copied_bytes", "failed_copies", "mean_idle_before_eviction")
    TIER_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    OFFLOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ONLOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILED_COPIES_FIELD_NUMBER: _ClassVar[int]
    MEAN_IDLE_BEFORE_EVICTION_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    total_blocks: int
    free_blocks: int
    used_blocks: int
    cached_blocks: int
    evictable_blocks: int
    allocated_blocks: int
    removed: _containers.RepeatedCompositeFieldContainer[CauseCount]
    offloaded_blocks: int
    onloaded_blocks: int
    copied_bytes: int
    failed_copies: int
    mean_idle_before_eviction: _duration_pb2.Duration
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., evictable_blocks: _Optional[int] = ..., allocated_blocks: _Optional[int] = ..., removed: _Optional[_Iterable[_Union[CauseCount, _Mapping]]] = ..., offloaded_blocks: _Optional[int] = ..., onloaded_blocks: _Optional[int] = ..., copied_bytes: _Optional[int] = ..., failed_copies: _Optional[int] = ..., mean_idle_before_eviction: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CauseCount(_message.Message):
    __slots__ = ("cause", "num_blocks")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    cause: RemovalCause
    num_blocks: int
    def __init__(self, cause: _Optional[_Union[RemovalCause, str]] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class TokenStats(_message.Message):
    __slots__ = ("queried_tokens", "hit_tokens")
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queried_tokens: int
    hit_tokens: int
    def __init__(self, queried_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class SaltStats(_message.Message):
    __slots__ = ("salt", "others", "tokens")
    SALT_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    salt: str
    others: bool
    tokens: TokenStats
    def __init__(self, salt: _Optional[str] = ..., others: _Optional[bool] = ..., tokens: _Optional[_Union[TokenStats, _Mapping]] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("pool_id", "slot", "tier", "key", "parent_key", "num_tokens", "references", "retention_priority", "depth", "salt", "adapter_id", "tenant_id", "session_id", "token_ids", "hits", "last_use_age")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    LAST_USE_AGE_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    slot: int
    tier: Tier
    key: bytes
    parent_key: bytes
    num_tokens: int
    references: int
    retention_priority: int
    depth: int
    salt: str
    adapter_id: int
    tenant_id: str
    session_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    hits: int
    last_use_age: _duration_pb2.Duration
    def __init__(self, pool_id: _Optional[str] = ..., slot: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., key: _Optional[bytes] = ..., parent_key: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., references: _Optional[int] = ..., retention_priority: _Optional[int] = ..., depth: _Optional[int] = ..., salt: _Optional[str] = ..., adapter_id: _Optional[int] = ..., tenant_id: _Optional[str] = ..., session_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., hits: _Optional[int] = ..., last_use_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("pool_id", "page_size", "page_token", "filter", "include_token_ids")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    page_size: int
    page_token: str
    filter: BlockFilter
    include_token_ids: bool
    def __init__(self, pool_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., filter: _Optional[_Union[BlockFilter, _Mapping]] = ..., include_token_ids: _Optional[bool] = ...) -> None: ...

class ListBlocksResponse(_message.Message):
    __slots__ = ("blocks", "next_page_token")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    next_page_token: str
    def __init__(self, blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("sequence_id", "sequence_handle", "scheduler_id", "executor_id", "num_tokens", "computed_tokens", "cached_tokens", "capacity_tokens", "num_blocks", "salt", "tenant_id", "session_id", "eviction_policy", "evicting", "window_tokens", "granted_blocks")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_FIELD_NUMBER: _ClassVar[int]
    EVICTING_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    sequence_handle: int
    scheduler_id: str
    executor_id: str
    num_tokens: int
    computed_tokens: int
    cached_tokens: int
    capacity_tokens: int
    num_blocks: int
    salt: str
    tenant_id: str
    session_id: str
    eviction_policy: _kvcommon_pb2.EvictionPolicy
    evicting: bool
    window_tokens: int
    granted_blocks: int
    def __init__(self, sequence_id: _Optional[str] = ..., sequence_handle: _Optional[int] = ..., scheduler_id: _Optional[str] = ..., executor_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., capacity_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., salt: _Optional[str] = ..., tenant_id: _Optional[str] = ..., session_id: _Optional[str] = ..., eviction_policy: _Optional[_Union[_kvcommon_pb2.EvictionPolicy, _Mapping]] = ..., evicting: _Optional[bool] = ..., window_tokens: _Optional[int] = ..., granted_blocks: _Optional[int] = ...) -> None: ...

class ListSequencesRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "executor_id", "scheduler_id", "salt")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    executor_id: str
    scheduler_id: str
    salt: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., executor_id: _Optional[str] = ..., scheduler_id: _Optional[str] = ..., salt: _Optional[str] = ...) -> None: ...

class ListSequencesResponse(_message.Message):
    __slots__ = ("sequences", "next_page_token")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[Sequence]
    next_page_token: str
    def __init__(self, sequences: _Optional[_Iterable[_Union[Sequence, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class BlockFilter(_message.Message):
    __slots__ = ("pool_id", "salt", "max_retention_priority", "session_id", "prefix", "adapter_id", "tier", "tenant_id")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    MAX_RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    salt: str
    max_retention_priority: int
    session_id: str
    prefix: PrefixSelector
    adapter_id: int
    tier: Tier
    tenant_id: str
    def __init__(self, pool_id: _Optional[str] = ..., salt: _Optional[str] = ..., max_retention_priority: _Optional[int] = ..., session_id: _Optional[str] = ..., prefix: _Optional[_Union[PrefixSelector, _Mapping]] = ..., adapter_id: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., tenant_id: _Optional[str] = ...) -> None: ...

class PurgeBlocksRequest(_message.Message):
    __slots__ = ("filter", "validate_only", "skip_used")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    SKIP_USED_FIELD_NUMBER: _ClassVar[int]
    filter: BlockFilter
    validate_only: bool
    skip_used: bool
    def __init__(self, filter: _Optional[_Union[BlockFilter, _Mapping]] = ..., validate_only: _Optional[bool] = ..., skip_used: _Optional[bool] = ...) -> None: ...

class PurgeBlocksResponse(_message.Message):
    __slots__ = ("purged_blocks", "used_blocks")
    PURGED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    purged_blocks: int
    used_blocks: int
    def __init__(self, purged_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ...) -> None: ...

class ForgetBlocksRequest(_message.Message):
    __slots__ = ("salt", "session_id", "prefix", "validate_only")
    SALT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    salt: str
    session_id: str
    prefix: PrefixSelector
    validate_only: bool
    def __init__(self, salt: _Optional[str] = ..., session_id: _Optional[str] = ..., prefix: _Optional[_Union[PrefixSelector, _Mapping]] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class ForgetBlocksResponse(_message.Message):
    __slots__ = ("removed", "used_blocks", "shared_blocks", "zeroing_blocks", "store_updated")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ZEROING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STORE_UPDATED_FIELD_NUMBER: _ClassVar[int]
    removed: _containers.RepeatedCompositeFieldContainer[TierCount]
    used_blocks: int
    shared_blocks: int
    zeroing_blocks: int
    store_updated: bool
    def __init__(self, removed: _Optional[_Iterable[_Union[TierCount, _Mapping]]] = ..., used_blocks: _Optional[int] = ..., shared_blocks: _Optional[int] = ..., zeroing_blocks: _Optional[int] = ..., store_updated: _Optional[bool] = ...) -> None: ...

class TierCount(_message.Message):
    __slots__ = ("tier", "num_blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    num_blocks: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class RetentionRule(_message.Message):
    __slots__ = ("name", "etag", "order", "match", "action")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    order: int
    match: RuleMatch
    action: RuleAction
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., order: _Optional[int] = ..., match: _Optional[_Union[RuleMatch, _Mapping]] = ..., action: _Optional[_Union[RuleAction, _Mapping]] = ...) -> None: ...

class RuleMatch(_message.Message):
    __slots__ = ("salt", "tenant_id", "adapter_id", "prefix_token_ids", "start", "end")
    SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    salt: str
    tenant_id: str
    adapter_id: int
    prefix_token_ids: _containers.RepeatedScalarFieldContainer[int]
    start: int
    end: int
    def __init__(self, salt: _Optional[str] = ..., tenant_id: _Optional[str] = ..., adapter_id: _Optional[int] = ..., prefix_token_ids: _Optional[_Iterable[int]] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class RuleAction(_message.Message):
    __slots__ = ("retention_priority", "retention_duration", "pin_duration", "no_store", "offload_min_priority", "eviction_policy")
    RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RETENTION_DURATION_FIELD_NUMBER: _ClassVar[int]
    PIN_DURATION_FIELD_NUMBER: _ClassVar[int]
    NO_STORE_FIELD_NUMBER: _ClassVar[int]
    OFFLOAD_MIN_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_FIELD_NUMBER: _ClassVar[int]
    retention_priority: int
    retention_duration: _duration_pb2.Duration
    pin_duration: _duration_pb2.Duration
    no_store: bool
    offload_min_priority: int
    eviction_policy: _kvcommon_pb2.EvictionPolicy
    def __init__(self, retention_priority: _Optional[int] = ..., retention_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pin_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., no_store: _Optional[bool] = ..., offload_min_priority: _Optional[int] = ..., eviction_policy: _Optional[_Union[_kvcommon_pb2.EvictionPolicy, _Mapping]] = ...) -> None: ...

class CreateRetentionRuleRequest(_message.Message):
    __slots__ = ("rule", "validate_only")
    RULE_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    rule: RetentionRule
    validate_only: bool
    def __init__(self, rule: _Optional[_Union[RetentionRule, _Mapping]] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class CreateRetentionRuleResponse(_message.Message):
    __slots__ = ("rule", "matching_blocks")
    RULE_FIELD_NUMBER: _ClassVar[int]
    MATCHING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    rule: RetentionRule
    matching_blocks: int
    def __init__(self, rule: _Optional[_Union[RetentionRule, _Mapping]] = ..., matching_blocks: _Optional[int] = ...) -> None: ...

class GetRetentionRuleRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetRetentionRuleResponse(_message.Message):
    __slots__ = ("rule",)
    RULE_FIELD_NUMBER: _ClassVar[int]
    rule: RetentionRule
    def __init__(self, rule: _Optional[_Union[RetentionRule, _Mapping]] = ...) -> None: ...

class ListRetentionRulesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRetentionRulesResponse(_message.Message):
    __slots__ = ("rules", "next_page_token")
    RULES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    rules: _containers.RepeatedCompositeFieldContainer[RetentionRule]
    next_page_token: str
    def __init__(self, rules: _Optional[_Iterable[_Union[RetentionRule, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class UpdateRetentionRuleRequest(_message.Message):
    __slots__ = ("rule", "update_mask", "validate_only")
    RULE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    rule: RetentionRule
    update_mask: _field_mask_pb2.FieldMask
    validate_only: bool
    def __init__(self, rule: _Optional[_Union[RetentionRule, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class UpdateRetentionRuleResponse(_message.Message):
    __slots__ = ("rule", "changed_leases", "matching_blocks")
    RULE_FIELD_NUMBER: _ClassVar[int]
    CHANGED_LEASES_FIELD_NUMBER: _ClassVar[int]
    MATCHING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    rule: RetentionRule
    changed_leases: int
    matching_blocks: int
    def __init__(self, rule: _Optional[_Union[RetentionRule, _Mapping]] = ..., changed_leases: _Optional[int] = ..., matching_blocks: _Optional[int] = ...) -> None: ...

class DeleteRetentionRuleRequest(_message.Message):
    __slots__ = ("name", "etag", "validate_only")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    validate_only: bool
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class DeleteRetentionRuleResponse(_message.Message):
    __slots__ = ("ended_leases",)
    ENDED_LEASES_FIELD_NUMBER: _ClassVar[int]
    ended_leases: int
    def __init__(self, ended_leases: _Optional[int] = ...) -> None: ...

class Quota(_message.Message):
    __slots__ = ("tenant_id", "salt", "device_floor_blocks", "device_ceiling_blocks", "host_floor_blocks", "host_ceiling_blocks")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FLOOR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_CEILING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_FLOOR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_CEILING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    salt: str
    device_floor_blocks: int
    device_ceiling_blocks: int
    host_floor_blocks: int
    host_ceiling_blocks: int
    def __init__(self, tenant_id: _Optional[str] = ..., salt: _Optional[str] = ..., device_floor_blocks: _Optional[int] = ..., device_ceiling_blocks: _Optional[int] = ..., host_floor_blocks: _Optional[int] = ..., host_ceiling_blocks: _Optional[int] = ...) -> None: ...

class QuotaAccount(_message.Message):
    __slots__ = ("tenant_id", "salt")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    salt: str
    def __init__(self, tenant_id: _Optional[str] = ..., salt: _Optional[str] = ...) -> None: ...

class SetQuotaRequest(_message.Message):
    __slots__ = ("quota", "validate_only")
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    quota: Quota
    validate_only: bool
    def __init__(self, quota: _Optional[_Union[Quota, _Mapping]] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class SetQuotaResponse(_message.Message):
    __slots__ = ("quota",)
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    quota: Quota
    def __init__(self, quota: _Optional[_Union[Quota, _Mapping]] = ...) -> None: ...

class ListQuotasRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class QuotaUsage(_message.Message):
    __slots__ = ("quota", "pool_id", "device_blocks", "host_blocks")
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    quota: Quota
    pool_id: str
    device_blocks: int
    host_blocks: int
    def __init__(self, quota: _Optional[_Union[Quota, _Mapping]] = ..., pool_id: _Optional[str] = ..., device_blocks: _Optional[int] = ..., host_blocks: _Optional[int] = ...) -> None: ...

class ListQuotasResponse(_message.Message):
    __slots__ = ("quotas", "next_page_token")
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    quotas: _containers.RepeatedCompositeFieldContainer[QuotaUsage]
    next_page_token: str
    def __init__(self, quotas: _Optional[_Iterable[_Union[QuotaUsage, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteQuotaRequest(_message.Message):
    __slots__ = ("tenant_id", "salt")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    salt: str
    def __init__(self, tenant_id: _Optional[str] = ..., salt: _Optional[str] = ...) -> None: ...

class DeleteQuotaResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinPrefixRequest(_message.Message):
    __slots__ = ("prefix", "owner", "duration", "validate_only")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    prefix: PrefixSelector
    owner: str
    duration: _duration_pb2.Duration
    validate_only: bool
    def __init__(self, prefix: _Optional[_Union[PrefixSelector, _Mapping]] = ..., owner: _Optional[str] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class PinPrefixResponse(_message.Message):
    __slots__ = ("hold_name", "receipt", "degraded_hold_names", "hold_names")
    HOLD_NAME_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_HOLD_NAMES_FIELD_NUMBER: _ClassVar[int]
    HOLD_NAMES_FIELD_NUMBER: _ClassVar[int]
    hold_name: str
    receipt: _kvcommon_pb2.RetentionReceipt
    degraded_hold_names: _containers.RepeatedScalarFieldContainer[str]
    hold_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, hold_name: _Optional[str] = ..., receipt: _Optional[_Union[_kvcommon_pb2.RetentionReceipt, _Mapping]] = ..., degraded_hold_names: _Optional[_Iterable[str]] = ..., hold_names: _Optional[_Iterable[str]] = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ("name", "pin", "owner", "remaining_duration", "executor_id", "num_blocks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    REMAINING_DURATION_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    pin: bool
    owner: str
    remaining_duration: _duration_pb2.Duration
    executor_id: str
    num_blocks: int
    def __init__(self, name: _Optional[str] = ..., pin: _Optional[bool] = ..., owner: _Optional[str] = ..., remaining_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., executor_id: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class ListHoldsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "owner")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    owner: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., owner: _Optional[str] = ...) -> None: ...

class ListHoldsResponse(_message.Message):
    __slots__ = ("holds", "next_page_token")
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    holds: _containers.RepeatedCompositeFieldContainer[Hold]
    next_page_token: str
    def __init__(self, holds: _Optional[_Iterable[_Union[Hold, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ReleaseHoldRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ReleaseHoldResponse(_message.Message):
    __slots__ = ("freed_blocks",)
    FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    freed_blocks: int
    def __init__(self, freed_blocks: _Optional[int] = ...) -> None: ...

class ListLeasesRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "pool_id", "holder")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    pool_id: str
    holder: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., pool_id: _Optional[str] = ..., holder: _Optional[str] = ...) -> None: ...

class BlockLease(_message.Message):
    __slots__ = ("block", "lease")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    block: Block
    lease: Lease
    def __init__(self, block: _Optional[_Union[Block, _Mapping]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ...) -> None: ...

class ListLeasesResponse(_message.Message):
    __slots__ = ("leases", "next_page_token")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[BlockLease]
    next_page_token: str
    def __init__(self, leases: _Optional[_Iterable[_Union[BlockLease, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListPrefixesRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "pool_id", "filter")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    pool_id: str
    filter: BlockFilter
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., pool_id: _Optional[str] = ..., filter: _Optional[_Union[BlockFilter, _Mapping]] = ...) -> None: ...

class CachedPrefix(_message.Message):
    __slots__ = ("last_block", "num_tokens", "blocks", "min_retention_priority")
    LAST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MIN_RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    last_block: Block
    num_tokens: int
    blocks: _containers.RepeatedCompositeFieldContainer[TierCount]
    min_retention_priority: int
    def __init__(self, last_block: _Optional[_Union[Block, _Mapping]] = ..., num_tokens: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[TierCount, _Mapping]]] = ..., min_retention_priority: _Optional[int] = ...) -> None: ...

class ListPrefixesResponse(_message.Message):
    __slots__ = ("prefixes", "next_page_token")
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[CachedPrefix]
    next_page_token: str
    def __init__(self, prefixes: _Optional[_Iterable[_Union[CachedPrefix, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ExplainPrefixRequest(_message.Message):
    __slots__ = ("prefix", "sequence_id", "group")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    prefix: PrefixSelector
    sequence_id: str
    group: int
    def __init__(self, prefix: _Optional[_Union[PrefixSelector, _Mapping]] = ..., sequence_id: _Optional[str] = ..., group: _Optional[int] = ...) -> None: ...

class Removal(_message.Message):
    __slots__ = ("cause", "age", "for_sequence_id", "retention_priority")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    FOR_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    cause: RemovalCause
    age: _duration_pb2.Duration
    for_sequence_id: str
    retention_priority: int
    def __init__(self, cause: _Optional[_Union[RemovalCause, str]] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., for_sequence_id: _Optional[str] = ..., retention_priority: _Optional[int] = ...) -> None: ...

class ExplainedBlock(_message.Message):
    __slots__ = ("block", "leases", "last_hit_age")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LAST_HIT_AGE_FIELD_NUMBER: _ClassVar[int]
    block: Block
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    last_hit_age: _duration_pb2.Duration
    def __init__(self, block: _Optional[_Union[Block, _Mapping]] = ..., leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., last_hit_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("executor_id", "cached_tokens", "blocks", "miss_reason", "removal")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    REMOVAL_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    cached_tokens: int
    blocks: _containers.RepeatedCompositeFieldContainer[ExplainedBlock]
    miss_reason: MissReason
    removal: Removal
    def __init__(self, executor_id: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[ExplainedBlock, _Mapping]]] = ..., miss_reason: _Optional[_Union[MissReason, str]] = ..., removal: _Optional[_Union[Removal, _Mapping]] = ...) -> None: ...

class ExplainPrefixResponse(_message.Message):
    __slots__ = ("explanations",)
    EXPLANATIONS_FIELD_NUMBER: _ClassVar[int]
    explanations: _containers.RepeatedCompositeFieldContainer[Explanation]
    def __init__(self, explanations: _Optional[_Iterable[_Union[Explanation, _Mapping]]] = ...) -> None: ...

class DumpStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DumpStateResponse(_message.Message):
    __slots__ = ("lines", "state_hash")
    LINES_FIELD_NUMBER: _ClassVar[int]
    STATE_HASH_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedScalarFieldContainer[str]
    state_hash: str
    def __init__(self, lines: _Optional[_Iterable[str]] = ..., state_hash: _Optional[str] = ...) -> None: ...

class LoggedOperation(_message.Message):
    __slots__ = ("time", "method", "request", "blocks", "pins", "later")
    TIME_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    LATER_FIELD_NUMBER: _ClassVar[int]
    time: float
    method: str
    request: bytes
    blocks: _containers.RepeatedCompositeFieldContainer[StoredBlock]
    pins: _containers.RepeatedCompositeFieldContainer[StoredPin]
    later: bool
    def __init__(self, time: _Optional[float] = ..., method: _Optional[str] = ..., request: _Optional[bytes] = ..., blocks: _Optional[_Iterable[_Union[StoredBlock, _Mapping]]] = ..., pins: _Optional[_Iterable[_Union[StoredPin, _Mapping]]] = ..., later: _Optional[bool] = ...) -> None: ...

class RecoveringExecutor(_message.Message):
    __slots__ = ("executor_id", "executor_epoch")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    executor_epoch: int
    def __init__(self, executor_id: _Optional[str] = ..., executor_epoch: _Optional[int] = ...) -> None: ...

class LoggedStart(_message.Message):
    __slots__ = ("manager_epoch", "settings")
    MANAGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    manager_epoch: int
    settings: _struct_pb2.Struct
    def __init__(self, manager_epoch: _Optional[int] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class BlockRecord(_message.Message):
    __slots__ = ("depth", "key", "parent_key", "tokens", "stored_step", "generation", "last_use", "extra", "leases", "salt", "adapter_id", "tenant_id", "session_id", "write_through_copy", "weight_version")
    class Lease(_message.Message):
        __slots__ = ("holder", "retention_priority", "duration", "remaining", "offload_min_priority")
        HOLDER_FIELD_NUMBER: _ClassVar[int]
        RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
        DURATION_FIELD_NUMBER: _ClassVar[int]
        REMAINING_FIELD_NUMBER: _ClassVar[int]
        OFFLOAD_MIN_PRIORITY_FIELD_NUMBER: _ClassVar[int]
        holder: str
        retention_priority: int
        duration: float
        remaining: float
        offload_min_priority: int
        def __init__(self, holder: _Optional[str] = ..., retention_priority: _Optional[int] = ..., duration: _Optional[float] = ..., remaining: _Optional[float] = ..., offload_min_priority: _Optional[int] = ...) -> None: ...
    class WriteThroughCopy(_message.Message):
        __slots__ = ("tier", "slot", "generation")
        TIER_FIELD_NUMBER: _ClassVar[int]
        SLOT_FIELD_NUMBER: _ClassVar[int]
        GENERATION_FIELD_NUMBER: _ClassVar[int]
        tier: int
        slot: int
        generation: int
        def __init__(self, tier: _Optional[int] = ..., slot: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORED_STEP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAST_USE_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    WRITE_THROUGH_COPY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    depth: int
    key: bytes
    parent_key: bytes
    tokens: bytes
    stored_step: int
    generation: int
    last_use: int
    extra: bytes
    leases: _containers.RepeatedCompositeFieldContainer[BlockRecord.Lease]
    salt: str
    adapter_id: int
    tenant_id: str
    session_id: str
    write_through_copy: BlockRecord.WriteThroughCopy
    weight_version: str
    def __init__(self, depth: _Optional[int] = ..., key: _Optional[bytes] = ..., parent_key: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., stored_step: _Optional[int] = ..., generation: _Optional[int] = ..., last_use: _Optional[int] = ..., extra: _Optional[bytes] = ..., leases: _Optional[_Iterable[_Union[BlockRecord.Lease, _Mapping]]] = ..., salt: _Optional[str] = ..., adapter_id: _Optional[int] = ..., tenant_id: _Optional[str] = ..., session_id: _Optional[str] = ..., write_through_copy: _Optional[_Union[BlockRecord.WriteThroughCopy, _Mapping]] = ..., weight_version: _Optional[str] = ...) -> None: ...

class StoredBlock(_message.Message):
    __slots__ = ("field", "record")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    field: bytes
    record: bytes
    def __init__(self, field: _Optional[bytes] = ..., record: _Optional[bytes] = ...) -> None: ...

class StoredPin(_message.Message):
    __slots__ = ("name", "owner", "remaining", "groups", "keys")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    remaining: float
    groups: _containers.RepeatedScalarFieldContainer[int]
    keys: bytes
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., remaining: _Optional[float] = ..., groups: _Optional[_Iterable[int]] = ..., keys: _Optional[bytes] = ...) -> None: ...

class StoredOperators(_message.Message):
    __slots__ = ("rules", "quotas", "shares")
    RULES_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    rules: _containers.RepeatedCompositeFieldContainer[RetentionRule]
    quotas: _containers.RepeatedCompositeFieldContainer[Quota]
    shares: _containers.RepeatedCompositeFieldContainer[PoolShare]
    def __init__(self, rules: _Optional[_Iterable[_Union[RetentionRule, _Mapping]]] = ..., quotas: _Optional[_Iterable[_Union[Quota, _Mapping]]] = ..., shares: _Optional[_Iterable[_Union[PoolShare, _Mapping]]] = ...) -> None: ...

class PoolShare(_message.Message):
    __slots__ = ("pool_id", "total_blocks", "num_blocks", "share_number")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    total_blocks: int
    num_blocks: int
    share_number: int
    def __init__(self, pool_id: _Optional[str] = ..., total_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., share_number: _Optional[int] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("after_event_number", "pool_id", "salt", "include_token_ids", "keys_only", "manager_epoch")
    AFTER_EVENT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_ONLY_FIELD_NUMBER: _ClassVar[int]
    MANAGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    after_event_number: int
    pool_id: str
    salt: str
    include_token_ids: bool
    keys_only: bool
    manager_epoch: int
    def __init__(self, after_event_number: _Optional[int] = ..., pool_id: _Optional[str] = ..., salt: _Optional[str] = ..., include_token_ids: _Optional[bool] = ..., keys_only: _Optional[bool] = ..., manager_epoch: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("holder", "retention_priority", "remaining_duration", "started")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REMAINING_DURATION_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    holder: str
    retention_priority: int
    remaining_duration: _duration_pb2.Duration
    started: bool
    def __init__(self, holder: _Optional[str] = ..., retention_priority: _Optional[int] = ..., remaining_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., started: _Optional[bool] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("events", "manager_epoch", "changes", "last_event_number", "snapshot", "snapshot_end")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    MANAGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    LAST_EVENT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    manager_epoch: int
    changes: _containers.RepeatedCompositeFieldContainer[CacheChange]
    last_event_number: int
    snapshot: bool
    snapshot_end: bool
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., manager_epoch: _Optional[int] = ..., changes: _Optional[_Iterable[_Union[CacheChange, _Mapping]]] = ..., last_event_number: _Optional[int] = ..., snapshot: _Optional[bool] = ..., snapshot_end: _Optional[bool] = ...) -> None: ...

class CacheChange(_message.Message):
    __slots__ = ("registered", "lost", "blocks")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    registered: Executor
    lost: Executor
    blocks: BlockKeys
    def __init__(self, registered: _Optional[_Union[Executor, _Mapping]] = ..., lost: _Optional[_Union[Executor, _Mapping]] = ..., blocks: _Optional[_Union[BlockKeys, _Mapping]] = ...) -> None: ...

class Executor(_message.Message):
    __slots__ = ("executor_id", "executor_epoch", "model", "model_fingerprint", "block_size", "pools", "weight_version")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    executor_epoch: int
    model: str
    model_fingerprint: bytes
    block_size: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolSpec]
    weight_version: str
    def __init__(self, executor_id: _Optional[str] = ..., executor_epoch: _Optional[int] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[bytes] = ..., block_size: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolSpec, _Mapping]]] = ..., weight_version: _Optional[str] = ...) -> None: ...

class BlockKeys(_message.Message):
    __slots__ = ("pool_id", "kind", "tier", "keys")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    kind: EventKind
    tier: Tier
    keys: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pool_id: _Optional[str] = ..., kind: _Optional[_Union[EventKind, str]] = ..., tier: _Optional[_Union[Tier, str]] = ..., keys: _Optional[_Iterable[int]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("event_number", "snapshot", "kind", "block", "removal_cause", "lease", "for_sequence_id", "executor")
    EVENT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    REMOVAL_CAUSE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FOR_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    event_number: int
    snapshot: bool
    kind: EventKind
    block: Block
    removal_cause: RemovalCause
    lease: Lease
    for_sequence_id: str
    executor: Executor
    def __init__(self, event_number: _Optional[int] = ..., snapshot: _Optional[bool] = ..., kind: _Optional[_Union[EventKind, str]] = ..., block: _Optional[_Union[Block, _Mapping]] = ..., removal_cause: _Optional[_Union[RemovalCause, str]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., for_sequence_id: _Optional[str] = ..., executor: _Optional[_Union[Executor, _Mapping]] = ...) -> None: ...
