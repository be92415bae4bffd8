"""The device's side of copies: both kinds of device agree on where a block's bytes lie."""

import numpy as np
import pytest
import torch

from executor.cache.pool import KvPools
from executor.cache.tiers.device import CpuBlocks, gathered, scatter, shaped
from tests.unit.executor.tiers.world import GROUPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("group", [0, 1])
def test_what_a_gpu_gathers_is_what_a_cpu_reads(dtype: torch.dtype, group: int) -> None:
    pools = KvPools(GROUPS, 4, 4, dtype, torch.device("cpu"))
    pool, blocks = pools.pools[group], CpuBlocks(pools)
    for cache in (pool.k, pool.v):
        cache.copy_(torch.randn(cache.shape).to(dtype))
    data = blocks.staging(pool.block_bytes)
    blocks.read(group, 2, data, None)
    # K first, layer after layer.
    half = pool.block_bytes // 2
    assert data[:half].tobytes() == pool.k[:, 2].contiguous().view(torch.uint8).numpy().tobytes()
    there = np.zeros_like(data)
    shaped(there, pool).copy_(gathered(pool, 2))
    assert (there == data).all()
    others = [gathered(pool, slot).view(torch.uint8) for slot in (0, 1, 2, 4)]
    scatter(pool, 3, shaped(data, pool))
    assert torch.equal(gathered(pool, 3).view(torch.uint8), gathered(pool, 2).view(torch.uint8))
    blocks.write(group, 3, there[::-1].copy(), None)
    blocks.write(group, 3, there, None)
    assert torch.equal(gathered(pool, 3).view(torch.uint8), gathered(pool, 2).view(torch.uint8))
    assert all(
        torch.equal(gathered(pool, slot).view(torch.uint8), other)
        for slot, other in zip((0, 1, 2, 4), others, strict=True)
    )
