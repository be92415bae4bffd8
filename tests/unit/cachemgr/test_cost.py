"""What calls cost as the cache grows: work is counted, and doubling the cache must not do more than double it."""

import pytest

from cachemgr.api import ManagerConfig
from cachemgr.block import Block
from cachemgr.tiers import Account, Tier, account_of
from cachemgr.transfers import OpenedCopies
from tests.support.work import work_of
from tests.unit.cachemgr.test_random_operations import live_long
from tests.unit.cachemgr.tiered import fill
from tests.unit.cachemgr.world import World

# A linear call has 2, a quadratic call comes near 4; the rest is what the call does besides.
LINEAR = 2.2
CONFIG = ManagerConfig(capacity_ahead_tokens=0, free_watermark=0.0, event_history=10)


def beside_a_full_host_tier(blocks: int, through: bool, disk: int = 0) -> World:
    """The device and the host tier hold two prompts that share nothing."""
    config = ManagerConfig(capacity_ahead_tokens=0, free_watermark=0.0, event_history=10, write_through=through)
    world = World(blocks, host_blocks=blocks, disk_blocks=disk * blocks, config=config)
    for first in (10_000, 20_000):
        fill(world, first)
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


def test_the_copy_that_is_recalled_is_the_one_whose_block_goes_first(monkeypatch):
    """The heap is compared with a look at all open copies, in lives with quotas, leases and lower tiers."""
    heap_first = OpenedCopies.first
    compared = 0

    def first(opened: OpenedCopies, tier: Tier, account: Account | None) -> Block | None:
        nonlocal compared
        found = heap_first(opened, tier, account)
        moving = [
            ticket.target
            for ticket in opened
            if ticket.pool.moving.get(ticket.target) is ticket
            and ticket.target.parent is not None
            and ticket.pool.tier_of(ticket.target) is tier
            and not ticket.target.near
            and account in (None, account_of(ticket.target))
        ]
        assert found is min(moving, key=lambda block: (block.priority, block.recency), default=None)
        compared += found is not None
        return found

    monkeypatch.setattr(OpenedCopies, "first", first)
    for seed in range(300_002, 300_008):
        live_long(seed, 250, host=3, disk=seed % 3 * 2, num_blocks=12)
    assert compared > 10
