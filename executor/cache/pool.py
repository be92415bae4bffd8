"""Device memory for keys and values: one pool per layer group."""

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from executor.cache.memory import MEMINFO, available_memory
from executor.cache.shares import Shares
from executor.errors import ModelError

# Most bytes of the pools on a CPU: even a laptop has this much.
CPU_BYTES = 4 << 30

Slots = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class LayerShape:
    """What determines the pool of a layer's keys and values. window: in tokens, None for full attention."""

    window: int | None
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LayerGroup:
    """Layers of equal shape, in the order of the model."""

    shape: LayerShape
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Scales:
    """k, v: [layers, kv_heads, head_dim] float32, factors of a group's 8-bit keys and values.

    Two numbers of a key that are rotated together have equal scales, so that rotated keys have the same scales.
    """

    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of its group's pool. k, v: [num_blocks + 1, block_size, kv_heads, head_dim].

    k_scale, v_scale: [kv_heads, head_dim] float32 of 8-bit caches, otherwise None.
    """

    group: int
    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True)
class Pool:
    """k, v: [layers, num_blocks + 1, block_size, kv_heads, head_dim]; slot 0 is the null block.

    last_write_steps: [num_blocks + 1] uint64 on the host, per slot the last step that wrote it, 0 for never.
    pages: releases the memory of unused slots; None if memory is allocated permanently.
    scales: of 8-bit pools, otherwise None. draft: the keys and values of a draft model, which are part of each block.
    """

    group: LayerGroup
    k: Tensor
    v: Tensor
    last_write_steps: np.ndarray[tuple[int], np.dtype[np.uint64]]
    pages: "Pages | None" = None
    scales: "Scales | None" = None
    draft: "Pool | None" = None

    @property
    def num_blocks(self) -> int:
        return self.k.shape[1] - 1

    @property
    def pairs(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """K and V, and those of a draft model: a block is a slot in all of them."""
        return (self.k, self.v), *(() if self.draft is None else self.draft.pairs)

    @property
    def caches(self) -> tuple[Tensor, ...]:
        """The tensors of all pairs."""
        return tuple(cache for pair in self.pairs for cache in pair)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all caches together."""
        return sum(cache[:, 0].numel() * cache.element_size() for cache in self.caches)

    def zero(self, slot: int) -> None:
        """Overwrites a block with zeros."""
        for cache in self.caches:
            cache[:, slot].zero_()

    def use(self, slots: Slots) -> None:
        """Prepares slots that are about to be written."""
        for pages in self._all_pages:
            pages.use(slots)

    def release(self, slot: int) -> None:
        """Releases the memory of a slot if possible."""
        for pages in self._all_pages:
            pages.release(slot)

    @property
    def _all_pages(self) -> "Iterator[Pages]":
        if self.pages is not None:
            yield self.pages
        if self.draft is not None:
            yield from self.draft._all_pages


_NONE: Mapping[int, Pool] = {}


class KvPools:
    """All pools of an executor."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        shares: Shares | int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[Scales] = (),
        drafts: Mapping[int, Pool] = _NONE,
    ) -> None:
        """shares: of each group; a number gives each group that many blocks permanently. scales: of each group, if
        `dtype` has 8 bits. drafts: by group, a draft model's pool with the same number of slots."""
        self.block_size = block_size
        self.dtype = dtype
        self.shares = Shares.fixed([shares] * len(groups)) if isinstance(shares, int) else shares
        allocate = _allocate if self.shares.memory_bytes is None else _reserve
        of_groups: Sequence[Scales | None] = scales or [None] * len(groups)
        self.pools = tuple(
            replace(allocate(group, slots, block_size, dtype, device), scales=own, draft=drafts.get(number))
            for number, (group, slots, own) in enumerate(zip(groups, self.shares.slots, of_groups, strict=True))
        )
        # Layer -> (its group, its index in the group's pool).
        self.places = {
            layer: (number, index) for number, group in enumerate(groups) for index, layer in enumerate(group.layers)
        }

    @property
    def max_tokens(self) -> int:
        """Tokens that initially fit into the smallest pool."""
        return min(self.shares.blocks) * self.block_size

    def layer(self, layer: int) -> LayerCache:
        """Returns where a layer keeps its keys and values."""
        group, index = self.places[layer]
        pool = self.pools[group]
        if pool.scales is None:
            return LayerCache(group, pool.k[index], pool.v[index])
        return LayerCache(group, pool.k[index], pool.v[index], pool.scales.k[index], pool.scales.v[index])

    @property
    def layers(self) -> list[LayerCache]:
        """Returns the caches of all layers, in the order of the model."""
        return [self.layer(layer) for layer in range(len(self.places))]

    def zero(self, group: int, slot: int, step: int) -> None:
        """Overwrites a block with zeros, notes `step` as its last write, and releases its memory if possible."""
        pool = self.pools[group]
        pool.zero(slot)
        self.mark_written(group, [slot], step)
        pool.release(slot)

    def mark_written(self, group: int, slots: Sequence[int] | Slots, step: int) -> None:
        """Notes that a step writes these slots, and prepares them."""
        pool, places = self.pools[group], np.asarray(slots, dtype=np.int64)
        pool.last_write_steps[places] = step
        pool.use(places)


def _allocate(group: LayerGroup, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Pool:
    # Not zeroed, so that on a CPU, pages that are never used never take memory.
    k, v = (torch.empty(_shape(group, num_blocks, block_size), dtype=dtype, device=device) for _ in range(2))
    for cache in (k, v):
        cache[:, 0].zero_()
    return Pool(group, k, v, np.zeros(num_blocks + 1, dtype=np.uint64))


def _reserve(group: LayerGroup, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Pool:
    """Returns a pool in host memory, whose pages are allocated when they are written."""
    assert device.type == "cpu"
    shape = _shape(group, num_blocks, block_size)
    size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    try:
        memories = [mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2)]
    except OSError as error:
        raise ModelError(
            f"the system does not let {size} bytes be reserved for a pool that may grow ({error.strerror}): give fixed "
            "shares in KVKEEP_EXECUTOR_POOL_SHARES"
        ) from error
    k, v = (torch.frombuffer(memory, dtype=dtype).view(shape) for memory in memories)
    pages = Pages(memories, len(group.layers), num_blocks + 1)
    return Pool(group, k, v, np.zeros(num_blocks + 1, dtype=np.uint64), pages)


def _shape(group: LayerGroup, num_blocks: int, block_size: int) -> tuple[int, ...]:
    return len(group.layers), num_blocks + 1, block_size, group.shape.kv_heads, group.shape.head_dim


class Pages:
    """The memory of a pool on a CPU; pages without blocks in use are released to the system.

    Not thread-safe: called by the thread that works on the device.
    """

    def __init__(self, memories: Sequence[mmap.mmap], layers: int, slots: int) -> None:
        """memories: each has contiguous blocks of equal size, [layers, slots]."""
        self._memories = memories
        self._layers = layers
        self._slots = slots
        self._size = len(memories[0]) // (layers * slots)
        self._is_free = np.zeros(slots, dtype=np.bool_)

    def use(self, slots: Slots) -> None:
        """Notes that slots are about to be written, and are in use until `release`."""
        self._is_free[slots] = False

    def release(self, slot: int) -> None:
        """Frees the pages of a slot, except pages that it shares with slots in use, other layers or the null block."""
        self._is_free[slot] = True
        for layer in range(self._layers):
            start, stop = self._free_pages(layer * self._slots, slot)
            if start < stop:
                for memory in self._memories:
                    memory.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def _free_pages(self, row: int, slot: int) -> tuple[int, int]:
        """Returns the bytes [start, stop) of the pages that hold a part of a slot, and otherwise only free slots.

        row: number of the first slot of the slot's layer in a memory.
        """
        begin = (row + slot) * self._size
        end = begin + self._size
        start, stop = begin // mmap.PAGESIZE * mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        if start < begin and not self._are_free(row, start, begin):
            start += mmap.PAGESIZE
        if stop > end and not self._are_free(row, end, stop):
            stop -= mmap.PAGESIZE
        return start, stop

    def _are_free(self, row: int, begin: int, end: int) -> bool:
        """Returns whether all bytes of [begin, end) belong to free slots of the layer whose first slot is `row`."""
        first, last = begin // self._size - row, (end - 1) // self._size - row
        return first > 0 and last < self._slots and bool(self._is_free[first : last + 1].all())


def block_bytes(groups: Sequence[LayerGroup], block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Returns the bytes of one block of each group, K and V of all its layers together. block_size: in tokens."""
    element = torch.empty(0, dtype=dtype).element_size()
    return tuple(
        2 * len(group.layers) * group.shape.kv_heads * group.shape.head_dim * element * block_size for group in groups
    )


def count_blocks(sizes: Sequence[int], block_size: int, *, max_tokens: int, free_bytes: int, fraction: float) -> int:
    """Returns the blocks per pool if all have the same number: limited by `max_tokens` (0 for no limit) and `fraction`
    of the free bytes. sizes: bytes of one block of each group.

    Raises ModelError if not even one block fits.
    """
    size = sum(sizes)
    # One block is not usable: the null block.
    blocks = int(free_bytes * fraction) // size - 1
    if max_tokens:
        blocks = min(blocks, max_tokens // block_size)
    if blocks < 1:
        raise ModelError(
            f"no memory for a single block of {block_size} tokens: it takes {size} bytes, "
            f"{int(free_bytes * fraction)} may be used, and KVKEEP_EXECUTOR_MAX_TOKENS is {max_tokens}"
        )
    return blocks


def free_memory(device: torch.device, meminfo: Path = MEMINFO) -> int:
    """Returns the bytes that the pools may share; on a CPU, limited by CPU_BYTES."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(available_memory(meminfo), CPU_BYTES)
