"""Small pools, and tiers over files in a temporary folder."""

import time
from pathlib import Path

import numpy as np
import torch

from executor.cache.pool import KvPools, LayerGroup, LayerShape
from executor.cache.tiers.files import FileSettings, open_file
from executor.cache.tiers.layout import FileLayout, least_size
from executor.cache.tiers.slot_file import SlotFile
from executor.cache.tiers.tiers import Tiers, layout_of, open_tiers
from executor.step import Copy, Tier
from tests.support.patience import patience

FINGERPRINT = b"f" * 32
# Two layer groups whose blocks are of different sizes.
GROUPS = (
    LayerGroup(LayerShape(None, 2, 8), (0, 1, 2)),
    LayerGroup(LayerShape(9, 1, 8), (3,)),
)
BLOCK_SIZE = 4


def make_pools(num_blocks: int = 6) -> KvPools:
    """Pools full of random numbers."""
    pools = KvPools(GROUPS, num_blocks, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    for pool in pools.pools:
        pool.k.normal_()
        pool.v.normal_()
    return pools


def size_for(pools: KvPools, slots: int) -> int:
    """Bytes of a file with N = `slots` slots per group."""
    block_bytes = tuple(pool.block_bytes for pool in pools.pools)
    return FileLayout(block_bytes, slots, bytes(32)).size + least_size(block_bytes) // 4


def settings(folder: Path, tier: str, size: int) -> FileSettings:
    """As the process makes them."""
    return FileSettings(
        folder,
        size,
        f"KVKEEP_EXECUTOR_{tier}_CACHE_DIR",
        f"KVKEEP_EXECUTOR_{tier}_CACHE_SIZE",
        in_memory=tier == "HOST",
    )


def make_tiers(
    pools: KvPools, folder: Path, *, host: int = 4, disk: int = 4, checksums: bool = True, name: str = "executor-0"
) -> Tiers:
    """Tiers with these numbers of slots per group."""
    return open_tiers(
        pools,
        FINGERPRINT,
        name,
        host=settings(folder / "host", "HOST", size_for(pools, host) if host else 0),
        disk=settings(folder / "disk", "DISK", size_for(pools, disk) if disk else 0),
        checksums=checksums,
    )


def make_file(
    kind: type[SlotFile], pools: KvPools, folder: Path, slots: int = 4, *, checksums: bool = True
) -> SlotFile:
    """A tier's file alone."""
    asked = settings(folder, kind.tier.name, size_for(pools, slots))
    layout = layout_of(pools, FINGERPRINT, asked.size, checksums=checksums)
    return kind(open_file(asked, f"{kind.tier.name}.kv", layout), layout)  # type: ignore[call-arg]


def block(pools: KvPools, group: int, slot: int) -> bytes:
    """What a device slot holds."""
    pool = pools.pools[group]
    return b"".join(cache[:, slot].contiguous().view(torch.uint8).numpy().tobytes() for cache in (pool.k, pool.v))


def fill(pools: KvPools, group: int, slot: int, value: float) -> None:
    """Writes a device slot."""
    for cache in (pools.pools[group].k, pools.pools[group].v):
        cache[:, slot] = torch.arange(cache[:, slot].numel()).reshape(cache[:, slot].shape) + value


def put(file: SlotFile, group: int, slot: int, ticket: int, seed: int = 0) -> bytes:
    """Fills a slot of a file by hand; returns what with."""
    size = file.layout.block_bytes[group]
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    file.claim(group, slot)
    buffer = file.buffer(group, slot, np.zeros(max(file.layout.block_bytes), dtype=np.uint8))
    buffer[:] = data
    file.store(group, slot, buffer)
    file.commit(group, slot, ticket, 77)
    return data.tobytes()


def held(file: SlotFile, group: int, slot: int) -> bytes:
    """What a slot of a file holds."""
    return file.fetch(group, slot, np.zeros(max(file.layout.block_bytes), dtype=np.uint8)).tobytes()


def until_idle(tiers: Tiers) -> None:
    """Waits until every copy has ended."""
    deadline = time.monotonic() + patience(10)
    while tiers.busy:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def shut(tiers: Tiers) -> None:
    """Waits until every copy has ended, and closes."""
    until_idle(tiers)
    tiers.close()


class Ends:
    """How copies ended."""

    def __init__(self) -> None:
        self.of: dict[int, bool] = {}

    def __call__(self, copy: Copy, good: bool) -> None:
        assert copy.ticket not in self.of, "reported twice"
        self.of[copy.ticket] = good


def down(ticket: int, source: int, target: int, tier: Tier = Tier.HOST, group: int = 0) -> Copy:
    """From the device."""
    return Copy(ticket, group, source, target, Tier.DEVICE, tier)


def up(ticket: int, source: int, target: int, tier: Tier = Tier.HOST, group: int = 0) -> Copy:
    """To the device."""
    return Copy(ticket, group, source, target, tier, Tier.DEVICE)
