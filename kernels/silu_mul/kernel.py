"""One program activates a piece of one row."""

# Triton reads the signature by its own rules.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, gate_up_row_stride, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < COLUMNS
    at = gate_up_ptr + row * gate_up_row_stride + column
    gate, up = tl.load(at, mask=inside, other=0.0), tl.load(at + COLUMNS, mask=inside, other=0.0)
    dtype = gate.dtype
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * COLUMNS + column, (activated * up).to(dtype), mask=inside)
