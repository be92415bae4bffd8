"""How the keys of single queries are shared out among programs."""

import itertools
from collections.abc import Callable

import pytest
import torch

from kernels.paged_attention.batch import PagedBatch
from kernels.paged_attention.launch import share_out
from kernels.paged_attention.tiling import MAX_SPLITS, MORE_SHARES, MOST_KEYS, SPLIT_KEYS, TileSizes

# Lengths of sequences; 0 for one without a query.
LENGTHS = {
    "short ones": [1, 40, 256, 257, 2048],
    "a long one among short ones": [1024] * 20 + [65536] + [1024] * 20,
    "the longest": [131072],
    "none has a query": [0, 0, 0],
    "gaps": [0, 9000, 0, 3, 0],
    "more than there are entries for": [60000] * 40,
}


def shares_of(backend: str, lengths: list[int], window: int | None, splits: int) -> list[list[int]]:
    """The sequence of each share, and the first share of each sequence."""
    device = "cuda" if backend == "cuda" else "cpu"
    queries = torch.tensor([0, *(length > 0 for length in lengths)], dtype=torch.int32).cumsum(0)
    batch = PagedBatch(
        query_start=queries.int().to(device),
        # Of a sequence without a query it may be anything.
        seq_lens=torch.tensor([length or 777 for length in lengths], dtype=torch.int32, device=device),
        block_tables=torch.zeros(len(lengths), 1, dtype=torch.int32, device=device),
        max_query_len=1,
        max_seq_len=max(lengths),
    )
    shares = share_out(batch, window, TileSizes(16, 4, 64, 4, 2, splits, SPLIT_KEYS))
    return [shares.sequence.tolist(), shares.first.tolist()]


def expected(keys: list[int], splits: int, most: int) -> list[int]:
    """Shares of each sequence."""
    return [min(max(min(-(-one // SPLIT_KEYS), splits), -(-one // most)), MAX_SPLITS) for one in keys]


@pytest.mark.parametrize("run_on", ["interpreter", "cuda"], indirect=True)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [None, 1500])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_each_sequence_is_shared_out_by_its_own_length(
    run_on: Callable[..., list[list[int]]], lengths: list[int], window: int | None, splits: int
) -> None:
    sequence, first = run_on(shares_of, lengths, window, splits)
    keys = [min(length, window or length) for length in lengths]
    most, entries = MOST_KEYS, splits * len(lengths) + max(MORE_SHARES, len(lengths))
    while sum(counts := expected(keys, splits, most)) > entries:
        most *= 2
    assert [later - earlier for earlier, later in itertools.pairwise(first)] == counts
    assert first[0] == 0
    rest = [-1] * (entries - sum(counts))
    assert sequence == [number for number, count in enumerate(counts) for _ in range(count)] + rest
