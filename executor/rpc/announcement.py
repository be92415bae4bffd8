"""How an executor registers at the cache manager: its pools, and which of their blocks are valid."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from executor.cache.pool import KvPools
from executor.cache.tiers.hazards import SlotRef
from executor.cache.tiers.tiers import Tiers
from executor.step import Tier
from protos.kvcache.v1 import kvcache_pb2 as kv

# The largest step number, for slots whose contents are about to change.
NEVER = (1 << 64) - 1


@dataclass
class PoolAnnouncement:
    """How an executor with pools registers. weight_version: as of the last update; empty before any."""

    executor_id: str
    epoch: int
    model: str
    fingerprint: bytes
    pools: KvPools
    tiers: Tiers
    plain_rotary: bool
    weight_version: str = ""

    def request(self, *, again: bool, awaited: Collection[SlotRef] = ()) -> kv.RegisterExecutorRequest:
        """again: whether to add the last write of every slot, by which the manager knows the blocks that still exist.

        awaited: slots that will be written by copies that have not begun.
        """
        pools, tiers = self.pools, self.tiers
        snapshot = tiers.snapshot()
        changing = {*snapshot.changing, *awaited}
        return kv.RegisterExecutorRequest(
            executor_id=self.executor_id,
            executor_epoch=self.epoch,
            model=self.model,
            model_fingerprint=self.fingerprint,
            block_size=pools.block_size,
            plain_rotary=self.plain_rotary,
            weight_version=self.weight_version,
            pools=[
                kv.PoolSpec(
                    group=number,
                    num_blocks=pool.num_blocks,
                    attention_window=pool.group.shape.window,
                    num_layers=len(pool.group.layers),
                    num_kv_heads=pool.group.shape.kv_heads,
                    head_dim=pool.group.shape.head_dim,
                    dtype=str(pool.k.dtype).removeprefix("torch."),
                    block_bytes=pool.block_bytes,
                    last_write_steps=_with(pool.last_write_steps[1:], Tier.DEVICE, number, changing, NEVER)
                    if again
                    else (),
                    host_blocks=tiers.slots.get(Tier.HOST, 0),
                    disk_blocks=tiers.slots.get(Tier.DISK, 0),
                    share_blocks=0 if pools.shares.memory_bytes is None else pools.shares.blocks[number],
                    host_generations=_with(snapshot.generations(Tier.HOST, number), Tier.HOST, number, changing, 0),
                    disk_generations=_with(snapshot.generations(Tier.DISK, number), Tier.DISK, number, changing, 0),
                )
                for number, pool in enumerate(pools.pools)
            ],
            memory_bytes=pools.shares.memory_bytes,
        )


def _with(
    values: np.ndarray[tuple[int], np.dtype[np.uint64]], tier: Tier, group: int, changing: set[SlotRef], value: int
) -> list[int]:
    """Returns the values of a tier's slots 1, 2, …; `value` for slots that are changing."""
    result: list[int] = values.tolist()
    for its_tier, its_group, slot in changing:
        if (its_tier, its_group) == (tier, group) and slot <= len(result):
            result[slot - 1] = value
    return result
