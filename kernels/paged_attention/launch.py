"""Attention of a step's packed queries over the paged cache: Triton on CUDA, dense torch calls on a CPU.

Prefill chunks and single new tokens go through one call; a sequence is nothing but a number of queries at the end of a
number of cached tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.arguments import check_caches, check_contiguous, check_device, check_like, check_shape
from kernels.paged_attention import host
from kernels.paged_attention.batch import PagedBatch

__all__ = ["PagedBatch", "paged_attention"]


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of every query over its own sequence's cached tokens, itself included; returns `out`.

    query: [T, Hq, D] packed, any strides, the caches' dtype, Hq a multiple of Hkv;
        query i of a sequence is its token seq_len - query_len + i.
    k_cache, v_cache: [N, B, Hkv, D] contiguous, one layer of the pool, this step's tokens stored.
    scale: factor of the logits. window: a token sees itself and the window - 1 before it.
    softcap: logits become softcap * tanh(logits / softcap).
    sinks: [Hq] logits that join the softmax and carry no value.
    out: [T, Hq, D] contiguous, like query; rows that belong to no sequence are left as they are.
    Raises ValueError naming the argument that is wrong. Block numbers are not checked on CUDA.
    """
    check_caches(k_cache, v_cache, "[N, B, Hkv, D]")
    check_shape("query", query, [None, None, k_cache.shape[3]], "[T, Hq, D]")
    check_like("query", query, "k_cache", k_cache)
    if query.shape[1] % k_cache.shape[2]:
        raise ValueError(f"query: expected a multiple of {k_cache.shape[2]} heads, got {query.shape[1]}")
    if window is not None and window < 1:
        raise ValueError(f"window: expected at least 1, got {window}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap: expected more than 0, got {softcap}")
    if sinks is not None:
        check_shape("sinks", sinks, query.shape[1:2], "[Hq]")
        check_device("sinks", sinks, "query", query)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    check_shape("out", out, query.shape, "[T, Hq, D]")
    check_like("out", out, "query", query)
    check_contiguous("out", out)
    batch.check("query", query, k_cache.shape[1])
    if query.shape[0] == 0 or batch.seq_lens.shape[0] == 0:
        return out
    attend = attend_with_triton if query.is_cuda else host.attend
    attend(query, k_cache, v_cache, batch, out, scale=scale, window=window, softcap=softcap, sinks=sinks)
    return out


@dataclass(frozen=True)
class TileSizes:
    """How the Triton kernel cuts its work (rows are pairs of a query token and a head), and how it is launched."""

    rows: int
    tokens: int
    keys: int
    num_warps: int
    num_stages: int


def tile_sizes(*, group: int, head_dim: int, element_size: int, max_query_len: int) -> TileSizes:
    """Sizes by rule: no autotuning, which would need a driver even in the interpreter.

    Wide heads and float32 get smaller tiles, so that registers hold them: ptxas reports few or no spills for these.
    """
    wide = element_size > 2
    heavy = power_of_two(head_dim) * element_size > 256
    rows = max(16, power_of_two(group))
    if max_query_len * group > rows:
        rows = max(rows, 32 if heavy else 64)
    return TileSizes(
        rows=rows,
        tokens=rows // group,
        keys=32 if heavy or wide else 64,
        num_warps=8 if rows > 32 or (rows > 16 and wide) else 4,
        num_stages=1 if wide else 2,
    )


def attend_with_triton(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Launch the Triton kernel on checked arguments; the grid depends on nothing but shapes, as CUDA graphs need."""
    # Imported here because a CPU machine may have no triton.
    from kernels.paged_attention.kernel import paged_attention_kernel

    _, block_size, kv_heads, head_dim = k_cache.shape
    group = query.shape[1] // kv_heads
    sequences = batch.seq_lens.shape[0]
    sizes = tile_sizes(
        group=group, head_dim=head_dim, element_size=query.element_size(), max_query_len=batch.max_query_len
    )
    paged_attention_kernel[(query.shape[0] // sizes.tokens + sequences, kv_heads)](
        query,
        k_cache,
        v_cache,
        out,
        out if sinks is None else sinks.contiguous(),
        batch.query_start.contiguous(),
        batch.seq_lens.contiguous(),
        batch.block_tables,
        sequences,
        batch.block_tables.stride(0),
        *query.stride(),
        window or 0,
        scale,
        softcap or 0.0,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=max(16, power_of_two(head_dim)),
        BLOCK_SIZE=block_size,
        ROWS=sizes.rows,
        TILE_TOKENS=sizes.tokens,
        TILE_KEYS=sizes.keys,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        WIDEN=query.is_cpu,
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
        enable_fp_fusion=True,
    )


def power_of_two(size: int) -> int:
    """The least power of two that is not less than `size`."""
    return 1 << (size - 1).bit_length()
