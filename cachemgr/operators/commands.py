"""Commands of operators: rules, quotas, pins, shares of pools, purging and forgetting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cachemgr import slices
from cachemgr.blocks.block import Account
from cachemgr.blocks.prefix_tree import children_of
from cachemgr.errors import (
    PoolInUseError,
    QuotaTooLargeError,
    StalePoolError,
    UnknownHoldError,
    UnknownQuotaError,
)
from cachemgr.operators.forget import ForgetHistory, Forgetting
from cachemgr.operators.hints import HintRunner
from cachemgr.operators.operator_journal import Kind, OperatorJournal, entry_name
from cachemgr.operators.purge import purge, stored_filter
from cachemgr.retention.bounds import check_duration
from cachemgr.retention.hint_actions import check as check_hints
from cachemgr.retention.priority import HINT, SESSION
from cachemgr.retention.rule_book import Rule
from cachemgr.sequences.holds import Pinned, with_ancestors
from cachemgr.sequences.prefix_match import cached_chain, keys_of
from cachemgr.sequences.registration import fits
from cachemgr.slices import Slices, read_batches, write_batches
from cachemgr.state import pool_view
from cachemgr.types import (
    AccountKey,
    BlockFilter,
    ForgetTarget,
    Forgotten,
    HintAnswer,
    Hints,
    PoolShare,
    Prefix,
    Purged,
    Quota,
    RemovalCause,
    Resized,
    RetentionRule,
    TierKind,
    Transfer,
)
from cachemgr.validation import check_id
from protos.errors import InvalidField
from protos.kvcommon.tokens import TOKEN_BYTES, pack, packed_bytes

if TYPE_CHECKING:
    from cachemgr.blocks.block import Block, Node
    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.sequences.clients import Executor
    from cachemgr.state import ManagerState


_KINDS = {RetentionRule: Kind.RULE, Quota: Kind.QUOTA, PoolShare: Kind.SHARE}


class OperatorCommands:
    """All operators' calls that change something. Calls that may touch very many blocks yield between slices."""

    def __init__(self, state: ManagerState, forgotten: ForgetHistory, journal: OperatorJournal) -> None:
        self._state = state
        self._forgotten = forgotten
        self._journal = journal

    def _report(self, entry: RetentionRule | Quota | PoolShare) -> None:
        """Reports to the journal that an entry has changed or was deleted."""
        self._journal.operator_changed(_KINDS[type(entry)], entry_name(entry))

    # Blocks

    def purge(self, selected: BlockFilter, *, validate_only: bool, skip_used: bool = False) -> Slices[Purged]:
        """Drops blocks that are cached when the call begins and not in use, with their descendants.

        Matching stored blocks that are not restored yet are overwritten instead of restored.
        Raises InvalidField, UnknownPoolError, UnknownExecutorError, BlocksInUseError.
        """
        self._state.begin()
        pools = self._state.filtered(selected, "filter.pool_id")
        purged = yield from purge(pools, selected, validate_only=validate_only, skip_used=skip_used)
        if not validate_only:
            for executor in dict.fromkeys(executor for executor, _, _ in pools):
                if executor.recovery is not None:
                    groups = {pool.spec.group for owner, pool, _ in pools if owner is executor}
                    executor.recovery.purge(stored_filter(executor, groups, selected))
        return purged

    def forget(self, target: ForgetTarget, *, validate_only: bool) -> Slices[Forgotten]:
        """Removes blocks from every tier and has their bytes overwritten. Raises InvalidField, UnknownExecutorError.

        See `Forgetting` for sequences that are admitted meanwhile. Stored blocks that are not in the index again yet
        are overwritten instead of restored.
        """
        self._state.begin()
        if target == ForgetTarget():
            raise InvalidField("target", "must name a salt, a session or a prefix")
        for field in ("salt", "session_id"):
            value = getattr(target, field)
            if value is not None:
                check_id(field, value)
        executors = list(self._state.executors.values())
        if target.prefix is not None:
            executors = self._state.check_prefix("prefix", target.prefix)
        forgetting = Forgetting(executors, target, self._state.events, self._state.executors)
        if validate_only:
            return (yield from forgetting.slices(validate_only=True))
        number = self._forgotten.begin(forgetting)
        for executor in executors:
            if executor.recovery is not None:
                executor.recovery.forgotten.add(target)
        receipt = yield from forgetting.slices(validate_only=False)
        self._forgotten.end(number)
        return receipt

    # Pools

    def update_pool(self, pool_id: str, total_blocks: int, etag: str, *, validate_only: bool) -> Slices[Resized]:
        """Changes how many device blocks a pool may use, at once; the pool gives up free blocks in slices.

        Cached blocks are offloaded if allowed. If cached blocks come into use meanwhile, such as by a pin, the pool
        gives up the missing slots when blocks become free. If the pins' budget is now too small, the oldest pins become
        leases.
        Raises InvalidField, UnknownPoolError, StalePoolError, PoolInUseError.
        """
        now = self._state.begin()
        pool = self._state.pool(pool_id, "pool.pool_id")
        executor = self._state.executors[pool.executor_id]
        if etag and etag != str(pool.share_number):
            raise StalePoolError("the pool has changed since", fields={"pool.etag": "is not the current one"})
        if not 1 <= total_blocks <= pool.spec.num_blocks:
            fixed = "" if executor.spec.memory_bytes is not None else "; the pools of this executor have fixed memory"
            limit = f"must be from 1 to the {pool.spec.num_blocks} slots of the pool{fixed}"
            raise InvalidField("pool.total_blocks", limit)
        self._check_memory(executor, pool, total_blocks)
        floors = self._state.accounts.floors[TierKind.DEVICE]
        if total_blocks < min(floors, pool.device.total):
            raise PoolInUseError(
                f"the floors of quotas are {floors} blocks together",
                fields={"pool.total_blocks": f"must be at least {floors}"},
            )
        shrink = pool.device.total - total_blocks
        if shrink > pool.device.free_for(None):
            raise PoolInUseError(
                f"{shrink} blocks should be withheld and {pool.device.free_for(None)} are free",
                fields={"pool.total_blocks": "would withhold blocks that are in use or protected"},
            )
        degraded = executor.holds.beyond_budget({pool: total_blocks})
        names = tuple(hold.name for hold in degraded)
        if validate_only:
            left = yield from pool.estimate_left(total_blocks)
        else:
            number = pool.share_number + 1
            self._state.shares[pool_id] = PoolShare(pool_id, total_blocks, pool.spec.num_blocks, number)
            self._report(self._state.shares[pool_id])
            pool.set_total(total_blocks)
            executor.holds.degrade(degraded, now)
            left = yield from pool.withhold_in_slices()
        return Resized(pool_view(pool), names, left)

    def _check_memory(self, executor: Executor, pool: BlockPool, total_blocks: int) -> None:
        """Raises InvalidField or PoolInUseError if the memory cannot hold `total_blocks` blocks of a pool."""
        memory, growth = executor.spec.memory_bytes, total_blocks - pool.device.total
        if memory is None or growth <= 0:
            return
        used = sum(other.device.total * other.spec.block_bytes for other in executor.pools)
        most = pool.device.total + (memory - used) // pool.spec.block_bytes
        if total_blocks > most:
            raise InvalidField("pool.total_blocks", f"must be at most {most}: make another pool smaller first")
        going = [(other, len(other.device.clearing) + other.device.to_withhold) for other in executor.pools]
        clearing = sum(count * other.spec.block_bytes for other, count in going)
        most = min(pool.device.num_ready, (memory - used - clearing) // pool.spec.block_bytes)
        if growth > most:
            count = sum(count for _, count in going)
            text = f"must be at most {pool.device.total + max(0, most)} until the executor has freed {count} blocks"
            raise PoolInUseError(f"the executor has yet to free {count} blocks", fields={"pool.total_blocks": text})

    # Rules

    def create_rule(self, spec: RetentionRule, *, validate_only: bool) -> Slices[tuple[RetentionRule, int]]:
        """Makes a rule, which applies at once; returns the rule and how many cached blocks it matches.

        Raises InvalidField, RuleExistsError.
        """
        self._state.begin()
        rule = self._state.rules.new(spec)
        if not validate_only:
            self._state.rules.add(rule)
            self._report(rule.spec)
        made = rule.spec
        matching = yield from self._matching(Rule(made))
        return made, len(matching)

    def update_rule(
        self, spec: RetentionRule, mask: tuple[str, ...], *, validate_only: bool
    ) -> Slices[tuple[RetentionRule, int, int]]:
        """Changes a rule at once, and its leases in slices.

        Returns the rule, the number of its changed leases, and the number of cached blocks that it matches.

        Raises InvalidField, UnknownRuleError, StaleRuleError.
        """
        self._state.begin()
        changed = self._state.rules.changed(spec, mask)
        rule = self._state.rules.get(spec.name)
        moved = rule.spec.match != changed.match
        if not validate_only:
            self._state.rules.update(changed)
            changed = rule.spec
            self._report(changed)
        leased = self._state.leases.of_rule(rule.holder)
        matching = yield from self._matching(Rule(changed))
        if validate_only:
            return changed, len(leased), len(matching)
        request = Rule(changed).request()
        for part in write_batches(leased):
            for lease in part:
                block = lease.block
                # The executor may have been lost since the last slice.
                if block is None or lease.pool.is_lost:
                    continue
                if request is None or (moved and block not in matching):
                    self._state.leases.revoke(lease.pool, block, rule.holder, RemovalCause.RULE_CHANGED)
                else:
                    self._state.leases.grant(lease.pool, block, request)
            yield
        return changed, len(leased), len(matching)

    def delete_rule(self, name: str, etag: str, *, validate_only: bool) -> Slices[int]:
        """Deletes a rule at once, and its leases in slices; returns how many leases end with the rule.

        Raises UnknownRuleError, StaleRuleError.
        """
        self._state.begin()
        rule = self._state.rules.get_for_delete(name, etag)
        if not validate_only:
            self._state.rules.remove(rule)
            self._report(rule.spec)
        leased = self._state.leases.of_rule(rule.holder)
        for part in write_batches(() if validate_only else leased):
            for lease in part:
                if lease.block is not None and not lease.pool.is_lost:
                    self._state.leases.revoke(lease.pool, lease.block, rule.holder, RemovalCause.RULE_CHANGED)
            yield
        return len(leased)

    def _matching(self, rule: Rule) -> Slices[set[Block]]:
        """Cached blocks that a rule matches."""
        match = rule.spec.match
        found: set[Block] = set()
        for executor in list(self._state.executors.values()):
            for pool in executor.pools:
                meant: Iterable[Block]
                if match.prefix_token_ids:
                    meant = yield from _blocks_of_prefix(pool, packed_bytes(pack(match.prefix_token_ids)))
                else:
                    keys = list(pool.tree.by_key)
                    yield
                    meant = (block for key in keys if (block := pool.tree.by_key.get(key)) is not None)
                for part in read_batches(meant):
                    for block in part:
                        scope = block.scope
                        if (
                            scope is not None
                            and match.salt in (None, scope.salt)
                            and match.tenant_id in (None, scope.tenant_id)
                            and match.adapter_id in (None, scope.adapter_id)
                            and rule.covers(block.depth * pool.block_size)
                        ):
                            found.add(block)
                    yield
        return found

    # Quotas

    def set_quota(self, quota: Quota, *, validate_only: bool) -> Slices[Quota]:
        """Sets an account's quota at once; in slices, cached blocks begin to count against a new quota.

        Raises InvalidField, QuotaTooLargeError.
        """
        self._state.begin()
        self._check_quota(quota)
        if not validate_only:
            account = self._state.accounts.set(quota)
            self._report(quota)
            if account is None:
                yield from self._change_accounts([Account(quota).key])
            else:
                for pool in self._state.pools():
                    for one in pool.tiers:
                        one.accounts.set_quota(account)
        return quota

    def _check_quota(self, quota: Quota) -> None:
        key = _account_key(quota, "quota.")
        for tier in ("device", "host"):
            floor, ceiling = getattr(quota, f"{tier}_floor"), getattr(quota, f"{tier}_ceiling")
            if ceiling is not None and ceiling < floor:
                raise InvalidField(f"quota.{tier}_ceiling_blocks", "must not be less than the floor")
        known = self._state.accounts.get(key)
        for pool in self._state.pools():
            for field, one in (("device_floor", pool.device), ("host_floor", pool.tiers[1])):
                total, before = one.total, 0 if known is None else known.floor(one.kind)
                floors = self._state.accounts.floors[one.kind] - before + getattr(quota, field)
                own = getattr(quota, field)
                if floors > total and own:
                    raise QuotaTooLargeError(
                        f"floors of {floors} blocks together do not fit into the {total} of {pool.pool_id}",
                        fields={f"quota.{field}_blocks": f"must be at most {max(0, total - floors + own)}"},
                    )

    def delete_quota(self, quota: Quota) -> Slices[None]:
        """Deletes an account's quota at once; in slices, cached blocks cease to count against it.

        Raises InvalidField, UnknownQuotaError.
        """
        self._state.begin()
        key = _account_key(quota)
        if key not in self._state.accounts:
            raise UnknownQuotaError("there is no quota of this account", fields={key[0]: "has no quota"})
        self._state.accounts.remove(key)
        self._report(quota)
        yield from self._change_accounts([key])

    def hint(self, prefix: Prefix, hints: Hints, session_id: str | None) -> tuple[list[HintAnswer], list[Transfer]]:
        """Carries out hints about a cached prefix; returns one answer per hint, and the copies that the hints began.

        Raises InvalidField, UnknownExecutorError.
        """
        now = self._state.begin()
        check_hints("hints", hints)
        executors = self._state.check_prefix("prefix", prefix)
        if session_id is None:
            # The message id names the leases' holder; without an id, senders would end each other's leases.
            check_id("hints.message_id", hints.message_id)
        else:
            check_id("session_id", session_id)
        who = HINT + hints.message_id if session_id is None else SESSION + session_id
        prefixes = [(executor, keys_of(executor.spec, prefix)) for executor in executors]
        runner = HintRunner(prefixes, who, self._state.config, now)
        return runner.run(hints), runner.transfers

    # Pins and holds

    def pin_prefix(self, prefix: Prefix, owner: str, duration: float, *, validate_only: bool) -> list[Pinned]:
        """Pins a cached prefix in each executor that has it; returns one answer per executor.

        Raises InvalidField, UnknownExecutorError.
        """
        now = self._state.begin()
        executors = self._state.check_prefix("prefix", prefix)
        check_id("owner", owner)
        check_duration("duration", duration)
        pinned = []
        for executor in executors:
            keys = keys_of(executor.spec, prefix)
            blocks = [(pool, block) for pool in executor.pools for block in cached_chain(pool, keys)]
            pinned.append(executor.holds.pin(with_ancestors(blocks), owner, now, duration, validate_only=validate_only))
        return pinned

    def release_hold(self, name: str) -> int:
        """Ends a hold or pin; returns how many blocks became evictable. Raises UnknownHoldError."""
        self._state.begin()
        for executor in self._state.executors.values():
            hold = executor.holds.get(name)
            if hold is not None:
                return executor.holds.release(hold)
        raise UnknownHoldError(f"there is no hold {name!r}", fields={"name": "is not known"})

    # What an earlier manager knew

    def restore(self, rules: Iterable[RetentionRule], quotas: Iterable[Quota], shares: Iterable[PoolShare]) -> None:
        """Restores the entries of an earlier manager. Entries that have changed since then are newer and stay.

        Rules and quotas apply from now on; if very many cached blocks must be counted against new quotas, later calls
        of `expire` do so. A share applies at once if its pool has the size that the share was set for, and enough free
        blocks and memory; otherwise, from the next registration of the executor.
        """
        self._state.begin()
        for spec in rules:
            self._state.rules.restore(spec)
        new = [quota for quota in quotas if Account(quota).key not in self._state.accounts]
        for quota in new:
            self._state.accounts.set(quota)
        if new:
            self._state.run_in_slices(self._change_accounts([Account(quota).key for quota in new]))
        new_shares = {share.pool_id: share for share in shares if share.pool_id not in self._state.shares}
        self._state.shares |= new_shares
        # Shrinking pools come first: other pools get their memory.
        known = [(pool, new_shares[pool.pool_id]) for pool in self._state.pools() if pool.pool_id in new_shares]
        for pool, share in sorted(known, key=lambda pair: pair[1].total_blocks - pair[0].device.total):
            if self._may_have(pool, share):
                pool.resize(share.total_blocks)
                pool.share_number = share.number
                holds = self._state.executors[pool.executor_id].holds
                holds.degrade(holds.beyond_budget(), self._state.leases.now)

    def _may_have(self, pool: BlockPool, share: PoolShare) -> bool:
        executor, shrink = self._state.executors[pool.executor_id], pool.device.total - share.total_blocks
        memory = executor.spec.memory_bytes
        need = sum(one.device.total * one.spec.block_bytes for one in executor.pools) - shrink * pool.spec.block_bytes
        possible = -pool.device.num_ready <= shrink <= pool.device.free_for(None)
        return fits(pool, share) and possible and (memory is None or need <= memory)

    def _change_accounts(self, keys: list[AccountKey]) -> Slices[None]:
        changing = [executor.change_accounts(keys) for executor in self._state.executors.values()]
        # All first slices run together; after them, no new block counts against an earlier quota.
        for change in changing:
            next(change, None)
        for change in changing:
            yield
            yield from change


def _blocks_of_prefix(pool: BlockPool, packed: bytes) -> Slices[list[Block]]:
    """Cached blocks on the path of these tokens; the last tokens may match only the beginning of a block."""
    found: list[Block] = []
    nodes: list[Node] = list(pool.tree.tombstones.values())
    while nodes:
        seen = 0
        while nodes and seen < slices.LOOKS:
            for block in children_of(nodes.pop()):
                seen += 1
                start = block.depth * pool.block_size * TOKEN_BYTES
                if start < len(packed) and block.tokens.startswith(packed[start : start + len(block.tokens)]):
                    found.append(block)
                    nodes.append(block)
        yield
    return found


def _account_key(quota: Quota, path: str = "") -> tuple[str, str]:
    if (quota.tenant_id is None) == (quota.salt is None):
        raise InvalidField(f"{path}account", "must name a tenant or a salt")
    field, name = ("tenant_id", quota.tenant_id) if quota.tenant_id is not None else ("salt", quota.salt)
    check_id(f"{path}{field}", name or "")
    return field, name or ""
