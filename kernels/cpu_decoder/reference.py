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
from kernels.store_kv.reference import store_kv
from kernels.weights import LayerAdapter, LowRank, Weights


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
    scales: Sequence[tuple[Tensor | None, Tensor | None]] = (),
    adapters: Sequence[tuple[Sequence[LayerAdapter], int, int]] = (),
) -> Tensor:
    """As `launch.Decoder.step`, in the dtype of the weights and scores, but without accumulators; returns [R, V].

    caches: [N, B, Hkv, D] each, of that dtype, or of 8 bits with `scales`, as `launch.Decoder.bind` takes them.
    adapters: layers, the first token, and the token after the last.
    """
    query_lens = query_start.diff().tolist()
    seq_lens = (cache_positions[query_start[1:].long() - 1] + 1).tolist()
    table = weights.head if weights.embedding is None else weights.embedding
    hidden = table[token_ids]
    angles = positions[:, None].to(table.dtype) * weights.frequencies.to(table.dtype)
    cosine, sine = (f(torch.cat([angles, angles], -1))[:, None] * weights.rotary_scale for f in (torch.cos, torch.sin))
    heads = [weights.q_heads, weights.kv_heads, weights.kv_heads]
    widths = {
        "qkv": [count * weights.head_dim for count in heads],
        "out": [len(weights.final_norm)],
        "gate_up": [len(weights.layers[0].gate_up) // 2] * 2,
        "down": [len(weights.final_norm)],
    }
    counts = [0] * len(seq_lens)
    for entry in scores:
        counts[entry.sequence] = entry.rows
    nothing = [(None, None)] * len(caches)
    for number, (layer, (k_cache, v_cache), (k_scale, v_scale)) in enumerate(
        zip(weights.layers, caches, scales or nothing, strict=True)
    ):
        own = [(layers[number], begin, end) for layers, begin, end in adapters]

        def added(x: Tensor, name: str, own: Sequence[tuple[LayerAdapter, int, int]] = own) -> Tensor | float:
            return sum(_added(x, getattr(adapter, name), widths[name], begin, end) for adapter, begin, end in own)

        normal = _norm(hidden, layer.input_norm, weights.epsilon)
        qkv = (F.linear(normal, layer.qkv, layer.qkv_bias) + added(normal, "qkv")).view(
            len(hidden), -1, weights.head_dim
        )
        query, key, value = torch.split(qkv, heads, 1)
        if layer.q_norm is not None:
            query = _norm(query, layer.q_norm, weights.epsilon)
        if layer.k_norm is not None:
            key = _norm(key, layer.k_norm, weights.epsilon)
        query, key = (x * cosine + _rotated_half(x) * sine for x in (query, key))
        group = groups[layer.group]
        store_kv(key, value, k_cache, v_cache, group.slots, k_scale, v_scale)
        args = AttentionArgs(weights.attention_scale, group.window, k_scale=k_scale, v_scale=v_scale)
        tables = group.tables.tolist()
        attended = paged_attention(query, k_cache, v_cache, query_lens, seq_lens, tables, args)
        computed = attention_scores(query, k_cache, query_lens, seq_lens, tables, counts, max(seq_lens), args)
        for entry in scores:
            for into, values in zip((entry.weights, entry.squares), computed, strict=True):
                if into is not None:
                    into[number] = values[entry.sequence, :, : into.shape[2]]
        attended = attended.flatten(1)
        hidden = hidden + F.linear(attended, layer.out) + added(attended, "out")
        normal = _norm(hidden, layer.post_norm, weights.epsilon)
        gate, up = (F.linear(normal, layer.gate_up) + added(normal, "gate_up")).chunk(2, -1)
        activated = F.silu(gate) * up
        hidden = hidden + F.linear(activated, layer.down) + added(activated, "down")
    return F.linear(_norm(hidden[rows], weights.final_norm, weights.epsilon), weights.head)


def _added(x: Tensor, parts: Sequence[LowRank | None], widths: Sequence[int], begin: int, end: int) -> Tensor:
    """Returns what an adapter adds to the products of tokens; 0 for tokens outside its span."""
    sums = x.new_zeros(len(x), sum(widths))
    for part, into in zip(parts, torch.split(sums, list(widths), 1), strict=True):
        if part is not None:
            into[begin:end] = part.scale * (x[begin:end] @ part.a.t() @ part.b.t())
    return sums


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def _rotated_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)
