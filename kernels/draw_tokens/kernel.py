"""One program draws the token of one row, in several passes over the row.

Nothing is sorted. Top-k and top-p keep the tokens from some logit up. A search finds this logit: each pass sums what
lies above three candidates at once, which leaves a quarter of the candidates.
"""

# Triton reads the signature by its own rules.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from kernels.device_functions import LOG2_E


@triton.jit
def order_keys(x, SHIFT: tl.constexpr):
    """int32 numbers in the order of float32 values. SHIFT: how many low bits to drop, all 0 in the logits' type."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def tile_of(row_ptr, start, vocab, TILE: tl.constexpr):
    """Logits of a row from `start` on, [TILE] float32; minus infinity after the end."""
    at = start + tl.arange(0, TILE)
    return tl.load(row_ptr + at, mask=at < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def least_kept(
    row_ptr, vocab, best, rate, low, high, limit, WEIGHTED: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr
):
    """Smallest key from low to high such that the tokens with larger keys sum to less than the limit.

    A token counts as 1 or, if WEIGHTED, as exp2((logit - best) * rate). No token has a key larger than high. Keys are
    int64 here.
    """
    while low < high:
        width = high - low
        first, second, third = low + width // 4, low + width // 2, low + 3 * width // 4
        above_first = tl.zeros([TILE], tl.float32)
        above_second = tl.zeros([TILE], tl.float32)
        above_third = tl.zeros([TILE], tl.float32)
        for start in range(0, vocab, TILE):
            x = tile_of(row_ptr, start, vocab, TILE)
            key = order_keys(x, SHIFT)
            weight = tl.exp2((x - best) * rate) if WEIGHTED else tl.full([TILE], 1.0, tl.float32)
            above_first += tl.where(key > first.to(tl.int32), weight, 0.0)
            above_second += tl.where(key > second.to(tl.int32), weight, 0.0)
            above_third += tl.where(key > third.to(tl.int32), weight, 0.0)
        if tl.sum(above_first, 0) < limit:
            high = first
        elif tl.sum(above_second, 0) < limit:
            low, high = first + 1, second
        elif tl.sum(above_third, 0) < limit:
            low, high = second + 1, third
        else:
            low = third + 1
    return low


@triton.jit
def least_of_lanes(keys, weights, low, high, limit):
    """Smallest key from low to high such that the weights of larger `keys` sum to less than the limit."""
    while low < high:
        # The difference is positive: (low + high) // 2 would round up for a negative sum.
        middle = low + (high - low) // 2
        if tl.sum(tl.where(keys > middle.to(tl.int32), weights, 0.0), 0) < limit:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def kept_weights(row_ptr, start, vocab, best, rate, least, least_power, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Weights of a tile's tokens, [TILE]; 0 for those with a key below `least` or a power below least_power."""
    x = tile_of(row_ptr, start, vocab, TILE)
    power = (x - best) * rate
    kept = (order_keys(x, SHIFT) >= least.to(tl.int32)) & (power >= least_power)
    return tl.where(kept, tl.exp2(power), 0.0)


@triton.jit
def draw_tokens_kernel(
    logits_ptr,
    rows_ptr,
    parameters_ptr,
    out_ptr,
    row_stride,
    vocab,
    LARGEST_UNIFORM: tl.constexpr,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    row_ptr = logits_ptr + tl.load(rows_ptr + program) * row_stride
    at = parameters_ptr + program * 5
    temperature, top_k, top_p = tl.load(at).to(tl.float32), tl.load(at + 1).to(tl.float32), tl.load(at + 2)
    min_p, uniform = tl.load(at + 3).to(tl.float32), tl.load(at + 4)

    largest = tl.full([TILE], float("-inf"), tl.float32)
    smallest = tl.full([TILE], float("inf"), tl.float32)
    for start in range(0, vocab, TILE):
        x = tile_of(row_ptr, start, vocab, TILE)
        largest = tl.maximum(largest, x)
        smallest = tl.minimum(smallest, tl.where(start + tl.arange(0, TILE) < vocab, x, float("inf")))
    best = tl.max(largest, 0)
    rate = LOG2_E / temperature
    highest = order_keys(best, SHIFT).to(tl.int64)
    least = order_keys(tl.min(smallest, 0), SHIFT).to(tl.int64)
    # The largest logit of each lane is one of the row's logits. So the sum of the lanes above a key is at most the sum
    # of the row, and a search among the lanes gives a lower bound.
    lanes = order_keys(largest, SHIFT)
    if (top_k > 0) & (top_k < vocab):
        least = least_of_lanes(lanes, tl.full([TILE], 1.0, tl.float32), least, highest, top_k)
        least = least_kept(row_ptr, vocab, best, rate, least, highest, top_k, False, SHIFT, TILE)
    if top_p < 1:
        total = tl.zeros([TILE], tl.float32)
        for start in range(0, vocab, TILE):
            total += kept_weights(row_ptr, start, vocab, best, rate, least, float("-inf"), SHIFT, TILE)
        share = top_p.to(tl.float32)
        mass = tl.sum(total, 0)
        # Even if all tokens had this logit, together they would weigh only half of what top-p may drop.
        negligible = best + tl.log2(0.5 * (1.0 - share) * mass / vocab) / rate
        low = tl.maximum(least, order_keys(negligible, SHIFT).to(tl.int64) - 1)
        low = least_of_lanes(lanes, tl.exp2((largest - best) * rate), low, highest, share * mass)
        least = least_kept(row_ptr, vocab, best, rate, low, highest, share * mass, True, SHIFT, TILE)
    # The best token stays, whatever the parameters.
    least_power = tl.minimum(tl.log2(min_p), 0.0)

    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, TILE):
        weights = kept_weights(row_ptr, start, vocab, best, rate, least, least_power, SHIFT, TILE)
        total += tl.sum(weights, 0).to(tl.float64)
    target = tl.minimum(uniform, LARGEST_UNIFORM) * total
    start = 0
    before = tl.full([], 0.0, tl.float64)
    weights = kept_weights(row_ptr, start, vocab, best, rate, least, least_power, SHIFT, TILE)
    here = tl.sum(weights, 0).to(tl.float64)
    while (before + here <= target) & (start + TILE < vocab):
        before += here
        start += TILE
        weights = kept_weights(row_ptr, start, vocab, best, rate, least, least_power, SHIFT, TILE)
        here = tl.sum(weights, 0).to(tl.float64)
    place = tl.arange(0, TILE)
    passed = (before + tl.cumsum(weights, 0).to(tl.float64) > target) & (weights > 0)
    first = tl.min(tl.where(passed, place, TILE), 0)
    # Rounding may leave the running sum of a tile below its total.
    last = tl.max(tl.where(weights > 0, place, 0), 0)
    tl.store(out_ptr + program, (start + tl.minimum(first, last)).to(tl.int64))
