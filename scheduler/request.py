"""A request as accepted: immutable. Its progress is a Sequence (step loop) and a Generation (output)."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from protos.execution.v1 import execution_pb2
from protos.kvcache.v1 import kvcache_pb2
from scheduler.cache.tier_costs import Tier


class Account(NamedTuple):
    """What a quota may be about: all of a tenant, or with a salt what of it is under that."""

    tenant_id: str | None
    salt: str | None


@dataclass(frozen=True, slots=True)
class CacheWishes:
    """What the request wishes of the cache, in the cache manager's terms."""

    salt: str | None = None
    session_id: str | None = None
    tenant_id: str | None = None
    retention: kvcache_pb2.RetentionConfig | None = None
    no_read: bool = False
    no_store: bool = False
    hints: kvcache_pb2.KvHints | None = None
    eviction_policy: kvcache_pb2.EvictionPolicy | None = None

    @property
    def accounts(self) -> tuple[Account, Account]:
        """Those that its blocks may count against: the tenant's, or the salt's where the tenant has no quota."""
        return Account(self.tenant_id, None), Account(self.tenant_id, self.salt)

    def account(self, full: kvcache_pb2.QuotaAccount) -> Account:
        """That of the two which the cache manager names."""
        return self.accounts[full.WhichOneof("account") == "salt"]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One sample of an accepted generation; most have only one. Samples share a request_id and nothing that changes.

    `arrival` names and orders requests, `arrived_at` is in seconds of the monotonic clock. `onboarding_timeout` is how
    many seconds it waits for blocks from lower tiers.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: execution_pb2.SamplingParams
    arrival: int
    arrived_at: float
    onboarding_timeout: float = math.inf
    stop: tuple[str, ...] = ()
    priority: int = 0
    wishes: CacheWishes = CacheWishes()
    sample_index: int = 0
    # W3C trace context of the scheduler's part in it; empty for none.
    traceparent: str = ""

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts requests: higher priority first, then order of arrival."""
        return (-self.priority, self.arrival)


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A request that wants blocks: new, or again with what it has generated so far."""

    request: Request
    token_ids: tuple[int, ...]
    attempt: int = 0
    # Handle of the sequence to share the prompt with while that one is live; 0 for none.
    parent: int = 0
    # Blocks below this tier were too late for the attempt before, or did not come.
    lowest_tier: Tier = Tier.DISK
    # Whether the attempt before gave its blocks to others.
    preempted: bool = False
    # Attempts in a row in which the executor was lost over it and no token came.
    failures: int = 0

    @property
    def sequence_id(self) -> str:
        """Key of this attempt at the cache manager; a request_id that is used again gets another one."""
        return f"{self.request.request_id}#{self.request.arrival}.{self.attempt}"
