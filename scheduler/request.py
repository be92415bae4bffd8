"""A request as accepted: immutable. Its progress is a Sequence (step loop) and a Generation (output)."""

from __future__ import annotations

import enum
import math
from array import array
from dataclasses import dataclass
from typing import NamedTuple

from protos.execution.v1 import execution_pb2
from protos.kvcache.v1 import kvcache_pb2
from protos.kvcommon.v1 import kvcommon_pb2 as common

# The executor may be lost so often in a row over one request before the scheduler gives the request up: twice in
# company, and then alone. An unrelated crash does not strike a request so often; one that the request causes costs
# every sequence its blocks.
MAX_FAILURES = 3


class Tier(enum.IntEnum):
    """Where a block's bytes live; the numbers are those of both protocols."""

    DEVICE = 1
    HOST = 2
    DISK = 3


class Account(NamedTuple):
    """The account of a quota: a tenant, or a salt of a tenant."""

    tenant_id: str | None
    salt: str | None


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The request's options for the cache, in the cache manager's terms."""

    salt: str | None = None
    session_id: str | None = None
    tenant_id: str | None = None
    retention: kvcache_pb2.RetentionConfig | None = None
    no_read: bool = False
    no_store: bool = False
    hints: common.KvHints | None = None
    eviction_policy: common.EvictionPolicy | None = None

    @property
    def accounts(self) -> tuple[Account, Account]:
        """The accounts that may own its blocks: the tenant's, or the salt's where the tenant has no quota."""
        return Account(self.tenant_id, None), Account(self.tenant_id, self.salt)

    def account(self, full: kvcache_pb2.QuotaAccount) -> Account:
        """The account that the cache manager names."""
        return self.accounts[full.WhichOneof("account") == "salt"]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One sample of an accepted generation; most have only one. Samples share a request_id and nothing that changes.

    Token ids are packed as 32-bit numbers from the validation on. `arrival` names and orders requests, `arrived_at` is
    in seconds of the monotonic clock. `onload_timeout`: seconds that it waits for onloads.
    """

    request_id: str
    prompt_ids: array[int]
    max_tokens: int
    sampling: execution_pb2.SamplingParams
    arrival: int
    arrived_at: float
    onload_timeout: float = math.inf
    stop: tuple[str, ...] = ()
    priority: int = 0
    cache: CacheOptions = CacheOptions()
    sample_index: int = 0
    # W3C trace context of the scheduler's span; empty for none.
    traceparent: str = ""
    # Of its prompt, as a router knows it.
    expected_cached_tokens: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts requests: higher priority first, then order of arrival."""
        return (-self.priority, self.arrival)


@dataclass(frozen=True, slots=True, eq=False)
class AdmissionAttempt:
    """A request that waits for blocks: new, or again with the tokens it has generated so far."""

    request: Request
    token_ids: array[int]
    # Counted from 0.
    number: int = 0
    # Handle of the sequence to fork from while that one is live; 0 for none.
    parent: int = 0
    # Blocks of lower tiers came too late for the attempt before, or not at all.
    lowest_tier: Tier = Tier.DISK
    # Whether the attempt before was preempted.
    preempted: bool = False
    # Attempts in a row in which the executor was lost over it and no token came.
    failures: int = 0

    @property
    def sequence_id(self) -> str:
        """Key of this attempt at the cache manager; a reused request_id gets another one."""
        return f"{self.request.request_id}#{self.request.arrival}.{self.number}"
