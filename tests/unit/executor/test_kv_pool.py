"""Pools in the host's memory: only written blocks take memory, and overwritten blocks give memory back."""

from pathlib import Path
from random import Random

import pytest
import torch

from executor.cache.pool import KvPools, LayerGroup, LayerShape
from executor.cache.shares import Shares
from executor.cache.tiers.tiers import Tiers
from executor.errors import ModelError
from executor.rpc.announcement import PoolAnnouncement
from protos.kvcache.v1 import kvcache_pb2 as kv

CPU = torch.device("cpu")


def pools_of(heads: int, blocks: int = 64, layers: int = 3) -> KvPools:
    """One group whose block of 16 tokens has `heads` * 1024 bytes in each of K and V of a layer."""
    groups = [LayerGroup(LayerShape(None, heads, 16), tuple(range(layers)))]
    return KvPools(groups, Shares((4,), (blocks,), 1 << 20), 16, torch.float32, CPU)


def resident_bytes(pools: KvPools) -> int:
    """Memory of this machine that K and V of all pools take, as the system reports it."""
    begins = {pool.data_ptr() for one in pools.pools for pool in (one.k, one.v)}
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            begin, end = (int(number, 16) for number in line.split(" ", 1)[0].split("-"))
            counts = any(begin <= one < end for one in begins)
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def write(pools: KvPools, slot: int, step: int = 1) -> None:
    pools.mark_written(0, [slot], step)
    pools.pools[0].k[:, slot] = slot
    pools.pools[0].v[:, slot] = -slot


def test_slots_that_are_overwritten_take_no_memory_any_more() -> None:
    pools = pools_of(heads=8, blocks=1024)
    before = resident_bytes(pools)
    for slot in range(1, 513):
        write(pools, slot)
    full = resident_bytes(pools)
    assert full - before >= 512 * pools.pools[0].block_bytes
    for slot in range(1, 513):
        pools.zero(0, slot, step=2)
    # Neighbours may share a page, and the kernel may have joined some pages to a huge one.
    assert resident_bytes(pools) - before <= (full - before) // 10
    assert not pools.pools[0].k[:, 1:513].any()
    assert set(pools.pools[0].last_write_steps[1:513]) == {2}


# A block of less than a page, of a page, of one and a half, and of several.
@pytest.mark.parametrize("heads", [1, 4, 6, 9])
def test_what_other_slots_hold_stays_in_whatever_order_slots_come_and_go(heads: int) -> None:
    random, pools = Random(heads), pools_of(heads)
    pool, held = pools.pools[0], set()
    for step in range(1, 600):
        slot = random.randint(1, 64)
        if slot in held and random.random() < 0.6:
            pools.zero(0, slot, step)
            held.discard(slot)
            assert not pool.k[:, slot].any()
            assert not pool.v[:, slot].any()
        else:
            write(pools, slot, step)
            held.add(slot)
        assert all((pool.k[:, one] == one).all() and (pool.v[:, one] == -one).all() for one in held)
        assert not pool.k[:, 0].any()


def test_memory_that_may_not_be_reserved_is_an_error_that_names_the_setting() -> None:
    # More than a process can address.
    with pytest.raises(ModelError, match="KVKEEP_EXECUTOR_POOL_SHARES"):
        pools_of(heads=8, blocks=1 << 36)


def test_the_memory_and_the_first_shares_are_reported_to_the_manager() -> None:
    groups = [LayerGroup(LayerShape(window, 2, 16), (layer,)) for layer, window in enumerate((None, 32))]

    def request(shares: Shares | int) -> kv.RegisterExecutorRequest:
        pools = KvPools(groups, shares, 16, torch.float32, CPU)
        announcement = PoolAnnouncement("e", 1, "m", bytes(32), pools, Tiers(pools), plain_rotary=True)
        return announcement.request(again=False)

    told = request(Shares((6, 2), (7, 7), 8 * 4096))
    assert told.memory_bytes == 8 * 4096
    assert [(pool.num_blocks, pool.share_blocks) for pool in told.pools] == [(7, 6), (7, 2)]
    assert {pool.block_bytes for pool in told.pools} == {4096}
    fixed = request(5)
    assert not fixed.HasField("memory_bytes")
    assert [(pool.num_blocks, pool.share_blocks) for pool in fixed.pools] == [(5, 0), (5, 0)]
