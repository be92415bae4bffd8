"""Cache scopes, and accounts: the tenants and salts that have a quota, which the blocks of a scope count against."""

from __future__ import annotations

from collections.abc import Sequence

from cachemgr.types import AccountKey, Quota, TierKind


class Account:
    """A tenant or a salt with a quota: its blocks are counted, and have an eviction order of their own."""

    __slots__ = ("quota",)

    def __init__(self, quota: Quota) -> None:
        self.quota = quota

    @property
    def key(self) -> AccountKey:
        quota = self.quota
        return ("salt", quota.salt or "") if quota.tenant_id is None else ("tenant_id", quota.tenant_id)

    def floor(self, kind: TierKind) -> int:
        """Blocks that other accounts cannot evict."""
        return {TierKind.DEVICE: self.quota.device_floor, TierKind.HOST: self.quota.host_floor}.get(kind, 0)

    def ceiling(self, kind: TierKind) -> int | None:
        """The most blocks that it may have; None for no bound."""
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
    """Salt, adapter, tenant and session that many blocks have in common, and their extra bytes, mostly none.

    Blocks are shared under equal `key`, that is by sequences of one model with equal salt and equal adapter. It is the
    parent key of their first blocks.
    """

    __slots__ = ("__weakref__", "account", "adapter_id", "extra", "key", "names", "salt", "session_id", "tenant_id")

    def __init__(
        self,
        key: bytes,
        salt: str | None = None,
        adapter_id: int | None = None,
        tenant_id: str | None = None,
        session_id: str | None = None,
        extra: bytes = b"",
    ) -> None:
        self.key = key
        self.salt = salt
        self.adapter_id = adapter_id
        self.tenant_id = tenant_id
        self.session_id = session_id
        self.extra = extra
        # The account that its blocks count against.
        self.account: Account | None = None
        # The scopes of its tenant and of its salt, which live as long as it does.
        self.names: Sequence[object] = ()
