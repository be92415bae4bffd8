"""One program norms a few rows and holds all their columns in registers: each element is read and written once."""

# Triton reads the signature by its own rules.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


# The number of rows changes from step to step; variants for 1 or multiples of 16 would gain nothing.
@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    rows,
    x_group_stride,
    x_row_stride,
    residual_group_stride,
    residual_row_stride,
    out_group_stride,
    out_row_stride,
    eps,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,  # COLUMNS rounded up to a power of two
    TILE_ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    tiles = tl.cdiv(rows, TILE_ROWS)
    group = (tl.program_id(0) // tiles).to(tl.int64)
    row = (tl.program_id(0) % tiles * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    at = x_ptr + group * x_group_stride + row[:, None] * x_row_stride + column[None, :]
    x = tl.load(at, mask=inside, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if HAS_RESIDUAL:
        at = residual_ptr + group * residual_group_stride + row[:, None] * residual_row_stride + column[None, :]
        x = (x + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(at, x, mask=inside)
        x = x.to(tl.float32)
    mean = tl.sum(x * x, 1) / COLUMNS
    normed = (x * tl.rsqrt(mean + eps)[:, None]).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    at = out_ptr + group * out_group_stride + row[:, None] * out_row_stride + column[None, :]
    tl.store(at, (normed * weight[None, :]).to(dtype), mask=inside)
