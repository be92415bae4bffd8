"""Cache fields beyond OpenAI's requests. The validator of gRPC requests checks most of their values later."""

import json
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.durations import MAX_SECONDS
from scheduler.frontend import validation

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)([smhd]?)")


def _seconds(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value)
    if match is None:
        raise ValueError('must be a number of seconds, or a text such as "90s", "5m", "1h" or "1d"')
    return float(match[1]) * _UNITS[match[2]]


def bounds(low: float, high: float) -> dict[str, JsonValue]:
    """Returns bounds for the JSON schema only: the common validator checks the value."""
    return {"minimum": low, "maximum": high}


class EnumName:
    """Accepts names of a protobuf enum's values without their prefix; validation returns the whole name."""

    def __init__(self, kinds: Any, prefix: str) -> None:
        self._names = {name.removeprefix(prefix).lower(): name for name, number in kinds.items() if number}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "enum": list(self._names)}

    def _check(self, value: str) -> str:
        if value not in self._names:
            raise ValueError(f"must be one of {', '.join(self._names)}")
        return str(self._names[value])


def is_encodable(value: str) -> bool:
    """Returns whether a text can be encoded as UTF-8: JSON may have unpaired surrogates, protobuf may not."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def encodable(value: str) -> str:
    """Returns the text. Raises ValueError if it cannot be encoded as UTF-8, as protobuf requires."""
    if not is_encodable(value):
        raise ValueError("must not have an unpaired surrogate")
    return value


# Types with the ranges of protobuf's types.
Text = Annotated[str, AfterValidator(encodable)]
Uint32 = Annotated[int, Field(ge=0, lt=1 << 32)]
Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
Uint64 = Annotated[int, Field(ge=0, lt=1 << 64)]
Priority = Annotated[Uint32, Field(json_schema_extra=bounds(0, validation.MAX_PRIORITY))]
_LEAST_SECONDS = 0.001
_SECONDS_SCHEMA: list[dict[str, Any]] = [
    {"type": "number", "minimum": _LEAST_SECONDS, "maximum": MAX_SECONDS},
    {"type": "string", "pattern": "^[1-9][0-9]{0,5}[smhd]$"},
]
Seconds = Annotated[
    float,
    BeforeValidator(_seconds),
    Field(ge=_LEAST_SECONDS, le=MAX_SECONDS),
    WithJsonSchema({"anyOf": _SECONDS_SCHEMA}),
]
# OpenAI's prompt_cache_retention: a duration; in_memory and null ask for no retention.
_IN_MEMORY = ("in_memory", "in-memory")
RetentionSeconds = Annotated[
    Seconds | None,
    BeforeValidator(lambda value: None if value in _IN_MEMORY else value),
    WithJsonSchema({"anyOf": [{"enum": [*_IN_MEMORY, None]}, *_SECONDS_SCHEMA]}),
]


# Stops at the first error: a caller is told only one error.
T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
# More fields than any object has. An object with more fields is refused before its fields are read.
_MAX_FIELDS = 256


class LimitedModel(BaseModel):
    """An object of a request."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > _MAX_FIELDS:
            raise ValueError(f"has more than {_MAX_FIELDS} fields")
        for index, name in enumerate(value if isinstance(value, dict) else ()):
            if not is_encodable(name):
                raise ValueError(f"must not have an unpaired surrogate in the name of its field {index}")
        return value


class StrictModel(LimitedModel):
    """An extension: an unknown field is an error."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, value: object) -> object:
        """Drops unknown fields that are null: null is the same as an absent field."""
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: one for name, one in value.items() if one is not None or name in known}


class CacheControl(StrictModel):
    """Keeps the prompt up to here in the cache for a while."""

    type: Literal["ephemeral"]
    ttl: Seconds = 300.0


class PromptCacheBreakpoint(StrictModel):
    """OpenAI's name for cache_control. Without a ttl, the ttl of prompt_cache_options counts, or else 30 minutes."""

    mode: Literal["explicit"] = "explicit"
    ttl: Seconds | None = None


class PromptCacheOptions(StrictModel):
    """OpenAI's options for how the prompt is cached."""

    mode: Literal["implicit", "explicit"] = Field(
        "implicit",
        description='With "explicit" only the prompt up to its last breakpoint is stored. Without a breakpoint, the '
        "cache is then neither read nor written.",
    )
    ttl: Seconds | None = Field(
        None, description='How long each breakpoint without a ttl is kept and, with "implicit", the whole prompt.'
    )
    prewarm: bool | None = Field(None, description="The prompt is computed and stored, and no token is generated.")
    comparison_response_id: Text | None = Field(
        None,
        description="The id of a recent response. The answer says why less of the prompt was reused than possible.",
        json_schema_extra={"minLength": 1},
    )


class Diagnostics(StrictModel):
    """Anthropic's form of comparison_response_id."""

    previous_message_id: Text | None = Field(
        None, description="A recent response to compare with; null for none.", json_schema_extra={"minLength": 1}
    )


class RetentionRange(StrictModel):
    """A retention request for the blocks whose first token lies in [start, end)."""

    start: Uint32 = 0
    end: Uint32 | None = None
    priority: Priority
    duration: Seconds | None = None


class DecodeRetention(StrictModel):
    """A retention request for the output's blocks."""

    priority: Priority
    duration: Seconds | None = None


class Retention(StrictModel):
    """Retention requests; a priority is 0..100, higher is kept longer."""

    ranges: Items[RetentionRange] = Field([], max_length=validation.MAX_RANGES)
    decode: DecodeRetention | None = None


class KvCrush(StrictModel):
    """Keeps the most diverse of the blocks that are about to be evicted."""

    budget_blocks: Uint32
    anchor: Annotated[str, EnumName(common.KvCrushAnchor, "KV_CRUSH_ANCHOR_")] | None = None


class AdaptiveRkv(StrictModel):
    """Settings of the kind "adaptive_rkv"."""

    attention_mass: float | None = None
    window_steps: Uint32 | None = None


class EvictionPolicy(StrictModel):
    """Which tokens a sequence evicts when it may not keep all of them; lengths in tokens."""

    kind: Annotated[str, EnumName(common.EvictionKind, "EVICTION_KIND_")]
    start_tokens: Uint32 | None = None
    recent_tokens: Uint32 | None = None
    max_cache_tokens: Uint32 | None = None
    period_tokens: Uint32 | None = None
    during_prefill: bool = False
    positions: Annotated[str, EnumName(common.EvictionPositions, "EVICTION_POSITIONS_")] | None = None
    score_window_tokens: Uint32 | None = None
    kvcrush: KvCrush | None = None
    adaptive_rkv: AdaptiveRkv | None = None
    attention_mass: float | None = None
    seed: Uint64 = 0


class HintAction(StrictModel):
    """One hint about the prompt's blocks: Retain, Pin, Demote, Prefetch or Share."""

    action_id: Text = Field(json_schema_extra={"minLength": 1})
    action_type: Text
    action_version: Text = "0.1"
    # Checked on conversion to protobuf: errors of pydantic would name branches of a JSON type as if they were fields.
    payload: Annotated[dict[Any, Any], WithJsonSchema({"type": "object"})] = {}


def short(value: object, most: int) -> object:
    """Returns the value, which may be any JSON. Raises ValueError for more than `most` bytes, or too deep a nesting."""
    try:
        size = len(json.dumps(value))
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    if size > most:
        raise ValueError(f"has more than {most} bytes")
    return value


class KvHints(StrictModel):
    """Hints in the envelope that agent frameworks send; the answer has an outcome for each."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: object) -> object:
        """Bounds the size before anything is parsed."""
        return short(value, validation.MAX_HINTS_BYTES)

    protocol_version: Text = Field("0.1", json_schema_extra={"const": "0.1"})
    message_id: Text = ""
    actions: Items[HintAction] = Field(json_schema_extra={"minItems": 1})
