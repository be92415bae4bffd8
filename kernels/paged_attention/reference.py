"""What paged_attention means, query by query; in float64 it is what the tests measure against."""

import torch
from torch import Tensor

from kernels.paged_attention.batch import AttentionArgs
from kernels.quantization import dequantize


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    block_tables: list[list[int]],
    args: AttentionArgs,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention of query [T, Hq, D] over the caches [N, B, Hkv, D], in the dtype of `query`; returns [T, Hq, D].

    Query i of a sequence is its token seq_len - query_len + i and sees itself and what came before it, of a window
    the window - 1 tokens before. Query head h reads KV head h // (Hq / Hkv).
    lse: [T, Hq], gets the logarithm of each row's sum of exp(logits). Rows of no sequence are zero.
    """
    if args.k_scale is not None and args.v_scale is not None:
        k_cache, v_cache = (
            dequantize(x, s, query.dtype) for x, s in ((k_cache, args.k_scale), (v_cache, args.v_scale))
        )
    block_size, kv_heads = k_cache.shape[1:3]
    out = torch.zeros_like(query)
    row = 0
    for query_len, seq_len, table in zip(query_lens, seq_lens, block_tables, strict=True):
        for position in range(seq_len - query_len, seq_len):
            first = 0 if args.window is None else max(0, position - args.window + 1)
            slots = [(table[at // block_size], at % block_size) for at in range(first, position + 1)]
            for head in range(query.shape[1]):
                kv_head = head // (query.shape[1] // kv_heads)
                keys = torch.stack([k_cache[block, offset, kv_head] for block, offset in slots]).to(query.dtype)
                values = torch.stack([v_cache[block, offset, kv_head] for block, offset in slots]).to(query.dtype)
                logits = keys @ query[row, head] * args.scale
                if args.softcap is not None:
                    logits = args.softcap * torch.tanh(logits / args.softcap)
                if args.sinks is not None:
                    logits = torch.cat([logits, args.sinks[head : head + 1].to(query.dtype)])
                if lse is not None:
                    lse[row, head] = torch.logsumexp(logits, 0)
                out[row, head] = torch.softmax(logits, 0)[: len(slots)] @ values
            row += 1
    return out
