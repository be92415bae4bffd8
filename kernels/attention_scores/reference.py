"""What attention_scores means, query by query."""

import torch
from torch import Tensor

from kernels.paged_attention.batch import AttentionArgs
from kernels.paged_attention.reference import logits_of, seen_positions, slots_of
from kernels.quantization import dequantize


def attention_scores(
    query: Tensor,
    k_cache: Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    block_tables: list[list[int]],
    counts: list[int],
    columns: int,
    args: AttentionArgs,
) -> tuple[Tensor, Tensor]:
    """Sums of each key's softmax weights and of their squares, [S, Hkv, columns] each.

    The sums are over a sequence's last counts[s] queries and over the query heads that share the key's head. The other
    arguments are those of paged_attention's reference.
    """
    if args.k_scale is not None:
        k_cache = dequantize(k_cache, args.k_scale, query.dtype)
    kv_heads = k_cache.shape[2]
    out, squares = torch.zeros(2, len(seq_lens), kv_heads, columns, dtype=query.dtype)
    end = 0
    for sequence, (query_len, seq_len, table) in enumerate(zip(query_lens, seq_lens, block_tables, strict=True)):
        end += query_len
        for back in range(min(counts[sequence], query_len)):
            seen = seen_positions(seq_len - 1 - back, args)
            logits = logits_of(query[end - 1 - back], slots_of(k_cache, table, seen, query), args)
            weights = torch.softmax(logits, 1)[:, : len(seen)].view(kv_heads, -1, len(seen))
            out[sequence, :, seen.start : seen.stop] += weights.sum(1)
            squares[sequence, :, seen.start : seen.stop] += weights.square().sum(1)
    return out, squares
