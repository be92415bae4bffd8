"""Draws tokens from the softmax of logits, as shaped by sampling parameters: Triton on CUDA, torch on a CPU."""

import torch
from torch import Tensor

from kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from kernels.draw_tokens.reference import LARGEST_UNIFORM

# In a sorted distribution, top-k and top-p seldom need more candidates than this; a row that does is fully sorted.
_CANDIDATES = 512
# Low bits that float32 has beyond those of each type.
_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
# Logits that a program reads at a time, and its warps: the fastest on an H100 for 256 rows of 128,256 logits, among
# those that spill no registers.
TILE, WARPS = 8192, 16


def draw_tokens(logits: Tensor, rows: Tensor, parameters: Tensor) -> Tensor:
    """Draws one id for each of `rows`.

    logits: [R, V] float32, float16 or bfloat16, the logits of a row side by side.
    rows: [P] int64, the rows to draw from. parameters: [P, 5] float64 contiguous, for each row: temperature, above 0;
    top-k, 0 for none; top-p, 1 for none; min-p, 0 for none; and a random number in [0, 1).
    Returns ids, [P] int64. Equal logits are kept or dropped together; see the reference. An id depends only on its own
    row, not on the rest of the batch.
    Raises ValueError naming the argument whose shape, dtype, device or layout is wrong.
    """
    check_shape("logits", logits, [None, None], "[R, V]")
    check_dtype("logits", logits, *_SHIFTS)
    if logits.stride(1) != 1:
        raise ValueError(f"logits: expected the elements of a row side by side, got strides {logits.stride()}")
    check_shape("rows", rows, [None], "[P]")
    check_dtype("rows", rows, torch.int64)
    check_shape("parameters", parameters, [len(rows), 5], "[P, 5]")
    check_dtype("parameters", parameters, torch.float64)
    for name, tensor in (("rows", rows), ("parameters", parameters)):
        check_device(name, tensor, "logits", logits)
        check_contiguous(name, tensor)
    if not len(rows):
        return torch.empty_like(rows)
    return (draw_with_triton if logits.is_cuda else draw_with_torch)(logits, rows, parameters)


def draw_with_triton(logits: Tensor, rows: Tensor, parameters: Tensor) -> Tensor:
    """As draw_tokens, on CUDA or in Triton's interpreter.

    Weights and the sums for top-p are float32; for the draw, sums over tiles are float64.
    """
    # Imported here because a CPU machine may have no triton.
    import triton

    from kernels.draw_tokens.kernel import draw_tokens_kernel

    ids, vocab = torch.empty_like(rows), logits.shape[1]
    draw_tokens_kernel[(len(rows),)](
        logits,
        rows,
        parameters,
        ids,
        logits.stride(0),
        vocab,
        LARGEST_UNIFORM=LARGEST_UNIFORM,
        SHIFT=_SHIFTS[logits.dtype],
        TILE=min(TILE, triton.next_power_of_2(vocab)),
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    return ids


def draw_with_torch(logits: Tensor, rows: Tensor, parameters: Tensor) -> Tensor:
    """As draw_tokens. Weights and their sums are float64."""
    temperature, top_k, top_p, min_p, uniform = parameters.unbind(1)
    logits = logits[rows].float()
    # The largest logit is subtracted first, so that no temperature makes it overflow.
    logits = logits - logits.amax(-1, keepdim=True)
    logits /= temperature.float()[:, None]
    # The best token stays, whatever the parameters.
    least = min_p.float().log().clamp_(max=0)[:, None]
    filtered = ((top_k > 0) | (top_p < 1)).nonzero()[:, 0]
    if len(filtered):
        cut = _least_kept(logits[filtered], top_k[filtered], top_p[filtered])
        least[filtered] = torch.maximum(least[filtered], cut)
    weights = logits.double().exp_().masked_fill_(logits < least, 0)
    cumulative = weights.cumsum_(-1)
    targets = uniform.clamp(max=LARGEST_UNIFORM)[:, None] * cumulative[:, -1:]
    # right=True: an id with a weight of 0 is never drawn, not even for a target of 0.
    return torch.searchsorted(cumulative, targets, right=True)[:, 0]


def _least_kept(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """logits: [P, V]. Returns the smallest logit that top-k and top-p keep, [P, 1]."""
    vocab = logits.shape[1]
    width = min(vocab, _CANDIDATES)
    least, complete = _cut(logits.topk(width, -1).values, logits, top_k, top_p)
    rest = (~complete).nonzero()[:, 0]
    if len(rest) and width < vocab:
        full = logits[rest].sort(-1, descending=True).values
        least[rest] = _cut(full, logits[rest], top_k[rest], top_p[rest])[0]
    return least


def _cut(ordered: Tensor, logits: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the smallest logit kept, [P, 1], and whether `ordered` was enough, [P].

    ordered: [P, W], the W best logits, best first.
    """
    width, vocab = ordered.shape[1], logits.shape[1]
    bounded = ((top_k > 0) & (top_k < vocab))[:, None]
    last_of_k = torch.where(bounded[:, 0], top_k, vocab).long().clamp_(max=width)[:, None] - 1
    # Equal logits stay together.
    in_k = (ordered >= ordered.gather(1, last_of_k)) | ~bounded
    weights = (ordered - ordered[:, :1]).double().exp().masked_fill_(~in_k, 0)
    everything = (logits - ordered[:, :1]).double().exp_().sum(-1, keepdim=True)
    total = torch.where(bounded, weights.sum(-1, keepdim=True), everything)
    before = weights.cumsum(-1) - weights
    kept = in_k & ((before < top_p[:, None] * total) | (top_p[:, None] >= 1))
    # The best token stays, whatever the parameters.
    kept[:, 0] = True
    last = kept.sum(-1, keepdim=True) - 1
    # If the last candidate is in top-k, equal logits may follow it.
    complete = torch.where(bounded, ~in_k[:, -1:], last < width - 1)
    return ordered.gather(1, last), complete[:, 0]
