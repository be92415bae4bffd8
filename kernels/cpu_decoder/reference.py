"""What a decoder step means, operation by operation; in float64 it is what the tests measure against."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention_scores.reference import attention_scores
from kernels.cpu_decoder.launch import TokenGroup
from kernels.paged_attention.batch import AttentionArgs
from kernels.paged_attention.reference import paged_attention
from kernels.scores import SequenceScores
from kernels.weights import Weights


def step(
    weights: Weights,
    token_ids: Tensor,
    positions: Tensor,
    cache_positions: Tensor,
    query_start: Tensor,
    groups: Sequence[TokenGroup],
    rows: Tensor,
    caches: Sequence[tuple[Tensor, Tensor]],
    scores: Sequence[SequenceScores] = (),
) -> Tensor:
    """As `launch.Decoder.step`, in the dtype of the weights, caches [N, B, Hkv, D] and scores; returns [R, V]."""
    query_lens = query_start.diff().tolist()
    seq_lens = (cache_positions[query_start[1:].long() - 1] + 1).tolist()
    table = weights.head if weights.embedding is None else weights.embedding
    hidden = table[token_ids]
    angles = positions[:, None].to(table.dtype) * weights.frequencies.to(table.dtype)
    cosine, sine = (f(torch.cat([angles, angles], -1))[:, None] * weights.rotary_scale for f in (torch.cos, torch.sin))
    heads = [weights.q_heads, weights.kv_heads, weights.kv_heads]
    counts = [0] * len(seq_lens)
    for entry in scores:
        counts[entry.sequence] = entry.rows
    for number, (layer, (k_cache, v_cache)) in enumerate(zip(weights.layers, caches, strict=True)):
        normal = _norm(hidden, layer.input_norm, weights.epsilon)
        qkv = F.linear(normal, layer.qkv, layer.qkv_bias).view(len(hidden), -1, weights.head_dim)
        query, key, value = torch.split(qkv, heads, 1)
        if layer.q_norm is not None:
            query = _norm(query, layer.q_norm, weights.epsilon)
        if layer.k_norm is not None:
            key = _norm(key, layer.k_norm, weights.epsilon)
        query, key = (x * cosine + _rotated_half(x) * sine for x in (query, key))
        group = groups[layer.group]
        kept = group.slots >= 0
        for cache, new in ((k_cache, key), (v_cache, value)):
            cache.view(-1, *cache.shape[2:])[group.slots[kept]] = new[kept]
        args = AttentionArgs(weights.attention_scale, group.window)
        tables = group.tables.tolist()
        attended = paged_attention(query, k_cache, v_cache, query_lens, seq_lens, tables, args)
        computed = attention_scores(query, k_cache, query_lens, seq_lens, tables, counts, max(seq_lens), args)
        for entry in scores:
            for into, values in zip((entry.weights, entry.squares), computed, strict=True):
                if into is not None:
                    into[number] = values[entry.sequence, :, : into.shape[2]]
        hidden = hidden + F.linear(attended.flatten(1), layer.out)
        normal = _norm(hidden, layer.post_norm, weights.epsilon)
        gate, up = F.linear(normal, layer.gate_up).chunk(2, -1)
        hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
    return F.linear(_norm(hidden[rows], weights.final_norm, weights.epsilon), weights.head)


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def _rotated_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)
