"""Random operations against a device that knows what is in its memory, and a check of everything after each."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from cachemgr.errors import (
    RulePolicyError,
    SequenceEvictsError,
    SequenceTooLongError,
    SequenceUnsettledError,
    SharedBlockError,
    VoidSequenceError,
    WindowPassedError,
)
from cachemgr.types import Admission, EventKind, ManagerConfig, RemovalCause, Retention, TierKind
from tests.unit.cachemgr.deaths import DEATHS, Deaths, death_arguments
from tests.unit.cachemgr.evicting_world import POLICIES, EvictingWorld
from tests.unit.cachemgr.live import BLOCK
from tests.unit.cachemgr.lookup import naive_match
from tests.unit.cachemgr.operators import BASES, OPERATIONS, TENANTS, Operators, operator_arguments, small_steps
from tests.unit.cachemgr.world import wish

TOKENS = st.builds(
    lambda base, cut, tail: BASES[base][:cut] + tail,
    st.integers(0, 2),
    st.integers(1, 18),
    st.lists(st.integers(0, 2), max_size=3),
)
LAYOUTS = st.sampled_from([(None,), (None,), (None, 5), (3,), (None, 2, 9)])
DURATION = st.sampled_from([None, 1.0, 4.0, 30.0])
SESSION = st.sampled_from([None, None, "x", "y"])
PRIORITY = st.one_of(st.none(), st.sampled_from([0, 10, 35, 90]))


def admit_as_previewed(world: EvictingWorld, tokens: list[int], **options: object) -> Admission:
    """Admits a sequence if and only if its preview says so, and takes and evicts just what that says."""
    request, manager = world.request(tokens, **options), world.manager
    number = manager.queries.last_event
    on_device = {block.key for block in manager.queries.records("e") if block.tier is TierKind.DEVICE}
    # Beside other groups a block may move down and be lost with its key, and quotas are left aside.
    tiers = [tier for pool in manager._state.executors["e"].pools for tier in pool.tiers]
    is_exact = len(world.windows) == 1 and not any(tier.shares for tier in tiers) and not any(manager.queries.quotas())
    preview = manager.queries.preview(request, 0)
    used = [pool.used_blocks for pool in manager.queries.pools()]
    assert manager.queries.last_event == number
    admission = manager.admit(request)
    assert (admission.admitted, admission.blocks_short) == (preview.admitted, preview.blocks_short)
    now_used = [pool.used_blocks for pool in manager.queries.pools()]
    if not admission.admitted:
        assert now_used == used
        return admission
    live = world.enter(request, admission, list(tokens))
    assert admission.cached_tokens == preview.cached_tokens
    if is_exact:
        assert [tuple(one) for one in preview.evictions] == evicted(world, number, on_device)
    copied = Counter(copy.group for copy in admission.transfers if copy.source_tier is copy.target_tier)
    for group, estimate in enumerate(preview.estimates):
        slots = len(tokens) if live.policy is None else live.policy.clean_tokens(len(tokens), len(tokens))
        ahead = len(live.tables[group]) - -(-slots // BLOCK)
        taken = now_used[group] - used[group] - estimate.next_step
        # The source of a copy is kept, too, until the copy has ended.
        assert 0 <= taken - ahead <= copied[group], f"{taken} blocks beyond the estimate, {ahead} ahead"
    return admission


def evicted(world: EvictingWorld, number: int, on_device: set[bytes]) -> list[tuple[int, int, int, int]]:
    """Of the only group: priority, blocks that have left the device since an event, and how many of them moved down."""
    left: dict[bytes, tuple[int, bool]] = {}
    for event in world.manager.queries.events_after(number):
        block, key = event.block, event.block.key
        lost = event.kind is EventKind.REMOVED and block.tier is TierKind.DEVICE
        moved = event.kind is EventKind.UPDATED and block.tier is not TierKind.DEVICE
        if key in on_device and key not in left and (moved or (lost and event.cause is not RemovalCause.TAKEN_OVER)):
            left[key] = block.priority, moved
    counts = Counter(priority for priority, _ in left.values())
    down = Counter(priority for priority, moved in left.values() if moved)
    return [(0, priority, counts[priority], down[priority]) for priority in sorted(counts)]


class CacheWorld(Operators, Deaths):
    """Everything that schedulers, executors, operators and time can do to one executor's blocks."""

    @initialize(
        windows=LAYOUTS,
        num_blocks=st.integers(4, 12),
        seed=st.integers(0, 9),
        ahead=st.sampled_from([0, 3, 8]),
        low=st.sampled_from([0.0, 0.2]),
        host=st.sampled_from([0, 0, 2, 6]),
        disk=st.sampled_from([0, 0, 3]),
        copy=st.sampled_from([True, True, True, False]),
        pins=st.sampled_from([0.1, 0.3, 0.7]),
        through=st.sampled_from([True, True, False]),
        movable=st.sampled_from([0, 0, 6]),
    )
    def build(self, windows, num_blocks, seed, ahead, low, host, disk, copy, pins, through, movable):
        config = ManagerConfig(
            capacity_ahead_tokens=ahead,
            free_watermark=low,
            lease_seconds=10,
            event_history=50,
            copy_on_partial_reuse=copy,
            pin_budget=pins,
            write_through=through,
        )
        shared: dict[str, Any] = {}
        if movable:
            sizes = (2, 1, 1)[: len(windows)]
            shared = {"block_bytes": sizes, "share_blocks": (num_blocks,) * len(windows)}
            shared["memory_bytes"] = num_blocks * sum(sizes)
        self.world = EvictingWorld(
            num_blocks + movable,
            windows=windows,
            host_blocks=host,
            disk_blocks=disk,
            seed=seed,
            config=config,
            **shared,
        )
        self.forks = 0

    def pick(self, index):
        names = list(self.world.live)
        return self.world.live[names[index % len(names)]]

    @rule(
        tokens=TOKENS,
        salt=st.sampled_from([None, None, None, None, "a"]),
        adapter_id=st.sampled_from([None, None, None, None, 0]),
        priority=PRIORITY,
        duration=DURATION,
        session_id=SESSION,
        tenant_id=st.sampled_from(TENANTS),
        no_store=st.sampled_from([False, False, False, False, False, True]),
        no_read=st.sampled_from([False, False, False, False, False, True]),
        lowest=st.sampled_from([*TierKind, TierKind.DISK]),
        policy=st.none() | st.sampled_from(POLICIES),
    )
    def admit(
        self, tokens, salt, adapter_id, priority, duration, session_id, tenant_id, no_store, no_read, lowest, policy
    ):
        world = self.world
        if len(tokens) > world.longest:
            return
        retention = Retention() if priority is None else wish(priority, duration)
        full = world.windows == (None,)
        stored = naive_match(world, tokens, salt, adapter_id) if full and not no_read else 0
        before = world.free
        options = {"salt": salt, "adapter_id": adapter_id, "session_id": session_id, "tenant_id": tenant_id}
        options |= {"retention": retention, "no_store": no_store, "no_read": no_read, "lowest_tier": lowest}
        if world.windows == (None,):
            options["eviction_policy"] = policy
        try:
            admission = admit_as_previewed(world, tokens, **options)
        except (SequenceTooLongError, RulePolicyError):
            return
        if not admission.admitted:
            assert admission.blocks_short > 0
            return
        assert admission.cached_tokens < len(tokens)
        live = world.live[f"q{world.names}"]
        assert world.manager.admit(live.request) == admission
        if live.policy is not None:
            assert admission.capacity_tokens >= live.policy.clean_tokens(len(tokens), len(tokens))
            assert admission.cached_tokens <= live.policy.reusable(len(tokens), len(tokens))
            return
        assert admission.capacity_tokens >= len(tokens)
        lower = world.host_blocks or world.disk_blocks
        assert not full or admission.wait_for_handle or admission.cached_tokens <= stored
        exact = not lower and not any(world.manager.queries.quotas()) and world.manager.config.copy_on_partial_reuse
        if full and exact and not admission.wait_for_handle:
            # Without a block to spare for the source of a copy the copy is left out.
            reserve = int(world.longest // BLOCK * world.manager.config.free_watermark)
            tight = before - (len(tokens) // BLOCK + 2) < reserve
            assert admission.cached_tokens in (set(range(stored - stored % BLOCK, stored + 1)) if tight else {stored})

    @rule(most=st.integers(1, 9), fail=st.sampled_from([0, 0, 0, 0, 0, 0.5, 1]))
    def step(self, most, fail):
        self.world.fail_moves = fail > 0
        self.world.step(most, fail_copies=fail)

    @rule(rounds=st.integers(1, 5))
    def work(self, rounds):
        for _ in range(rounds):
            self.world.step()
            self.world.confirm()
            self.world.sync()

    @rule()
    def sync(self):
        self.world.sync()

    @rule()
    def sync_half(self):
        self.world.sync(set(list(self.world.live)[::2]))

    @rule(limit=st.integers(0, 3))
    def confirm(self, limit):
        self.world.confirm(limit)

    @precondition(lambda self: self.world.live)
    @rule(index=st.integers(0, 20))
    def leave(self, index):
        self.world.leave(self.pick(index))

    @precondition(lambda self: self.world.live)
    @rule(index=st.integers(0, 20))
    def release(self, index):
        world, live = self.world, self.pick(index)
        cancelled = [] if live.started else [copy.ticket for copy in live.copies]
        if live.has_news:
            world.leave_untold(live)
        world.forget(live)
        assert world.manager.release(world.caller, live.request.sequence_id).found
        assert not world.manager.release(world.caller, live.request.sequence_id).found
        world.cancelled += cancelled

    @precondition(lambda self: self.world.live)
    @rule(index=st.integers(0, 20))
    def trim(self, index):
        live = self.pick(index)
        if live.moved:
            return
        capacity = -(-(len(live.tokens) + 2) // BLOCK) * BLOCK
        for table in live.tables:
            del table[capacity // BLOCK :]
        self.world.trimmed[live.handle] = capacity
        self.world.sync()

    @precondition(lambda self: self.world.live)
    @rule(index=st.integers(0, 20), more=st.integers(0, 9))
    def extend(self, index, more):
        world, live = self.world, self.pick(index)
        if live.clean is not None:
            return
        wanted = min(live.capacity + more, world.longest)
        try:
            extension = world.manager.extend(world.caller, live.request.sequence_id, wanted)
        except VoidSequenceError:
            return
        for copy in extension.transfers:
            world.copy(copy, False)
        for table in extension.new_blocks:
            live.tables[table.group].extend(table.slots)
        assert extension.capacity_tokens == live.capacity
        # With a policy it gets no more than it will ever use.
        assert extension.extended == (live.capacity >= wanted) or live.policy is not None

    @precondition(lambda self: self.world.live)
    @rule(index=st.integers(0, 20), drop=st.integers(0, 6))
    def truncate(self, index, drop):
        world, live = self.world, self.pick(index)
        reported = live.reported_tokens == len(live.tokens) and live.reported_computed == live.computed
        if not live.started or not reported or live.tainted:
            return
        length = max(1, len(live.tokens) - drop)
        before = world.manager.queries.snapshot().events
        try:
            world.manager.truncate(world.caller, live.request.sequence_id, length)
        except (SharedBlockError, WindowPassedError, VoidSequenceError, SequenceEvictsError):
            assert world.manager.queries.snapshot().events == before
            return
        del live.tokens[length:]
        live.computed = min(live.computed, length - 1)
        live.reported_tokens = length
        live.reported_computed = live.computed
        for table in live.tables:
            del table[-(-length // BLOCK) :]
        world.give_up_on(live)

    @precondition(lambda self: self.world.live)
    @rule(index=st.integers(0, 20), length=st.none() | st.integers(1, 24))
    def fork(self, index, length):
        world, parent = self.world, self.pick(index)
        self.forks += 1
        name = f"fork{self.forks}"
        if parent.reported_tokens != len(parent.tokens):
            return
        if length is not None:
            length = min(length, len(parent.tokens))
        try:
            admission = world.manager.fork(world.caller, parent.request.sequence_id, name, length)
        except (SequenceUnsettledError, VoidSequenceError, WindowPassedError, SequenceEvictsError):
            return
        if not admission.admitted:
            assert admission.blocks_short > 0
            return
        tokens = parent.tokens[:length]
        request = world.request(tokens, name, salt=parent.request.salt, adapter_id=parent.request.adapter_id)
        child = world.enter(request, admission, tokens)
        child.tainted = parent.tainted
        # What the manager has not heard of is not shared.
        assert child.computed <= parent.computed

    @precondition(lambda self: self.world.live)
    @rule(index=st.integers(0, 20), duration=st.sampled_from([1.0, 6.0]))
    def hold(self, index, duration):
        try:
            self.world.manager.hold(self.world.caller, self.pick(index).request.sequence_id, "owner", duration)
        except VoidSequenceError:
            return

    @rule(seconds=st.sampled_from([0.5, 5.0]))
    def wait(self, seconds):
        world = self.world
        world.now += seconds
        world.sync()
        world.renew()
        # What a scheduler held that is gone is freed a sequence at a time.
        with small_steps():
            world.manager.expire()

    @invariant()
    def everything_adds_up(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        world.cancelled = [copy.ticket for live in world.live.values() if not live.started for copy in live.copies]
        world.sync()
        world.start_scheduler()
        world.run_executor_copies()
        # A hold that a sequence leaves behind counts from when it is released.
        world.carry_out()
        world.now += 100
        world.renew()
        world.manager.expire()
        world.carry_out()
        world.run_executor_copies()
        world.check()
        assert all(pool.used_blocks == 0 for pool in world.manager.queries.pools())


TestCacheWorld = CacheWorld.TestCase
TestCacheWorld.settings = settings(max_examples=60, stateful_step_count=50, suppress_health_check=list(HealthCheck))

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
    "extend": 3,
    "hold": 2,
    "wait": 2,
    **DEATHS,
    **OPERATIONS,
}
OF_A_SEQUENCE = {"leave", "release", "truncate", "fork", "trim", "extend", "hold"}


def arguments(name: str, random: Random) -> dict[str, object]:
    """What an operation is called with; mostly what makes sequences meet."""
    if name == "admit":
        base = random.choice(BASES)[: random.randint(1, 18)]
        return {
            "tokens": base + [random.randrange(3) for _ in range(random.randrange(4))],
            "salt": random.choice([None] * 6 + ["a"]),
            "adapter_id": random.choice([None] * 8 + [0]),
            "priority": random.choice([None, None, 0, 10, 35, 90]),
            "duration": random.choice([None, 1.0, 4.0, 30.0]),
            "session_id": random.choice([None, None, "x", "y"]),
            "tenant_id": random.choice(TENANTS),
            "no_store": random.random() < 0.08,
            "no_read": random.random() < 0.08,
            "lowest": random.choice([*TierKind, TierKind.DISK, TierKind.DISK]),
            "policy": random.choice([None, random.choice(POLICIES)]),
        }
    if name in OPERATIONS:
        return operator_arguments(name, random)
    if name in DEATHS:
        return death_arguments(name, random)
    found = {
        "step": {"most": random.randint(1, 9), "fail": random.choice([0] * 8 + [0.5, 1])},
        "work": {"rounds": random.randint(1, 5)},
        "confirm": {"limit": random.randrange(3)},
        "wait": {"seconds": random.choice([0.5, 5.0])},
    }.get(name, {})
    found |= {"index": random.randrange(20)} if name in OF_A_SEQUENCE else {}
    found |= {"truncate": {"drop": random.randrange(7)}, "extend": {"more": random.randrange(9)}}.get(name, {})
    found |= {"duration": random.choice([1.0, 6.0])} if name == "hold" else {}
    found |= {"length": random.choice([None, random.randint(1, 24)])} if name == "fork" else {}
    return found


def live_long(seed: int, operations: int, *, moves: int = WEIGHTS["update_pool"], **fixed: object) -> dict[str, object]:
    """Operations weighted so that blocks are shared, copied, evicted and truncated often; returns the life's settings.

    `make fuzz-manager` has lives that nobody has seen, here are always the same. moves: how often the size of a pool
    changes, as a weight.
    """
    random, weights = Random(seed), WEIGHTS | {"update_pool": moves}
    machine = CacheWorld()
    drawn = {
        "windows": random.choice([(None,), (None,), (None, 5), (3,), (None, 2, 9)]),
        "num_blocks": random.choice([4, 6, 8, 12, 12, 20]),
        "seed": seed,
        "ahead": random.choice([0, 3, 8]),
        "low": random.choice([0.0, 0.2]),
        "host": random.choice([0, 2, 6]),
        "disk": random.choice([0, 3]),
        "copy": random.random() < 0.8,
        "pins": random.choice([0.1, 0.3, 0.7]),
        "through": random.random() < 0.8,
        # Pools that share memory, with so many slots more than they may use.
        "movable": 6 * (seed % 3 == 1),
    }
    drawn |= fixed
    machine.build(**drawn)
    for _ in range(operations):
        (name,) = random.choices(list(weights), list(weights.values()))
        if name not in OF_A_SEQUENCE or machine.world.live:
            getattr(machine, name)(**arguments(name, random))
            machine.world.check()
    machine.teardown()
    return drawn


@pytest.mark.parametrize("seed", range(100))
def test_a_long_random_life_ends_with_every_block_free_or_cached(seed):
    live_long(seed, 400)


@pytest.mark.parametrize("seed", range(20))
def test_so_does_a_life_with_room_for_many_that_evict_tokens(seed):
    live_long(seed, 400, windows=(None,), num_blocks=24)


@pytest.mark.parametrize("seed", [*range(15), 700129, 700173])
def test_so_does_a_life_in_which_memory_moves_between_groups(seed):
    windows = [(None, 5), (None, 2, 9), (None,)]
    live_long(seed, 400, moves=6, windows=Random(seed).choice(windows), movable=6)
