"""Attention of a step's packed queries over the paged cache: Triton on CUDA, dense torch calls on a CPU.

Prefill chunks and decodes go through one call: a sequence is a number of queries at the end of its cached tokens.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.checks import (
    check_caches,
    check_contiguous,
    check_like,
    check_lse,
    check_query,
    check_shape,
)
from kernels.paged_attention import cpu
from kernels.paged_attention.batch import AttentionArgs, PagedBatch
from kernels.paged_attention.tiling import (
    MAX_SPLITS,
    MORE_SHARES,
    MOST_KEYS,
    TileSizes,
    choose_sizes,
    power_of_two,
)

__all__ = ["AttentionArgs", "PagedBatch", "paged_attention"]


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    args: AttentionArgs,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    sizes: TileSizes | None = None,
) -> Tensor:
    """Causal attention of every query over its own sequence's cached tokens, itself included; returns `out`.

    query: [T, Hq, D] packed, any strides, Hq a multiple of Hkv, the caches' dtype unless these are quantized;
        query i of a sequence is its token seq_len - query_len + i.
    k_cache, v_cache: [N, B, Hkv, D] contiguous, one layer of the pool, this step's tokens stored.
    out: [T, Hq, D] contiguous, like query; rows that belong to no sequence are not written.
    lse: [T, Hq] float32 contiguous, gets the logarithm of each row's sum of exp(logits), the sink's among them.
    sizes: how the Triton kernel splits its work, for measurements; None for those of choose_sizes.
    Raises ValueError naming the argument that is wrong. Block numbers are not checked on CUDA.
    """
    check_caches(k_cache, v_cache, "[N, B, Hkv, D]")
    check_query(query, *k_cache.shape[2:])
    args.check(query, k_cache)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    check_shape("out", out, query.shape, "[T, Hq, D]")
    check_like("out", out, "query", query)
    check_contiguous("out", out)
    if lse is not None:
        check_lse(lse, query)
    batch.check("query", query, k_cache.shape[1])
    if query.shape[0] == 0 or batch.seq_lens.shape[0] == 0:
        return out
    if query.is_cuda:
        attend_with_triton(query, k_cache, v_cache, batch, args, out, lse, sizes)
    else:
        cpu.attend(query, k_cache, v_cache, batch, args, out, lse)
    return out


def attend_with_triton(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    args: AttentionArgs,
    out: Tensor,
    lse: Tensor | None = None,
    sizes: TileSizes | None = None,
) -> None:
    """Write `out`, and `lse` if given: arguments as paged_attention has checked them, on CUDA or in the interpreter.

    query: [T, Hq, D], of any float dtype and strides. k_cache, v_cache: [N, B, Hkv, D], like query, or int8 or
    float8_e4m3fn with scales. out: [T, Hq, D] like query. lse: [T, Hq] float32, natural logarithms.
    The grid depends only on shapes and the bounds in `batch`, as CUDA graphs need. If keys are divided into shares, a
    second launch merges these. If no sequence has more than one query, keys are always divided, and the first layer
    with this batch takes one more launch, for `share_out`.
    """
    # Imported here because a CPU machine may have no triton.
    from kernels.paged_attention.kernel import merge_shares_kernel, merge_splits_kernel, paged_attention_kernel

    _, block_size, kv_heads, head_dim = k_cache.shape
    rows, query_heads, _ = query.shape
    group = query_heads // kv_heads
    sequences = batch.seq_lens.shape[0]
    if sizes is None:
        sizes = choose_sizes(
            *device_of(query.device),
            rows=rows,
            sequences=sequences,
            kv_heads=kv_heads,
            group=group,
            head_dim=head_dim,
            element_size=query.element_size(),
            cache_element_size=k_cache.element_size(),
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            window=args.window,
        )
    decode = batch.max_query_len == 1
    head_dim_padded = max(16, power_of_two(head_dim))
    # The kernel writes either the result, or a part per share.
    parts, parts_lse, shares = out, lse, None
    if decode:
        shares = batch.once(
            ("shares", args.window, sizes.splits, sizes.least_keys), lambda: share_out(batch, args.window, sizes)
        )
        tiles, splits = len(shares.sequence), 1
        parts = torch.empty(tiles, query_heads, head_dim, dtype=torch.float32, device=query.device)
        parts_lse = torch.empty(tiles, query_heads, dtype=torch.float32, device=query.device)
    else:
        tiles, splits = rows // sizes.tokens + sequences, sizes.splits
        if splits > 1:
            parts = torch.empty(rows, query_heads, splits, head_dim, dtype=torch.float32, device=query.device)
            parts_lse = torch.empty(rows, query_heads, splits, dtype=torch.float32, device=query.device)
    paged_attention_kernel[(kv_heads, tiles, splits)](
        query,
        k_cache,
        v_cache,
        parts,
        out if parts_lse is None else parts_lse,
        out if args.sinks is None else args.sinks.contiguous(),
        out if args.k_scale is None else args.k_scale.contiguous(),
        out if args.v_scale is None else args.v_scale.contiguous(),
        batch.query_start,
        batch.seq_lens,
        batch.block_tables,
        batch.query_start if shares is None else shares.sequence,
        batch.query_start if shares is None else shares.first,
        sequences,
        splits,
        batch.block_tables.stride(0),
        *query.stride(),
        args.window or 0,
        args.scale,
        args.softcap or 0.0,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=head_dim_padded,
        BLOCK_SIZE=block_size,
        ROWS=sizes.rows,
        TILE_TOKENS=sizes.tokens,
        TILE_KEYS=sizes.keys,
        DECODE_ONLY=decode,
        HAS_WINDOW=args.window is not None,
        HAS_SOFTCAP=args.softcap is not None,
        HAS_SINKS=args.sinks is not None,
        QUANTIZED=args.k_scale is not None,
        STORE_LSE=parts_lse is not None,
        INTERPRETER=query.is_cpu,
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
        enable_fp_fusion=True,
    )
    merged: dict[str, Any] = {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": head_dim_padded,
        "STORE_LSE": lse is not None,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    lse = out if lse is None else lse
    if shares is not None:
        merge_shares_kernel[(sequences, query_heads)](
            parts, parts_lse, out, lse, batch.query_start, shares.first, MOST_SHARES=MAX_SPLITS, **merged
        )
    elif splits > 1:
        merge_splits_kernel[(rows, query_heads)](
            parts, parts_lse, out, lse, batch.query_start, sequences, SPLITS=splits, **merged
        )


@dataclass(frozen=True)
class Shares:
    """Shares of the keys of sequences with one query each; a separate program attends to each share.

    sequence: [W] int32, the sequence of each share, with a sequence's shares side by side; -1 after the last share.
    first: [S + 1] int32, the first share of each sequence, and the total number of shares.
    """

    sequence: Tensor
    first: Tensor


def share_out(batch: PagedBatch, window: int | None, sizes: TileSizes) -> Shares:
    """Makes the shares with `share_out_kernel`, on CUDA or in Triton's interpreter; one launch for all layers.

    The tensors have room for any lengths: if there would be too many shares, the kernel makes larger shares.
    """
    from kernels.paged_attention.kernel import share_out_kernel

    sequences, device = len(batch.seq_lens), batch.seq_lens.device
    entries = sizes.splits * sequences + max(MORE_SHARES, sequences)
    shares = Shares(*(torch.empty(size, dtype=torch.int32, device=device) for size in (entries, sequences + 1)))
    share_out_kernel[(1,)](
        batch.query_start,
        batch.seq_lens,
        shares.sequence,
        shares.first,
        sequences,
        sizes.splits,
        window or 0,
        entries,
        LEAST_KEYS=sizes.least_keys,
        MOST_KEYS=MOST_KEYS,
        MOST_SHARES=MAX_SPLITS,
        SEQUENCES_PADDED=max(16, power_of_two(sequences)),
        ENTRIES_PADDED=max(16, power_of_two(entries)),
        num_warps=4,
    )
    return shares


@cache
def device_of(device: torch.device) -> tuple[tuple[int, int], int]:
    """Returns compute capability and number of multiprocessors; 9.0 and one multiprocessor for the interpreter."""
    if device.type != "cuda":
        return (9, 0), 1
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count
