"""What several kernels need on the device: the sequence of a tile, and some arithmetic."""

import triton
import triton.language as tl

# Triton reads the signature by its own rules.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sequence_of_tile(query_start_ptr, tile, sequences, TILE_TOKENS: tl.constexpr):
    """The sequence whose tile it is, where sequence s has the tiles from query_start[s] // TILE_TOKENS + s on.

    These are as many as its rows need, or one more; their number in all is known without a look at the lengths.
    `sequences` where the tile is behind all of them. Counts the sequences that end at or before the tile, 128 at once:
    halving would wait for memory once per half.
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
    """x / scale in DTYPE, int8 or float8e4nv: the nearest value, of two the even one, at most the largest there is."""
    x = tl.div_rn(x.to(tl.float32), scale)
    if tl.int8 == DTYPE:
        x = tl.minimum(tl.maximum(x, -128.0), 127.0)
        # From 2**23 on floats are whole numbers, so that the sum rounds; 1.5 times that keeps negative ones there.
        return ((x + 12582912.0) - 12582912.0).to(tl.int8)
    return tl.minimum(tl.maximum(x, -448.0), 448.0).to(DTYPE)


@triton.jit
def scaled(x, scale_ptr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    """x [rows, HEAD_DIM_PADDED] times a head's scale [HEAD_DIM], in float32."""
    dim = tl.arange(0, HEAD_DIM_PADDED)
    return x.to(tl.float32) * tl.load(scale_ptr + dim, mask=dim < HEAD_DIM, other=1.0)[None, :]


@triton.jit
def tanh(x):
    # The quotient loses its digits near zero, where the series has them.
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0, -far, far))
