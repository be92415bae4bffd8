"""Norm and rotate a step's queries and keys and store its keys and values, in one launch on CUDA; torch on a CPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.checks import (
    check_caches,
    check_contiguous,
    check_device,
    check_dtype,
    check_like,
    check_query,
    check_shape,
)
from kernels.quantization import check_quantization
from kernels.rms_norm.launch import rms_norm
from kernels.rotary_store import reference
from kernels.store_kv.launch import check_slots, store_with_torch


@dataclass(frozen=True)
class HeadNorms:
    """Norms of single heads, like rms_norm. query, key: weights [D], None for no norm. eps: added to mean squares."""

    query: Tensor | None = None
    key: Tensor | None = None
    eps: float = 0.0

    def apply(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns query and key [T, H, D], each normed if it has a norm."""
        query = query if self.query is None else rms_norm(query, self.query, self.eps)
        return query, key if self.key is None else rms_norm(key, self.key, self.eps)


NO_NORMS = HeadNorms()


def rotary_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    norms: HeadNorms = NO_NORMS,
) -> None:
    """Rotate query in place; store the rotated key and the value at their slots, and leave both tensors unchanged.

    query: [T, Hq, D] and key, value: [T, Hkv, D], of one dtype, the caches' unless these are quantized; a head's
        elements side by side, tokens and heads at any distance, as in one merged product.
    cos, sin: [P, D] by position, both halves of a row the same. Like each product, they are rounded to the dtype of
        query. Elements j and j + D / 2 are a pair, as in "rotate_half" of transformers' llama.
    positions: [T] int64, at most P - 1, by which tokens are rotated.
    slot_mapping: [T] int64, as in store_kv; -1 skips the token, including its query.
    k_cache, v_cache: [N, B, Hkv, D] contiguous, one layer of the pool.
    k_scale, v_scale: [Hkv, D] float32 of int8 or float8_e4m3fn caches, which hold numbers divided by their scale.
    norms: norm each head of the query and the key before the rotation.
    The launch depends only on shapes, as CUDA graphs need. Raises ValueError naming the argument that is wrong.
    Positions and slots are not checked on CUDA.
    """
    check_caches(k_cache, v_cache, "[N, B, Hkv, D]")
    kv_heads, head_dim = k_cache.shape[2:]
    check_query(query, kv_heads, head_dim)
    if head_dim % 2:
        raise ValueError(f"query: expected an even head size, got {head_dim}")
    check_quantization("query", query, k_cache, k_scale, v_scale)
    check_shape("key", key, [query.shape[0], kv_heads, head_dim], "[T, Hkv, D]")
    check_shape("value", value, key.shape, "[T, Hkv, D]")
    check_like("key", key, "query", query)
    check_like("value", value, "query", query)
    check_shape("cos", cos, [None, head_dim], "[P, D]")
    check_shape("sin", sin, cos.shape, "[P, D]")
    check_shape("positions", positions, query.shape[:1], "[T]")
    check_dtype("positions", positions, torch.int64)
    check_device("positions", positions, "query", query)
    for name, tensor in (("query", query), ("key", key), ("value", value), ("cos", cos), ("sin", sin)):
        check_device(name, tensor, "k_cache", k_cache)
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: expected its last dimension side by side, got strides {tensor.stride()}")
    for name, weight in (("norms.query", norms.query), ("norms.key", norms.key)):
        if weight is not None:
            check_shape(name, weight, [head_dim], "[D]")
            check_like(name, weight, "query", query)
            check_contiguous(name, weight)
    check_slots(slot_mapping, query.shape[0], k_cache)
    if query.shape[0] == 0:
        return
    rotate = rotate_with_triton if query.is_cuda else rotate_with_torch
    rotate(query, key, value, cos, sin, positions, slot_mapping, k_cache, v_cache, k_scale, v_scale, norms)


def rotate_with_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    norms: HeadNorms = NO_NORMS,
) -> None:
    """Norm, rotate and store on a CPU: arguments as rotary_store has checked them.

    query: [T, Hq, D], written; key, value: [T, Hkv, D]; all of one float dtype. cos, sin: [P, D] of any float dtype.
    positions: [T] int64, in tokens. slot_mapping: [T] int64 slots, -1 for none.
    k_cache, v_cache: [N, B, Hkv, D], like key, or int8 or float8_e4m3fn with k_scale, v_scale: [Hkv, D] float32.
    """
    rows = (slot_mapping >= 0).nonzero().flatten()
    cos, sin = (table[positions[rows], None] for table in (cos, sin))
    queries, keys = norms.apply(query[rows], key[rows])
    query[rows] = reference.rotate(queries, cos, sin)
    rotated = reference.rotate(keys, cos, sin)
    store_with_torch(rotated, value[rows], k_cache, v_cache, slot_mapping[rows], k_scale, v_scale)


def rotate_with_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    norms: HeadNorms = NO_NORMS,
) -> None:
    """As rotate_with_torch, with the same shapes and dtypes, on CUDA or in Triton's interpreter, in one launch."""
    # Imported here because a CPU machine may have no triton.
    import triton

    from kernels.rotary_store.kernel import rotary_store_kernel

    tokens, query_heads, head_dim = query.shape
    kv_heads = key.shape[1]
    group_padded = triton.next_power_of_2(query_heads // kv_heads)
    half_padded = triton.next_power_of_2(head_dim // 2)
    rotary_store_kernel[(tokens, kv_heads)](
        query,
        key,
        value,
        cos,
        sin,
        positions.contiguous(),
        slot_mapping.contiguous(),
        k_cache,
        v_cache,
        k_cache if k_scale is None else k_scale.contiguous(),
        v_cache if v_scale is None else v_scale.contiguous(),
        query if norms.query is None else norms.query,
        key if norms.key is None else norms.key,
        norms.eps,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        KV_HEADS=kv_heads,
        GROUP=query_heads // kv_heads,
        GROUP_PADDED=group_padded,
        HALF=head_dim // 2,
        HALF_PADDED=half_padded,
        QUANTIZED=k_scale is not None,
        Q_NORM=norms.query is not None,
        K_NORM=norms.key is not None,
        # At most sixteen elements of each half per thread.
        num_warps=max(1, min(8, group_padded * half_padded // 512)),
        # Without fused multiply-adds, which would round differently.
        enable_fp_fusion=False,
    )
