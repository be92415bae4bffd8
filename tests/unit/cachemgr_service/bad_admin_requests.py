"""Operators and watchers: per method a good request, and changes that make it a bad request."""

from typing import Any

from tests.support.cachemgr_client import NUM_BLOCKS
from tests.unit.cachemgr_service.bad_data_requests import ADMISSION, ADMISSIONS, TOO_MANY
from tests.unit.cachemgr_service.bad_requests import (
    ACCOUNTS,
    CACHED_TOKENS,
    DURATIONS,
    FILTERS,
    HOST_BLOCKS,
    HUGE,
    IN_POOL,
    INVALID,
    LONG,
    POOL_ID,
    PREFIX,
    PREFIXES,
    RULE,
    RULES,
    Case,
    Known,
    at,
    invalid,
    pages,
    unknown_pool,
)

FILTERS_IN_POOL: list[Case] = [
    *at("filter", {}, FILTERS),
    ({"filter": {"pool_id": "x/0"}}, INVALID, "filter.pool_id"),
]


def mask(*paths: str) -> dict[str, Any]:
    return {"update_mask": {"paths": list(paths)}}


ADMIN_METHODS: dict[str, tuple[dict[str, Any], list[Case]]] = {
    "CheckPool": ({"pool_id": POOL_ID}, unknown_pool()),
    "ListPools": ({}, pages("pools")),
    "GetPool": ({"pool_id": POOL_ID}, IN_POOL),
    "UpdatePool": (
        {"pool": {"pool_id": POOL_ID, "total_blocks": 30, "etag": "0"}} | mask("total_blocks"),
        [
            (mask(), INVALID, "update_mask"),
            ({"update_mask": None}, INVALID, "update_mask"),
            ({"pool": {"total_blocks": 30}}, INVALID, "pool.pool_id"),
            ({"pool": {"pool_id": "nobody/0", "total_blocks": 30}}, "UNKNOWN_POOL", "pool.pool_id"),
            ({"pool": {"pool_id": POOL_ID}}, INVALID, "pool.total_blocks"),
            ({"pool": {"pool_id": POOL_ID, "total_blocks": NUM_BLOCKS + 1}}, INVALID, "pool.total_blocks"),
            ({"pool": {"pool_id": POOL_ID, "total_blocks": HUGE}}, INVALID, "pool.total_blocks"),
            ({"pool": {"pool_id": POOL_ID, "total_blocks": 1}}, "POOL_IN_USE", "pool.total_blocks"),
            ({"pool": {"pool_id": POOL_ID, "total_blocks": 30, "etag": "7"}}, "STALE_POOL", "pool.etag"),
            (mask("total_blocks", "spec"), INVALID, "update_mask.paths[1]"),
            (mask("*"), INVALID, "update_mask.paths[0]"),
        ],
    ),
    "GetStats": (
        {"pool_id": POOL_ID, "window": {"seconds": 3600}},
        [
            *IN_POOL,
            *invalid("window", {"seconds": 0}, {"seconds": -1}, {"seconds": 3600, "nanos": 1}, {"seconds": 3601}),
        ],
    ),
    "GetGhostCaches": (
        {"executor_id": POOL_ID.partition("/")[0]},
        [
            *invalid("executor_id", ""),
            ({"executor_id": "nobody"}, "UNKNOWN_EXECUTOR", "executor_id"),
            *invalid("window", {"seconds": 0}, {"seconds": -1}, {"seconds": 3600, "nanos": 1}, {"seconds": 3601}),
        ],
    ),
    "ListBlocks": (
        {"pool_id": POOL_ID},
        [
            *IN_POOL,
            *pages("blocks"),
            *at("filter", {}, FILTERS),
            ({"filter": {"pool_id": "x/0"}}, INVALID, "filter.pool_id"),
        ],
    ),
    "ListSequences": ({}, [*pages("sequences"), *invalid("salt", "", LONG)]),
    "ListPrefixes": (
        {"pool_id": POOL_ID},
        [
            *IN_POOL,
            *pages("prefixes"),
            *at("filter", {}, FILTERS),
            ({"filter": {"pool_id": "x/0"}}, INVALID, "filter.pool_id"),
        ],
    ),
    "ListLeases": ({"pool_id": POOL_ID}, [*IN_POOL, *pages("leases")]),
    "ListHolds": ({}, pages("holds")),
    "ReleaseHold": (
        {"name": Known.HOLD_NAME},
        [({"name": name}, "UNKNOWN_HOLD", "name") for name in ("", "nothing", "pin-0")],
    ),
    "PinPrefix": (
        {"prefix": PREFIX, "owner": "o", "duration": {"seconds": 60}},
        [
            *at("prefix", PREFIX, PREFIXES),
            ({"prefix": None}, INVALID, "prefix.token_ids"),
            *invalid("owner", "", LONG),
            *invalid("duration", *DURATIONS),
        ],
    ),
    "ExplainPrefix": (
        {"prefix": PREFIX},
        [
            *at("prefix", PREFIX, PREFIXES),
            ({"prefix": None}, INVALID, "subject"),
            ({"prefix": None, "sequence_id": "nobody"}, "UNKNOWN_SEQUENCE", "sequence_id"),
            ({"prefix": None, "sequence_id": ""}, "UNKNOWN_SEQUENCE", "sequence_id"),
            ({"prefix": None, "sequence_id": "live", "group": 1}, INVALID, "group"),
            ({"prefix": {"token_ids": CACHED_TOKENS}, "group": 1}, INVALID, "group"),
            ({"group": HUGE}, INVALID, "group"),
        ],
    ),
    "PreviewAdmission": (
        {"admission": ADMISSION, "max_new_tokens": 5},
        [
            # A preview needs no scheduler.
            *at("admission", ADMISSION, [case for case in ADMISSIONS if case[0] != {"scheduler_id": ""}]),
            ({"admission": None}, INVALID, "admission.sequence_id"),
            ({"max_new_tokens": TOO_MANY}, "SEQUENCE_TOO_LONG", "max_new_tokens"),
            ({"max_new_tokens": HUGE}, "SEQUENCE_TOO_LONG", "max_new_tokens"),
        ],
    ),
    "PurgeBlocks": (
        {"skip_used": True},
        [
            *at("filter", {}, FILTERS),
            ({"filter": {"pool_id": "nobody/0"}}, "UNKNOWN_POOL", "filter.pool_id"),
            ({"skip_used": False}, "BLOCKS_IN_USE", ""),
        ],
    ),
    "ForgetBlocks": (
        {"salt": "s"},
        [
            ({"salt": None}, INVALID, "target"),
            *invalid("salt", "", LONG),
            ({"salt": None, "session_id": ""}, INVALID, "session_id"),
            *(({"salt": None} | changes, reason, field) for changes, reason, field in at("prefix", PREFIX, PREFIXES)),
        ],
    ),
    "CreateRetentionRule": (
        {"rule": RULE},
        [
            *at("rule", RULE, RULES),
            *((({"rule": RULE | {"name": name}}), INVALID, "rule.name") for name in ("", "x" * 65, "a b", "é", "a\n")),
            ({"rule": RULE | {"name": "rule-a"}}, "RULE_EXISTS", "rule.name"),
            ({"rule": None}, INVALID, "rule.name"),
        ],
    ),
    "GetRetentionRule": (
        {"name": "rule-a"},
        [({"name": name}, "UNKNOWN_RULE", "name") for name in ("", "nobody", LONG)],
    ),
    "ListRetentionRules": ({}, pages("rules")),
    "UpdateRetentionRule": (
        {"rule": RULE | {"name": "rule-a"}} | mask("order", "match", "action"),
        [
            (mask(), INVALID, "update_mask"),
            ({"update_mask": None}, INVALID, "update_mask"),
            *at("rule", RULE | {"name": "rule-a"}, RULES),
            ({"rule": RULE | {"name": "nobody"}}, "UNKNOWN_RULE", "rule.name"),
            ({"rule": None}, "UNKNOWN_RULE", "rule.name"),
            ({"rule": RULE | {"name": "rule-a", "etag": "99"}}, "STALE_RULE", "rule.etag"),
            *(
                (mask("order", path), INVALID, "update_mask.paths[1]")
                for path in ("", "name", "etag", "action.", "action.priority", "match.salt.x", "*", "order.x")
            ),
            (mask("action.eviction_policy.kind"), INVALID, "update_mask.paths[0]"),
            (
                mask("action.retention_priority") | {"rule": {"name": "rule-a"}},
                INVALID,
                "rule.action.retention_duration",
            ),
        ],
    ),
    "DeleteRetentionRule": (
        {"name": "rule-a"},
        [
            ({"name": "nobody"}, "UNKNOWN_RULE", "name"),
            ({"name": ""}, "UNKNOWN_RULE", "name"),
            ({"etag": "99"}, "STALE_RULE", "etag"),
        ],
    ),
    "SetQuota": (
        {"quota": {"tenant_id": "new", "device_floor_blocks": 4}},
        [
            *at("quota", {"tenant_id": "new"}, ACCOUNTS),
            ({"quota": None}, INVALID, "quota.account"),
            *(
                ({"quota": {"salt": "s", f"{tier}_floor_blocks": 4, f"{tier}_ceiling_blocks": 3}}, INVALID, field)
                for tier, field in (("device", "quota.device_ceiling_blocks"), ("host", "quota.host_ceiling_blocks"))
            ),
            *(
                (
                    {"quota": {"salt": "s", f"{tier}_floor_blocks": floor}},
                    "QUOTA_TOO_LARGE",
                    f"quota.{tier}_floor_blocks",
                )
                for tier, size in (("device", NUM_BLOCKS), ("host", HOST_BLOCKS))
                # "acme" keeps two of each.
                for floor in (size - 1, size + 1, HUGE)
            ),
        ],
    ),
    "ListQuotas": ({}, pages("quotas")),
    "DeleteQuota": (
        {"tenant_id": "acme"},
        [
            *ACCOUNTS,
            ({"tenant_id": "nobody"}, "UNKNOWN_QUOTA", "tenant_id"),
            ({"tenant_id": None, "salt": "acme"}, "UNKNOWN_QUOTA", "salt"),
        ],
    ),
    "WatchEvents": (
        {"pool_id": POOL_ID},
        [
            *invalid("salt", "", LONG),
            *unknown_pool(),
            ({"after_event_number": 1 << 40}, "EVENTS_GONE", "after_event_number"),
            ({"after_event_number": (1 << 64) - 1}, "EVENTS_GONE", "after_event_number"),
            ({"after_event_number": 1, "manager_epoch": 1}, "EVENTS_GONE", "manager_epoch"),
            ({"keys_only": True, "include_token_ids": True}, INVALID, "include_token_ids"),
        ],
    ),
}
