"""The rule by which the Triton kernel cuts its work."""

from itertools import product
from typing import Any

import pytest

from kernels.paged_attention.tiling import MAX_SPLITS, TileSizes, choose_sizes

# A batch of single tokens on a large device.
DECODE: dict[str, Any] = {
    "capability": (9, 0),
    "multiprocessors": 132,
    "rows": 64,
    "sequences": 64,
    "kv_heads": 8,
    "group": 4,
    "head_dim": 128,
    "element_size": 2,
    "cache_element_size": 2,
    "max_query_len": 1,
    "max_seq_len": 4096,
    "window": None,
}


def sizes(**changes: Any) -> TileSizes:
    return choose_sizes(**{**DECODE, **changes})


@pytest.mark.parametrize(
    ("changes", "splits"),
    [
        ({}, 1),
        ({"rows": 32, "sequences": 32}, 2),
        ({"rows": 1, "sequences": 1}, 16),
        ({"rows": 1, "sequences": 1, "max_seq_len": 131072}, 64),
        ({"rows": 1, "sequences": 1, "max_seq_len": 400}, 1),
        ({"rows": 1, "sequences": 1, "max_seq_len": 131072, "window": 1024}, 4),
        ({"rows": 1, "sequences": 1, "kv_heads": 1, "max_seq_len": 1 << 20}, MAX_SPLITS),
        ({"rows": 128, "sequences": 1, "max_query_len": 128}, 4),
        ({"rows": 512, "sequences": 1, "max_query_len": 512}, 1),
        ({"rows": 1, "sequences": 1, "multiprocessors": 1}, 1),
    ],
    ids=str,
)
def test_keys_are_shared_out_until_the_device_is_busy_or_shares_get_small(changes: dict[str, Any], splits: int) -> None:
    assert sizes(**changes).splits == splits


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256, 512])
@pytest.mark.parametrize("group", [1, 3, 7, 20, 200])
def test_a_tile_holds_whole_tokens_and_at_least_one(group: int, head_dim: int) -> None:
    for capability, max_query_len, element_size in product([(8, 0), (9, 0), (12, 0)], [1, 2, 500], [2, 4]):
        chosen = sizes(
            group=group,
            head_dim=head_dim,
            element_size=element_size,
            max_query_len=max_query_len,
            capability=capability,
        )
        assert chosen.tokens >= 1
        assert chosen.tokens * group <= chosen.rows
        assert chosen.rows >= 16
        for size in (chosen.rows, chosen.keys, chosen.splits, chosen.num_warps):
            assert size & (size - 1) == 0
