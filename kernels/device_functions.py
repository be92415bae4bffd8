"""What several kernels need on the device: whose a packed row is, where its token is stored, and in which form."""

import triton
import triton.language as tl

# Triton reads the signature by its own rules.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"


@triton.jit
def sequence_of_row(query_start_ptr, row, sequences):
    """The sequence with query_start[s] <= row < query_start[s + 1]; `sequences` where the row is behind all of them.

    Counts the sequences that end at or before the row, 128 at once: halving would wait for memory once per half.
    """
    sequence = 0
    for first in range(0, sequences, 128):
        index = first + tl.arange(0, 128)
        used = index < sequences
        end = tl.load(query_start_ptr + 1 + index, mask=used, other=0)
        sequence += tl.sum((used & (end <= row)).to(tl.int32), 0)
    return sequence


@triton.jit
def slot_of_token(block_tables_ptr, table_stride, sequence, position, BLOCK_SIZE: tl.constexpr):
    """block * BLOCK_SIZE + place in the block, int64, of the token at `position` of a sequence."""
    block = tl.load(block_tables_ptr + sequence.to(tl.int64) * table_stride + position // BLOCK_SIZE)
    return block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def quantized(x, scale, DTYPE: tl.constexpr):
    """x / scale in DTYPE, int8 or float8e4nv: the nearest value, of two the even one, at most the largest there is."""
    x = tl.div_rn(x.to(tl.float32), scale)
    if tl.int8 == DTYPE:
        x = tl.minimum(tl.maximum(x, -128.0), 127.0)
        # From 2**23 on floats are whole numbers, so that the sum rounds; 1.5 times that keeps negative ones there.
        return ((x + 12582912.0) - 12582912.0).to(tl.int8)
    return tl.minimum(tl.maximum(x, -448.0), 448.0).to(DTYPE)
