"""Requests and answers of the manager. Tokens are ids, lengths are in tokens, and times are in seconds."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from protos.kvcommon.eviction import Policy
    from protos.kvcommon.eviction_message import EvictionPolicyRequest


class Scope(Protocol):
    """The cache scope of a block: tenant, session, weights, and extra keys as they enter the block's key."""

    salt: str | None
    adapter_id: int | None
    tenant_id: str | None
    session_id: str | None
    extra: bytes
    weight_version: str


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    lease_seconds: float = 10.0
    capacity_ahead_tokens: int = 32
    # Share of a pool that capacity ahead of need and admissions leave free.
    free_watermark: float = 0.01
    partial_reuse: bool = True
    # Blocks of a lower priority are dropped rather than offloaded.
    offload_min_priority: int = 35
    # Whether device blocks are copied to empty slots of the next lower tier before they are evicted.
    write_through: bool = True
    # The limit on keys of removed blocks that each pool keeps, to explain why blocks are missing.
    lost_blocks: int = 20_000
    # Whether the beginning of a longer block is copied. Otherwise, an unused block without children is taken over.
    copy_on_partial_reuse: bool = True
    # Limits on retention requests; 0 seconds for no limit.
    max_retention_priority: int = 100
    max_retention_seconds: float = 0.0
    # Share of a pool that pins may keep.
    pin_budget: float = 0.1
    # Events that are kept for consumers.
    event_history: int = 100_000
    # Sampled blocks of a ghost cache as large as the device; 0 for no ghost caches.
    ghost_sample: int = 0


class TierKind(enum.IntEnum):
    """The tiers, fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One pool as its executor announces it; see the message of the same name."""

    group: int
    num_blocks: int
    attention_window: int | None = None
    num_layers: int = 1
    num_kv_heads: int = 1
    head_dim: int = 1
    dtype: str = "float32"
    block_bytes: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    share_blocks: int = 0


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """What an executor announces: settings, and the contents of its memory.

    `last_write_steps[group]` has an entry per slot 1..num_blocks, or is empty. The generations of a lower tier have an
    entry per slot of that tier, or are empty: the ticket of the copy that filled the slot.
    """

    executor_id: str
    executor_epoch: int
    model: str
    model_fingerprint: bytes
    block_size: int
    pools: Sequence[PoolSpec]
    last_write_steps: Sequence[Sequence[int]] = ()
    memory_bytes: int | None = None
    plain_rotary: bool = False
    host_generations: Sequence[Sequence[int]] = ()
    disk_generations: Sequence[Sequence[int]] = ()
    # The version of the weights that the executor computes with; empty for the weights of its start.
    weight_version: str = ""
    # The epoch of the manager whose blocks running steps may still write into; 0 if no step runs.
    steps_manager_epoch: int = 0

    @property
    def has_contents(self) -> bool:
        """Whether some slot was filled before the registration."""
        return any(
            any(slots)
            for tier in (self.last_write_steps, self.host_generations, self.disk_generations)
            for slots in tier
        )

    @property
    def pool_ids(self) -> list[str]:
        return [f"{self.executor_id}/{pool.group}" for pool in self.pools]

    def without_contents(self) -> ExecutorSpec:
        return replace(self, last_write_steps=(), host_generations=(), disk_generations=(), steps_manager_epoch=0)

    def generations(self, tier: TierKind, group: int) -> Sequence[int]:
        """Generations of the slots 1, 2, … of a lower tier of a pool; empty if unknown."""
        known = self.host_generations if tier is TierKind.HOST else self.disk_generations
        return known[group] if known else ()


class Restored(NamedTuple):
    """Number of cached blocks of an executor after a registration: on its device, and in its lower tiers."""

    device_blocks: int
    lower_blocks: int


@dataclass(frozen=True, slots=True)
class RetentionRange:
    """A request for the blocks whose first token lies in [start, end); no end: to the end of the prompt."""

    start: int
    end: int | None
    priority: int
    duration: float | None = None


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention that a request asks for. Durations in seconds, None for no end."""

    ranges: tuple[RetentionRange, ...] = ()
    decode_priority: int | None = None
    decode_duration: float | None = None


class ExtraKey(NamedTuple):
    """Content other than text, for which the tokens in [start, start + length) stand."""

    start: int
    length: int
    digest: bytes


class Outcome(enum.IntEnum):
    """The outcome of a retention request; numbers as in the message."""

    GRANTED = 1
    CLIPPED = 2
    REJECTED = 3


class Receipt(NamedTuple):
    """The answer to one retention request: the granted values, and the reason for a clipping or rejection."""

    request: str
    outcome: Outcome
    reason: str = ""
    priority: int = 0
    duration: float | None = None
    num_blocks: int = 0


class SchedulerEpoch(NamedTuple):
    """A scheduler process: every call about a sequence names it."""

    scheduler_id: str
    epoch: int


# The key of an account with a quota: "tenant_id" or "salt", and the name.
AccountKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class AdmitRequest:
    sequence_id: str
    scheduler_id: str
    scheduler_epoch: int
    executor_id: str
    token_ids: Sequence[int]
    salt: str | None = None
    adapter_id: int | None = None
    session_id: str | None = None
    request_id: str | None = None
    num_prompt_tokens: int | None = None
    tenant_id: str | None = None
    extra_keys: tuple[ExtraKey, ...] = ()
    retention: Retention = field(default_factory=Retention)
    hints: Hints | None = None
    eviction_policy: EvictionPolicyRequest | None = None
    no_read: bool = False
    no_store: bool = False
    # Blocks of tiers below this tier are not used.
    lowest_tier: TierKind = TierKind.DISK
    # The limit on cached tokens after the request's own tokens that the answer has.
    max_continuation: int = 0
    # Whether the answer says why the first missing block is missing.
    explain_miss: bool = False
    # Only whole blocks within this many leading tokens stay in the cache; None for no limit.
    store_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Slots of one sequence in one group; 0 if the window does not need the block."""

    group: int
    slots: tuple[int, ...]


class Transfer(NamedTuple):
    """A ticket for one copy within a group, or, with source slot 0, for overwriting the target with zeros."""

    ticket: int
    group: int
    source_slot: int
    target_slot: int
    num_tokens: int
    num_bytes: int
    source_tier: TierKind = TierKind.DEVICE
    target_tier: TierKind = TierKind.DEVICE


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to an admission or a fork. If not admitted, nothing was allocated and `missing_blocks` were missing.

    `full_account`: only the ceiling of this account was reached. `continuation`: cached tokens after the request's own.
    """

    admitted: bool
    missing_blocks: int = 0
    full_account: AccountKey | None = None
    sequence_handle: int = 0
    cached_tokens: int = 0
    wait_for_handle: int = 0
    capacity_tokens: int = 0
    block_tables: tuple[Table, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    receipts: tuple[Receipt, ...] = ()
    hint_answers: tuple[HintAnswer, ...] = ()
    eviction_policy: Policy | None = None
    continuation: tuple[int, ...] = ()
    miss: Miss | None = None
    # Number of leading tokens of the prompt whose blocks stay in the cache.
    store_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """Progress in columns, exactly as in the message."""

    scheduler_id: str
    scheduler_epoch: int
    manager_epoch: int
    sync_number: int
    step: int = 0
    handles: Sequence[int] = ()
    computed_tokens: Sequence[int] = ()
    new_token_counts: Sequence[int] = ()
    new_token_ids: Sequence[int] = ()
    released_handles: Sequence[int] = ()
    trimmed_handles: Sequence[int] = ()
    trimmed_capacity_tokens: Sequence[int] = ()
    cancelled_tickets: Sequence[int] = ()
    evicting_handles: Sequence[int] = ()
    evicted_handles: Sequence[int] = ()
    computed_tokens_before_eviction: Sequence[int] = ()
    evicting_window_tokens: Sequence[int] = ()
    window_handles: Sequence[int] = ()
    window_tokens: Sequence[int] = ()


class WindowChange(enum.Enum):
    """What happened to a longer adaptive window. After TAKEN_BACK, the window counts as RETURNED once it is shorter."""

    GRANTED = "granted"
    REFUSED = "refused"
    TAKEN_BACK = "taken_back"
    RETURNED = "returned"


@dataclass(slots=True)
class SyncAnswer:
    extended_handles: list[int] = field(default_factory=list)
    extended_groups: list[int] = field(default_factory=list)
    extended_counts: list[int] = field(default_factory=list)
    extended_slots: list[int] = field(default_factory=list)
    void_handles: list[int] = field(default_factory=list)
    unknown_handles: list[int] = field(default_factory=list)
    missing_blocks: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    transfers: list[Transfer] = field(default_factory=list)
    evicting_handles: list[int] = field(default_factory=list)
    evicting_counts: list[int] = field(default_factory=list)
    evicting_slots: list[int] = field(default_factory=list)
    evicting_window_tokens: list[int] = field(default_factory=list)
    window_handles: list[int] = field(default_factory=list)
    window_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Freed:
    """The answer to a truncation or release. `freed_blocks`: blocks that became free or evictable."""

    found: bool
    freed_blocks: int = 0


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool with its counters. Unless the pool still has to shrink, free = empty + cached, and free + used = total."""

    pool_id: str
    executor_id: str
    spec: PoolSpec
    block_size: int
    total_blocks: int
    free_blocks: int
    used_blocks: int
    cached_blocks: int
    evicted_blocks: int
    queried_tokens: int
    hit_tokens: int
    lower_tiers: tuple[TierUsage, ...] = ()
    etag: str = ""


class TierUsage(NamedTuple):
    """Slots of one tier of a pool. `copy_blocks` are free slots with a write-through copy of a device block."""

    tier: TierKind
    total_blocks: int
    free_blocks: int
    used_blocks: int
    cached_blocks: int
    copy_blocks: int


class BlockView(NamedTuple):
    """A block in answers and events. Keys and packed tokens are empty if there are none."""

    pool_id: str
    slot: int
    key: bytes
    parent_key: bytes
    tokens: bytes
    references: int
    priority: int
    depth: int
    tier: TierKind = TierKind.DEVICE
    scope: Scope | None = None
    # Both are set only in a listing. `idle`: seconds since the last use; None while the block is in use.
    hits: int = 0
    idle: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    @classmethod
    def of_pool(cls, pool_id: str) -> BlockView:
        """The view in an event about a pool."""
        return cls(pool_id, 0, b"", b"", b"", 0, 0, 0)


class EventKind(enum.IntEnum):
    """Numbers as in the message."""

    CREATED = 1
    STORED = 2
    REMOVED = 3
    UPDATED = 4
    LEASE_GRANTED = 5
    LEASE_EXPIRED = 6
    LEASE_BROKEN = 7
    EXECUTOR_REGISTERED = 8
    EXECUTOR_LOST = 9


class RemovalCause(enum.IntEnum):
    """Numbers as in the message; NONE for events that remove nothing."""

    NONE = 0
    EVICTED = 1
    PURGED = 2
    EXECUTOR_LOST = 3
    COVERED = 4
    TRUNCATED = 5
    FORGOTTEN = 6
    OVERWRITTEN = 7
    COPY_FAILED = 8
    PARENT_EVICTED = 9
    POOL_SHRUNK = 10
    RULE_CHANGED = 11
    TOO_MANY_LEASES = 12
    WEIGHTS_UPDATED = 13


class LeaseView(NamedTuple):
    """A lease as seen from outside. `remaining`: seconds until its end; None for no end.

    `started`: whether its clock runs; set only in a listing.
    """

    holder: str
    priority: int
    remaining: float | None
    started: bool = False


class Removal(NamedTuple):
    """How a block left the index: cause, time, the sequence that needed blocks, and the priority of the block.

    `for_owner` are tenant and salt of that sequence. `lease_ended`: the block's last lease had ended earlier.
    """

    cause: RemovalCause
    time: float
    for_sequence_id: str
    priority: int
    for_owner: tuple[str | None, str | None] = (None, None)
    lease_ended: bool = False


@dataclass(frozen=True, slots=True)
class Quota:
    """Blocks that a tenant or salt keeps, and may have, on the device and host of each pool; None for no limit."""

    tenant_id: str | None = None
    salt: str | None = None
    device_floor: int = 0
    device_ceiling: int | None = None
    host_floor: int = 0
    host_ceiling: int | None = None


class Resized(NamedTuple):
    """A resized pool, the names of pins that became leases as the budget shrank, and the blocks that left."""

    pool: PoolView
    degraded: tuple[str, ...]
    left: LeftBlocks


class LeftBlocks(NamedTuple):
    """Numbers of a pool's cached blocks that moved from the device to a lower tier, or were dropped, per tier."""

    offloaded: int
    dropped: dict[TierKind, int]


class PoolShare(NamedTuple):
    """How many device blocks an operator lets a pool use. `number` is the etag of the pool.

    The share is for a pool of `num_blocks` slots; a pool of a different size means that the executor was reconfigured.
    """

    pool_id: str
    total_blocks: int
    num_blocks: int
    number: int


class PinRecord(NamedTuple):
    """A pin. `remaining` is in seconds; `blocks` are groups and keys, root first."""

    name: str
    owner: str
    remaining: float
    blocks: tuple[tuple[int, bytes], ...]

    @property
    def number(self) -> int:
        return int(self.name.partition("-")[2])


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """What a rule matches; all set fields must match. Blocks count by the position of their first token."""

    salt: str | None = None
    tenant_id: str | None = None
    adapter_id: int | None = None
    prefix_token_ids: tuple[int, ...] = ()
    start: int = 0
    end: int | None = None


@dataclass(frozen=True, slots=True)
class RuleAction:
    """The effects of a rule; see the message of the same name."""

    priority: int | None = None
    duration: float | None = None
    pin_duration: float | None = None
    no_store: bool = False
    offload_min_priority: int | None = None
    eviction_policy: EvictionPolicyRequest | None = None


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """A rule of an operator; `etag` changes with every change."""

    name: str
    order: int = 0
    match: RuleMatch = RuleMatch()
    action: RuleAction = RuleAction()
    etag: str = ""


@dataclass(frozen=True, slots=True)
class PoolViolation:
    """One contradiction; slot 0 if it is about the pool."""

    pool_id: str
    slot: int
    message: str


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt in one cache scope, in one executor or, without a name, in all executors."""

    token_ids: Sequence[int]
    executor_id: str = ""
    salt: str | None = None
    adapter_id: int | None = None
    extra_keys: tuple[ExtraKey, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockFilter:
    """Selects cached blocks; all set fields must match."""

    pool_id: str = ""
    salt: str | None = None
    max_priority: int | None = None
    session_id: str | None = None
    tenant_id: str | None = None
    adapter_id: int | None = None
    tier: TierKind | None = None
    prefix: Prefix | None = None


@dataclass(frozen=True, slots=True)
class Purged:
    """Blocks that a purge dropped or would drop, and matching blocks in use, which stay."""

    purged_blocks: int
    used_blocks: int


@dataclass(frozen=True, slots=True)
class ForgetTarget:
    """The target of a forget; exactly one field is set."""

    salt: str | None = None
    session_id: str | None = None
    prefix: Prefix | None = None


@dataclass(slots=True)
class Forgotten:
    """The receipt of a forget, in blocks.

    `removed` counts per tier. Of these, `used_blocks` are still in use, and `zeroing_blocks` are overwritten now.
    `shared_blocks` stay.
    """

    removed: dict[TierKind, int]
    used_blocks: int = 0
    shared_blocks: int = 0
    zeroing_blocks: int = 0


@dataclass(frozen=True, slots=True)
class HoldView:
    """A hold or pin in answers; `remaining` is in seconds. All its blocks are under one salt."""

    name: str
    pin: bool
    owner: str
    remaining: float
    executor_id: str
    num_blocks: int
    salt: str | None = None


class BlockEstimate(NamedTuple):
    """Blocks of one sequence in one group.

    `reusable`: cached blocks of its prompt. `next_step`: free blocks that its next step takes. `completion`: the most
    free blocks that the sequence takes until its end.
    """

    group: int
    reusable: int
    next_step: int
    completion: int


@dataclass(frozen=True, slots=True)
class Preview:
    """The outcome that an admission would have."""

    admitted: bool
    missing_blocks: int
    cached_tokens: int
    estimates: list[BlockEstimate]


@dataclass(frozen=True, slots=True)
class HintAction:
    """One hint; its payload is JSON."""

    action_id: str
    action_type: str
    action_version: str
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Hints:
    """The envelope of hints."""

    protocol_version: str
    message_id: str
    actions: tuple[HintAction, ...]


class HintOutcome(enum.IntEnum):
    """Numbers as in the message."""

    ACCEPTED = 1
    CLIPPED = 2
    DEFERRED = 3
    REJECTED = 4
    MISSING = 5


class HintAnswer(NamedTuple):
    """The outcome of a hint, and the number of blocks that the hint was applied to."""

    action_id: str
    outcome: HintOutcome
    detail: str = ""
    num_blocks: int = 0


class MissCause(enum.IntEnum):
    """Numbers as in the message of an admission."""

    NEVER_STORED = 1
    EVICTED = 2
    LEASE_ENDED = 3
    PURGED = 4
    LOST = 5
    BEING_COMPUTED = 6
    SLOWER_TIER = 7
    NOT_READ = 8


class Miss(NamedTuple):
    """Why the first missing block of a prompt was not used, without information about other tenants.

    `removed_ago` is in seconds. `for_own`: a sequence of the same owner got the slot; only then is its id given.
    `tier`: the tier of a block that lies in too low a tier, or is still being copied there.
    """

    cause: MissCause
    removed_ago: float | None = None
    priority: int | None = None
    for_own: bool = False
    for_sequence_id: str = ""
    tier: TierKind | None = None


class MissReason(enum.IntEnum):
    """Numbers as in the message; NONE when nothing is missing."""

    NONE = 0
    NEVER_STORED = 1
    REMOVED = 2
    OTHER_SALT = 3
    OTHER_ADAPTER = 4
    BEING_COMPUTED = 5
    OTHER_WEIGHTS = 6


@dataclass(slots=True)
class Explanation:
    """The cached blocks of a prompt in one executor, and the reason for the first missing block.

    Ages are in seconds. `blocks` have their leases and the time since the last use.
    """

    executor_id: str
    cached_tokens: int = 0
    blocks: list[tuple[BlockView, list[LeaseView], float]] = field(default_factory=list)
    miss_reason: MissReason = MissReason.NONE
    removal: Removal | None = None
    removal_age: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefixView:
    """A cached chain by its last block: tokens, blocks per tier, and the lowest priority among the blocks."""

    index: int
    last_block: BlockView
    num_tokens: int
    blocks: dict[TierKind, int]
    min_priority: int


class GhostPolicy(enum.IntEnum):
    """Eviction orders; numbers as in the message."""

    # By priorities, durations and leases, as in pools.
    RETENTION = 1
    # Only by the last use.
    LRU = 2
    # As LRU, but for a while, blocks that were found once are evicted after blocks that were never found.
    SEGMENTED_LRU = 3


class GhostCache(NamedTuple):
    """The hits of one simulated cache."""

    policy: GhostPolicy
    total_blocks: int
    hit_blocks: int
    hit_tokens: int


class GhostReport(NamedTuple):
    """All simulated caches, the queries and hits of the real pool, and the sampled share of blocks."""

    caches: list[GhostCache]
    queried_blocks: int
    queried_tokens: int
    hit_tokens: int
    sample_rate: float


# A slot: group, tier, and its number in the tier.
Slot = tuple[int, TierKind, int]
