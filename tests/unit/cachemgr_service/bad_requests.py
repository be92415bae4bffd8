"""Requests that every method must refuse: the change to a good request, the reason, and the named field."""

import base64
import enum
from typing import Any

import grpc

from tests.support.cachemgr_client import EXECUTOR

POOL_ID = f"{EXECUTOR}/0"
BLOCK_BYTES = 512
HOST_BLOCKS = 8
CACHED_TOKENS = list(range(100, 112))
LONG = "é" * 129
HUGE = (1 << 32) - 1
MAX_DURATION = 315_576_000_000

INVALID = "INVALID_FIELD"
STATUSES = {
    INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    "SEQUENCE_TOO_LONG": grpc.StatusCode.INVALID_ARGUMENT,
    "UNKNOWN_EXECUTOR": grpc.StatusCode.NOT_FOUND,
    "UNKNOWN_HOLD": grpc.StatusCode.NOT_FOUND,
    "UNKNOWN_POOL": grpc.StatusCode.NOT_FOUND,
    "UNKNOWN_QUOTA": grpc.StatusCode.NOT_FOUND,
    "UNKNOWN_RULE": grpc.StatusCode.NOT_FOUND,
    "UNKNOWN_SEQUENCE": grpc.StatusCode.NOT_FOUND,
    "RULE_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
    "SEQUENCE_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
    "STALE_POOL": grpc.StatusCode.ABORTED,
    "STALE_RULE": grpc.StatusCode.ABORTED,
    "EVENTS_GONE": grpc.StatusCode.OUT_OF_RANGE,
    "BLOCKS_IN_USE": grpc.StatusCode.FAILED_PRECONDITION,
    "EXECUTOR_NOT_REGISTERED": grpc.StatusCode.FAILED_PRECONDITION,
    "EXECUTOR_POOLS_CHANGED": grpc.StatusCode.FAILED_PRECONDITION,
    "MANAGER_RESTARTED": grpc.StatusCode.FAILED_PRECONDITION,
    "POOL_IN_USE": grpc.StatusCode.FAILED_PRECONDITION,
    "QUOTA_TOO_LARGE": grpc.StatusCode.FAILED_PRECONDITION,
    "STALE_EXECUTOR": grpc.StatusCode.FAILED_PRECONDITION,
    "STALE_SCHEDULER": grpc.StatusCode.FAILED_PRECONDITION,
    "SHARED_BLOCK": grpc.StatusCode.FAILED_PRECONDITION,
    "SYNC_NUMBER": grpc.StatusCode.FAILED_PRECONDITION,
    "RULE_POLICY": grpc.StatusCode.FAILED_PRECONDITION,
    "SEQUENCE_EVICTS": grpc.StatusCode.FAILED_PRECONDITION,
    "UNKNOWN_SCHEDULER": grpc.StatusCode.FAILED_PRECONDITION,
    "VOID_SEQUENCE": grpc.StatusCode.FAILED_PRECONDITION,
}

# Changes of a good request's fields, the reason of the refusal, and the field that it names: empty when it names none.
Case = tuple[dict[str, Any], str, str]


class Known(enum.Enum):
    """What is known only when a manager runs, and takes its value there."""

    MANAGER_EPOCH = enum.auto()
    LIVE_HANDLE = enum.auto()
    HOLD_NAME = enum.auto()


def at(path: str, good: dict[str, Any], cases: list[Case]) -> list[Case]:
    """Cases of a message as cases of one that has it in a field, with the paths that names them there."""
    return [({path: good | changes}, reason, f"{path}.{field}") for changes, reason, field in cases]


def invalid(field: str, *values: object) -> list[Case]:
    """Values that one field can never have."""
    return [({field: value}, INVALID, field) for value in values]


def span(start: int, length: int, digest: bytes = b"d") -> dict[str, object]:
    return {"start": start, "length": length, "digest": digest}


EXTRA_KEYS: list[Case] = [
    ({"extra_keys": [span(0, 0)]}, INVALID, "extra_keys[0].length"),
    ({"extra_keys": [span(8, HUGE)]}, INVALID, "extra_keys[0].length"),
    ({"extra_keys": [span(HUGE, 1)]}, INVALID, "extra_keys[0].length"),
    ({"extra_keys": [span(0, 4), span(3, 1)]}, INVALID, "extra_keys[1].start"),
    ({"extra_keys": [span(4, 1), span(0, 1)]}, INVALID, "extra_keys[1].start"),
    ({"extra_keys": [span(0, 1, b"")]}, INVALID, "extra_keys[0].digest"),
    ({"extra_keys": [span(0, 1, b"d" * 65)]}, INVALID, "extra_keys[0].digest"),
    ({"extra_keys": [span(0, 1)] * 4097}, INVALID, "extra_keys"),
]

DURATIONS = ({"seconds": 0}, {"seconds": -1}, {"nanos": -1}, {"seconds": MAX_DURATION, "nanos": 1_000_000}, None)


def kept(**fields: object) -> dict[str, object]:
    return {"start": 0, "end": 4, "retention_priority": 1, **fields}


def ranges(*requested: dict[str, object]) -> dict[str, object]:
    return {"retention": {"ranges": list(requested)}}


RETENTION: list[Case] = [
    (ranges(kept(retention_priority=101)), INVALID, "retention.ranges[0].retention_priority"),
    (ranges(kept(start=4)), INVALID, "retention.ranges[0].end"),
    (ranges(*(kept(start=at, end=at + 1) for at in range(65))), INVALID, "retention.ranges"),
    (ranges(kept(start=2), kept(start=0, end=3)), INVALID, "retention.ranges[0].start"),
    (ranges(kept(), kept(start=3, end=8)), INVALID, "retention.ranges[1].start"),
    (ranges({"retention_priority": 1}, kept(start=5, end=6)), INVALID, "retention.ranges[0].end"),
    *(
        (ranges(kept(retention_duration=time)), INVALID, "retention.ranges[0].retention_duration")
        for time in DURATIONS
        if time is not None
    ),
    ({"retention": {"decode_retention_priority": 101}}, INVALID, "retention.decode_retention_priority"),
    ({"retention": {"decode_retention_duration": {"seconds": 1}}}, INVALID, "retention.decode_retention_duration"),
    (
        {"retention": {"decode_retention_priority": 1, "decode_retention_duration": {"seconds": 0}}},
        INVALID,
        "retention.decode_retention_duration",
    ),
]


def action(**fields: object) -> dict[str, object]:
    return {"action_id": "1", "action_type": "Retain", "action_version": "0.1", "payload": {"priority": 1}, **fields}


def envelope(*actions: dict[str, object], version: str = "0.1") -> dict[str, object]:
    return {"protocol_version": version, "message_id": "m", "actions": list(actions)}


HINTS: list[Case] = [
    ({"hints": envelope(action(), version="0.2")}, INVALID, "hints.protocol_version"),
    ({"hints": envelope(action(), version="")}, INVALID, "hints.protocol_version"),
    ({"hints": envelope()}, INVALID, "hints.actions"),
    ({"hints": envelope(*[action()] * 65)}, INVALID, "hints.actions"),
    ({"hints": envelope(action(), action(action_id=""))}, INVALID, "hints.actions[1].action_id"),
    ({"hints": envelope(action(action_id=LONG))}, INVALID, "hints.actions[0].action_id"),
    ({"hints": envelope(action(payload={"priority": float("nan")}))}, INVALID, "hints.actions[0].payload"),
    ({"hints": envelope(action(payload={"a": [float("inf")]}))}, INVALID, "hints.actions[0].payload"),
]

PREFIX = {"executor_id": EXECUTOR, "token_ids": CACHED_TOKENS}
PREFIXES: list[Case] = [
    ({"token_ids": []}, INVALID, "token_ids"),
    *invalid("salt", "", LONG),
    ({"executor_id": "nobody"}, "UNKNOWN_EXECUTOR", "executor_id"),
    *EXTRA_KEYS,
]

FILTERS: list[Case] = [
    *invalid("salt", "", LONG),
    *invalid("session_id", ""),
    *invalid("tenant_id", ""),
    *invalid("max_retention_priority", 101, HUGE),
    *invalid("tier", 4, -1),
    *at("prefix", PREFIX, PREFIXES),
]


def token(listing: str, cursor: object) -> str:
    return base64.urlsafe_b64encode(f"{listing}:{cursor}".encode()).decode()


def pages(listing: str) -> list[Case]:
    """The cases that every listing refuses, among them a token of a different listing."""
    other = "blocks" if listing != "blocks" else "leases"
    bad = ["x", "é", token(other, 1), token(listing, ""), base64.urlsafe_b64encode(b"\xff\xfe").decode()]
    if listing != "pools":
        bad += [token(listing, cursor) for cursor in ("a", -1, "²", 1 << 63, "9" * 5000)]
    return [*invalid("page_size", -1, -(1 << 31)), *invalid("page_token", *bad)]


def unknown_pool(field: str = "pool_id") -> list[Case]:
    return [({field: name}, "UNKNOWN_POOL", field) for name in ("nobody/0", f"{EXECUTOR}/1", EXECUTOR)]


IN_POOL: list[Case] = [({"pool_id": ""}, INVALID, "pool_id"), *unknown_pool()]


def policy(kind: str, **fields: object) -> dict[str, object]:
    return {"eviction_policy": {"kind": f"EVICTION_KIND_{kind}", **fields}}


POLICIES: list[Case] = [
    (change, INVALID, f"eviction_policy.{field}")
    for change, field in (
        ({"eviction_policy": {}}, "kind"),
        ({"eviction_policy": {"kind": 99}}, "kind"),
        ({"eviction_policy": {"kind": -1}}, "kind"),
        (policy("LAST", start_tokens=1), "kind"),
        (policy("SUM", start_tokens=0), "start_tokens"),
        (policy("KEYDIFF", start_tokens=HUGE), "start_tokens"),
        (policy("SLIDING_WINDOW", recent_tokens=0), "recent_tokens"),
        (policy("SLIDING_WINDOW", max_cache_tokens=3), "max_cache_tokens"),
        (policy("H2O", period_tokens=0), "period_tokens"),
        (policy("NORM_SUM", period_tokens=4), "period_tokens"),
        (policy("SNAPKV", during_prefill=True), "during_prefill"),
        (policy("KNORM", positions=3), "positions"),
        (policy("SNAPKV", score_window_tokens=0), "score_window_tokens"),
        (policy("TOVA", score_window_tokens=1), "score_window_tokens"),
        (policy("ADAPTIVE_WINDOW", period_tokens=0), "period_tokens"),
        (policy("ADAPTIVE_WINDOW", period_tokens=16, recent_tokens=24), "recent_tokens"),
        (policy("ADAPTIVE_WINDOW", period_tokens=16, max_cache_tokens=150), "max_cache_tokens"),
        (policy("ADAPTIVE_WINDOW", attention_mass=2.0), "attention_mass"),
        (policy("RANDOM", attention_mass=0.5), "attention_mass"),
        (policy("SUM", kvcrush={}), "kvcrush.budget_blocks"),
        (policy("SUM", kvcrush={"budget_blocks": 1, "anchor": 6}), "kvcrush.anchor"),
        (policy("ADAPTIVE_RKV", kvcrush={"budget_blocks": 1}), "kvcrush"),
        (policy("ADAPTIVE_RKV", adaptive_rkv={"attention_mass": 0}), "adaptive_rkv.attention_mass"),
        (policy("ADAPTIVE_RKV", adaptive_rkv={"window_steps": 0}), "adaptive_rkv.window_steps"),
        (policy("RANDOM", adaptive_rkv={}), "adaptive_rkv"),
    )
]

MATCH = {"tenant_id": "acme"}
RULE = {"name": "rule-b", "match": MATCH, "action": {"retention_priority": 60}}
RULES: list[Case] = [
    *(({"match": {"salt": salt}}, INVALID, "match.salt") for salt in ("", LONG)),
    ({"match": {"tenant_id": ""}}, INVALID, "match.tenant_id"),
    ({"match": {"tenant_id": LONG}}, INVALID, "match.tenant_id"),
    ({"match": {"start": 4, "end": 4}}, INVALID, "match.end"),
    ({"match": {"end": 0}}, INVALID, "match.end"),
    ({"action": {}}, INVALID, "action"),
    ({"action": {"retention_priority": 101}}, INVALID, "action.retention_priority"),
    ({"action": {"offload_min_priority": 101}}, INVALID, "action.offload_min_priority"),
    ({"action": {"retention_duration": {"seconds": 1}}}, INVALID, "action.retention_duration"),
    *at("action", {}, POLICIES),
    *(
        ({"action": {"retention_priority": 1, field: time}}, INVALID, f"action.{field}")
        for field in ("retention_duration", "pin_duration")
        for time in DURATIONS
        if time is not None
    ),
]

ACCOUNTS: list[Case] = [
    ({"tenant_id": None}, INVALID, "account"),
    ({"tenant_id": ""}, INVALID, "tenant_id"),
    ({"tenant_id": LONG}, INVALID, "tenant_id"),
    *(({"tenant_id": None, "salt": salt}, INVALID, "salt") for salt in ("", LONG)),
]
