"""The device's side of copies: both kinds of device agree on where a block's bytes lie."""

import ctypes

import pytest
import torch

from executor.cache.pool import KvPools
from executor.cache.tiers.cuda_driver import MAX_PITCH, Rows, _Copy, first_rows
from executor.cache.tiers.device import CpuBlocks
from tests.unit.executor.tiers.world import GROUPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("group", [0, 1])
def test_the_rows_that_a_gpu_copies_are_what_a_cpu_reads(dtype: torch.dtype, group: int) -> None:
    pools = KvPools(GROUPS, 4, 4, dtype, torch.device("cpu"))
    pool, blocks = pools.pools[group], CpuBlocks(pools)
    for cache in (pool.k, pool.v):
        cache.copy_(torch.randn(cache.shape).to(dtype))
    data = blocks.staging(pool.block_bytes)
    blocks.begin_read(group, 2, data, None)
    # K first, layer after layer.
    half = pool.block_bytes // 2
    assert data[:half].tobytes() == pool.k[:, 2].contiguous().view(torch.uint8).numpy().tobytes()
    there = b"".join(
        ctypes.string_at(rows.address + row * rows.pitch, rows.width)
        for rows in (first.of_slot(2) for cache in pool.caches for first in first_rows(cache))
        for row in range(rows.height)
    )
    assert there == data.tobytes()


def test_layers_that_are_too_far_apart_for_one_copy_are_copied_one_by_one() -> None:
    def rows_of(slots: int) -> list[Rows]:
        return first_rows(torch.empty(3, slots, 16, 8, 128, dtype=torch.bfloat16, device="meta"))

    size = 16 * 8 * 128 * 2
    at_most = MAX_PITCH // size
    assert rows_of(at_most) == [Rows(0, at_most * size, size, 3)]
    far = (at_most + 1) * size
    assert rows_of(at_most + 1) == [Rows(layer * far, size, size, 1) for layer in range(3)]


def test_the_drivers_copy_has_the_size_of_its_declaration() -> None:
    # On 64 bits: 16 words, of which a memory type fills half of one.
    assert ctypes.sizeof(_Copy) == 16 * 8
    assert (_Copy.src_host.offset, _Copy.dst_x.offset, _Copy.width.offset) == (24, 56, 112)
