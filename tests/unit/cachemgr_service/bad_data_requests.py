"""The data plane: per method a good request, and changes that make it a bad request."""

from typing import Any

from tests.support.cachemgr_client import BLOCK_SIZE, EXECUTOR, NUM_BLOCKS, SCHEDULED, SCHEDULER
from tests.unit.cachemgr_service.bad_requests import (
    BLOCK_BYTES,
    DURATIONS,
    EXTRA_KEYS,
    HINTS,
    HOST_BLOCKS,
    HUGE,
    INVALID,
    LONG,
    POLICIES,
    PREFIX,
    PREFIXES,
    RETENTION,
    Case,
    Known,
    action,
    at,
    envelope,
    invalid,
    policy,
)

EPOCH = 7
POOL = {
    "group": 0,
    "num_blocks": NUM_BLOCKS,
    "num_layers": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "dtype": "float32",
    "block_bytes": BLOCK_BYTES,
    "share_blocks": NUM_BLOCKS,
    "host_blocks": HOST_BLOCKS,
}
REGISTRATION: dict[str, Any] = {
    "executor_id": EXECUTOR,
    "executor_epoch": EPOCH,
    "model": "tiny",
    "model_fingerprint": bytes(32),
    "block_size": BLOCK_SIZE,
    "pools": [POOL],
    "memory_bytes": NUM_BLOCKS * BLOCK_BYTES,
}
ADMISSION = {
    "sequence_id": "new",
    "scheduler_id": SCHEDULER,
    "scheduler_epoch": 1,
    "executor_id": EXECUTOR,
    "token_ids": list(range(10)),
}
SYNC = {
    "scheduler_id": SCHEDULER,
    "scheduler_epoch": 1,
    "manager_epoch": Known.MANAGER_EPOCH,
    "sync_number": 4,
    "handles": [Known.LIVE_HANDLE],
    "computed_tokens": [10],
    "new_token_counts": [1],
    "new_token_ids": [5],
}
# It is registered, and has no sequence.
ANOTHER_SCHEDULER = {"scheduler_id": "twice", "scheduler_epoch": 5}
UNKNOWN_EXECUTOR: Case = ({"executor_id": "nobody"}, "UNKNOWN_EXECUTOR", "executor_id")
SCHEDULERS: list[Case] = [
    ({"scheduler_id": "nobody"}, "UNKNOWN_SCHEDULER", "scheduler_id"),
    ({"scheduler_id": ""}, "UNKNOWN_SCHEDULER", "scheduler_id"),
    ({"scheduler_epoch": 2}, "STALE_SCHEDULER", "scheduler_epoch"),
    ({"scheduler_id": "twice", "scheduler_epoch": 4}, "STALE_SCHEDULER", "scheduler_epoch"),
]
TOO_MANY = NUM_BLOCKS * BLOCK_SIZE + 1
ADMISSIONS: list[Case] = [
    *invalid("sequence_id", "", LONG),
    *invalid("token_ids", []),
    *POLICIES,
    # The block size, and the model's rotary embeddings, are the executor's.
    (policy("SUM", start_tokens=6), INVALID, "eviction_policy.start_tokens"),
    (policy("KEYDIFF", positions=2), INVALID, "eviction_policy.positions"),
    (policy("SLIDING_WINDOW", recent_tokens=TOO_MANY), "SEQUENCE_TOO_LONG", "eviction_policy"),
    ({"token_ids": [1] * TOO_MANY}, "SEQUENCE_TOO_LONG", "token_ids"),
    *invalid("salt", "", LONG),
    *(case for field in ("session_id", "request_id", "tenant_id") for case in invalid(field, "", LONG)),
    *invalid("num_prompt_tokens", 0, 11, HUGE),
    *invalid("lowest_tier", 4, -1),
    *invalid("max_continuation_tokens", 65537),
    UNKNOWN_EXECUTOR,
    *SCHEDULERS,
    *EXTRA_KEYS,
    *RETENTION,
    *HINTS,
]


def pools(**changes: object) -> dict[str, object]:
    return {"pools": [POOL | changes]}


def unknown_sequence(field: str = "sequence_id") -> list[Case]:
    return [(changes, "UNKNOWN_SEQUENCE", field) for changes in ({field: "nobody"}, {field: ""}, ANOTHER_SCHEDULER)]


DATA_METHODS: dict[str, tuple[dict[str, Any], list[Case]]] = {
    "RegisterExecutor": (
        REGISTRATION,
        [
            *invalid("executor_id", "", LONG),
            *invalid("executor_epoch", 0, (1 << 64) - 1),
            *invalid("model_fingerprint", b""),
            *invalid("block_size", 0, 1, 3, 24),
            *invalid("pools", []),
            *invalid("memory_bytes", 0, NUM_BLOCKS * BLOCK_BYTES - 1),
            ({"memory_bytes": None}, INVALID, "pools[0].share_blocks"),
            (pools(group=1), INVALID, "pools[0].group"),
            ({"pools": [POOL, POOL]}, INVALID, "pools[1].group"),
            (pools(num_blocks=0), INVALID, "pools[0].num_blocks"),
            (pools(num_blocks=HUGE), INVALID, "pools[0].num_blocks"),
            (pools(num_blocks=(1 << 24) + 1), INVALID, "pools[0].num_blocks"),
            ({"block_size": 1 << 31}, INVALID, "pools[0].num_blocks"),
            (pools(host_blocks=HUGE), INVALID, "pools[0].host_blocks"),
            (pools(disk_blocks=1 << 24), INVALID, "pools[0].disk_blocks"),
            ({"pools": [POOL, POOL | {"group": 1, "disk_blocks": 1 << 24}]}, INVALID, "pools[1].disk_blocks"),
            (pools(block_bytes=0), INVALID, "pools[0].block_bytes"),
            (pools(share_blocks=0), INVALID, "pools[0].share_blocks"),
            (pools(share_blocks=NUM_BLOCKS + 1), INVALID, "pools[0].share_blocks"),
            (pools(attention_window=0), INVALID, "pools[0].attention_window"),
            (pools(last_write_steps=[1]), INVALID, "pools[0].last_write_steps"),
            (pools(host_generations=[1]), INVALID, "pools[0].host_generations"),
            (pools(disk_generations=[1]), INVALID, "pools[0].disk_generations"),
            (pools(num_blocks=NUM_BLOCKS + 1), "EXECUTOR_POOLS_CHANGED", "pools"),
            *invalid("weight_version", LONG),
            ({"executor_epoch": EPOCH - 1}, "STALE_EXECUTOR", "executor_epoch"),
        ],
    ),
    "RenewExecutor": (
        {"executor_id": EXECUTOR, "executor_epoch": EPOCH, "manager_epoch": Known.MANAGER_EPOCH},
        [
            ({"manager_epoch": 1}, "MANAGER_RESTARTED", "manager_epoch"),
            ({"executor_epoch": EPOCH - 1}, "EXECUTOR_NOT_REGISTERED", "executor_epoch"),
            ({"executor_epoch": EPOCH + 1}, "EXECUTOR_NOT_REGISTERED", "executor_epoch"),
            ({"executor_id": "nobody"}, "EXECUTOR_NOT_REGISTERED", "executor_id"),
            ({"executor_id": ""}, "EXECUTOR_NOT_REGISTERED", "executor_id"),
        ],
    ),
    "UpdateWeights": (
        {"executor_id": EXECUTOR, "executor_epoch": EPOCH, "weight_version": "v1"},
        [
            *invalid("weight_version", LONG),
            ({"executor_epoch": EPOCH - 1}, "STALE_EXECUTOR", "executor_epoch"),
            ({"executor_id": "nobody"}, "UNKNOWN_EXECUTOR", "executor_id"),
        ],
    ),
    "RegisterScheduler": (
        {"scheduler_id": SCHEDULER, "scheduler_epoch": 2},
        [
            *invalid("scheduler_id", "", LONG),
            *invalid("scheduler_epoch", 0, (1 << 64) - 1),
            ({"scheduler_id": "twice", "scheduler_epoch": 1}, "STALE_SCHEDULER", "scheduler_epoch"),
        ],
    ),
    "AdmitSequences": (
        {"admissions": [ADMISSION]},
        [
            *invalid("admissions", [], [ADMISSION] * 257),
            *(
                ({"admissions": [ADMISSION | changes]}, reason, f"admissions[0].{field}" if field else "")
                for changes, reason, field in (
                    *ADMISSIONS,
                    ({"sequence_id": "live", "token_ids": [9]}, "SEQUENCE_EXISTS", "sequence_id"),
                )
            ),
        ],
    ),
    "SyncSequences": (
        SYNC,
        [
            ({"manager_epoch": 1}, "MANAGER_RESTARTED", "manager_epoch"),
            *SCHEDULERS,
            ({"sync_number": 0}, "SYNC_NUMBER", "sync_number"),
            ({"sync_number": 2}, "SYNC_NUMBER", "sync_number"),
            ({"sync_number": 5}, "SYNC_NUMBER", "sync_number"),
            *invalid("computed_tokens", [], [10, 10]),
            *invalid("new_token_counts", [], [1, 0]),
            *invalid("new_token_ids", [], [5, 5]),
            ({"computed_tokens": [7]}, INVALID, "computed_tokens[0]"),
            ({"computed_tokens": [12]}, INVALID, "computed_tokens[0]"),
            ({"computed_tokens": [HUGE]}, INVALID, "computed_tokens[0]"),
            (
                {"handles": [1, 1], "computed_tokens": [0, 0], "new_token_counts": [0, 1]},
                INVALID,
                "handles",
            ),
            *invalid("released_handles", [1, 1]),
            *invalid("evicting_handles", [1, 1]),
            ({"evicting_handles": [1, Known.LIVE_HANDLE]}, INVALID, "evicting_handles[1]"),
            ({"evicted_handles": [1]}, INVALID, "computed_tokens_before_eviction"),
            ({"computed_tokens_before_eviction": [1]}, INVALID, "computed_tokens_before_eviction"),
            ({"evicted_handles": [1, 1], "computed_tokens_before_eviction": [1, 1]}, INVALID, "evicted_handles"),
            (
                {"evicted_handles": [Known.LIVE_HANDLE], "computed_tokens_before_eviction": [10]},
                INVALID,
                "evicted_handles[0]",
            ),
            ({"window_handles": [1]}, INVALID, "window_tokens"),
            ({"window_tokens": [1]}, INVALID, "window_tokens"),
            ({"window_handles": [1, 1], "window_tokens": [16, 16]}, INVALID, "window_handles"),
            ({"window_handles": [Known.LIVE_HANDLE], "window_tokens": [16]}, INVALID, "window_handles[0]"),
            ({"evicting_handles": [1], "evicting_window_tokens": [1, 2]}, INVALID, "evicting_window_tokens"),
            ({"trimmed_handles": [1]}, INVALID, "trimmed_capacity_tokens"),
            ({"trimmed_capacity_tokens": [1]}, INVALID, "trimmed_capacity_tokens"),
            ({"trimmed_handles": [1, 1], "trimmed_capacity_tokens": [1, 1]}, INVALID, "trimmed_handles"),
            (
                {"trimmed_handles": [Known.LIVE_HANDLE], "trimmed_capacity_tokens": [9]},
                INVALID,
                "trimmed_capacity_tokens[0]",
            ),
        ],
    ),
    "TruncateSequence": (
        SCHEDULED | {"sequence_id": "live", "num_tokens": 9},
        [*SCHEDULERS, *invalid("num_tokens", 0, 11, HUGE)],
    ),
    "ForkSequence": (
        SCHEDULED | {"parent_sequence_id": "live", "sequence_id": "new"},
        [
            *SCHEDULERS,
            *invalid("sequence_id", "", LONG),
            *unknown_sequence("parent_sequence_id"),
            *invalid("num_tokens", 0, 11),
            ({"sequence_id": "live"}, "SEQUENCE_EXISTS", "sequence_id"),
        ],
    ),
    "HoldSequence": (
        SCHEDULED | {"sequence_id": "live", "owner": "o", "duration": {"seconds": 60}},
        [*SCHEDULERS, *invalid("owner", "", LONG), *invalid("duration", *DURATIONS), *unknown_sequence()],
    ),
    "ConfirmTransfers": (
        {"executor_id": EXECUTOR, "executor_epoch": EPOCH},
        [
            UNKNOWN_EXECUTOR,
            ({"executor_id": ""}, "UNKNOWN_EXECUTOR", "executor_id"),
            ({"executor_epoch": EPOCH - 1, "tickets": [1]}, "STALE_EXECUTOR", "executor_epoch"),
        ],
    ),
    "SendHints": (
        {"prefix": PREFIX, "hints": envelope(action())},
        [
            *at("prefix", PREFIX, PREFIXES),
            *HINTS,
            ({"prefix": None}, INVALID, "prefix.token_ids"),
            ({"hints": None}, INVALID, "hints.protocol_version"),
            ({"hints": envelope(action()) | {"message_id": ""}}, INVALID, "hints.message_id"),
            ({"hints": envelope(action()) | {"message_id": LONG}}, INVALID, "hints.message_id"),
            *invalid("session_id", "", LONG),
        ],
    ),
}
