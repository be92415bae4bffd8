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


class WantedWeights(NamedTuple):
    """The weights that requests are to be computed with. pending: version of those that the executor is loading."""

    version: str
    path: str
    pending: str | None = None


class Adapter(NamedTuple):
    """A loaded adapter by its name. adapter_id: of its content. path: of its folder, as the executor was given it."""

    name: str
    adapter_id: int
    rank: int = 0
    path: str = ""

    @classmethod
    def of(cls, message: execution_pb2.Adapter) -> Adapter:
        return cls(message.name, message.adapter_id, message.rank, message.path)

    def message(self) -> execution_pb2.Adapter:
        return execution_pb2.Adapter(**self._asdict())


class AdapterChange(NamedTuple):
    """An executor that has started again has another adapter under a name, or none, or one that is new."""

    before: Adapter | None
    now: Adapter | None


class PromptParts(NamedTuple):
    """Digests of what a prompt was rendered from, besides its messages; 0 for nothing."""

    tools: int = 0
    system: int = 0
    template: int = 0


NO_PARTS = PromptParts()


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The request's options for the cache, in the cache manager's terms.

    `comparison_id` names the request whose response this one is compared with.
    """

    salt: str | None = None
    session_id: str | None = None
    tenant_id: str | None = None
    retention: kvcache_pb2.RetentionConfig | None = None
    no_read: bool = False
    no_store: bool = False
    hints: common.KvHints | None = None
    eviction_policy: common.EvictionPolicy | None = None
    explain_miss: bool = False
    store_tokens: int | None = None
    comparison_id: str | None = None

    @property
    def accounts(self) -> tuple[Account, Account]:
        """The accounts that may own its blocks: the tenant's, or the salt's where the tenant has no quota."""
        return Account(self.tenant_id, None), Account(self.tenant_id, self.salt)

    def account(self, full: kvcache_pb2.QuotaAccount) -> Account:
        """The account that the cache manager names."""
        return self.accounts[full.WhichOneof("account") == "salt"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How an output may call tools, by their names.

    is_required: the output is nothing but calls, of one tool where `name` says which. single: it ends behind its first
    call.
    """

    names: frozenset[str] = frozenset()
    is_required: bool = False
    name: str = ""
    single: bool = False


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
    # Whether the text has what ends it, and special tokens.
    include_stop_text: bool = False
    keep_special_tokens: bool = False
    tools: ToolUse = ToolUse()
    priority: int = 0
    cache: CacheOptions = CacheOptions()
    # None for the model alone.
    adapter: Adapter | None = None
    sample_index: int = 0
    # W3C trace context of the scheduler's span; empty for none.
    traceparent: str = ""
    # Of its prompt, as a router knows it.
    expected_cached_tokens: int = 0
    # Id of the caller's request that it is a part of, where that is another one than request_id.
    part_of: str = ""
    # X-Request-Id of its call; empty for none.
    header_id: str = ""
    # Its prompt is only computed: the token that this samples is nobody's.
    is_prewarm: bool = False
    # For comparisons with later requests: of its prompt, and the id by which they name its response, empty where it is
    # not kept.
    parts: PromptParts = NO_PARTS
    response_id: str = ""

    @property
    def caller_id(self) -> str:
        """The id of the caller's request."""
        return self.part_of or self.request_id

    @property
    def abort_ids(self) -> set[str]:
        """The ids by which callers abort it."""
        return {self.caller_id, self.header_id or self.caller_id}

    @property
    def adapter_id(self) -> int | None:
        """In the keys of its blocks; None for the model alone."""
        return None if self.adapter is None else self.adapter.adapter_id

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

    def sequence_id(self, scheduler: str) -> str:
        """Key of this attempt at the cache manager; a reused request_id gets another one.

        scheduler: differs between schedulers. A request that continues on another engine keeps its id, and the
        sequences of the engine that died are at the manager until their lease ends.
        """
        return f"{self.request.caller_id}#{scheduler}.{self.request.arrival}.{self.number}"


def caller_id_of(sequence_id: str) -> str:
    """The `caller_id` of the request whose attempt has this key at the cache manager."""
    return sequence_id.rpartition("#")[0]
