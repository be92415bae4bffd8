"""What several kernels need on the device: the sequence of a tile, and some arithmetic."""

import triton
import triton.language as tl

# Triton reads the signature by its own rules.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sequence_of_tile(query_start_ptr, tile, sequences, TILE_TOKENS: tl.constexpr):
    """The sequence of a tile; `sequences` for a tile after the last sequence.

    Sequence s has the tiles from query_start[s] // TILE_TOKENS + s on: as many as its rows need, or one more. So the
    total number of tiles does not depend on the lengths. Counts the sequences that end at or before the tile, 128 at
    once: a binary search would wait for memory in each of its steps.
    """
    count = 0
    for first in range(1, sequences + 1, 128):
        sequence = first + tl.arange(0, 128)
        used = sequence <= sequences
        start = tl.load(query_start_ptr + sequence, mask=used, other=0) // TILE_TOKENS + sequence
        count += tl.sum((used & (start <= tile)).to(tl.int32), 0)
    return count


@triton.jit
def quantized(x, scale, DTYPE: tl.constexpr):
    """x / scale in DTYPE, int8 or float8e4nv: clamped to its range and rounded to nearest, ties to even."""
    x = tl.div_rn(x.to(tl.float32), scale)
    if tl.int8 == DTYPE:
        x = tl.minimum(tl.maximum(x, -128.0), 127.0)
        # Floats from 2**23 to 2**24 are the whole numbers, so the sum is rounded. 1.5 * 2**23 keeps sums with negative
        # numbers in this range, too.
        return ((x + 12582912.0) - 12582912.0).to(tl.int8)
    return tl.minimum(tl.maximum(x, -448.0), 448.0).to(DTYPE)


@triton.jit
def scaled(x, scale_ptr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    """x [rows, HEAD_DIM_PADDED] times a head's scale [HEAD_DIM], in float32."""
    dim = tl.arange(0, HEAD_DIM_PADDED)
    return x.to(tl.float32) * tl.load(scale_ptr + dim, mask=dim < HEAD_DIM, other=1.0)[None, :]


@triton.jit
def tanh(x):
    # Near zero, the difference in the quotient cancels most digits; the series keeps them.
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0, -far, far))
