"""Random lives of the in-process manager: all actions of schedulers, executors, operators and agents, and time.

Every operation draws its own arguments. Operations are weighted so that blocks are shared, copied, evicted and
truncated often; `World.check` recounts everything after each.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from inspect import GEN_SUSPENDED, getgeneratorstate
from random import Random
from typing import Any

import pytest

from cachemgr import slices
from cachemgr.blocks.block_record import BlockRecord
from cachemgr.blocks.cache_scopes import account_for
from cachemgr.errors import (
    PoolInUseError,
    QuotaTooLargeError,
    RulePolicyError,
    SchedulerFirstError,
    SequenceEvictsError,
    SequenceTooLongError,
    SequenceUnsettledError,
    SharedBlockError,
    UnknownQuotaError,
    UnknownRuleError,
    VoidSequenceError,
    WindowPassedError,
)
from cachemgr.retention.rule_book import FIELDS
from cachemgr.slices import at_once
from cachemgr.types import (
    Admission,
    BlockFilter,
    ForgetTarget,
    HintAction,
    Hints,
    ManagerConfig,
    Prefix,
    Quota,
    RemovalCause,
    Retention,
    RetentionRule,
    RuleAction,
    RuleMatch,
    TierKind,
)
from protos.errors import InvalidField
from tests.support.in_process_manager import BLOCK, POLICIES, Live, Shared, World, asked, retain, snapshot

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
LAYOUTS = [(None,), (None,), (None, 5), (3,), (None, 2, 9)]
QUOTA = Quota(salt="a", device_floor=1, device_ceiling=4, host_floor=1)
TENANT_QUOTA = Quota(tenant_id="t", device_floor=1, device_ceiling=5)

VERSIONS = ["", "v1"]

WEIGHTS = {
    "admit": 30,
    "step": 15,
    "work": 12,
    "confirm": 12,
    "sync": 10,
    "sync_half": 8,
    "leave": 8,
    "release": 8,
    "truncate": 5,
    "fork": 5,
    "trim": 3,
    "hold": 2,
    "wait": 2,
    # Operators and agents.
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
    "update_weights": 0.5,
    # Processes that die, with copies in every state.
    "write_store": 2,
    "read_store": 5,
    "restart_scheduler": 0.25,
    "restart_executor": 0.5,
    "restart_manager": 0.5,
    "restart_manager_before_the_store": 0.75,
    "restart_manager_at_rest": 0.25,
    "restart_both": 0.25,
    "silence_executor": 0.25,
    "lose_executor": 0.25,
}
# Operations on two engines with one manager.
OF_TWINS = {
    name: WEIGHTS[name]
    for name in (
        "admit",
        "step",
        "work",
        "confirm",
        "sync",
        "sync_half",
        "leave",
        "release",
        "truncate",
        "fork",
        "trim",
        "hold",
        "wait",
        "executor_copies",
        "renew",
        "write_store",
        "restart_scheduler",
        "restart_executor",
        "lose_executor",
    )
} | {"restart_manager": 4.0}
OF_A_SEQUENCE = {"leave", "release", "truncate", "fork", "trim", "hold"}


def live_long(seed: int, operations: int, *, moves: float = WEIGHTS["update_pool"], **fixed: Any) -> dict[str, Any]:
    """A life of N = `count` operations, which ends with every block free or cached; returns its settings.

    moves: how often the size of a pool changes, as a weight.
    """
    life = RandomLife(seed, moves=moves, **fixed)
    for _ in range(operations):
        life.operate()
        life.world.check()
    life.end()
    return life.settings


def live_long_as_twins(seed: int, operations: int) -> None:
    """Like `live_long`, for two engines with one manager."""
    life = TwinLife(seed)
    for _ in range(operations):
        life.operate()
        life.check()
    life.end()


@contextlib.contextmanager
def small_steps() -> Iterator[None]:
    """Long calls take a step for each block."""
    before = slices.LOOKS, slices.CHANGES
    slices.LOOKS = slices.CHANGES = 1
    try:
        yield
    finally:
        slices.LOOKS, slices.CHANGES = before


class RandomLife:
    """One world, and operations on it."""

    def __init__(
        self,
        seed: int,
        *,
        moves: float = WEIGHTS["update_pool"],
        engine: str = "",
        shared: Shared | None = None,
        **fixed: Any,
    ) -> None:
        self.random = Random(seed)
        self._weights = WEIGHTS | {"update_pool": moves}
        self.settings = self._settings(seed) | fixed
        drawn = self.settings
        windows, num_blocks, movable = drawn["windows"], drawn["num_blocks"], drawn["movable"]
        memory: dict[str, Any] = {}
        if movable:
            # Pools that share memory, with `movable` more slots than they may use.
            sizes = (2, 1, 1)[: len(windows)]
            memory = {"block_bytes": sizes, "share_blocks": (num_blocks,) * len(windows)}
            memory["memory_bytes"] = num_blocks * sum(sizes)
        self.world = World(
            num_blocks + movable,
            windows=windows,
            host_blocks=drawn["host"],
            disk_blocks=drawn["disk"],
            seed=seed,
            config=ManagerConfig(lease_seconds=10, event_history=50, **drawn["config"])
            if shared is None
            else shared.config,
            engine=engine,
            shared=shared,
            **memory,
        )
        self.world.changes_windows = True
        self.forks = 0
        # A call that is carried out in steps.
        self.long_call: Any = None

    def _settings(self, seed: int) -> dict[str, Any]:
        choose = self.random.choice
        return {
            "windows": choose(LAYOUTS),
            "num_blocks": choose([4, 6, 8, 12, 12, 20]),
            "host": choose([0, 2, 6]),
            "disk": choose([0, 3]),
            "movable": 6 * (seed % 3 == 1),
            "config": {
                "capacity_ahead_tokens": choose([0, 3, 8]),
                "free_watermark": choose([0.0, 0.2]),
                "copy_on_partial_reuse": self.random.random() < 0.8,
                "pin_budget": choose([0.1, 0.3, 0.7]),
                "write_through": self.random.random() < 0.8,
            },
        }

    def operate(self) -> str:
        """Carries out a random operation, of this class or without arguments of the world; returns its name."""
        (name,) = self.random.choices(list(self._weights), list(self._weights.values()))
        self.carry_out(name)
        return name

    def carry_out(self, name: str) -> None:
        """Carries out an operation by its name."""
        operation = getattr(self, name, None) or getattr(self.world, name)
        if name not in OF_A_SEQUENCE:
            operation()
        elif self.world.live:
            operation(self.random.choice(list(self.world.live.values())))

    def end(self) -> None:
        """All sequences leave; afterwards every block is free or cached."""
        world = self.world
        world.cancelled = [copy.ticket for live in world.live.values() if not live.started for copy in live.copies]
        world.sync()
        world.start_scheduler()
        world.run_executor_copies()
        # A hold that a sequence leaves counts from the release of the sequence.
        world.run_in_slices()
        for _ in range(20):
            world.pass_time(5.0)
        world.run_in_slices()
        world.run_executor_copies()
        world.check()
        assert all(pool.used_blocks == 0 for pool in world.pools())

    # Sequences

    def prompt(self) -> list[int]:
        """The tokens of a request."""
        choose = self.random.choice
        return choose(BASES)[: self.random.randint(1, 18)] + [choose(range(3)) for _ in range(choose(range(4)))]

    def admit(self) -> None:
        world, choose, draw = self.world, self.random.choice, self.random.random
        tokens = self.prompt()
        priority = choose([None, None, 0, 10, 35, 90])
        options: dict[str, Any] = {
            "salt": choose([None] * 6 + ["a"]),
            "adapter_id": choose([None] * 8 + [0]),
            "retention": Retention() if priority is None else retain(priority, choose([None, 1.0, 4.0, 30.0])),
            "session_id": choose([None, None, "x", "y"]),
            "tenant_id": choose(TENANTS),
            "no_store": draw() < 0.08,
            "no_read": draw() < 0.08,
            "max_continuation": len(tokens) % 3 * 50,
            # Derived from the prompt instead of drawn, like the bound above.
            "explain_miss": len(tokens) % 2 == 0,
            "store_tokens": sum(tokens) % 13 if len(tokens) % 5 == 0 else None,
            "lowest_tier": choose([*TierKind, TierKind.DISK, TierKind.DISK]),
        }
        if len(tokens) > world.longest:
            return
        full = world.windows == (None,)
        stored = 0
        if full:
            options["eviction_policy"] = choose([None, choose(POLICIES)])
            stored = 0 if options["no_read"] else naive_match(world, tokens, options["salt"], options["adapter_id"])
        before = world.free
        try:
            admission = admit_as_previewed(world, tokens, **options)
        except (SequenceTooLongError, RulePolicyError):
            return
        if not admission.admitted:
            assert admission.missing_blocks > 0
            return
        assert admission.cached_tokens < len(tokens)
        live = world.newest
        assert world.manager.admit(live.request) == admission
        if live.policy is not None:
            assert admission.capacity_tokens >= live.policy.clean_tokens(len(tokens), len(tokens))
            assert admission.cached_tokens <= live.policy.reusable(len(tokens), len(tokens))
            return
        assert admission.capacity_tokens >= len(tokens)
        lower = world.host_blocks or world.disk_blocks
        assert not full or admission.wait_for_handle or admission.cached_tokens <= stored
        exact = not lower and not any(world.queries.quotas()) and world.manager.config.copy_on_partial_reuse
        if full and exact and not admission.wait_for_handle:
            # Without a spare block for the source of a copy, the copy is left out.
            reserve = int(world.longest // BLOCK * world.manager.config.free_watermark)
            tight = before - (len(tokens) // BLOCK + 2) < reserve
            assert admission.cached_tokens in (set(range(stored - stored % BLOCK, stored + 1)) if tight else {stored})

    def step(self) -> None:
        fail = self.random.choice([0] * 8 + [0.5, 1])
        self.world.fail_moves = fail > 0
        self.world.step(self.random.randint(1, 9), fail_copies=fail)

    def work(self) -> None:
        for _ in range(self.random.randint(1, 5)):
            self.world.step()
            self.world.confirm()
            self.world.sync()

    def sync_half(self) -> None:
        self.world.sync(set(list(self.world.live)[::2]))

    def confirm(self) -> None:
        self.world.confirm(self.random.randrange(3))

    def release(self, live: Live) -> None:
        world = self.world
        cancelled = [] if live.started else [copy.ticket for copy in live.copies]
        if live.has_news:
            world.leave_untold(live)
        world.release(live.request.sequence_id)
        world.cancelled += cancelled

    def trim(self, live: Live) -> None:
        if live.moved:
            return
        capacity = -(-(len(live.tokens) + 2) // BLOCK) * BLOCK
        for table in live.tables:
            del table[capacity // BLOCK :]
        self.world.trimmed[live.handle] = capacity
        self.world.sync()

    def truncate(self, live: Live) -> None:
        world = self.world
        if not live.started or live.has_news or live.tainted:
            return
        before = snapshot(world.manager)
        try:
            world.truncate(live.request.sequence_id, max(1, len(live.tokens) - self.random.randrange(7)))
        except (SharedBlockError, WindowPassedError, VoidSequenceError, SequenceEvictsError):
            assert snapshot(world.manager) == before
            return
        world.give_up_on(live)

    def fork(self, parent: Live) -> None:
        world = self.world
        self.forks += 1
        name = f"{self.world.executor_id}-fork{self.forks}"
        if parent.reported_tokens != len(parent.tokens):
            return
        length = self.random.choice([None, min(self.random.randint(1, 24), len(parent.tokens))])
        try:
            admission = world.manager.fork(world.caller, parent.request.sequence_id, name, length)
        except (SequenceUnsettledError, VoidSequenceError, WindowPassedError, SequenceEvictsError):
            return
        if not admission.admitted:
            assert admission.missing_blocks > 0
            return
        # The call is idempotent.
        child = world.fork(parent.request.sequence_id, name, length)
        child.tainted = parent.tainted
        # Tokens that are not reported to the manager are not shared.
        assert child.computed <= parent.computed

    def hold(self, live: Live) -> None:
        with contextlib.suppress(VoidSequenceError):
            seconds = self.random.choice([1.0, 6.0])
            self.world.manager.hold(self.world.caller, live.request.sequence_id, "owner", seconds)

    def wait(self) -> None:
        # Blocks of a lost scheduler are freed a sequence at a time.
        with small_steps():
            self.world.pass_time(self.random.choice([0.5, 5.0]))

    # Operators and agents

    def _prefix(self, salt: str | None = None) -> Prefix:
        return Prefix(tuple(self.random.choice(BASES)[: self.random.randint(4, 18)]), salt=salt)

    def _target(self) -> ForgetTarget:
        return self.random.choice(
            [ForgetTarget(salt="a"), ForgetTarget(session_id="x"), ForgetTarget(prefix=self._prefix())]
        )

    def purge(self) -> None:
        world = self.world
        priority = self.random.choice([None, 0, 10, 35])
        selected = BlockFilter(salt=self.random.choice([None, "a"]), max_priority=priority)
        said = at_once(world.operators.purge(selected, validate_only=True))
        before = cached_blocks(world)
        assert at_once(world.operators.purge(selected, validate_only=False, skip_used=True)) == said
        assert before - said.purged_blocks == cached_blocks(world)
        self._removed_by_others(said.purged_blocks)

    def forget(self) -> None:
        manager, target = self.world.manager, self._target()
        said = at_once(manager.operators.forget(target, validate_only=True))
        assert at_once(manager.operators.forget(target, validate_only=False)) == said
        self._removed_by_others(sum(said.removed.values()))
        again = at_once(manager.operators.forget(target, validate_only=True))
        assert (again.removed, again.shared_blocks) == ({}, said.shared_blocks)

    def begin_long_call(self) -> None:
        """Other operations follow between its steps."""
        if self.long_call is not None:
            return
        manager, choose = self.world.manager, self.random.choice
        pool, quota = choose(manager.queries.pools()), next((quota for quota, *_ in manager.queries.quotas()), QUOTA)
        rule = RetentionRule("r", match=RuleMatch(prefix_token_ids=self._prefix().token_ids), action=choose(ACTIONS))
        known = rule.name in {one.name for one in manager.queries.rules()}
        change = partial(manager.operators.update_rule, mask=FIELDS) if known else manager.operators.create_rule
        forgotten, total = self._target(), self.random.randint(3, 20)
        calls: list[tuple[object, Callable[[], Any]]] = [
            (forgotten, lambda: manager.operators.forget(forgotten, validate_only=False)),
            (forgotten, lambda: manager.operators.forget(forgotten, validate_only=False)),
            (BlockFilter(), lambda: manager.operators.purge(BlockFilter(), validate_only=False, skip_used=True)),
            (None, lambda: self.world.update_weights(choose(VERSIONS))),
            (QUOTA, lambda: manager.operators.set_quota(choose([QUOTA, TENANT_QUOTA]), validate_only=False)),
            (quota, lambda: manager.operators.delete_quota(quota)),
            (rule, lambda: change(rule, validate_only=False)),
            (rule, lambda: manager.operators.delete_rule("r", "", validate_only=False)),
            (pool, lambda: manager.operators.update_pool(pool.pool_id, total, "", validate_only=False)),
        ]
        self.meant, call = choose(calls)
        self.long_call, self.caller = call(), manager
        self.removed_before, self.pools = self._removed(), self._pools()
        self._steps(1)

    def go_on(self) -> None:
        if self.long_call is not None:
            self._steps(self.random.randint(1, 6))

    def _steps(self, count: int) -> None:
        call = self.long_call
        if self.caller is not self.world.manager:
            # The manager that carried out the call has ended.
            self.long_call = None
            return
        for _ in range(count):
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
                self._check_receipt(ended.value)
                return

    def _removed_by_others(self, count: int) -> None:
        """Counts blocks that other operations remove while a call is carried out in steps."""
        if self.long_call is not None:
            self.removed_before += count

    def _removed(self) -> int:
        causes = (RemovalCause.PURGED, RemovalCause.FORGOTTEN)
        return sum(tier.counters.removed[cause] for pool in self._pools() for tier in pool.tiers for cause in causes)

    def _pools(self) -> list[Any]:
        return [pool for executor in self.world.manager._state.executors.values() for pool in executor.pools]

    def _check_receipt(self, receipt: Any) -> None:
        meant = self.meant
        if isinstance(meant, Quota):
            self._check_accounts()
        if not isinstance(meant, BlockFilter | ForgetTarget):
            return
        told = receipt.purged_blocks if isinstance(meant, BlockFilter) else sum(receipt.removed.values())
        if self.world.windows == (None,) and self._pools() == self.pools:
            # Stored blocks that are forgotten before they are read count as removed, too.
            assert told <= self._removed() - self.removed_before
        if isinstance(meant, ForgetTarget) and meant.salt is not None:
            for pool in self._pools():
                assert all(block.scope.salt != meant.salt for block in pool.tree.by_key.values())

    def _check_accounts(self) -> None:
        """Every block counts against the present quota."""
        manager = self.world.manager
        for executor in manager._state.executors.values():
            scopes = [sequence.scope for sequence in executor.sequences.values()]
            for pool in executor.pools:
                scopes += [block.scope for block in pool.blocks if block is not None and block.scope is not None]
            for scope in scopes:
                assert scope.account is account_for(manager._state.accounts, scope.tenant_id, scope.salt)

    def executor_copies(self) -> None:
        self.world.run_executor_copies(self.random.choice([None, None, 0, 1, 3]), fail=self.random.random() < 0.15)

    def set_quota(self) -> None:
        choose, manager = self.random.choice, self.world.manager
        floor, room = self.random.randrange(5), choose([None, 0, 1, 4])
        host_floor, host_room = self.random.randrange(3), choose([None, 0, 2])
        quota = Quota(
            **dict([choose([("tenant_id", "t"), ("tenant_id", "u"), ("salt", "a")])]),
            device_floor=floor,
            device_ceiling=None if room is None else floor + room,
            host_floor=host_floor,
            host_ceiling=None if host_room is None else host_floor + host_room,
        )
        before = list(manager.queries.quotas())
        try:
            assert at_once(manager.operators.set_quota(quota, validate_only=False)) == quota
        except QuotaTooLargeError:
            assert list(manager.queries.quotas()) == before

    def delete_quota(self) -> None:
        if quotas := [quota for quota, *_ in self.world.queries.quotas()]:
            at_once(self.world.operators.delete_quota(self.random.choice(quotas)))

    def pin(self) -> None:
        prefix = self._prefix(self.random.choice(SALTS))
        (said,) = self.world.operators.pin_prefix(prefix, "ops", 6.0, validate_only=True)
        (pinned,) = self.world.operators.pin_prefix(prefix, "ops", 6.0, validate_only=False)
        assert (pinned.receipt, pinned.degraded) == (said.receipt, said.degraded)

    def update_weights(self) -> None:
        at_once(self.world.update_weights(self.random.choice(VERSIONS)))

    def release_hold(self) -> None:
        manager = self.world.manager
        if names := [hold.name for hold in manager.queries.holds()]:
            before = sum(pool.free_blocks for pool in manager.queries.pools())
            freed = manager.operators.release_hold(self.random.choice(names))
            assert freed >= 0
            assert sum(pool.free_blocks for pool in manager.queries.pools()) <= before + freed

    def make_rule(self) -> None:
        manager, choose = self.world.manager, self.random.choice
        match = RuleMatch(salt=choose(SALTS), end=self.random.randrange(3) * BLOCK or None)
        spec = RetentionRule(choose("rs"), match=match, action=choose(ACTIONS))
        if spec.name in {one.name for one in manager.queries.rules()}:
            said = at_once(manager.operators.update_rule(spec, FIELDS, validate_only=True))
            assert at_once(manager.operators.update_rule(spec, FIELDS, validate_only=False))[1:] == said[1:]
        else:
            at_once(manager.operators.create_rule(spec, validate_only=False))

    def delete_rule(self) -> None:
        manager = self.world.manager
        if rules := manager.queries.rules():
            name = self.random.choice(rules).name
            at_once(manager.operators.delete_rule(name, "", validate_only=False))
            assert not [
                one
                for pool in manager.queries.pools()
                for one in filter(None, manager.queries.leases(pool.pool_id, f"rule/{name}"))
            ]

    def hint(self) -> None:
        kind, payload = self.random.choice(HINTS)
        hints = Hints("0.1", "m", (HintAction("one", kind, "0.1", payload),))
        (answer,), begun = self.world.operators.hint(self._prefix(self.random.choice(SALTS)), hints, None)
        assert answer.action_id == "one"
        assert not begun or kind == "Prefetch"

    def update_pool(self) -> None:
        world, manager = self.world, self.world.manager
        pool, total = self.random.choice(manager.queries.pools()), self.random.randint(3, 20)
        try:
            said = at_once(manager.operators.update_pool(pool.pool_id, total, pool.etag, validate_only=True))
            done = at_once(manager.operators.update_pool(pool.pool_id, total, pool.etag, validate_only=False))
        except (InvalidField, PoolInUseError):
            assert manager.queries.pool(pool.pool_id) == pool
            return
        view = done.pool
        assert view.total_blocks == total
        assert done.degraded == said.degraded
        # A block is in use during its offload.
        if not done.degraded and not world.host_blocks and not world.disk_blocks:
            assert view.used_blocks == pool.used_blocks
            assert done.left == said.left
            assert view.cached_blocks == pool.cached_blocks - sum(done.left.dropped.values())
        if total > pool.total_blocks and world.memory_bytes is not None:
            taken = sum(
                one.spec.block_bytes * (one.device.total + one.device.to_withhold + len(one.device.clearing))
                for one in world.executor().pools
            )
            assert taken <= world.memory_bytes

    # Processes

    def write_store(self) -> None:
        if self.world.unread is None:
            self.world.journal.flush()

    def read_store(self) -> None:
        if self.world.unread:
            self.world.read_store(self.random.randrange(7))
        else:
            self.world.end_recovery()

    def restart_scheduler(self) -> None:
        with small_steps():
            self.world.start_scheduler()

    def restart_executor(self) -> None:
        self.break_off()
        self._lose_slots()
        self.world.start_executor()

    def restart_manager(self) -> None:
        self.break_off()
        self.fall_back()
        self.world.restart_manager()

    def restart_manager_before_the_store(self) -> None:
        self.break_off()
        self.fall_back()
        self.world.begin_recovery()

    def restart_manager_at_rest(self) -> None:
        """A restart loses nothing after all sequences have left, all copies have run and the store has everything."""
        world = self.world
        world.end_recovery()
        for live in list(world.live.values()):
            world.leave(live)
        world.run_in_slices()
        world.sync()
        world.open_write_through_copies()
        world.confirm()
        world.journal.flush()
        before = {block.tier_slot: block for block in world.queries.records(world.executor_id)}
        world.restart_manager()
        after = {block.tier_slot: block for block in world.queries.records(world.executor_id)}
        lost = {(block.group, block.key): block for place, block in before.items() if place not in after}
        for block in lost.values():
            if (block.group, block.parent_key) not in lost:
                is_covered = any(_covers(other, block) for other in after.values())
                assert is_covered or world.has_untold(block), f"{block} is not restored"

    def restart_both(self) -> None:
        self.break_off()
        self._lose_slots()
        self.fall_back()
        self.world.lose_manager()
        self.world.register_again()

    def lose_executor(self) -> None:
        self.break_off()
        self.world.expire_executor()
        self.world.register_again()

    def break_off(self) -> None:
        """Some first copies of the executor or a scheduler have run, and the next copy is broken off."""
        world, finished = self.world, self.random.randrange(8)
        told = [copy for live in world.live.values() if not live.started for copy in live.copies]
        told += [copy for copy in world.queries.executor_transfers(world.executor_id) if copy.ticket not in world.done]
        world.step_number += 1
        for number, copy in enumerate(sorted(told, key=lambda copy: copy.ticket)[: finished + 1]):
            world.copy(copy, number == finished)

    def fall_back(self) -> None:
        """When the manager dies, the store may lag behind it."""
        if self.random.random() < 0.5 and self.world.unread is None:
            self.world.journal.fall_back()

    def _lose_slots(self) -> None:
        """Slots of lower tiers may be lost, too."""
        generations, first = self.world.device.generations, self.random.randrange(10)
        for place in list(generations)[first::5] if first < 5 else ():
            generations[place] = 0


class TwinLife:
    """Two engines with one manager, which starts again now and then. There are no operators and agents."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        config = ManagerConfig(
            lease_seconds=10,
            event_history=50,
            capacity_ahead_tokens=self.random.choice([0, 3, 8]),
            write_through=self.random.random() < 0.8,
        )
        shared = Shared(config)
        self.lives = [RandomLife(2 * seed + number, engine=name, shared=shared) for number, name in enumerate("ab")]
        self.worlds = shared.worlds
        self._shared = shared

    def operate(self) -> None:
        """An operation of one of the engines, or of the manager."""
        (name,) = self.random.choices(list(OF_TWINS), list(OF_TWINS.values()))
        if name == "restart_manager":
            self.restart_manager()
        else:
            self.random.choice(self.lives).carry_out(name)

    def check(self) -> None:
        """Checks everything of both engines."""
        for world in self.worlds:
            world.check()

    def end(self) -> None:
        """All leave: every block is free or cached then."""
        for life in self.lives:
            life.end()

    def restart_manager(self) -> None:
        """Schedulers and executors find the new manager in any order. Until then, the steps of a scheduler go on."""
        for life in self.lives:
            # Sequences that took slots of cached blocks last have computed nothing yet, and are unknown to the store.
            life.write_store()
            for _ in range(self.random.randrange(4)):
                life.admit()
            life.fall_back()
            life.world.break_off_recovery()
        self._shared.lose_manager()
        unaware, away = [*self.lives], [*self.lives]
        while away:
            life = self.random.choice(away)
            world = life.world
            if life not in unaware:
                world.manager.register_executor(world.spec(), list(world.journal.blocks.values()))
                away.remove(life)
                world.check()
            elif self.random.random() < 0.3:
                life.break_off()
                world.find_manager()
                unaware.remove(life)
            elif world.journal.blocks and self.random.random() < 0.5:
                with pytest.raises(SchedulerFirstError):
                    world.manager.register_executor(world.spec(), list(world.journal.blocks.values()))
            else:
                world.step(self.random.randint(1, 9))


def _covers(longer: BlockRecord, block: BlockRecord) -> bool:
    """Whether a longer sibling holds the tokens of a partly filled block, which is useless then."""
    siblings = (longer.group, longer.parent_key, longer.salt) == (block.group, block.parent_key, block.salt)
    return siblings and len(longer.tokens) > len(block.tokens) and longer.tokens.startswith(block.tokens)


# Expected results, computed without the index


def cached_blocks(world: World) -> int:
    """Cached blocks of all pools and tiers."""
    pools = world.queries.pools()
    return sum(pool.cached_blocks + sum(tier.cached_blocks for tier in pool.lower_tiers) for pool in pools)


def naive_match(world: World, tokens: list[int], salt: str | None, adapter_id: int | None) -> int:
    """The longest beginning of the tokens, all but the last, that the indexed blocks of group 0 hold."""
    blocks = [one for one in world.queries.records(world.executor_id) if one.group == 0]
    scope = salt, adapter_id, world.weight_version
    known = {one.key: one for one in blocks if (one.salt, one.adapter_id, one.weight_version) == scope}

    def path(block: BlockRecord) -> list[int]:
        if block.parent_key is None:
            return list(block.token_ids)
        # The parent of a block in a lower tier may be lost: then no prompt finds the block.
        before = path(known[block.parent_key]) if block.parent_key in known else [-1]
        return [*before, *block.token_ids]

    return max((_common(path(block), tokens[:-1]) for block in known.values()), default=0)


def _common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def admit_as_previewed(world: World, tokens: list[int], **options: Any) -> Admission:
    """The sequence is admitted if and only if its preview says so, and takes exactly the blocks of the preview."""
    request, manager = world.request(tokens, **options), world.manager
    number = manager.queries.last_event
    preview = manager.queries.preview(request, 0)
    used = [pool.used_blocks for pool in world.pools()]
    assert manager.queries.last_event == number
    admission = manager.admit(request)
    assert (admission.admitted, admission.missing_blocks) == (preview.admitted, preview.missing_blocks)
    now_used = [pool.used_blocks for pool in world.pools()]
    if not admission.admitted:
        assert now_used == used
        return admission
    live = world.enter(request, admission, list(tokens))
    assert admission.cached_tokens == preview.cached_tokens
    copied = Counter(copy.group for copy in admission.transfers if copy.source_tier is copy.target_tier)
    for group, estimate in enumerate(preview.estimates):
        slots = len(tokens) if live.policy is None else live.policy.clean_tokens(len(tokens), len(tokens))
        ahead = len(live.tables[group]) - -(-slots // BLOCK)
        taken = now_used[group] - used[group] - estimate.next_step
        # The source of a copy also stays in use until the copy has ended.
        assert 0 <= taken - ahead <= copied[group], f"{taken} blocks beyond the estimate, {ahead} ahead"
    return admission
