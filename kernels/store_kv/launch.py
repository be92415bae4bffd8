"""Write a step's keys and values to their cache slots: Triton on CUDA, one indexed copy per cache on a CPU."""

import torch
from torch import Tensor

from kernels.checks import check_caches, check_device, check_dtype, check_shape
from kernels.quantization import check_quantization, quantize


def store_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write each token's key and value to its slot; no other slot is touched.

    key, value: [T, Hkv, D], any strides, the caches' dtype; of quantized caches any float dtype.
    k_cache, v_cache: [N, B, Hkv, D] contiguous, one layer of the pool.
    slot_mapping: [T] int64, block * B + offset in the block, no slot twice; -1 skips the token.
    k_scale, v_scale: [Hkv, D] float32 of int8 or float8_e4m3fn caches, which hold numbers divided by their scale.
    Raises ValueError naming the argument whose shape, dtype or device is wrong. Slots are not checked on CUDA.
    """
    check_caches(k_cache, v_cache, "[N, B, Hkv, D]")
    check_shape("key", key, [None, *k_cache.shape[2:]], "[T, Hkv, D]")
    check_shape("value", value, key.shape, "[T, Hkv, D]")
    check_quantization("key", key, k_cache, k_scale, v_scale)
    check_quantization("value", value, k_cache, k_scale, v_scale)
    check_slots(slot_mapping, key.shape[0], k_cache)
    if key.shape[0] == 0:
        return
    store = store_with_triton if key.is_cuda else store_with_torch
    store(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def check_slots(slot_mapping: Tensor, tokens: int, cache: Tensor) -> None:
    """Raises ValueError unless slot_mapping is [T] int64, on the device of the cache."""
    check_shape("slot_mapping", slot_mapping, [tokens], "[T]")
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_device("slot_mapping", slot_mapping, "k_cache", cache)


def store_with_torch(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Store on a CPU: arguments as store_kv has checked them.

    key, value: [T, Hkv, D] of a float dtype. slot_mapping: [T] int64 slots, -1 for none.
    k_cache, v_cache: [N, B, Hkv, D], written, like key, or int8 or float8_e4m3fn with scales.
    k_scale, v_scale: [Hkv, D] float32, or None.
    """
    if bool((slot_mapping < 0).any()):
        kept = (slot_mapping >= 0).nonzero().flatten()
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    for x, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        if scale is None:
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, x)
        else:
            # As bytes: torch copies no float8 by index on a CPU.
            bytes_ = quantize(x, scale, cache.dtype).view(torch.int8)
            cache.view(torch.int8).view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, bytes_)


def store_with_triton(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """As store_with_torch, with the same shapes and dtypes, on CUDA or in Triton's interpreter, in one launch."""
    # Imported here because a CPU machine may have no triton.
    import triton

    from kernels.store_kv.kernel import store_kv_kernel

    tokens, heads, head_dim = key.shape
    store_kv_kernel[(tokens,)](
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping.contiguous(),
        k_cache if k_scale is None else k_scale.contiguous(),
        v_cache if v_scale is None else v_scale.contiguous(),
        *key.stride(),
        *value.stride(),
        HEADS=heads,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(heads * head_dim),
        QUANTIZED=k_scale is not None,
        # Without fused multiply-adds, which would round differently.
        enable_fp_fusion=False,
    )
