"""What operators and agents do at random to a simulated world."""

import contextlib
from functools import partial
from inspect import GEN_SUSPENDED, getgeneratorstate
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from cachemgr.blocks import steps
from cachemgr.errors import InvalidField, PoolInUseError, QuotaTooLargeError, UnknownQuotaError, UnknownRuleError
from cachemgr.retention.rules import FIELDS
from cachemgr.sequences.clients import account_for
from cachemgr.types import (
    BlockFilter,
    ForgetTarget,
    HintAction,
    Hints,
    Prefix,
    Quota,
    RemovalCause,
    RetentionRule,
    RuleAction,
    RuleMatch,
)
from tests.unit.cachemgr.evicting_world import asked
from tests.unit.cachemgr.live import BLOCK
from tests.unit.cachemgr.lookup import cached_blocks
from tests.unit.cachemgr.world import World

# Prompts that share beginnings of every length.
BASES = [[0] * 20, [0, 0, 0, 0, 1] + [0] * 15, [1, 2] * 10]
SALTS = [None, None, None, "a"]
TENANTS = [None, None, "t", "u"]
ACTIONS = [
    RuleAction(priority=80),
    RuleAction(priority=10, duration=4.0),
    RuleAction(offload_min_priority=60),
    RuleAction(pin_duration=5.0),
    RuleAction(no_store=True),
    RuleAction(eviction_policy=asked("SLIDING_WINDOW", recent_tokens=6)),
    RuleAction(eviction_policy=asked("NONE")),
]
HINTS = [
    ("Retain", {"priority": 70, "duration_seconds": 3}),
    ("Pin", {"owner": "agent", "duration_seconds": 4}),
    ("Demote", {}),
    ("Demote", {"tier": "host"}),
    ("Demote", {"tier": "host"}),
    ("Prefetch", {}),
    ("Prefetch", {}),
    ("Share", {}),
]


class Operators(RuleBasedStateMachine):
    """Operations on the cache as a whole; the machine that inherits them makes the world."""

    world: World
    # A call that is carried out in steps.
    long_call = None

    def prefix(self, base, cut, salt=None):
        return Prefix(tuple(BASES[base % len(BASES)][:cut]), salt=salt)

    @rule(salt=st.sampled_from([None, "a"]), priority=st.sampled_from([None, 0, 10, 35]), chance=st.integers(0, 3))
    def purge(self, salt, priority, chance):
        world = self.world
        if chance != 3:
            return
        selected = BlockFilter(salt=salt, max_priority=priority)
        said = world.manager.operators.purge(selected, validate_only=True)
        before = cached_blocks(world)
        assert world.manager.operators.purge(selected, validate_only=False, skip_used=True) == said
        assert before - said.purged_blocks == cached_blocks(world)
        self.removed_by_others(said.purged_blocks)

    @rule(kind=st.integers(0, 2), base=st.integers(0, 2), cut=st.integers(1, 18), chance=st.integers(0, 3))
    def forget(self, kind, base, cut, chance):
        manager = self.world.manager
        if chance != 3:
            return
        target = [ForgetTarget(salt="a"), ForgetTarget(session_id="x"), ForgetTarget(prefix=self.prefix(base, cut))]
        said = manager.operators.forget(target[kind], validate_only=True)
        assert manager.operators.forget(target[kind], validate_only=False) == said
        self.removed_by_others(sum(said.removed.values()))
        again = manager.operators.forget(target[kind], validate_only=True)
        assert again.removed == {}
        assert again.shared_blocks == said.shared_blocks

    @rule(kind=st.integers(0, 10), base=st.integers(0, 2), cut=st.integers(1, 18))
    def begin_long_call(self, kind, base, cut):
        """Others follow between its steps."""
        if self.long_call is None:
            quotas = [quota for quota, *_ in self.world.manager.queries.quotas()] or [QUOTA]
            rule = RetentionRule("r", match=RuleMatch(prefix_token_ids=tuple(BASES[base][:cut])), action=ACTIONS[base])
            ours = [QUOTA, TENANT_QUOTA, quotas[0], rule, rule]
            pools = self.world.manager.queries.pools()
            share = (pools[base % len(pools)].pool_id, cut + 2)
            self.target = [*self.targets(base, cut), BlockFilter(), *ours, share, share][kind]
            self.deletes = kind in (6, 8)
            self.long_call = self.steps_of(self.target)
            self.before, self.caller = self.removed(), self.world.manager
            self.pools = self.all_pools()
            self.go_on(1)

    def targets(self, base, cut):
        return [ForgetTarget(salt="a"), ForgetTarget(session_id="x"), ForgetTarget(prefix=self.prefix(base, cut))]

    def steps_of(self, target):
        manager = self.world.manager
        if isinstance(target, BlockFilter):
            return manager.operators.purge_in_steps(target, validate_only=False, skip_used=True)
        if isinstance(target, tuple):
            return manager.operators.update_pool_in_steps(*target, "", validate_only=False)
        if isinstance(target, RetentionRule):
            if self.deletes:
                return manager.operators.delete_rule_in_steps(target.name, "", validate_only=False)
            known = target.name in {one.name for one in manager.queries.rules()}
            change = (
                partial(manager.operators.update_rule_in_steps, mask=FIELDS)
                if known
                else manager.operators.create_rule_in_steps
            )
            return change(target, validate_only=False)
        if isinstance(target, Quota):
            return (
                manager.operators.delete_quota_in_steps(target)
                if self.deletes
                else manager.operators.set_quota_in_steps(target, validate_only=False)
            )
        return manager.operators.forget_in_steps(target, validate_only=False)

    def removed_by_others(self, count):
        """Of what is removed while a call is carried out in steps."""
        if self.long_call is not None:
            self.before += count

    def removed(self):
        causes = (RemovalCause.PURGED, RemovalCause.FORGOTTEN)
        return sum(tier.counters.removed[cause] for pool in self.all_pools() for tier in pool.tiers for cause in causes)

    def all_pools(self):
        return [pool for executor in self.world.manager._state.executors.values() for pool in executor.pools]

    @precondition(lambda self: self.long_call is not None)
    @rule(steps=st.integers(1, 6))
    def go_on(self, steps):
        call = self.long_call
        if call is None:
            return
        if self.caller is not self.world.manager:
            # The process that carried it out is gone.
            self.long_call = None
            return
        for _ in range(steps):
            if getgeneratorstate(call) == GEN_SUSPENDED:
                self.world.manager.go_on()
            try:
                with small_steps():
                    next(call)
            except (UnknownQuotaError, QuotaTooLargeError, UnknownRuleError, InvalidField, PoolInUseError):
                self.long_call = None
                return
            except StopIteration as ended:
                self.long_call = None
                self.check_receipt(ended.value)
                return

    def check_receipt(self, receipt):
        world, target = self.world, self.target
        if isinstance(target, Quota):
            self.check_accounts()
        if isinstance(target, Quota | RetentionRule | tuple):
            return
        told = receipt.purged_blocks if isinstance(target, BlockFilter) else sum(receipt.removed.values())
        if world.windows == (None,) and self.all_pools() == self.pools:
            # Remembered blocks that were forgotten before they were read are removed, too.
            assert told <= self.removed() - self.before
        if isinstance(target, ForgetTarget) and target.salt is not None:
            for executor in world.manager._state.executors.values():
                for pool in executor.pools:
                    assert all(block.domain.salt != target.salt for block in pool.index.values())

    def check_accounts(self):
        """Every block counts against the quota that is there."""
        manager = self.world.manager
        for executor in manager._state.executors.values():
            domains = [sequence.domain for sequence in executor.sequences.values()]
            for pool in executor.pools:
                domains += [block.domain for block in pool.blocks if block is not None and block.domain is not None]
            for domain in domains:
                assert domain.account is account_for(manager._state.accounts, domain.tenant_id, domain.salt)

    @rule(limit=st.sampled_from([None, None, 0, 1, 3]), fail=st.sampled_from([False, False, False, True]))
    def executor_copies(self, limit, fail):
        self.world.run_executor_copies(limit, fail=fail)

    @rule()
    def renew(self):
        self.world.renew()

    @rule(
        account=st.sampled_from([("tenant_id", "t"), ("tenant_id", "u"), ("salt", "a")]),
        floor=st.integers(0, 4),
        room=st.sampled_from([None, 0, 1, 4]),
        host_floor=st.integers(0, 2),
        host_room=st.sampled_from([None, 0, 2]),
    )
    def set_quota(self, account, floor, room, host_floor, host_room):
        quota = Quota(
            **dict([account]),
            device_floor=floor,
            device_ceiling=None if room is None else floor + room,
            host_floor=host_floor,
            host_ceiling=None if host_room is None else host_floor + host_room,
        )
        before = list(self.world.manager.queries.quotas())
        try:
            assert self.world.manager.operators.set_quota(quota, validate_only=False) == quota
        except QuotaTooLargeError:
            assert list(self.world.manager.queries.quotas()) == before

    @precondition(lambda self: any(True for _ in self.world.manager.queries.quotas()))
    @rule(index=st.integers(0, 5))
    def delete_quota(self, index):
        quotas = [quota for quota, *_ in self.world.manager.queries.quotas()]
        if quotas:
            self.world.manager.operators.delete_quota(quotas[index % len(quotas)])

    @rule(base=st.integers(0, 2), cut=st.integers(1, 18), salt=st.sampled_from(SALTS))
    def pin(self, base, cut, salt):
        prefix = self.prefix(base, cut, salt)
        (said,) = self.world.manager.operators.pin_prefix(prefix, "ops", 6.0, validate_only=True)
        (pinned,) = self.world.manager.operators.pin_prefix(prefix, "ops", 6.0, validate_only=False)
        assert (pinned.receipt, pinned.degraded) == (said.receipt, said.degraded)

    @rule(index=st.integers(0, 20))
    def release_hold(self, index):
        names = [hold.name for hold in self.world.manager.queries.holds()]
        if names:
            before = sum(pool.free_blocks for pool in self.world.manager.queries.pools())
            freed = self.world.manager.operators.release_hold(names[index % len(names)])
            assert freed >= 0
            assert sum(pool.free_blocks for pool in self.world.manager.queries.pools()) <= before + freed

    @rule(
        name=st.sampled_from(["r", "s"]),
        salt=st.sampled_from(SALTS),
        index=st.integers(0, len(ACTIONS) - 1),
        end=st.integers(0, 2),
    )
    def make_rule(self, name, salt, index, end):
        manager = self.world.manager
        match = RuleMatch(salt=salt, end=end * BLOCK or None)
        spec = RetentionRule(name, match=match, action=ACTIONS[index])
        if name in {one.name for one in manager.queries.rules()}:
            said = manager.operators.update_rule(spec, FIELDS, validate_only=True)
            assert manager.operators.update_rule(spec, FIELDS, validate_only=False)[1:] == said[1:]
        else:
            manager.operators.create_rule(spec, validate_only=False)

    @rule(index=st.integers(0, 1))
    def delete_rule(self, index):
        rules = self.world.manager.queries.rules()
        if rules:
            name = rules[index % len(rules)].name
            self.world.manager.operators.delete_rule(name, "", validate_only=False)
            leases = [
                lease for pool in self.world.manager.queries.pools() for lease in self.leases_of(pool, f"rule/{name}")
            ]
            assert leases == []

    def leases_of(self, pool, holder):
        return list(self.world.manager.queries.leases(pool.pool_id, holder))

    @rule(index=st.integers(0, 7), base=st.integers(0, 2), cut=st.integers(4, 18), salt=st.sampled_from(SALTS))
    def hint(self, index, base, cut, salt):
        kind, payload = HINTS[index]
        hints = Hints("0.1", "m", (HintAction("one", kind, "0.1", payload),))
        (answer,), begun = self.world.manager.operators.hint(self.prefix(base, cut, salt), hints, None)
        assert answer.action_id == "one"
        assert not begun or kind == "Prefetch"

    @rule(group=st.integers(0, 2), total=st.integers(3, 20))
    def update_pool(self, group, total):
        pools = self.world.manager.queries.pools()
        pool = pools[group % len(pools)]
        try:
            view = self.world.manager.operators.update_pool(pool.pool_id, total, pool.etag, validate_only=False)
        except (InvalidField, PoolInUseError):
            assert self.world.manager.queries.pool(pool.pool_id) == pool
        else:
            assert view.total_blocks == total
            assert view.used_blocks == pool.used_blocks
            if total > pool.total_blocks and self.world.memory_bytes is not None:
                pools = self.world.manager._state.executors["e"].pools
                taken = sum(
                    one.spec.block_bytes * (one.device.total + one.device.owed + len(one.device.clearing))
                    for one in pools
                )
                assert taken <= self.world.memory_bytes


@contextlib.contextmanager
def small_steps():
    """A block per step."""
    before = steps.LOOKS, steps.CHANGES
    steps.LOOKS = steps.CHANGES = 1
    try:
        yield
    finally:
        steps.LOOKS, steps.CHANGES = before


QUOTA = Quota(salt="a", device_floor=1, device_ceiling=4, host_floor=1)
TENANT_QUOTA = Quota(tenant_id="t", device_floor=1, device_ceiling=5)

OPERATIONS = {
    "begin_long_call": 3,
    "go_on": 12,
    "purge": 1,
    "forget": 1,
    "executor_copies": 8,
    "renew": 6,
    "set_quota": 1,
    "delete_quota": 1,
    "pin": 2,
    "release_hold": 1,
    "make_rule": 1,
    "delete_rule": 1,
    "hint": 4,
    "update_pool": 1,
}


def operator_arguments(name: str, random: Random) -> dict[str, object]:
    """What one of the operations is called with."""
    prefix = {"base": random.randrange(3), "cut": random.randint(4, 18)}
    salt = {"salt": random.choice(SALTS)}
    return {
        "begin_long_call": {"kind": random.randrange(11), **prefix},
        "go_on": {"steps": random.randint(1, 6)},
        "purge": {"salt": random.choice([None, "a"]), "priority": random.choice([None, 0, 10, 35]), "chance": 3},
        "forget": {"kind": random.randrange(3), **prefix, "chance": 3},
        "executor_copies": {"limit": random.choice([None, None, 0, 1, 3]), "fail": random.random() < 0.15},
        "renew": {},
        "set_quota": {
            "account": random.choice([("tenant_id", "t"), ("tenant_id", "u"), ("salt", "a")]),
            "floor": random.randrange(5),
            "room": random.choice([None, 0, 1, 4]),
            "host_floor": random.randrange(3),
            "host_room": random.choice([None, 0, 2]),
        },
        "delete_quota": {"index": random.randrange(5)},
        "pin": prefix | salt,
        "release_hold": {"index": random.randrange(20)},
        "make_rule": {
            "name": random.choice("rs"),
            "index": random.randrange(len(ACTIONS)),
            "end": random.randrange(3),
            **salt,
        },
        "delete_rule": {"index": random.randrange(2)},
        "hint": {"index": random.randrange(len(HINTS)), **prefix, **salt},
        "update_pool": {"group": random.randrange(3), "total": random.randint(3, 20)},
    }[name]
