"""An accepted request, which is immutable. Its progress is kept by a Sequence (step loop) and a Generation (output)."""

from __future__ import annotations

import enum
import math
from array import array
from dataclasses import dataclass
from typing import NamedTuple

from protos.execution.v1 import execution_pb2
from protos.kvcache.v1 import kvcache_pb2
from protos.kvcommon.v1 import kvcommon_pb2 as common

# A request is given up after this many losses of the executor in a row during its steps: two with other requests, then
# one alone. Unrelated crashes do not hit a request that often; a crash that the request causes costs every sequence its
# blocks.
MAX_FAILURES = 3


class Tier(enum.IntEnum):
    """Where a block's bytes live; the numbers equal those of both protocols."""

    DEVICE = 1
    HOST = 2
    DISK = 3


class Account(NamedTuple):
    """The account of a quota: a tenant, or a salt of a tenant."""

    tenant_id: str | None
    salt: str | None


class WantedWeights(NamedTuple):
    """The weights that requests are to be computed with. pending: version of weights that the executor is loading."""

    version: str
    path: str
    pending: str | None = None


class Adapter(NamedTuple):
    """A loaded adapter. adapter_id: identifies its content. path: its folder, as given to the executor."""

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
    """The adapters of one name before and after an executor's restart; None for no adapter."""

    before: Adapter | None
    now: Adapter | None


class PromptParts(NamedTuple):
    """Digests of what a prompt was rendered from, besides its messages; 0 if there was nothing."""

    tools: int = 0
    system: int = 0
    template: int = 0


NO_PARTS = PromptParts()


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The request's options for the cache, in the cache manager's terms.

    `comparison_id` is the `response_id` of an earlier request, with which the request is compared.
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
        """The accounts that may own its blocks: the tenant's, or the salt's if the tenant has no quota."""
        return Account(self.tenant_id, None), Account(self.tenant_id, self.salt)

    def account(self, full: kvcache_pb2.QuotaAccount) -> Account:
        """Returns the account that the cache manager names."""
        return self.accounts[full.WhichOneof("account") == "salt"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How an output may call tools, by their names.

    is_required: the output is nothing but calls; `name` limits them to one tool. single: it ends after its first call.
    """

    names: frozenset[str] = frozenset()
    is_required: bool = False
    name: str = ""
    single: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One sample of an accepted generation; samples of a generation share a request_id but no mutable state.

    Token ids are packed as 32-bit numbers from validation on. `arrival` names and orders requests, `arrived_at` is in
    seconds of the monotonic clock. `onload_timeout` is how many seconds it waits for onloads.
    """

    request_id: str
    prompt_ids: array[int]
    max_tokens: int
    sampling: execution_pb2.SamplingParams
    arrival: int
    arrived_at: float
    onload_timeout: float = math.inf
    stop: tuple[str, ...] = ()
    # Whether the text includes the stop string or token that ends it, and whether it includes special tokens.
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
    # Cached tokens of its prompt, as a router expects them.
    expected_cached_tokens: int = 0
    # Id of the caller's request that this request is a part of, if the id differs from request_id.
    part_of: str = ""
    # X-Request-Id of its call; empty if there was none.
    header_id: str = ""
    # Whether only its prompt matters: the token that it samples goes to nobody.
    is_prewarm: bool = False
    # For comparisons with later requests: the parts of its prompt, and the id by which later requests name its
    # response, empty if the request is not kept.
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
        """The adapter's id in the keys of its blocks; None for the model alone."""
        return None if self.adapter is None else self.adapter.adapter_id

    @property
    def rank(self) -> tuple[int, int]:
        """The sort key of requests: higher priority first, then order of arrival."""
        return (-self.priority, self.arrival)


@dataclass(frozen=True, slots=True, eq=False)
class AdmissionAttempt:
    """A request that waits for blocks: new, or again with the tokens it has generated so far."""

    request: Request
    token_ids: array[int]
    # Counted from 0.
    number: int = 0
    # Handle of the sequence to fork from while that sequence is live; 0 for none.
    parent: int = 0
    # The lowest tier to take blocks from: blocks of lower tiers came too late for the previous attempt, or not at all.
    lowest_tier: Tier = Tier.DISK
    # Whether the previous attempt was preempted.
    preempted: bool = False
    # Attempts in a row during which the executor was lost, possibly because of the request, and no token came.
    failures: int = 0
    # Monotonic time of the last of these failures, at a router; 0 for none.
    failed_at: float = 0.0

    def sequence_id(self, scheduler: str) -> str:
        """Returns this attempt's key at the cache manager, which differs even if a request_id is reused.

        scheduler: differs between schedulers. A request that continues on another engine keeps its id, while the
        sequences of the dead engine stay at the manager until their lease ends.
        """
        return f"{self.request.caller_id}#{scheduler}.{self.request.arrival}.{self.number}"


def caller_id_of(sequence_id: str) -> str:
    """Returns the `caller_id` of the request whose attempt has this key at the cache manager."""
    return sequence_id.rpartition("#")[0]
