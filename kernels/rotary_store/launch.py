"""Rotate a step's queries and keys and store its keys and values, in one launch on CUDA; torch on a CPU."""

import torch
from torch import Tensor

from kernels.arguments import check_caches, check_device, check_dtype, check_like, check_query, check_shape
from kernels.paged_attention.batch import PagedBatch
from kernels.quantization import check_quantization
from kernels.rotary_store import reference
from kernels.store_kv.launch import slot_mapping, store_with_torch


def rotary_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Rotate query in place; rotate key and store it and value at their sequence's slots. Key and value are left.

    query: [T, Hq, D] and key, value: [T, Hkv, D], of one dtype, the caches' unless these are quantized; a head's
        elements side by side, tokens and heads at any distance, as in one merged product.
    cos, sin: [P, D] by position, both halves of a row the same; they are rounded to the dtype of query, and so is each
        product, as transformers' llama does with its halves split ("rotate_half").
    positions: [T] int64, at most P - 1, by which tokens are rotated; a token's slot follows from the batch's lengths.
    k_cache, v_cache: [N, B, Hkv, D] contiguous, one layer of the pool.
    batch: whose the rows are; nothing is written for those from query_start[S] on. The launch depends on shapes alone,
        as CUDA graphs need. No two rows have one slot.
    k_scale, v_scale: [Hkv] float32 of int8 or float8_e4m3fn caches, which hold what is divided by them.
    Raises ValueError naming the argument that is wrong. Positions and block numbers are not checked on CUDA.
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
    batch.check("query", query, k_cache.shape[1])
    if query.shape[0] == 0 or batch.seq_lens.shape[0] == 0:
        return
    rotate = rotate_with_triton if query.is_cuda else rotate_with_torch
    rotate(query, key, value, cos, sin, positions, k_cache, v_cache, batch, k_scale, v_scale)


def rotate_with_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    # A sequence's rows have its last slots.
    starts = batch.query_start
    rows = torch.arange(int(starts[0]), int(starts[-1]))
    places = torch.zeros_like(positions)
    places[rows] = rows + (batch.seq_lens - starts[1:]).repeat_interleave(starts.diff())
    slots = slot_mapping(places, batch, k_cache.shape[1])
    rows = (slots >= 0).nonzero().flatten()
    cos, sin = (table[positions[rows], None] for table in (cos, sin))
    query[rows] = reference.rotate(query[rows], cos, sin)
    rotated = reference.rotate(key[rows], cos, sin)
    store_with_torch(rotated, value[rows], k_cache, v_cache, slots[rows], k_scale, v_scale)


def rotate_with_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
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
        k_cache,
        v_cache,
        k_cache if k_scale is None else k_scale.contiguous(),
        v_cache if v_scale is None else v_scale.contiguous(),
        batch.query_start,
        batch.seq_lens,
        batch.block_tables,
        batch.seq_lens.shape[0],
        batch.block_tables.stride(0),
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
        BLOCK_SIZE=k_cache.shape[1],
        QUANTIZED=k_scale is not None,
        # Sixteen elements of each half per thread at most.
        num_warps=max(1, min(8, group_padded * half_padded // 512)),
        # Products and sums stay apart: fused ones would round differently.
        enable_fp_fusion=False,
    )
