"""What operators, agents and planners give to the manager and get from it. Times in seconds, lengths in tokens."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from cachemgr.types import BlockView, ExtraKey, LeaseView, TierKind

if TYPE_CHECKING:
    from cachemgr.blocks.eviction_history import Lost
    from cachemgr.sequences.eviction_policy import PolicyWish


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant, or else a salt, keeps and may have of each tier of each pool, in blocks; None for no bound."""

    tenant_id: str | None = None
    salt: str | None = None
    device_floor: int = 0
    device_ceiling: int | None = None
    host_floor: int = 0
    host_ceiling: int | None = None


class PoolShare(NamedTuple):
    """How many device blocks an operator lets a pool use. `number` is the pool's etag.

    It holds for a pool of `num_blocks` slots: with another number the executor was set up anew.
    """

    pool_id: str
    total_blocks: int
    num_blocks: int
    number: int


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """What a rule is about; what is set must all match. Blocks count by the position of their first token."""

    salt: str | None = None
    tenant_id: str | None = None
    adapter_id: int | None = None
    prefix_token_ids: tuple[int, ...] = ()
    start: int = 0
    end: int | None = None


@dataclass(frozen=True, slots=True)
class RuleAction:
    """What a rule does; see the message of the same name."""

    priority: int | None = None
    duration: float | None = None
    pin_duration: float | None = None
    no_store: bool = False
    offload_min_priority: int | None = None
    eviction_policy: PolicyWish | None = None


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """An operator's rule; `etag` changes with every change."""

    name: str
    order: int = 0
    match: RuleMatch = RuleMatch()
    action: RuleAction = RuleAction()
    etag: str = ""


@dataclass(frozen=True, slots=True)
class PoolViolation:
    """One contradiction; slot 0 when it is about the pool."""

    pool_id: str
    slot: int
    message: str


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt in one domain of sharing, in one executor or, without a name, in all."""

    token_ids: Sequence[int]
    executor_id: str = ""
    salt: str | None = None
    adapter_id: int | None = None
    extra_keys: tuple[ExtraKey, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockFilter:
    """Selects cached blocks; what is set must all match."""

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
    """What a purge dropped or would drop, and matching blocks that stay because they are in use."""

    purged_blocks: int
    used_blocks: int


@dataclass(frozen=True, slots=True)
class ForgetTarget:
    """What is to be forgotten; one of them is set."""

    salt: str | None = None
    session_id: str | None = None
    prefix: Prefix | None = None


@dataclass(slots=True)
class Forgotten:
    """The receipt, in blocks: taken out of the index per tier; of these used; being overwritten; left for others."""

    removed: dict[TierKind, int]
    used_blocks: int = 0
    shared_blocks: int = 0
    zeroing_blocks: int = 0


@dataclass(frozen=True, slots=True)
class HoldView:
    """A hold or pin as seen from outside; `remaining` seconds. All its blocks are under one salt."""

    name: str
    pin: bool
    owner: str
    remaining: float
    executor_id: str
    num_blocks: int
    salt: str | None = None


class BlockEstimate(NamedTuple):
    """Blocks of one sequence in one group: cached ones it would use, those its next step takes, and all it takes."""

    group: int
    reusable: int
    next_step: int
    completion: int


class PredictedEviction(NamedTuple):
    """Cached blocks of one priority that would leave the device, and how many of them move down; quotas aside."""

    group: int
    priority: int
    num_blocks: int
    offloaded: int


@dataclass(frozen=True, slots=True)
class Preview:
    """What an admission would do."""

    admitted: bool
    blocks_short: int
    cached_tokens: int
    estimates: list[BlockEstimate]
    evictions: list[PredictedEviction]


@dataclass(frozen=True, slots=True)
class HintAction:
    """One hint; its payload is JSON."""

    action_id: str
    action_type: str
    action_version: str
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Hints:
    """The envelope."""

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
    """What became of a hint, and how many blocks it was done to."""

    action_id: str
    outcome: HintOutcome
    detail: str = ""
    num_blocks: int = 0


class MissReason(enum.IntEnum):
    """Numbers as in the message; NONE when nothing is missing."""

    NONE = 0
    NEVER_STORED = 1
    REMOVED = 2
    OTHER_SALT = 3
    OTHER_ADAPTER = 4
    BEING_COMPUTED = 5


@dataclass(slots=True)
class Explanation:
    """What one executor knows of a prompt. Ages in seconds; `blocks` with their leases and time since the last use."""

    executor_id: str
    cached_tokens: int = 0
    blocks: list[tuple[BlockView, list[LeaseView], float]] = field(default_factory=list)
    miss_reason: MissReason = MissReason.NONE
    removal: Lost | None = None
    removal_age: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefixView:
    """A cached chain by its last block: tokens, blocks that are there per tier, and the least priority among them."""

    place: int
    last_block: BlockView
    num_tokens: int
    blocks: dict[TierKind, int]
    min_priority: int
