"""The work of calls as the cache grows: doubling the cache must not do more than double it."""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from cachemgr.blocks.block import Account, Block, account_of
from cachemgr.blocks.tier import Tier
from cachemgr.manager import CacheManager
from cachemgr.operators.removal_plan import RemovalPlan
from cachemgr.sequences.copies import OpenedCopies
from cachemgr.slices import at_once
from cachemgr.types import (
    ExecutorSpec,
    ExtraKey,
    ForgetTarget,
    ManagerConfig,
    PoolSpec,
    Prefix,
    Quota,
    RetentionRule,
    RuleAction,
    RuleMatch,
)
from protos.kvcommon import block_keys
from tests.support.in_process_manager import World
from tests.support.random_operations import live_long
from tests.support.work import work_of

# A linear call has 2, a quadratic call nearly 4; the margin is for the other work of a call.
LINEAR = 2.2
CONFIG = ManagerConfig(capacity_ahead_tokens=0, free_watermark=0.0, event_history=10)


def test_the_recalled_copy_is_the_first_in_eviction_order(monkeypatch):
    """The heap is compared with a look at all open copies, in lives with quotas, leases and lower tiers."""
    heap_first = OpenedCopies.first
    compared = 0

    def first(opened: OpenedCopies, tier: Tier, account: Account | None) -> Block | None:
        nonlocal compared
        found = heap_first(opened, tier, account)
        moving = [
            ticket.target
            for ticket in opened
            if ticket.pool.offloader.offloading.get(ticket.target) is ticket
            and ticket.target.parent is not None
            and ticket.pool.tier_of(ticket.target) is tier
            and not ticket.target.children_in_tier
            and account in (None, account_of(ticket.target))
        ]
        assert found is min(moving, key=lambda block: (block.priority, block.recency), default=None)
        compared += found is not None
        return found

    monkeypatch.setattr(OpenedCopies, "first", first)
    for seed in range(300_002, 300_022):
        live_long(seed, 250, host=3, disk=seed % 3 * 2, num_blocks=12)
    assert compared > 10


def one_chain(blocks: int, **options: object) -> World:
    """A cached prompt of N = `blocks` blocks."""
    world = World(blocks + 4, config=CONFIG)
    world.cache(list(range(blocks * 4 + 1)), **options)
    return world


def beside_full_lower_tiers(blocks: int, *, through: bool, disk: int) -> Callable[[], object]:
    config = dataclasses.replace(CONFIG, write_through=through)
    world = World(blocks, host_blocks=blocks, disk_blocks=disk * blocks, config=config)
    for first in (10_000, 20_000):
        world.fill(first)
        world.finish(f"fill{first}")
    request = world.request(list(range(30_000, 30_000 + blocks * 4)))
    return lambda: world.manager.admit(request)


def forget_a_chain(blocks: int, *, validate_only: bool, **target: object) -> Callable[[], object]:
    world = one_chain(blocks, salt="a", session_id="x")
    return lambda: at_once(world.operators.forget(ForgetTarget(**target), validate_only=validate_only))


def forget_a_shared_session(blocks: int) -> Callable[[], object]:
    world = one_chain(blocks, session_id="x")
    # Another session continues the chain, and a third one uses it.
    world.cache([*range(blocks * 4), 1, 2, 3, 4, 5], session_id="y")
    world.run(list(range(blocks * 4 + 1)), session_id="z")
    return lambda: at_once(world.operators.forget(ForgetTarget(session_id="x"), validate_only=True))


def register_again(blocks: int) -> Callable[[], object]:
    world = World(220, config=CONFIG)
    world.cache(list(range(blocks * 4 + 1)))
    return lambda: world.manager.register_executor(world.spec())


def register_slots(slots: int) -> Callable[[], object]:
    manager = CacheManager(1, lambda: 0.0)
    manager.register_scheduler("s", 1)
    half = slots // 2
    pools = [PoolSpec(0, slots, host_blocks=slots, block_bytes=1, share_blocks=half)]
    filled = {"last_write_steps": [[1] * half + [0] * half], "host_generations": [[7] * slots]}
    spec = ExecutorSpec("e", 1, "m", b"f" * 32, 16, pools, memory_bytes=half, **filled)
    return lambda: manager.register_executor(spec, later=True)


def beside_quotas(tenants: int, **options: int) -> Callable[[], object]:
    world = World(tenants + 60)
    for number in range(tenants):
        at_once(world.operators.set_quota(Quota(tenant_id=f"t{number}", **options), validate_only=False))
    at_once(world.operators.set_quota(Quota(tenant_id="me"), validate_only=False))
    for number in range(tenants):
        world.cache([number, 1, 2, 3], tenant_id=f"t{number}")
    prompt = list(range(50_000, 50_080))
    world.cache(prompt, tenant_id="me")
    world.cache(list(range(60_000, 60_160)), tenant_id="me")
    return lambda: world.admit([*prompt, *range(100)], "a", tenant_id="me")


def beside_rules(rules: int) -> Callable[[], object]:
    world = World(12)
    for number in range(rules):
        for match in (RuleMatch(prefix_token_ids=(number + 100,) * 8), RuleMatch(salt=f"s{number}")):
            rule = RetentionRule(f"r{number}{match.salt}", match=match, action=RuleAction(priority=1))
            at_once(world.operators.create_rule(rule, validate_only=False))
    return lambda: world.manager.admit(world.request(list(range(9))))


def pin_a_chain(blocks: int) -> Callable[[], object]:
    world = World(blocks + 10, config=dataclasses.replace(CONFIG, pin_budget=1.0))
    world.cache(list(range(4 * blocks)))
    return lambda: world.operators.pin_prefix(Prefix(tuple(range(4 * blocks))), "ops", 5.0, validate_only=False)


def admit_images(images: int) -> Callable[[], object]:
    world = World(images + 4)
    keys_of_images = tuple(ExtraKey(4 * index, 2, b"cat") for index in range(images))
    return lambda: world.manager.admit(world.request(list(range(images * 4 + 1)), extra_keys=keys_of_images))


PREFIX = Prefix(tuple(range(8)), salt="a")
WORK: list[tuple[Callable[[int], Callable[[], object]], int, int, float]] = [
    *((partial(beside_full_lower_tiers, through=t, disk=d), 100, 200, LINEAR) for t in (False, True) for d in (0, 1)),
    *(
        (partial(forget_a_chain, validate_only=dry, **target), 100, 200, LINEAR)
        for dry in (True, False)
        for target in ({"salt": "a"}, {"session_id": "x"}, {"prefix": PREFIX})
    ),
    (forget_a_shared_session, 100, 200, LINEAR),
    (register_again, 20, 200, 1.2),
    (register_slots, 20_000, 80_000, 2),
    *((partial(beside_quotas, **quota), 20, 400, 1.3) for quota in ({}, {"device_floor": 1}, {"device_ceiling": 40})),
    (beside_rules, 10, 200, 1.2),
    (pin_a_chain, 40, 160, 5),
    (admit_images, 200, 400, 2.5),
]


@pytest.mark.parametrize(
    ("prepare", "small", "large", "most"),
    WORK,
    ids=lambda value: getattr(getattr(value, "func", value), "__name__", None),
)
def test_the_work_of_a_call_grows_no_faster_than_its_blocks(prepare, small, large, most):
    assert work_of(prepare(large)) < most * work_of(prepare(small))


def test_explaining_a_miss_hashes_the_prompt_for_its_own_root_only():
    prompt = tuple(range(200))
    world = World(164, config=CONFIG)
    for number in range(100):
        world.cache([number + 1_000] * 5, salt=f"s{number}")
    with counted(block_keys, "_begin_child") as hashes:
        world.queries.explain(Prefix(prompt), 0)
    # For the look-up, and for the walk.
    assert hashes[0] <= 3 * len(prompt) // 4


@contextlib.contextmanager
def counted(owner: object, name: str) -> Iterator[list[int]]:
    """Counts the calls of a function meanwhile."""
    real, calls = getattr(owner, name), [0]

    def call(*arguments: object, **options: object) -> object:
        calls[0] += 1
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield calls


def test_a_removal_plan_is_not_tracked_by_the_garbage_collector():
    world = one_chain(64)
    pool = world.manager._state.pool("e/0")
    plan = RemovalPlan()
    at_once(plan.add_all(pool, list(pool.tree.by_key.values())))
    assert len(list(plan.blocks())) == len(pool.tree.by_key) >= 64
    keyed = vars(plan)["_by_depth"].values()
    assert keyed
    assert not any(map(gc.is_tracked, keyed))
