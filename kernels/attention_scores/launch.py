"""How much attention each cached key got, for policies that evict tokens: Triton on CUDA, torch on a CPU.

It costs a pass over the keys, and nothing if it is not called: paged_attention only has to keep `lse`.
"""

import torch
from torch import Tensor

from kernels.checks import (
    check_contiguous,
    check_device,
    check_dtype,
    check_like,
    check_lse,
    check_query,
    check_shape,
)
from kernels.paged_attention.batch import AttentionArgs, PagedBatch
from kernels.paged_attention.tiling import power_of_two
from kernels.quantization import check_quantization, dequantize


def attention_scores(
    query: Tensor,
    k_cache: Tensor,
    batch: PagedBatch,
    lse: Tensor,
    counts: Tensor,
    args: AttentionArgs,
    *,
    out: Tensor | None = None,
    squares: Tensor | None = None,
) -> Tensor:
    """Softmax weights of every key, summed over queries and over the query heads that share the key's head.

    query, k_cache, batch, args: as paged_attention got them, or only the last rows of some sequences.
    lse: [T, Hq] float32 contiguous, as paged_attention computed it for these rows.
    counts: [S] int32, how many of a sequence's last queries of this step count: 1 in decode, the queries inside the
        observed window of a prompt. A number larger than the number of queries counts all queries.
    out: [S, Hkv, K] float32 contiguous, K at least batch.max_seq_len; created with K equal to batch.max_seq_len if not
        given. Returned; by the key's slot in its sequence, 0 after the sequence's end. Without sinks, a head's sum is
        the number of counted queries times Hq / Hkv.
    squares: like out, gets the sums of the squares of the same weights.
    Raises ValueError naming the argument that is wrong.
    """
    check_shape("k_cache", k_cache, [None] * 4, "[N, B, Hkv, D]")
    check_contiguous("k_cache", k_cache)
    kv_heads, head_dim = k_cache.shape[2:]
    check_query(query, kv_heads, head_dim)
    check_quantization("query", query, k_cache, args.k_scale, args.k_scale)
    batch.check("query", query, k_cache.shape[1])
    check_lse(lse, query)
    check_shape("counts", counts, batch.seq_lens.shape, "[S]")
    check_dtype("counts", counts, torch.int32)
    check_contiguous("counts", counts)
    if out is None:
        shape = (batch.seq_lens.shape[0], kv_heads, batch.max_seq_len)
        out = torch.empty(shape, dtype=torch.float32, device=query.device)
    check_shape("out", out, [batch.seq_lens.shape[0], kv_heads, None], "[S, Hkv, K]")
    check_dtype("out", out, torch.float32)
    check_contiguous("out", out)
    if out.shape[2] < batch.max_seq_len:
        raise ValueError(f"out: expected at least {batch.max_seq_len} columns, got {out.shape[2]}")
    if squares is not None:
        check_shape("squares", squares, out.shape, "[S, Hkv, K]")
        check_like("squares", squares, "out", out)
        check_contiguous("squares", squares)
    for name, tensor in (("counts", counts), ("out", out)):
        check_device(name, tensor, "query", query)
    if out.numel():
        score = score_with_triton if query.is_cuda else score_with_torch
        score(query, k_cache, batch, lse, counts, args, out, squares)
    return out


def score_with_torch(
    query: Tensor,
    k_cache: Tensor,
    batch: PagedBatch,
    lse: Tensor,
    counts: Tensor,
    args: AttentionArgs,
    out: Tensor,
    squares: Tensor | None = None,
) -> None:
    """Write `out`, and `squares` if given: arguments as attention_scores has checked them, on a CPU.

    query: [T, Hq, D], of any float dtype. lse: [T, Hq] float32, natural logarithms. counts: [S] int32, queries.
    k_cache: [N, B, Hkv, D], like query, or int8 or float8_e4m3fn with args.k_scale.
    out, squares: [S, Hkv, K] float32, overwritten; sums of weights, which have no unit.
    """
    block_size, kv_heads = k_cache.shape[1:3]
    window, softcap, k_scale = args.window, args.softcap, args.k_scale
    group = query.shape[1] // kv_heads
    for tensor in (out,) if squares is None else (out, squares):
        tensor.zero_()
    starts, seq_lens = batch.query_start.tolist(), batch.seq_lens.tolist()
    for sequence, (start, end, seq_len, count) in enumerate(
        zip(starts, starts[1:], seq_lens, counts.tolist(), strict=False)
    ):
        rows = min(end - start, count)
        if not rows:
            continue
        position = torch.arange(seq_len - rows, seq_len)[:, None]
        first = 0 if window is None else max(0, seq_len - rows - window + 1)
        first_block = first // block_size
        key_position = torch.arange(first_block * block_size, seq_len)
        blocks = batch.block_tables[sequence, first_block : -(-seq_len // block_size)]
        # As bytes: torch selects no float8 by index on a CPU.
        stored = k_cache.view(torch.int8)[blocks.long()].view(k_cache.dtype) if k_scale is not None else k_cache[blocks]
        stored = stored.flatten(0, 1)[: len(key_position)]
        keys = stored.float() if k_scale is None else dequantize(stored, k_scale, torch.float32)
        queries = query[end - rows : end].float().reshape(rows, kv_heads, group, -1)
        # [rows, Hkv, group, keys]
        logits = torch.einsum("rhgd,khd->rhgk", queries, keys) * args.scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        seen = key_position <= position
        if window is not None:
            seen &= key_position > position - window
        weights = (logits - lse[end - rows : end].view(rows, kv_heads, group, 1)).exp()
        weights = weights.masked_fill(~seen[:, None, None], 0)
        out[sequence, :, first_block * block_size : seq_len] = weights.sum((0, 2))
        if squares is not None:
            squares[sequence, :, first_block * block_size : seq_len] = weights.square().sum((0, 2))


def score_with_triton(
    query: Tensor,
    k_cache: Tensor,
    batch: PagedBatch,
    lse: Tensor,
    counts: Tensor,
    args: AttentionArgs,
    out: Tensor,
    squares: Tensor | None = None,
) -> None:
    """As score_with_torch, with the same shapes and dtypes, on CUDA or in Triton's interpreter.

    The launch depends only on shapes and on batch.max_query_len.
    """
    # Imported here because a CPU machine may have no triton.
    import triton

    from kernels.attention_scores.kernel import attention_scores_kernel

    _, block_size, kv_heads, head_dim = k_cache.shape
    group = query.shape[1] // kv_heads
    sequences, _, columns = out.shape
    few = max(16, power_of_two(group))
    wide = query.element_size() > 2 or head_dim > 128
    tile_keys = 32 if wide else 64
    attention_scores_kernel[(triton.cdiv(columns, tile_keys), kv_heads, sequences)](
        query,
        k_cache,
        lse,
        out,
        out if squares is None else squares,
        lse if args.k_scale is None else args.k_scale.contiguous(),
        counts,
        batch.query_start,
        batch.seq_lens,
        batch.block_tables,
        columns,
        batch.block_tables.stride(0),
        *query.stride(),
        args.window or 0,
        args.scale,
        args.softcap or 0.0,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=max(16, power_of_two(head_dim)),
        BLOCK_SIZE=block_size,
        ROWS=few if batch.max_query_len == 1 or wide else max(few, 64),
        TILE_KEYS=tile_keys,
        HAS_WINDOW=args.window is not None,
        HAS_SOFTCAP=args.softcap is not None,
        QUANTIZED=args.k_scale is not None,
        SQUARES=squares is not None,
        INTERPRETER=query.is_cpu,
        num_warps=4,
        num_stages=1 if query.element_size() > 2 else 2,
        enable_fp_fusion=True,
    )
