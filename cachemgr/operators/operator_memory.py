"""What outlives a manager beside its blocks: rules, quotas, shares of pools, and pins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol

from cachemgr.blocks.steps import Steps
from cachemgr.blocks.tier import Account
from cachemgr.operators.queries import ManagerViews
from cachemgr.operators.types import PoolShare, Quota, RetentionRule
from cachemgr.persistence.operator_records import Entry, Kind, PinRecord, entry_name
from cachemgr.retention.priority import RULE
from cachemgr.sequences.executor_spec import fits
from cachemgr.types import AccountKey

if TYPE_CHECKING:
    from cachemgr.blocks.block_pool import Pool
    from cachemgr.operators.pins import Hold
    from cachemgr.sequences.clients import Executor


class OperatorJournal(Protocol):
    """Hears of every change of what operators said, at once. Must not fail or block."""

    def operator_changed(self, kind: Kind, name: str, executor_id: str = "") -> None:
        """The entry of this name is new, another, or gone. `executor_id` is set for pins."""


class NoOperatorJournal:
    """Keeps nothing."""

    def operator_changed(self, kind: Kind, name: str, executor_id: str = "") -> None:
        """Forgets it."""


_KINDS = {RetentionRule: Kind.RULE, Quota: Kind.QUOTA, PoolShare: Kind.SHARE}


class ManagerMemory(ManagerViews):
    """The remembering part of the cache manager; the whole owns the fields."""

    _operator_journal: OperatorJournal

    def _now(self) -> float:
        raise NotImplementedError

    def _carry_out(self, call: Steps[None]) -> None:
        raise NotImplementedError

    def entries(self, kind: Kind, executor_id: str = "") -> Iterator[Entry]:
        """All entries of a kind; pins only of one executor, oldest first."""
        match kind:
            case Kind.RULE:
                yield from self.rules()
            case Kind.QUOTA:
                yield from (account.quota for account in self._accounts.values())
            case Kind.SHARE:
                yield from self._shares.values()
            case Kind.PIN:
                executor = self._executors.get(executor_id)
                for hold in () if executor is None else executor.holds:
                    if hold.pin:
                        yield self._pin_record(hold)

    def entry(self, kind: Kind, name: str, executor_id: str = "") -> Entry | None:
        """One entry as it is now, None when there is none."""
        match kind:
            case Kind.RULE:
                return self.rule(name) if name in self._rules else None
            case Kind.QUOTA:
                field, _, account = name.partition("/")
                found = self._accounts.get((field, account))
                return None if found is None else found.quota
            case Kind.SHARE:
                return self._shares.get(name)
            case Kind.PIN:
                executor = self._executors.get(executor_id)
                hold = None if executor is None else executor.holds.get(name)
                return None if hold is None else self._pin_record(hold)

    def _pin_record(self, hold: Hold) -> PinRecord:
        ((owner, end),) = hold.owners.items()
        blocks = tuple((pool.spec.group, block.key) for pool, block in hold.blocks)
        # Below 0 until it is noticed that the time is over: its end is what it was.
        return PinRecord(hold.name, owner, end - self._leases.now, blocks)

    def _tell(self, entry: RetentionRule | Quota | PoolShare) -> None:
        """The journal hears of an entry that has changed or is gone."""
        self._operator_journal.operator_changed(_KINDS[type(entry)], entry_name(entry))

    def restore_operators(
        self, rules: Iterable[RetentionRule], quotas: Iterable[Quota], shares: Iterable[PoolShare]
    ) -> None:
        """Puts back what an earlier manager knew. What this one has heard since is newer and stays.

        Rules and quotas apply from now on; very many cached blocks come to count against new quotas in later calls of
        `expire`. A share of a pool that is there already applies when it fits, else from the
        executor's next registration on.
        """
        self._now()
        for spec in rules:
            self._rules.restore(spec)
        new = [quota for quota in quotas if Account(quota).key not in self._accounts]
        for quota in new:
            self._accounts.set(quota)
        if new:
            self._carry_out(self._change_accounts([Account(quota).key for quota in new]))
        new_shares = {share.pool_id: share for share in shares if share.pool_id not in self._shares}
        self._shares |= new_shares
        # What one pool gives up is what another gets.
        known = [(pool, new_shares[pool.pool_id]) for pool in self._selected("") if pool.pool_id in new_shares]
        for pool, share in sorted(known, key=lambda pair: pair[1].total_blocks - pair[0].device.total):
            if self._may_have(pool, share):
                pool.resize(share.total_blocks)
                pool.share_number = share.number

    def _may_have(self, pool: Pool, share: PoolShare) -> bool:
        executor, shrink = self._executors[pool.executor_id], pool.device.total - share.total_blocks
        memory = executor.spec.memory_bytes
        need = sum(one.device.total * one.spec.block_bytes for one in executor.pools) - shrink * pool.spec.block_bytes
        possible = -pool.device.num_ready <= shrink <= pool.device.free_for(None)
        return fits(pool, share) and possible and (memory is None or need <= memory)

    def _change_accounts(self, keys: list[AccountKey]) -> Steps[None]:
        """Accounts have come or gone."""
        changing = [executor.change_accounts(keys) for executor in self._executors.values()]
        # All first steps together: from then on nothing counts against the quotas of before.
        for steps in changing:
            next(steps, None)
        for steps in changing:
            yield
            yield from steps

    def _is_deleted_rule(self, holder: str) -> bool:
        """Whether a lease's holder is a rule that is gone: blocks may have been remembered before."""
        return holder.startswith(RULE) and holder.removeprefix(RULE) not in self._rules

    def _hear_of_pins(self, executor: Executor) -> None:
        executor.holds.on_pin = partial(self._pin_changed, executor.executor_id)

    def _restore_pins(self, executor: Executor, pins: Iterable[PinRecord]) -> None:
        """Pins the blocks again that have come back, oldest pin first."""
        now = self._leases.now
        for pin in sorted(pins, key=lambda pin: pin.number):
            blocks = [
                (executor.pools[group], block)
                for group, key in pin.blocks
                if group < len(executor.pools) and (block := executor.pools[group].index.get(key)) is not None
            ]
            if blocks and pin.remaining > 0:
                executor.holds.restore(pin.name, blocks, pin.owner, now + pin.remaining)
            else:
                self._pin_changed(executor.executor_id, pin.name)
        executor.holds.keep_budget(now)

    def _lose_pins(self, executor: Executor) -> None:
        """What an executor had pinned is about to be gone for good."""
        for hold in executor.holds:
            if hold.pin:
                self._pin_changed(executor.executor_id, hold.name)

    def _pin_changed(self, executor_id: str, name: str) -> None:
        self._operator_journal.operator_changed(Kind.PIN, name, executor_id)


def _field(quota: Quota) -> str:
    return "tenant_id" if quota.tenant_id is not None else "salt"
