"""Which tiers are worth waiting for."""

import pytest

from scheduler.bridge import CopySpeed
from scheduler.cache.tier_costs import RETRY_SECONDS, TierCosts
from scheduler.request import Tier

# Computing a block of 16 tokens takes 16 ms.
TOKEN = 1e-3


@pytest.mark.parametrize(
    ("host", "disk", "token", "lowest"),
    [
        (None, None, TOKEN, Tier.DISK),
        (1.0, 1.0, None, Tier.DISK),
        (0.015, None, TOKEN, Tier.DISK),
        (0.015, 0.015, TOKEN, Tier.DISK),
        (0.015, 0.017, TOKEN, Tier.HOST),
        (None, 0.017, TOKEN, Tier.HOST),
        (0.017, None, TOKEN, Tier.DEVICE),
        (0.017, 0.017, TOKEN, Tier.DEVICE),
    ],
)
def test_a_tier_is_used_unless_its_blocks_are_known_to_come_later_than_they_are_computed(
    host: float | None, disk: float | None, token: float | None, lowest: Tier
) -> None:
    costs = TierCosts(16)
    costs.observe(CopySpeed(host, disk, token), 0.0)
    assert costs.lowest_tier(0.0) is lowest


def test_the_cost_of_a_prompt_token_stays_known() -> None:
    costs = TierCosts(16)
    costs.observe(CopySpeed(1.0, None, TOKEN), 0.0)
    costs.observe(CopySpeed(2.0, None, None), 1.0)
    assert costs.lowest_tier(1.0) is Tier.DEVICE


def test_a_slow_tier_is_tried_again_after_a_while() -> None:
    costs = TierCosts(16)
    costs.observe(CopySpeed(0.001, 1.0, TOKEN), 0.0)
    # Copies from host memory go on, and nothing is heard of the disk.
    costs.observe(CopySpeed(0.002, 1.0, TOKEN), RETRY_SECONDS - 1)
    assert costs.lowest_tier(RETRY_SECONDS - 1) is Tier.HOST
    assert costs.lowest_tier(RETRY_SECONDS) is Tier.DISK
    costs.observe(CopySpeed(0.002, 0.9, TOKEN), RETRY_SECONDS + 1)
    assert costs.lowest_tier(RETRY_SECONDS + 1) is Tier.HOST
