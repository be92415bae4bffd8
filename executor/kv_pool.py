"""Device memory for keys and values: one pool per layer group, all with the same number of blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from executor.errors import ModelError
from executor.layers import LayerGroup, place_of_layers

# What a CPU executor takes when nobody says more: a laptop survives it.
CPU_BYTES = 4 << 30
MEMINFO = Path("/proc/meminfo")


Slots = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Pool:
    """k, v: [layers, num_blocks + 1, block_size, kv_heads, head_dim]; slot 0 is the null block.

    last_write_steps: [num_blocks + 1] uint64 on the host, per slot the last step that wrote it, 0 for never.
    """

    group: LayerGroup
    k: Tensor
    v: Tensor
    last_write_steps: np.ndarray[tuple[int], np.dtype[np.uint64]]

    @property
    def num_blocks(self) -> int:
        """Usable blocks."""
        return self.k.shape[1] - 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, K and V of all layers together."""
        return 2 * self.k[:, 0].numel() * self.k.element_size()


class KvPools:
    """All pools of an executor."""

    def __init__(
        self, groups: Sequence[LayerGroup], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.pools = tuple(_allocate(group, num_blocks, block_size, dtype, device) for group in groups)
        self.places = place_of_layers(groups)

    @property
    def max_tokens(self) -> int:
        """Tokens that fit into the smallest pool."""
        return self.num_blocks * self.block_size

    def layer(self, layer: int) -> tuple[int, Tensor, Tensor]:
        """Group of a layer and its K and V, [num_blocks + 1, block_size, kv_heads, head_dim]."""
        group, index = self.places[layer]
        pool = self.pools[group]
        return group, pool.k[index], pool.v[index]

    def zero(self, group: int, slot: int, step: int) -> None:
        """Overwrites a block with zeros, after this step."""
        pool = self.pools[group]
        pool.k[:, slot].zero_()
        pool.v[:, slot].zero_()
        self.mark_written(group, [slot], step)

    def mark_written(self, group: int, slots: Sequence[int] | Slots, step: int) -> None:
        """Notes that a step writes these slots."""
        self.pools[group].last_write_steps[np.asarray(slots, dtype=np.int64)] = step


def _allocate(group: LayerGroup, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Pool:
    shape = (len(group.layers), num_blocks + 1, block_size, group.shape.kv_heads, group.shape.head_dim)
    # Not zeroed: on a CPU, pages that are never used then never take memory.
    k, v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    for cache in (k, v):
        cache[:, 0].zero_()
    return Pool(group, k, v, np.zeros(num_blocks + 1, dtype=np.uint64))


def count_blocks(
    groups: Sequence[LayerGroup],
    block_size: int,
    dtype: torch.dtype,
    *,
    max_tokens: int,
    free_bytes: int,
    fraction: float,
) -> int:
    """Usable blocks per pool: the lesser of `max_tokens` (0 for no limit) and `fraction` of the free bytes.

    Raises ModelError when not even one block fits.
    """
    element = torch.empty(0, dtype=dtype).element_size()
    block_bytes = sum(
        2 * len(group.layers) * group.shape.kv_heads * group.shape.head_dim * element * block_size for group in groups
    )
    # One more than usable: the null block.
    blocks = int(free_bytes * fraction) // block_bytes - 1
    if max_tokens:
        blocks = min(blocks, max_tokens // block_size)
    if blocks < 1:
        raise ModelError(
            f"no memory for a single block of {block_size} tokens: it takes {block_bytes} bytes, "
            f"{int(free_bytes * fraction)} may be used, and KVKEEP_EXECUTOR_MAX_TOKENS is {max_tokens}"
        )
    return blocks


def free_memory(device: torch.device, meminfo: Path = MEMINFO) -> int:
    """Bytes that the pools may share; on a CPU bounded by CPU_BYTES."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(available_memory(meminfo), CPU_BYTES)


def available_memory(meminfo: Path = MEMINFO) -> int:
    """Bytes of the host's memory that nobody uses; without a word from the kernel more than there can be."""
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return 1 << 62
