"""What operators do to a manager: rules, quotas, pins, shares, purging and forgetting."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from cachemgr.admin_api import (
    BlockFilter,
    ForgetTarget,
    Forgotten,
    HintAnswer,
    Hints,
    PoolShare,
    Prefix,
    Purged,
    Quota,
    RetentionRule,
)
from cachemgr.api import RemovalCause, TierKind, Transfer
from cachemgr.block import Block
from cachemgr.chains import chain, keys_of
from cachemgr.errors import (
    InvalidField,
    PoolInUseError,
    QuotaTooLargeError,
    StalePoolError,
    UnknownHoldError,
    UnknownQuotaError,
)
from cachemgr.forgetting import forget, is_remembered_of
from cachemgr.hints import HintRunner
from cachemgr.hints import check as check_hints
from cachemgr.holds import Pinned
from cachemgr.keys import TOKEN_BYTES, pack, packed_bytes
from cachemgr.purging import is_remembered, purge
from cachemgr.remembering import ManagerMemory
from cachemgr.retention import HINT, SESSION, check_duration
from cachemgr.rules import Rule
from cachemgr.validation import check_id

if TYPE_CHECKING:
    from cachemgr.api import PoolView
    from cachemgr.block import Node
    from cachemgr.pool import Pool


class ManagerAdmin(ManagerMemory):
    """The steering half of the cache manager."""

    # Blocks

    def purge(self, selected: BlockFilter, *, validate_only: bool, skip_used: bool = False) -> Purged:
        """Drops cached blocks with the blocks behind them.

        Raises InvalidField, UnknownPoolError, UnknownExecutorError, BlocksInUseError.
        """
        self._now()
        self.check_filter(selected)
        pools = self.filtered(selected, "filter.pool_id")
        purged = purge(pools, selected, validate_only=validate_only, skip_used=skip_used)
        if not validate_only:
            for executor_id in {pool.executor_id for pool, _ in pools}:
                recovery = self._executors[executor_id].recovery
                if recovery is not None:
                    recovery.forget(partial(is_remembered, selected))
        return purged

    def forget(self, target: ForgetTarget, *, validate_only: bool) -> Forgotten:
        """Takes blocks out of every tier and has their bytes overwritten. Raises InvalidField, UnknownExecutorError."""
        self._now()
        if target == ForgetTarget():
            raise InvalidField("target", "must name a salt, a session or a prefix")
        for field in ("salt", "session_id"):
            if getattr(target, field) == "":
                raise InvalidField(field, "must not be empty")
        executors = list(self._executors.values())
        if target.prefix is not None:
            executors = self.check_prefix("prefix", target.prefix)
        if not validate_only:
            for executor in executors:
                if executor.recovery is not None:
                    executor.recovery.forget(is_remembered_of(executor, target))
        return forget(executors, target, self._events, validate_only=validate_only)

    # Pools

    def update_pool(self, pool_id: str, total_blocks: int, etag: str, *, validate_only: bool) -> PoolView:
        """Changes how many device blocks a pool may use; only free ones come and go.

        Raises InvalidField, UnknownPoolError, StalePoolError, PoolInUseError.
        """
        self._now()
        pool = self._pool(pool_id, "pool.pool_id")
        executor = self._executors[pool.executor_id]
        if etag and etag != str(pool.share_number):
            raise StalePoolError("the pool has changed since", fields={"pool.etag": "is not the current one"})
        if not 1 <= total_blocks <= pool.spec.num_blocks:
            raise InvalidField("pool.total_blocks", f"must be from 1 to the {pool.spec.num_blocks} slots of the pool")
        memory = executor.spec.memory_bytes
        if memory is not None:
            others = sum(other.device.total * other.spec.block_bytes for other in executor.pools if other is not pool)
            if others + total_blocks * pool.spec.block_bytes > memory:
                most = (memory - others) // max(1, pool.spec.block_bytes)
                raise InvalidField("pool.total_blocks", f"must be at most {most}: make another pool smaller first")
        floors = self._accounts.floors[TierKind.DEVICE]
        if total_blocks < min(floors, pool.device.total):
            raise PoolInUseError(
                f"the floors of quotas are {floors} blocks together",
                fields={"pool.total_blocks": f"must be at least {floors}"},
            )
        shrink = pool.device.total - total_blocks
        if shrink > pool.device.free_for(None):
            raise PoolInUseError(
                f"{shrink} blocks should go and {pool.device.free_for(None)} are free",
                fields={"pool.total_blocks": "would take blocks that are in use or protected"},
            )
        if not validate_only:
            pool.resize(total_blocks)
            self._shares[pool_id] = PoolShare(pool_id, total_blocks, pool.spec.num_blocks, pool.share_number)
            self._tell(self._shares[pool_id])
        return pool.pool_view()

    # Rules

    def create_rule(self, spec: RetentionRule, *, validate_only: bool) -> tuple[RetentionRule, int]:
        """Makes a rule; returns it and the cached blocks that it is about. Raises InvalidField, RuleExistsError."""
        self._now()
        rule = self._rules.new(spec)
        if not validate_only:
            self._rules.add(rule)
            self._tell(rule.spec)
        return rule.spec, self._count_matching(rule)

    def update_rule(
        self, spec: RetentionRule, mask: tuple[str, ...], *, validate_only: bool
    ) -> tuple[RetentionRule, int, int]:
        """Changes a rule and its leases; returns it, how many leases changed, and the cached blocks it is about.

        Raises InvalidField, UnknownRuleError, StaleRuleError.
        """
        self._now()
        changed = self._rules.changed(spec, mask)
        leased = self._leased(self._rules.get(spec.name).holder)
        if validate_only:
            return changed, len(leased), self._count_matching(Rule(changed))
        rule = self._rules.get(spec.name)
        moved = rule.spec.match != changed.match
        self._rules.update(changed)
        self._tell(rule.spec)
        wish = rule.wish()
        meant = {block for _, block in self._matching(rule)} if moved else set()
        for pool, block in leased:
            if wish is None or (moved and block not in meant):
                self._leases.revoke(pool, block, rule.holder, RemovalCause.RULE_CHANGED)
            else:
                pool.grant(block, wish)
        return rule.spec, len(leased), self._count_matching(rule)

    def delete_rule(self, name: str, etag: str, *, validate_only: bool) -> int:
        """Deletes a rule; returns how many leases end with it. Raises UnknownRuleError, StaleRuleError."""
        self._now()
        rule = self._rules.doomed(name, etag)
        leased = self._leased(rule.holder)
        if not validate_only:
            self._rules.remove(rule)
            self._tell(rule.spec)
            for pool, block in leased:
                self._leases.revoke(pool, block, rule.holder, RemovalCause.RULE_CHANGED)
        return len(leased)

    def _leased(self, holder: str) -> list[tuple[Pool, Block]]:
        return [(pool, block) for pool in self._selected("") for block in pool.leased_to(holder)]

    def _count_matching(self, rule: Rule) -> int:
        return sum(1 for _ in self._matching(rule))

    def _matching(self, rule: Rule) -> Iterator[tuple[Pool, Block]]:
        """Cached blocks that a rule is about."""
        match = rule.spec.match
        packed = packed_bytes(pack(match.prefix_token_ids))
        for executor in self._executors.values():
            for pool in executor.pools:
                for block in pool.index.values():
                    domain = block.domain
                    if (
                        domain is not None
                        and match.salt in (None, domain.salt)
                        and match.tenant_id in (None, domain.tenant_id)
                        and match.adapter_id in (None, domain.adapter_id)
                        and rule.covers(block.depth * pool.block_size)
                        and _begins(packed, block, pool.block_size)
                    ):
                        yield pool, block

    # Quotas

    def set_quota(self, quota: Quota, *, validate_only: bool) -> Quota:
        """Sets what an account keeps and may have. Raises InvalidField, QuotaTooLargeError."""
        self._now()
        key = _account_key(quota, "quota.")
        for tier in ("device", "host"):
            floor, ceiling = getattr(quota, f"{tier}_floor"), getattr(quota, f"{tier}_ceiling")
            if ceiling is not None and ceiling < floor:
                raise InvalidField(f"quota.{tier}_ceiling_blocks", "must not be less than the floor")
        known = self._accounts.get(key)
        for pool in self._selected(""):
            for field, one in (("device_floor", pool.device), ("host_floor", pool.tiers[1])):
                total, before = one.total, 0 if known is None else known.floor(one.kind)
                floors = self._accounts.floors[one.kind] - before + getattr(quota, field)
                own = getattr(quota, field)
                if floors > total and own:
                    raise QuotaTooLargeError(
                        f"floors of {floors} blocks together do not fit into the {total} of {pool.pool_id}",
                        fields={f"quota.{field}_blocks": f"must be at most {max(0, total - floors + own)}"},
                    )
        if not validate_only:
            account = self._accounts.set(quota)
            if account is None:
                self._change_accounts()
            else:
                for pool in self._selected(""):
                    for one in pool.tiers:
                        one.set_quota(account)
            self._tell(quota)
        return quota

    def delete_quota(self, quota: Quota) -> None:
        """Deletes an account's quota. Raises InvalidField, UnknownQuotaError."""
        self._now()
        key = _account_key(quota)
        if key not in self._accounts:
            raise UnknownQuotaError("there is no quota of this account", fields={key[0]: "has no quota"})
        self._accounts.remove(key)
        self._change_accounts()
        self._tell(quota)

    def hint(self, prefix: Prefix, hints: Hints, session_id: str | None) -> tuple[list[HintAnswer], list[Transfer]]:
        """Carries out hints about a cached prefix. Raises InvalidField, UnknownExecutorError."""
        now = self._now()
        check_hints("hints", hints)
        executors = self.check_prefix("prefix", prefix)
        if session_id is None:
            # It holds the leases: senders without one would end each other's.
            check_id("hints.message_id", hints.message_id)
        else:
            check_id("session_id", session_id)
        who = HINT + hints.message_id if session_id is None else SESSION + session_id
        prefixes = [(executor, keys_of(executor, prefix)) for executor in executors]
        runner = HintRunner(prefixes, who, self.config, now)
        return runner.run(hints), runner.transfers

    # Pins and holds

    def pin_prefix(self, prefix: Prefix, owner: str, duration: float, *, validate_only: bool) -> list[Pinned]:
        """Pins a cached prefix in each executor that has it. Raises InvalidField, UnknownExecutorError."""
        now = self._now()
        executors = self.check_prefix("prefix", prefix)
        check_id("owner", owner)
        check_duration("duration", duration)
        pinned = []
        for executor in executors:
            keys = keys_of(executor, prefix)
            blocks = [(pool, block) for pool in executor.pools for block in chain(pool, keys)]
            pinned.append(executor.holds.pin(blocks, owner, now, duration, validate_only=validate_only))
        return pinned

    def release_hold(self, name: str) -> int:
        """Ends a hold or pin; returns the blocks that may be taken now. Raises UnknownHoldError."""
        self._now()
        for executor in self._executors.values():
            hold = executor.holds.get(name)
            if hold is not None:
                return executor.holds.release(hold)
        raise UnknownHoldError(f"no hold {name}", fields={"name": "is not known"})


def _begins(packed: bytes, block: Block, block_size: int) -> bool:
    """Whether what leads to a block, and its own part of them, are these tokens."""
    node: Node | None = block
    while packed and isinstance(node, Block):
        start = node.depth * block_size * TOKEN_BYTES
        if not node.tokens.startswith(packed[start : start + len(node.tokens)]):
            return False
        node = node.parent
    return True


def _account_key(quota: Quota, path: str = "") -> tuple[str, str]:
    if (quota.tenant_id is None) == (quota.salt is None):
        raise InvalidField(f"{path}account", "must name a tenant or a salt")
    field, name = ("tenant_id", quota.tenant_id) if quota.tenant_id is not None else ("salt", quota.salt)
    if not name:
        raise InvalidField(f"{path}{field}", "must not be empty")
    if field == "tenant_id":
        check_id(f"{path}{field}", name)
    return field, name
