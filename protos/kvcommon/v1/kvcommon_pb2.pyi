import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_GRANTED: _ClassVar[Outcome]
    OUTCOME_CLIPPED: _ClassVar[Outcome]
    OUTCOME_REJECTED: _ClassVar[Outcome]

class MissCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_CAUSE_UNSPECIFIED: _ClassVar[MissCause]
    MISS_CAUSE_NEVER_STORED: _ClassVar[MissCause]
    MISS_CAUSE_EVICTED: _ClassVar[MissCause]
    MISS_CAUSE_LEASE_ENDED: _ClassVar[MissCause]
    MISS_CAUSE_PURGED: _ClassVar[MissCause]
    MISS_CAUSE_LOST: _ClassVar[MissCause]
    MISS_CAUSE_BEING_COMPUTED: _ClassVar[MissCause]
    MISS_CAUSE_SLOWER_TIER: _ClassVar[MissCause]
    MISS_CAUSE_NOT_READ: _ClassVar[MissCause]

class EvictionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVICTION_KIND_UNSPECIFIED: _ClassVar[EvictionKind]
    EVICTION_KIND_NONE: _ClassVar[EvictionKind]
    EVICTION_KIND_SLIDING_WINDOW: _ClassVar[EvictionKind]
    EVICTION_KIND_SUM: _ClassVar[EvictionKind]
    EVICTION_KIND_NORM_SUM: _ClassVar[EvictionKind]
    EVICTION_KIND_ADAPTIVE_RKV: _ClassVar[EvictionKind]
    EVICTION_KIND_SNAPKV: _ClassVar[EvictionKind]
    EVICTION_KIND_H2O: _ClassVar[EvictionKind]
    EVICTION_KIND_TOVA: _ClassVar[EvictionKind]
    EVICTION_KIND_ROCO: _ClassVar[EvictionKind]
    EVICTION_KIND_AVERAGE: _ClassVar[EvictionKind]
    EVICTION_KIND_KEYDIFF: _ClassVar[EvictionKind]
    EVICTION_KIND_KNORM: _ClassVar[EvictionKind]
    EVICTION_KIND_LAST: _ClassVar[EvictionKind]
    EVICTION_KIND_RANDOM: _ClassVar[EvictionKind]
    EVICTION_KIND_ADAPTIVE_WINDOW: _ClassVar[EvictionKind]
    EVICTION_KIND_H2O_TOVA: _ClassVar[EvictionKind]

class EvictionPositions(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVICTION_POSITIONS_UNSPECIFIED: _ClassVar[EvictionPositions]
    EVICTION_POSITIONS_ABSOLUTE: _ClassVar[EvictionPositions]
    EVICTION_POSITIONS_COMPACTED: _ClassVar[EvictionPositions]

class KvCrushAnchor(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_CRUSH_ANCHOR_UNSPECIFIED: _ClassVar[KvCrushAnchor]
    KV_CRUSH_ANCHOR_RANDOM: _ClassVar[KvCrushAnchor]
    KV_CRUSH_ANCHOR_ZEROS: _ClassVar[KvCrushAnchor]
    KV_CRUSH_ANCHOR_ONES: _ClassVar[KvCrushAnchor]
    KV_CRUSH_ANCHOR_ALTERNATING: _ClassVar[KvCrushAnchor]
    KV_CRUSH_ANCHOR_MEAN: _ClassVar[KvCrushAnchor]

class HintOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HINT_OUTCOME_UNSPECIFIED: _ClassVar[HintOutcome]
    HINT_OUTCOME_ACCEPTED: _ClassVar[HintOutcome]
    HINT_OUTCOME_CLIPPED: _ClassVar[HintOutcome]
    HINT_OUTCOME_DEFERRED: _ClassVar[HintOutcome]
    HINT_OUTCOME_REJECTED: _ClassVar[HintOutcome]
    HINT_OUTCOME_MISSING: _ClassVar[HintOutcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_GRANTED: Outcome
OUTCOME_CLIPPED: Outcome
OUTCOME_REJECTED: Outcome
MISS_CAUSE_UNSPECIFIED: MissCause
MISS_CAUSE_NEVER_STORED: MissCause
MISS_CAUSE_EVICTED: MissCause
MISS_CAUSE_LEASE_ENDED: MissCause
MISS_CAUSE_PURGED: MissCause
MISS_CAUSE_LOST: MissCause
MISS_CAUSE_BEING_COMPUTED: MissCause
MISS_CAUSE_SLOWER_TIER: MissCause
MISS_CAUSE_NOT_READ: MissCause
EVICTION_KIND_UNSPECIFIED: EvictionKind
EVICTION_KIND_NONE: EvictionKind
EVICTION_KIND_SLIDING_WINDOW: EvictionKind
EVICTION_KIND_SUM: EvictionKind
EVICTION_KIND_NORM_SUM: EvictionKind
EVICTION_KIND_ADAPTIVE_RKV: EvictionKind
EVICTION_KIND_SNAPKV: EvictionKind
EVICTION_KIND_H2O: EvictionKind
EVICTION_KIND_TOVA: EvictionKind
EVICTION_KIND_ROCO: EvictionKind
EVICTION_KIND_AVERAGE: EvictionKind
EVICTION_KIND_KEYDIFF: EvictionKind
EVICTION_KIND_KNORM: EvictionKind
EVICTION_KIND_LAST: EvictionKind
EVICTION_KIND_RANDOM: EvictionKind
EVICTION_KIND_ADAPTIVE_WINDOW: EvictionKind
EVICTION_KIND_H2O_TOVA: EvictionKind
EVICTION_POSITIONS_UNSPECIFIED: EvictionPositions
EVICTION_POSITIONS_ABSOLUTE: EvictionPositions
EVICTION_POSITIONS_COMPACTED: EvictionPositions
KV_CRUSH_ANCHOR_UNSPECIFIED: KvCrushAnchor
KV_CRUSH_ANCHOR_RANDOM: KvCrushAnchor
KV_CRUSH_ANCHOR_ZEROS: KvCrushAnchor
KV_CRUSH_ANCHOR_ONES: KvCrushAnchor
KV_CRUSH_ANCHOR_ALTERNATING: KvCrushAnchor
KV_CRUSH_ANCHOR_MEAN: KvCrushAnchor
HINT_OUTCOME_UNSPECIFIED: HintOutcome
HINT_OUTCOME_ACCEPTED: HintOutcome
HINT_OUTCOME_CLIPPED: HintOutcome
HINT_OUTCOME_DEFERRED: HintOutcome
HINT_OUTCOME_REJECTED: HintOutcome
HINT_OUTCOME_MISSING: HintOutcome

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

class RetentionReceipt(_message.Message):
    __slots__ = ("request", "outcome", "reason", "retention_priority", "retention_duration", "num_blocks")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RETENTION_DURATION_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request: str
    outcome: Outcome
    reason: str
    retention_priority: int
    retention_duration: _duration_pb2.Duration
    num_blocks: int
    def __init__(self, request: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., reason: _Optional[str] = ..., retention_priority: _Optional[int] = ..., retention_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class PrefixMiss(_message.Message):
    __slots__ = ("cause", "removed_ago", "retention_priority", "for_own_request", "for_id", "tier")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    REMOVED_AGO_FIELD_NUMBER: _ClassVar[int]
    RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    FOR_OWN_REQUEST_FIELD_NUMBER: _ClassVar[int]
    FOR_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    cause: MissCause
    removed_ago: _duration_pb2.Duration
    retention_priority: int
    for_own_request: bool
    for_id: str
    tier: str
    def __init__(self, cause: _Optional[_Union[MissCause, str]] = ..., removed_ago: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., retention_priority: _Optional[int] = ..., for_own_request: _Optional[bool] = ..., for_id: _Optional[str] = ..., tier: _Optional[str] = ...) -> None: ...

class KvCrush(_message.Message):
    __slots__ = ("budget_blocks", "anchor")
    BUDGET_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    budget_blocks: int
    anchor: KvCrushAnchor
    def __init__(self, budget_blocks: _Optional[int] = ..., anchor: _Optional[_Union[KvCrushAnchor, str]] = ...) -> None: ...

class AdaptiveRkv(_message.Message):
    __slots__ = ("attention_mass", "window_steps")
    ATTENTION_MASS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_STEPS_FIELD_NUMBER: _ClassVar[int]
    attention_mass: float
    window_steps: int
    def __init__(self, attention_mass: _Optional[float] = ..., window_steps: _Optional[int] = ...) -> None: ...

class EvictionPolicy(_message.Message):
    __slots__ = ("kind", "start_tokens", "recent_tokens", "max_cache_tokens", "period_tokens", "during_prefill", "positions", "score_window_tokens", "kvcrush", "adaptive_rkv", "seed", "attention_mass")
    KIND_FIELD_NUMBER: _ClassVar[int]
    START_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PERIOD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DURING_PREFILL_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SCORE_WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KVCRUSH_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_RKV_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_MASS_FIELD_NUMBER: _ClassVar[int]
    kind: EvictionKind
    start_tokens: int
    recent_tokens: int
    max_cache_tokens: int
    period_tokens: int
    during_prefill: bool
    positions: EvictionPositions
    score_window_tokens: int
    kvcrush: KvCrush
    adaptive_rkv: AdaptiveRkv
    seed: int
    attention_mass: float
    def __init__(self, kind: _Optional[_Union[EvictionKind, str]] = ..., start_tokens: _Optional[int] = ..., recent_tokens: _Optional[int] = ..., max_cache_tokens: _Optional[int] = ..., period_tokens: _Optional[int] = ..., during_prefill: _Optional[bool] = ..., positions: _Optional[_Union[EvictionPositions, str]] = ..., score_window_tokens: _Optional[int] = ..., kvcrush: _Optional[_Union[KvCrush, _Mapping]] = ..., adaptive_rkv: _Optional[_Union[AdaptiveRkv, _Mapping]] = ..., seed: _Optional[int] = ..., attention_mass: _Optional[float] = ...) -> None: ...

class KvHints(_message.Message):
    __slots__ = ("protocol_version", "message_id", "actions")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: str
    message_id: str
    actions: _containers.RepeatedCompositeFieldContainer[HintAction]
    def __init__(self, protocol_version: _Optional[str] = ..., message_id: _Optional[str] = ..., actions: _Optional[_Iterable[_Union[HintAction, _Mapping]]] = ...) -> None: ...

class HintAction(_message.Message):
    __slots__ = ("action_id", "action_type", "action_version", "payload")
    ACTION_ID_FIELD_NUMBER: _ClassVar[int]
    ACTION_TYPE_FIELD_NUMBER: _ClassVar[int]
    ACTION_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    action_id: str
    action_type: str
    action_version: str
    payload: _struct_pb2.Struct
    def __init__(self, action_id: _Optional[str] = ..., action_type: _Optional[str] = ..., action_version: _Optional[str] = ..., payload: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class HintAnswer(_message.Message):
    __slots__ = ("action_id", "outcome", "detail", "num_blocks")
    ACTION_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    action_id: str
    outcome: HintOutcome
    detail: str
    num_blocks: int
    def __init__(self, action_id: _Optional[str] = ..., outcome: _Optional[_Union[HintOutcome, str]] = ..., detail: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "regex", "choice", "grammar", "structural_tags")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAGS_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    choice: TextChoice
    grammar: str
    structural_tags: StructuralTags
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[TextChoice, _Mapping]] = ..., grammar: _Optional[str] = ..., structural_tags: _Optional[_Union[StructuralTags, _Mapping]] = ...) -> None: ...

class TextChoice(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class StructuralTags(_message.Message):
    __slots__ = ("tags", "triggers")
    TAGS_FIELD_NUMBER: _ClassVar[int]
    TRIGGERS_FIELD_NUMBER: _ClassVar[int]
    tags: _containers.RepeatedCompositeFieldContainer[StructuralTag]
    triggers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tags: _Optional[_Iterable[_Union[StructuralTag, _Mapping]]] = ..., triggers: _Optional[_Iterable[str]] = ...) -> None: ...

class StructuralTag(_message.Message):
    __slots__ = ("begin", "json_schema", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: str
    json_schema: str
    end: str
    def __init__(self, begin: _Optional[str] = ..., json_schema: _Optional[str] = ..., end: _Optional[str] = ...) -> None: ...
