"""What tables say about messages."""

import pytest

from kvctl.display.output import table
from kvctl.display.tables import POOLS
from protos.kvcache.v1 import kvcache_pb2 as pb


def cells(pool: pb.Pool) -> dict[str, str]:
    """The cells of a pool, whose texts have single spaces only, by their headers."""
    head, row = table(POOLS, [pool], wide=False).splitlines()
    names = head.split()
    return dict(zip(names, [cell.strip() for cell in row.split("   ") if cell.strip()], strict=True))


def test_each_block_of_a_pool_counts_once() -> None:
    pool = pb.Pool(pool_id="e/0", total_blocks=512, used_blocks=3, cached_blocks=171, free_blocks=509)
    found = cells(pool)
    assert (found["USED"], found["CACHED"], found["EMPTY"]) == ("3", "171", "338")
    owing = pb.Pool(pool_id="e/0", total_blocks=2, used_blocks=6)
    assert cells(owing)["EMPTY"] == "0"


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({}, "0/91"),
        ({"used_blocks": 2, "cached_blocks": 5}, "7/91"),
        ({"copy_blocks": 91}, "91/91 (91 copies)"),
        ({"cached_blocks": 5, "copy_blocks": 1}, "6/91 (1 copy)"),
    ],
)
def test_copies_of_device_blocks_fill_a_lower_tier(counts: dict[str, int], said: str) -> None:
    host = pb.TierUsage(tier=pb.TIER_HOST, total_blocks=91, **counts)
    found = cells(pb.Pool(pool_id="e/0", lower_tiers=[host]))
    assert (found["HOST"], found["DISK"]) == (said, "-")
