"""The work of calls as the cache grows: doubling the cache must not do more than double it."""

import contextlib
import gc
from collections.abc import Iterator

import pytest

from cachemgr.blocks import block_keys as keys
from cachemgr.blocks.block import Block
from cachemgr.blocks.quota import Account, account_of
from cachemgr.blocks.tier import Tier
from cachemgr.operators.removal_plan import RemovalPlan
from cachemgr.sequences.transfers import OpenedCopies
from cachemgr.steps import at_once
from cachemgr.types import ForgetTarget, ManagerConfig, Prefix
from tests.support.in_process_manager import World
from tests.support.random_operations import live_long
from tests.support.work import work_of

# A linear call has 2, a quadratic call comes near 4; the rest is what the call does besides.
LINEAR = 2.2
CONFIG = ManagerConfig(capacity_ahead_tokens=0, free_watermark=0.0, event_history=10)


def beside_a_full_host_tier(blocks: int, through: bool, disk: int = 0) -> World:
    """The device and the host tier hold two prompts that share nothing."""
    config = ManagerConfig(capacity_ahead_tokens=0, free_watermark=0.0, event_history=10, write_through=through)
    world = World(blocks, host_blocks=blocks, disk_blocks=disk * blocks, config=config)
    for first in (10_000, 20_000):
        world.fill(first)
        world.confirm()
        world.finish(f"fill{first}")
    return world


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("disk", [0, 1])
def test_an_admission_beside_full_lower_tiers_costs_its_blocks_and_not_their_square(through, disk):
    def cost(blocks: int) -> int:
        world = beside_a_full_host_tier(blocks, through, disk)
        request = world.request(list(range(30_000, 30_000 + blocks * 4)))
        return work_of(lambda: world.manager.admit(request))

    assert cost(200) < LINEAR * cost(100)


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
    """A cached prompt of so many blocks."""
    world = World(blocks + 4, config=CONFIG)
    world.cache(list(range(blocks * 4 + 1)), **options)
    return world


TARGETS = [ForgetTarget(salt="a"), ForgetTarget(session_id="x"), ForgetTarget(prefix=Prefix(tuple(range(8)), salt="a"))]


@pytest.mark.parametrize("validate_only", [True, False])
@pytest.mark.parametrize("target", TARGETS, ids=["salt", "session", "prefix"])
def test_forgetting_a_chain_costs_its_blocks_and_not_their_square(target, validate_only):
    def cost(blocks: int) -> int:
        world = one_chain(blocks, salt="a", session_id="x")
        return work_of(lambda: at_once(world.operators.forget(target, validate_only=validate_only)))

    assert cost(200) < LINEAR * cost(100)


def test_forgetting_a_shared_session_costs_the_blocks_and_not_their_square():
    def cost(blocks: int) -> int:
        world = one_chain(blocks, session_id="x")
        # Another session goes on behind the chain, and a third one uses it.
        world.cache([*range(blocks * 4), 1, 2, 3, 4, 5], session_id="y")
        world.run(list(range(blocks * 4 + 1)), session_id="z")
        return work_of(lambda: at_once(world.operators.forget(ForgetTarget(session_id="x"), validate_only=True)))

    assert cost(200) < LINEAR * cost(100)


def test_registering_an_executor_again_costs_the_same_whatever_is_cached():
    def cost(blocks: int) -> int:
        world = World(220, config=CONFIG)
        world.cache(list(range(blocks * 4 + 1)))
        return work_of(lambda: world.manager.register_executor(world.spec()))

    assert cost(200) < 1.2 * cost(20)


def test_explaining_a_miss_hashes_the_prompt_for_its_own_root_only():
    prompt = tuple(range(200))
    world = World(164, config=CONFIG)
    for number in range(100):
        world.cache([number + 1_000] * 5, salt=f"s{number}")
    with counted(keys, "sha256") as hashes:
        world.queries.explain(Prefix(prompt), 0)
    # For the look-up, for the walk, and for the roots themselves.
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
