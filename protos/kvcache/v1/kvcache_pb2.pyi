import datetime

from google.protobuf import duration_pb2 as _duration_pb2
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

class RemovalCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REMOVAL_CAUSE_UNSPECIFIED: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_EVICTED: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_PURGED: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_EXECUTOR_LOST: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_COVERED: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_TRUNCATED: _ClassVar[RemovalCause]
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_DISK: Tier
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_CREATED: EventKind
EVENT_KIND_STORED: EventKind
EVENT_KIND_REMOVED: EventKind
EVENT_KIND_UPDATED: EventKind
EVENT_KIND_LEASE_GRANTED: EventKind
EVENT_KIND_LEASE_EXPIRED: EventKind
EVENT_KIND_LEASE_BROKEN: EventKind
REMOVAL_CAUSE_UNSPECIFIED: RemovalCause
REMOVAL_CAUSE_EVICTED: RemovalCause
REMOVAL_CAUSE_PURGED: RemovalCause
REMOVAL_CAUSE_EXECUTOR_LOST: RemovalCause
REMOVAL_CAUSE_COVERED: RemovalCause
REMOVAL_CAUSE_TRUNCATED: RemovalCause

class PoolSpec(_message.Message):
    __slots__ = ("group", "num_blocks", "attention_window", "num_layers", "num_kv_heads", "head_dim", "dtype", "block_bytes", "last_write_steps")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_WINDOW_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_WRITE_STEPS_FIELD_NUMBER: _ClassVar[int]
    group: int
    num_blocks: int
    attention_window: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_bytes: int
    last_write_steps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., num_blocks: _Optional[int] = ..., attention_window: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., block_bytes: _Optional[int] = ..., last_write_steps: _Optional[_Iterable[int]] = ...) -> None: ...

class RegisterExecutorRequest(_message.Message):
    __slots__ = ("executor_id", "executor_epoch", "model", "model_fingerprint", "block_size", "pools")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    executor_epoch: int
    model: str
    model_fingerprint: bytes
    block_size: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolSpec]
    def __init__(self, executor_id: _Optional[str] = ..., executor_epoch: _Optional[int] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[bytes] = ..., block_size: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolSpec, _Mapping]]] = ...) -> None: ...

class RegisterExecutorResponse(_message.Message):
    __slots__ = ("manager_epoch", "lease_duration", "restored_blocks")
    MANAGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    RESTORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    manager_epoch: int
    lease_duration: _duration_pb2.Duration
    restored_blocks: int
    def __init__(self, manager_epoch: _Optional[int] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., restored_blocks: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("manager_epoch", "lease_duration")
    MANAGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    manager_epoch: int
    lease_duration: _duration_pb2.Duration
    def __init__(self, manager_epoch: _Optional[int] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

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

class RetentionRange(_message.Message):
    __slots__ = ("start", "end", "retention_priority", "retention_duration")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RETENTION_DURATION_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    retention_priority: int
    retention_duration: _duration_pb2.Duration
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., retention_priority: _Optional[int] = ..., retention_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RetentionConfig(_message.Message):
    __slots__ = ("ranges", "decode_retention_priority", "decode_retention_duration")
    RANGES_FIELD_NUMBER: _ClassVar[int]
    DECODE_RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DECODE_RETENTION_DURATION_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[RetentionRange]
    decode_retention_priority: int
    decode_retention_duration: _duration_pb2.Duration
    def __init__(self, ranges: _Optional[_Iterable[_Union[RetentionRange, _Mapping]]] = ..., decode_retention_priority: _Optional[int] = ..., decode_retention_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AdmitSequenceRequest(_message.Message):
    __slots__ = ("sequence_id", "scheduler_id", "scheduler_epoch", "executor_id", "token_ids", "salt", "adapter_id", "retention", "no_read", "no_store", "session_id", "request_id", "num_prompt_tokens")
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
    def __init__(self, sequence_id: _Optional[str] = ..., scheduler_id: _Optional[str] = ..., scheduler_epoch: _Optional[int] = ..., executor_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., salt: _Optional[str] = ..., adapter_id: _Optional[int] = ..., retention: _Optional[_Union[RetentionConfig, _Mapping]] = ..., no_read: _Optional[bool] = ..., no_store: _Optional[bool] = ..., session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("manager_epoch", "admitted", "blocks_short", "sequence_handle", "cached_tokens", "wait_for_handle", "capacity_tokens", "block_tables", "transfers")
    MANAGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SHORT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FOR_HANDLE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    manager_epoch: int
    admitted: bool
    blocks_short: int
    sequence_handle: int
    cached_tokens: int
    wait_for_handle: int
    capacity_tokens: int
    block_tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    transfers: _containers.RepeatedCompositeFieldContainer[Transfer]
    def __init__(self, manager_epoch: _Optional[int] = ..., admitted: _Optional[bool] = ..., blocks_short: _Optional[int] = ..., sequence_handle: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., wait_for_handle: _Optional[int] = ..., capacity_tokens: _Optional[int] = ..., block_tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., transfers: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ...) -> None: ...

class SyncSequencesRequest(_message.Message):
    __slots__ = ("scheduler_id", "scheduler_epoch", "manager_epoch", "sync_number", "step", "handles", "computed_tokens", "new_token_counts", "new_token_ids", "released_handles", "trimmed_handles", "trimmed_capacity_tokens", "cancelled_tickets")
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
    def __init__(self, scheduler_id: _Optional[str] = ..., scheduler_epoch: _Optional[int] = ..., manager_epoch: _Optional[int] = ..., sync_number: _Optional[int] = ..., step: _Optional[int] = ..., handles: _Optional[_Iterable[int]] = ..., computed_tokens: _Optional[_Iterable[int]] = ..., new_token_counts: _Optional[_Iterable[int]] = ..., new_token_ids: _Optional[_Iterable[int]] = ..., released_handles: _Optional[_Iterable[int]] = ..., trimmed_handles: _Optional[_Iterable[int]] = ..., trimmed_capacity_tokens: _Optional[_Iterable[int]] = ..., cancelled_tickets: _Optional[_Iterable[int]] = ...) -> None: ...

class SyncSequencesResponse(_message.Message):
    __slots__ = ("manager_epoch", "extended_handles", "extended_groups", "extended_counts", "extended_slots", "void_handles", "unknown_handles", "blocks_short", "free_blocks", "lease_duration")
    MANAGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXTENDED_HANDLES_FIELD_NUMBER: _ClassVar[int]
    EXTENDED_GROUPS_FIELD_NUMBER: _ClassVar[int]
    EXTENDED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    EXTENDED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    VOID_HANDLES_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_HANDLES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SHORT_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    manager_epoch: int
    extended_handles: _containers.RepeatedScalarFieldContainer[int]
    extended_groups: _containers.RepeatedScalarFieldContainer[int]
    extended_counts: _containers.RepeatedScalarFieldContainer[int]
    extended_slots: _containers.RepeatedScalarFieldContainer[int]
    void_handles: _containers.RepeatedScalarFieldContainer[int]
    unknown_handles: _containers.RepeatedScalarFieldContainer[int]
    blocks_short: int
    free_blocks: int
    lease_duration: _duration_pb2.Duration
    def __init__(self, manager_epoch: _Optional[int] = ..., extended_handles: _Optional[_Iterable[int]] = ..., extended_groups: _Optional[_Iterable[int]] = ..., extended_counts: _Optional[_Iterable[int]] = ..., extended_slots: _Optional[_Iterable[int]] = ..., void_handles: _Optional[_Iterable[int]] = ..., unknown_handles: _Optional[_Iterable[int]] = ..., blocks_short: _Optional[int] = ..., free_blocks: _Optional[int] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ExtendSequenceRequest(_message.Message):
    __slots__ = ("sequence_id", "capacity_tokens")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    capacity_tokens: int
    def __init__(self, sequence_id: _Optional[str] = ..., capacity_tokens: _Optional[int] = ...) -> None: ...

class ExtendSequenceResponse(_message.Message):
    __slots__ = ("extended", "blocks_short", "new_blocks", "capacity_tokens")
    EXTENDED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SHORT_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    extended: bool
    blocks_short: int
    new_blocks: _containers.RepeatedCompositeFieldContainer[BlockTable]
    capacity_tokens: int
    def __init__(self, extended: _Optional[bool] = ..., blocks_short: _Optional[int] = ..., new_blocks: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., capacity_tokens: _Optional[int] = ...) -> None: ...

class TruncateSequenceRequest(_message.Message):
    __slots__ = ("sequence_id", "num_tokens")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    num_tokens: int
    def __init__(self, sequence_id: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class TruncateSequenceResponse(_message.Message):
    __slots__ = ("found", "freed_blocks")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    found: bool
    freed_blocks: int
    def __init__(self, found: _Optional[bool] = ..., freed_blocks: _Optional[int] = ...) -> None: ...

class ForkSequenceRequest(_message.Message):
    __slots__ = ("parent_sequence_id", "sequence_id")
    PARENT_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    parent_sequence_id: str
    sequence_id: str
    def __init__(self, parent_sequence_id: _Optional[str] = ..., sequence_id: _Optional[str] = ...) -> None: ...

class ForkSequenceResponse(_message.Message):
    __slots__ = ("admitted", "blocks_short", "sequence_handle", "block_tables", "transfers")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SHORT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    admitted: bool
    blocks_short: int
    sequence_handle: int
    block_tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    transfers: _containers.RepeatedCompositeFieldContainer[Transfer]
    def __init__(self, admitted: _Optional[bool] = ..., blocks_short: _Optional[int] = ..., sequence_handle: _Optional[int] = ..., block_tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., transfers: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ...) -> None: ...

class HoldSequenceRequest(_message.Message):
    __slots__ = ("sequence_id", "owner", "duration")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    owner: str
    duration: _duration_pb2.Duration
    def __init__(self, sequence_id: _Optional[str] = ..., owner: _Optional[str] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class HoldSequenceResponse(_message.Message):
    __slots__ = ("held_blocks",)
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    held_blocks: int
    def __init__(self, held_blocks: _Optional[int] = ...) -> None: ...

class ReleaseSequenceRequest(_message.Message):
    __slots__ = ("sequence_id",)
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    def __init__(self, sequence_id: _Optional[str] = ...) -> None: ...

class ReleaseSequenceResponse(_message.Message):
    __slots__ = ("found", "freed_blocks")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    found: bool
    freed_blocks: int
    def __init__(self, found: _Optional[bool] = ..., freed_blocks: _Optional[int] = ...) -> None: ...

class ConfirmTransfersRequest(_message.Message):
    __slots__ = ("executor_id", "executor_epoch", "tickets", "failed_tickets")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    FAILED_TICKETS_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    executor_epoch: int
    tickets: _containers.RepeatedScalarFieldContainer[int]
    failed_tickets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, executor_id: _Optional[str] = ..., executor_epoch: _Optional[int] = ..., tickets: _Optional[_Iterable[int]] = ..., failed_tickets: _Optional[_Iterable[int]] = ...) -> None: ...

class ConfirmTransfersResponse(_message.Message):
    __slots__ = ("unknown_tickets",)
    UNKNOWN_TICKETS_FIELD_NUMBER: _ClassVar[int]
    unknown_tickets: int
    def __init__(self, unknown_tickets: _Optional[int] = ...) -> None: ...

class CheckPoolRequest(_message.Message):
    __slots__ = ("pool_id",)
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    def __init__(self, pool_id: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("violations", "pools")
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    violations: _containers.RepeatedCompositeFieldContainer[PoolViolation]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    def __init__(self, violations: _Optional[_Iterable[_Union[PoolViolation, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("pool_id", "spec", "block_size", "total_blocks", "free_blocks", "used_blocks", "cached_blocks", "evicted_blocks", "queried_tokens", "hit_tokens")
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
    def __init__(self, pool_id: _Optional[str] = ..., spec: _Optional[_Union[PoolSpec, _Mapping]] = ..., block_size: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., queried_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

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

class Block(_message.Message):
    __slots__ = ("pool_id", "slot", "tier", "key", "parent_key", "num_tokens", "references", "retention_priority", "depth")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    slot: int
    tier: Tier
    key: bytes
    parent_key: bytes
    num_tokens: int
    references: int
    retention_priority: int
    depth: int
    def __init__(self, pool_id: _Optional[str] = ..., slot: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., key: _Optional[bytes] = ..., parent_key: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., references: _Optional[int] = ..., retention_priority: _Optional[int] = ..., depth: _Optional[int] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("pool_id", "page_size", "page_token")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    page_size: int
    page_token: str
    def __init__(self, pool_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListBlocksResponse(_message.Message):
    __slots__ = ("blocks", "next_page_token")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    next_page_token: str
    def __init__(self, blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("sequence_id", "sequence_handle", "scheduler_id", "executor_id", "num_tokens", "computed_tokens", "cached_tokens", "capacity_tokens", "num_blocks")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    sequence_handle: int
    scheduler_id: str
    executor_id: str
    num_tokens: int
    computed_tokens: int
    cached_tokens: int
    capacity_tokens: int
    num_blocks: int
    def __init__(self, sequence_id: _Optional[str] = ..., sequence_handle: _Optional[int] = ..., scheduler_id: _Optional[str] = ..., executor_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., capacity_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class ListSequencesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSequencesResponse(_message.Message):
    __slots__ = ("sequences", "next_page_token")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[Sequence]
    next_page_token: str
    def __init__(self, sequences: _Optional[_Iterable[_Union[Sequence, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class BlockFilter(_message.Message):
    __slots__ = ("pool_id", "salt", "max_retention_priority")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    MAX_RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    salt: str
    max_retention_priority: int
    def __init__(self, pool_id: _Optional[str] = ..., salt: _Optional[str] = ..., max_retention_priority: _Optional[int] = ...) -> None: ...

class PurgeBlocksRequest(_message.Message):
    __slots__ = ("filter", "validate_only")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    filter: BlockFilter
    validate_only: bool
    def __init__(self, filter: _Optional[_Union[BlockFilter, _Mapping]] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class PurgeBlocksResponse(_message.Message):
    __slots__ = ("purged_blocks", "used_blocks")
    PURGED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    purged_blocks: int
    used_blocks: int
    def __init__(self, purged_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("after_event_number",)
    AFTER_EVENT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    after_event_number: int
    def __init__(self, after_event_number: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("holder", "retention_priority", "remaining_duration")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REMAINING_DURATION_FIELD_NUMBER: _ClassVar[int]
    holder: str
    retention_priority: int
    remaining_duration: _duration_pb2.Duration
    def __init__(self, holder: _Optional[str] = ..., retention_priority: _Optional[int] = ..., remaining_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("event_number", "snapshot", "kind", "block", "removal_cause", "lease")
    EVENT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    REMOVAL_CAUSE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    event_number: int
    snapshot: bool
    kind: EventKind
    block: Block
    removal_cause: RemovalCause
    lease: Lease
    def __init__(self, event_number: _Optional[int] = ..., snapshot: _Optional[bool] = ..., kind: _Optional[_Union[EventKind, str]] = ..., block: _Optional[_Union[Block, _Mapping]] = ..., removal_cause: _Optional[_Union[RemovalCause, str]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ...) -> None: ...
