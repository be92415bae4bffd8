"""The cache scopes of an executor, and the quotas that their blocks count against."""

from collections.abc import Iterable, Iterator, Mapping
from weakref import WeakSet, WeakValueDictionary

from cachemgr.blocks.block import Account, CacheScope
from cachemgr.types import AccountKey
from protos.kvcommon.block_keys import root_key


def account_for(accounts: Mapping[AccountKey, Account], tenant_id: str | None, salt: str | None) -> Account | None:
    """Returns the account that blocks count against, or None. A tenant's quota precedes a salt's quota."""
    tenants = None if tenant_id is None else accounts.get(("tenant_id", tenant_id))
    return tenants or (None if salt is None else accounts.get(("salt", salt)))


class _AccountScopes:
    """The cache scopes of one tenant or salt."""

    __slots__ = ("__weakref__", "scopes")

    def __init__(self) -> None:
        self.scopes: WeakSet[CacheScope] = WeakSet()


class CacheScopes:
    """The cache scopes of an executor. Blocks with equal values share one object, which lives as long as the blocks."""

    def __init__(self, model_fingerprint: bytes, accounts: Mapping[AccountKey, Account], weight_version: str) -> None:
        """weight_version: the version of the weights that new sequences are computed with."""
        self.weight_version = weight_version
        self._model_fingerprint = model_fingerprint
        self._accounts = accounts
        self._scopes: WeakValueDictionary[tuple[object, ...], CacheScope] = WeakValueDictionary()
        # Scopes by tenant or salt; an entry is dropped with its last scope.
        self._by_account: WeakValueDictionary[AccountKey, _AccountScopes] = WeakValueDictionary()

    def __iter__(self) -> Iterator[CacheScope]:
        """All cache scopes. No scope may be added or freed during the iteration."""
        return iter(self._scopes.values())

    def of(
        self,
        salt: str | None,
        adapter_id: int | None,
        tenant_id: str | None = None,
        session_id: str | None = None,
        extra: bytes = b"",
        weight_version: str | None = None,
    ) -> CacheScope:
        """The cache scope of these values. weight_version: None for the version of new sequences."""
        version = self.weight_version if weight_version is None else weight_version
        parts = (salt, adapter_id, tenant_id, session_id, extra, version)
        scope, account = self._scopes.get(parts), account_for(self._accounts, tenant_id, salt)
        # After a quota was added or deleted, a new scope replaces the earlier scope.
        if scope is None or scope.account is not account:
            scope = CacheScope(root_key(self._model_fingerprint, salt, adapter_id, version), *parts)
            scope.account = account
            keys = [(field, name) for field, name in (("tenant_id", tenant_id), ("salt", salt)) if name is not None]
            of_accounts = [self._of_account(key) for key in keys]
            for one in of_accounts:
                one.scopes.add(scope)
            scope.kept_alive = of_accounts
            self._scopes[parts] = scope
        return scope

    def _of_account(self, key: AccountKey) -> _AccountScopes:
        found = self._by_account.get(key)
        if found is None:
            found = self._by_account[key] = _AccountScopes()
        return found

    def with_extra(self, scope: CacheScope, extra: bytes) -> CacheScope:
        """The scope with these extra bytes instead."""
        if extra == scope.extra:
            return scope
        return self._like(scope, extra)

    def _like(self, scope: CacheScope, extra: bytes) -> CacheScope:
        return self.of(scope.salt, scope.adapter_id, scope.tenant_id, scope.session_id, extra, scope.weight_version)

    def current(self, scope: CacheScope) -> CacheScope:
        """The scope itself, or its replacement after quotas have changed."""
        if not self._is_outdated(scope):
            return scope
        return self._like(scope, scope.extra)

    @property
    def weight_versions(self) -> set[str]:
        """Versions of all weights of which blocks may exist, and the version of new sequences."""
        return {self.weight_version, *(scope.weight_version for scope in self)}

    def outdated(self, changed: Iterable[AccountKey]) -> set[CacheScope]:
        """The scopes of these accounts that still count against an earlier quota."""
        found = [one for key in changed if (one := self._by_account.get(key)) is not None]
        return {scope for one in found for scope in one.scopes if self._is_outdated(scope)}

    def _is_outdated(self, scope: CacheScope) -> bool:
        return scope.account is not account_for(self._accounts, scope.tenant_id, scope.salt)
