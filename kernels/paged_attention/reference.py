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

    Query i of a sequence is its token seq_len - query_len + i and sees itself and all earlier tokens, with a window
    only the window - 1 before it. Query head h reads KV head h // (Hq / Hkv).
    lse: [T, Hq], gets the logarithm of each row's sum of exp(logits). Returned rows of no sequence are zero.
    """
    if args.k_scale is not None and args.v_scale is not None:
        k_cache, v_cache = (
            dequantize(x, s, query.dtype) for x, s in ((k_cache, args.k_scale), (v_cache, args.v_scale))
        )
    out = torch.zeros_like(query)
    row = 0
    for query_len, seq_len, table in zip(query_lens, seq_lens, block_tables, strict=True):
        for position in range(seq_len - query_len, seq_len):
            seen = seen_positions(position, args)
            keys, values = (slots_of(cache, table, seen, query) for cache in (k_cache, v_cache))
            logits = logits_of(query[row], keys, args)
            if lse is not None:
                lse[row] = torch.logsumexp(logits, 1)
            out[row] = torch.einsum("hn,nhd->hd", torch.softmax(logits, 1)[:, : len(seen)], values)
            row += 1
    return out


def seen_positions(position: int, args: AttentionArgs) -> range:
    """Returns the positions that a position's query attends to."""
    return range(0 if args.window is None else max(0, position - args.window + 1), position + 1)


def slots_of(cache: Tensor, table: list[int], positions: range, query: Tensor) -> Tensor:
    """Returns keys or values [N, Hq, D] of a sequence's positions, repeated for each query head that reads a KV head.

    query: [T, Hq, D], whose dtype they get.
    """
    at, size = torch.tensor(positions), cache.shape[1]
    chosen = cache[torch.tensor(table)[at // size], at % size].to(query.dtype)
    return chosen.repeat_interleave(query.shape[1] // cache.shape[2], 1)


def logits_of(query: Tensor, keys: Tensor, args: AttentionArgs) -> Tensor:
    """[Hq, N] of one query [Hq, D] and keys [N, Hq, D]; [Hq, N + 1] with sinks."""
    logits = torch.einsum("hd,nhd->hn", query, keys) * args.scale
    if args.softcap is not None:
        logits = args.softcap * torch.tanh(logits / args.softcap)
    if args.sinks is not None:
        logits = torch.cat([logits, args.sinks[:, None].to(logits.dtype)], 1)
    return logits
