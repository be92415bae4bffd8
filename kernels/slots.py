"""Separate slots per layer and KV head: their checks, and a cache as rows that torch copies by index."""

import torch
from torch import Tensor

from kernels.checks import check_device, check_dtype


def check_slots(name: str, slots: Tensor, k_cache: Tensor) -> None:
    """Raise ValueError unless `slots` is [1 or L, 1 or Hkv, n] int64, on the device of k_cache [L, N, B, Hkv, D]."""
    layers, kv_heads = k_cache.shape[0], k_cache.shape[3]
    if slots.dim() != 3 or slots.shape[0] not in (1, layers) or slots.shape[1] not in (1, kv_heads):
        wanted = f"[1 or {layers}, 1 or {kv_heads}, any]"
        raise ValueError(f"{name}: expected [1 or L, 1 or Hkv, n] = {wanted}, got {list(slots.shape)}")
    check_dtype(name, slots, torch.int64)
    check_device(name, slots, "k_cache", k_cache)


def as_rows(cache: Tensor, heads: int) -> Tensor:
    """cache [L, N, B, Hkv, D] as [L * N * B * heads, W] integers, a row for each `heads`-th part of a slot.

    int64 if the bytes of a row are a multiple of 8, since few wide elements are copied faster; else int8. Integers,
    since torch cannot index float8 on a CPU.
    """
    rows = cache.view(-1, cache.shape[3] // heads * cache.shape[4])
    return rows.view(torch.int64 if rows.shape[1] * rows.element_size() % 8 == 0 else torch.int8)


def row_numbers(cache: Tensor, slots: Tensor, heads: int) -> Tensor:
    """[L * heads * n]: which rows of as_rows the slots [1 or L, 1 or heads, n] are, layer by layer and head by head."""
    layers, blocks, block_size = cache.shape[:3]
    layer, head = (torch.arange(count, device=slots.device) for count in (layers, heads))
    first = layer[:, None, None] * (blocks * block_size)
    return ((first + slots) * heads + head[:, None]).flatten()
