"""Give cached keys smaller positions after evicted tokens left a gap: Triton on CUDA, torch on a CPU."""

import torch
from torch import Tensor

from kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from kernels.quantization import LARGEST, check_float8
from kernels.rotate_keys import reference
from kernels.slots import as_rows, check_slots, row_numbers


def rotate_keys(k_cache: Tensor, slots: Tensor, deltas: Tensor, frequencies: Tensor) -> None:
    """Rotate the key of each slot back by its delta, in place: from position p to position p - delta.

    k_cache: [L, N, B, Hkv, D] contiguous, the whole pool; elements j and j + D / 2 of a head are a pair. Quantized keys
        are rotated without their scales, so both elements of a pair must have the same scale.
    slots: [1 or L, 1 or Hkv, n] int64, block * B + offset in the block; 1 if all layers or heads have the same slots.
        No slot occurs twice in one layer and head.
    deltas: like slots, in positions. With a delta of 0, the key keeps its bytes.
    frequencies: [D / 2] float32, radians per position of the model's plain rotary embedding.
    Angles and products are float32, rounded once to the cache's dtype; keys of 8 bits are clamped to its range.
    Raises ValueError naming the argument whose shape, dtype or device is wrong. Slots are not checked.
    """
    check_shape("k_cache", k_cache, [None] * 5, "[L, N, B, Hkv, D]")
    check_contiguous("k_cache", k_cache)
    check_float8(k_cache)
    head_dim = k_cache.shape[4]
    if head_dim % 2:
        raise ValueError(f"k_cache: expected an even head size, got {head_dim}")
    check_slots("slots", slots, k_cache)
    check_slots("deltas", deltas, k_cache)
    check_shape("deltas", deltas, slots.shape, "[1 or L, 1 or Hkv, n]")
    check_shape("frequencies", frequencies, [head_dim // 2], "[D / 2]")
    check_dtype("frequencies", frequencies, torch.float32)
    check_device("frequencies", frequencies, "k_cache", k_cache)
    if slots.shape[2]:
        (rotate_with_triton if k_cache.is_cuda else rotate_with_torch)(k_cache, slots, deltas, frequencies)


# Elements that are rotated at once on a CPU: with more, the intermediate results would not fit its caches.
ELEMENTS = 1 << 18


def rotate_with_torch(k_cache: Tensor, slots: Tensor, deltas: Tensor, frequencies: Tensor) -> None:
    """Turn keys back on a CPU, some slots at a time.

    k_cache: [L, N, B, Hkv, D] contiguous, written, of a float dtype, int8 or float8_e4m3fn.
    slots: [1 or L, 1 or Hkv, n] int64 slots; deltas: the same, in positions. frequencies: [D / 2] float32, radians per
    position.
    """
    at_once = max(1, ELEMENTS // k_cache[:, 0, 0].numel())
    for first in range(0, slots.shape[2], at_once):
        some = slice(first, first + at_once)
        rotate_at_once(k_cache, slots[..., some], deltas[..., some], frequencies)


def rotate_at_once(k_cache: Tensor, slots: Tensor, deltas: Tensor, frequencies: Tensor) -> None:
    """Like rotate_with_torch, but all slots together: takes several times the memory of their keys in float32."""
    layers, _, _, kv_heads, head_dim = k_cache.shape
    heads = slots.shape[1]
    rows, numbers = as_rows(k_cache, heads), row_numbers(k_cache, slots, heads)
    stored = rows.index_select(0, numbers)
    keys = stored.view(k_cache.dtype).view(layers, heads, -1, kv_heads // heads, head_dim)
    # [1 or L, heads, n, 1, D / 2]
    angles = deltas[..., None, None].float() * frequencies
    turned = reference.turn_back(keys, angles).view(len(numbers), -1).view(rows.dtype)
    stays = (deltas == 0).expand(layers, -1, -1).reshape(-1, 1)
    rows.index_copy_(0, numbers, torch.where(stays, stored, turned))


# Pairs of elements that one program rotates.
PAIRS = 1024


def rotate_with_triton(k_cache: Tensor, slots: Tensor, deltas: Tensor, frequencies: Tensor) -> None:
    """As rotate_with_torch, with the same shapes and dtypes, on CUDA or in Triton's interpreter, in one launch."""
    # Imported here because a CPU machine may have no triton.
    import triton

    from kernels.rotate_keys.kernel import rotate_keys_kernel

    layers, _, _, kv_heads, head_dim = k_cache.shape
    count = slots.shape[2]
    padded = triton.next_power_of_2(head_dim // 2)
    at_once = max(1, PAIRS // padded)
    slots, deltas = (one.contiguous().expand(layers, kv_heads, count) for one in (slots, deltas))
    rotate_keys_kernel[(triton.cdiv(count, at_once), kv_heads, layers)](
        k_cache,
        slots,
        deltas,
        frequencies.contiguous(),
        count,
        k_cache.stride(0),
        *slots.stride()[:2],
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        HALF_PADDED=padded,
        SLOTS=at_once,
        QUANTIZED=k_cache.dtype in LARGEST,
        # Without fused multiply-adds, which would round differently.
        enable_fp_fusion=False,
    )
