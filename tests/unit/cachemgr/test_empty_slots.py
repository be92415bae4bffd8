"""Empty slots of a tier: added in portions, and allocated once each."""

from cachemgr.blocks.tier import Tier
from cachemgr.types import TierKind

SLOTS = 10_000


def test_empty_slots_are_allocated_once_in_order_and_then_in_order_of_release():
    tier = Tier(TierKind.DEVICE, 100, SLOTS)
    assert tier.num_empty == SLOTS
    assert tier.all_empty() == list(range(101, 101 + SLOTS))
    places = [tier.take_empty() for _ in range(SLOTS)]
    assert places == list(range(101, 101 + SLOTS))
    assert tier.num_empty == 0
    for place in (205, 103):
        tier.empty.append(place)
    assert [tier.take_empty(), tier.take_empty()] == [205, 103]


def test_the_last_slots_are_withheld_first_also_after_releases():
    tier = Tier(TierKind.DEVICE, 0, SLOTS)
    taken = [tier.take_empty() for _ in range(5000)]
    tier.withhold(1000)
    assert sorted(tier.withheld) == list(range(9001, 10001))
    tier.empty.extend(taken)
    tier.withhold(8000)
    assert (tier.total, tier.num_empty) == (1000, 1000)
    assert len({*tier.withheld, *tier.all_empty()}) == SLOTS


def test_slots_set_aside_for_a_recovery_are_all_empty_after_it():
    tier = Tier(TierKind.HOST, 50, SLOTS)
    first = tier.take_empty()
    tier.await_stored_blocks([1] * SLOTS)
    assert tier.num_empty == SLOTS - 1
    tier.end_stored_blocks()
    assert sorted([first, *tier.all_empty()]) == list(range(51, 51 + SLOTS))


def test_slots_of_stored_blocks_are_withheld_last():
    tier = Tier(TierKind.DEVICE, 0, 12)
    tier.await_stored_blocks([0, 5, 5, 0, 5, 5, 5, 0, 5, 5, 5, 5])
    tier.withhold(5)
    assert tier.withheld == [1, 4, 8, 11, 12]
    assert [tier.take_empty() for _ in range(tier.num_empty)] == [10, 9, 7, 6, 5, 3, 2]
