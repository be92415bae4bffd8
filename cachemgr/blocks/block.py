"""Blocks, which are nodes of the prefix tree, their cache scopes, and the accounts that they count against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from cachemgr.retention.priority import DEFAULT_PRIORITY
from cachemgr.types import AccountKey, Quota, TierKind

if TYPE_CHECKING:
    from cachemgr.blocks.tier import Tier
    from cachemgr.retention.leases import Lease


class Account:
    """A tenant or a salt with a quota: its blocks are counted, and have a separate eviction order."""

    __slots__ = ("quota",)

    def __init__(self, quota: Quota) -> None:
        self.quota = quota

    @property
    def key(self) -> AccountKey:
        quota = self.quota
        return ("salt", quota.salt or "") if quota.tenant_id is None else ("tenant_id", quota.tenant_id)

    def floor(self, kind: TierKind) -> int:
        """The number of blocks that other accounts cannot evict."""
        return {TierKind.DEVICE: self.quota.device_floor, TierKind.HOST: self.quota.host_floor}.get(kind, 0)

    def ceiling(self, kind: TierKind) -> int | None:
        """The limit on the account's blocks; None for no limit."""
        return {TierKind.DEVICE: self.quota.device_ceiling, TierKind.HOST: self.quota.host_ceiling}.get(kind)


class Accounts(dict[AccountKey, Account]):
    """All accounts, and the sum of their floors."""

    def __init__(self) -> None:
        self.floors = {TierKind.DEVICE: 0, TierKind.HOST: 0}

    def set(self, quota: Quota) -> Account | None:
        """Sets the quota of an account; returns the account if there was one already."""
        new = Account(quota)
        known = self.setdefault(new.key, new)
        self._add(quota, 1)
        if known is new:
            return None
        self._add(known.quota, -1)
        known.quota = quota
        return known

    def remove(self, key: AccountKey) -> None:
        self._add(self.pop(key).quota, -1)

    def _add(self, quota: Quota, sign: int) -> None:
        self.floors[TierKind.DEVICE] += sign * quota.device_floor
        self.floors[TierKind.HOST] += sign * quota.host_floor


class CacheScope:
    """Salt, adapter, tenant, session, extra bytes (mostly none) and weight version that many blocks have in common.

    Sequences of one model share blocks if their weights, salt and adapter, and so the `key`, are equal. `key` is the
    parent key of their first blocks.
    """

    __slots__ = (
        "__weakref__",
        "account",
        "adapter_id",
        "extra",
        "kept_alive",
        "key",
        "owner",
        "salt",
        "session_id",
        "tenant_id",
        "weight_version",
    )

    def __init__(
        self,
        key: bytes,
        salt: str | None = None,
        adapter_id: int | None = None,
        tenant_id: str | None = None,
        session_id: str | None = None,
        extra: bytes = b"",
        weight_version: str = "",
    ) -> None:
        self.key = key
        self.salt = salt
        self.adapter_id = adapter_id
        self.tenant_id = tenant_id
        self.session_id = session_id
        self.extra = extra
        self.weight_version = weight_version
        self.owner = (tenant_id, salt)
        # The account that the scope's blocks count against.
        self.account: Account | None = None
        # The tenant's and the salt's sets of scopes live as long as their scopes.
        self.kept_alive: Sequence[object] = ()


class RecallableOffloads(Protocol):
    """Offloads that can still be cancelled."""

    def first(self, tier: Tier, account: Account | None) -> Block | None:
        """The first block to evict among blocks being copied to this tier; None if there is none.

        account: only blocks of this account; None for blocks of all accounts.
        """


class Writer(Protocol):
    """The sequence that fills a block."""

    @property
    def handle(self) -> int: ...
    @property
    def sequence_id(self) -> str: ...
    @property
    def scope(self) -> CacheScope: ...
    @property
    def opened(self) -> RecallableOffloads:
        """Offloads that make place for the writer's blocks, and that no scheduler knows of yet."""


class Node:
    """A node of the prefix tree: a block, the root of a chain, or the tombstone of a removed block.

    `children` is None, the only child, or a list sorted by extra bytes and tokens; the functions of `prefix_tree` sort.
    """

    __slots__ = ("children", "key")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.children: Block | list[Block] | None = None


class Block(Node):
    """A slot with its content. Indexed when it has a parent; then key, tokens, depth and scope are set.

    `writer` is the sequence that fills the block, until the block is committed.
    """

    __slots__ = (
        "children_in_tier",
        "depth",
        "hits",
        "index",
        "lease",
        "lease_ended",
        "lru_next",
        "lru_prev",
        "parent",
        "priority",
        "recency",
        "refs",
        "scope",
        "stored_step",
        "tokens",
        "writer",
    )

    def __init__(self, index: int, writer: Writer | None = None) -> None:
        # Without super(), for speed: very many blocks are made.
        self.key = b""
        self.children = None
        self.index = index
        self.refs = 0
        self.writer = writer
        self.parent: Node | None = None
        self.tokens = b""
        self.depth = 0
        self.scope: CacheScope | None = None
        # The highest priority among its leases (without leases, the default), and the newest lease.
        self.priority = DEFAULT_PRIORITY
        self.lease: Lease | None = None
        # Whether one of its leases has run its full time.
        self.lease_ended = False
        self.stored_step = 0
        # With full attention: children in the same tier.
        self.children_in_tier = 0
        self.recency = 0
        # Prefix hits since it entered the prefix tree.
        self.hits = 0
        self.lru_prev: Block | None = None
        self.lru_next: Block | None = None

    def detach(self) -> None:
        """Drops references to other blocks: only a full garbage collection would free such cycles."""
        self.parent = self.children = self.lru_prev = self.lru_next = None


def account_of(block: Block) -> Account | None:
    """The account that a block counts against."""
    scope = block.scope
    return None if scope is None else scope.account
