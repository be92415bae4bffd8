"""What attention_scores means, query by query."""

import torch
from torch import Tensor

from kernels.paged_attention.batch import AttentionArgs
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
    """[S, Hkv, columns], the softmax weight of each key summed over a sequence's last counts[s] queries and over the
    query heads that share the key's head; and the sums of the squares of the same weights. The rest as in
    paged_attention's reference.
    """
    if args.k_scale is not None:
        k_cache = dequantize(k_cache, args.k_scale, query.dtype)
    block_size, kv_heads = k_cache.shape[1:3]
    group = query.shape[1] // kv_heads
    out, squares = torch.zeros(2, len(seq_lens), kv_heads, columns, dtype=query.dtype)
    end = 0
    for sequence, (query_len, seq_len, table) in enumerate(zip(query_lens, seq_lens, block_tables, strict=True)):
        end += query_len
        for back in range(min(counts[sequence], query_len)):
            position = seq_len - 1 - back
            first = 0 if args.window is None else max(0, position - args.window + 1)
            slots = [(table[at // block_size], at % block_size) for at in range(first, position + 1)]
            for head in range(query.shape[1]):
                keys = torch.stack([k_cache[block, offset, head // group] for block, offset in slots]).to(query.dtype)
                logits = keys @ query[end - 1 - back, head] * args.scale
                if args.softcap is not None:
                    logits = args.softcap * torch.tanh(logits / args.softcap)
                if args.sinks is not None:
                    logits = torch.cat([logits, args.sinks[head : head + 1].to(query.dtype)])
                weights = torch.softmax(logits, 0)[: len(slots)]
                out[sequence, head // group, first : position + 1] += weights
                squares[sequence, head // group, first : position + 1] += weights.square()
    return out, squares
