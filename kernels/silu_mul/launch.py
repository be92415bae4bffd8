"""SiLU of one half of a product times its other half: Triton on CUDA, torch on a CPU."""

import torch
from torch import Tensor

from kernels.checks import check_shape
from kernels.silu_mul import reference

# Columns of a program. With elements of 16 bits, a thread loads 16 bytes of each half.
TILE = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [T, 2 I], the gate before up, of any float dtype; a row's elements lie side by side.

    Returns SiLU(gate) * up, [T, I], contiguous and of the same dtype. SiLU is rounded to this dtype before the product,
    as in transformers' LlamaMLP. Raises ValueError naming the argument whose shape or layout is wrong.
    """
    check_shape("gate_up", gate_up, [None, None], "[T, 2 I]")
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up: expected an even number of columns, got {gate_up.shape[1]}")
    if gate_up.stride(1) != 1:
        raise ValueError(f"gate_up: expected the elements of a row side by side, got strides {gate_up.stride()}")
    if not gate_up.is_cuda:
        return reference.silu_mul(gate_up)
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        silu_mul_with_triton(gate_up, out)
    return out


def silu_mul_with_triton(gate_up: Tensor, out: Tensor) -> None:
    """Like silu_mul, into out, [T, I] contiguous, on CUDA or in Triton's interpreter."""
    # Imported here because a CPU machine may have no triton.
    import triton

    from kernels.silu_mul.kernel import silu_mul_kernel

    rows, columns = out.shape
    grid = (rows, triton.cdiv(columns, TILE))
    silu_mul_kernel[grid](
        gate_up, out, gate_up.stride(0), COLUMNS=columns, TILE=TILE, num_warps=4, enable_fp_fusion=True
    )
