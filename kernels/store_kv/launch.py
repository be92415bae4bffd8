"""Write a step's keys and values to their cache slots: Triton on CUDA, one indexed copy per cache on a CPU."""

import torch
from torch import Tensor

from kernels.arguments import check_caches, check_device, check_dtype, check_like, check_shape


def store_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its slot; no other slot is touched.

    key, value: [T, Hkv, D], any strides, the caches' dtype.
    k_cache, v_cache: [N, B, Hkv, D] contiguous, one layer of the pool.
    slot_mapping: [T] int64, block * B + place in the block, no slot twice; -1 skips the token.
    Raises ValueError naming the argument whose shape, dtype or device is wrong. Slots are not checked on CUDA.
    """
    check_caches(k_cache, v_cache, "[N, B, Hkv, D]")
    check_shape("key", key, [None, *k_cache.shape[2:]], "[T, Hkv, D]")
    check_shape("value", value, key.shape, "[T, Hkv, D]")
    check_shape("slot_mapping", slot_mapping, key.shape[:1], "[T]")
    check_like("key", key, "k_cache", k_cache)
    check_like("value", value, "k_cache", k_cache)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_device("slot_mapping", slot_mapping, "k_cache", k_cache)
    if key.shape[0] == 0:
        return
    if key.is_cuda:
        store_with_triton(key, value, k_cache, v_cache, slot_mapping)
    else:
        store_with_torch(key, value, k_cache, v_cache, slot_mapping)


def store_with_torch(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    if bool((slot_mapping < 0).any()):
        kept = (slot_mapping >= 0).nonzero().flatten()
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slot_mapping, key)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slot_mapping, value)


def store_with_triton(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
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
        *key.stride(),
        *value.stride(),
        HEADS=heads,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(heads * head_dim),
        enable_fp_fusion=True,
    )
