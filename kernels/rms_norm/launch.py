"""Root mean square norm, of a sum if there is a residual: Triton on CUDA, torch on a CPU."""

import math

import torch
from torch import Tensor

from kernels.checks import check_contiguous, check_like, check_shape
from kernels.rms_norm import reference


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x over its root mean square, times weight; a residual becomes residual + x, which is normed instead.

    x: [..., N], a row's elements side by side; rows may lie apart like those of a merged product, for instance
        [T, H, N] of one [T, M], which norms per head.
    weight: [N], the dtype of x. eps: added to the mean of squares.
    residual: like x, written; the sum is rounded to its dtype before it is normed.
    out: like x, and may be x. Created if not given, and returned.
    Computes in float32, and rounds to the dtype of x before applying the weight, like transformers' LlamaRMSNorm.
    Raises ValueError naming the argument whose shape, dtype, device or layout is wrong.
    """
    if x.dim() == 0:
        raise ValueError("x: expected [..., N], got a single number")
    check_shape("weight", weight, x.shape[-1:], "[N]")
    check_like("weight", weight, "x", x)
    check_contiguous("weight", weight)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is not None:
            check_shape(name, tensor, x.shape, "[..., N], as x")
            check_like(name, tensor, "x", x)
    x_rows, out_rows = in_rows("x", x), in_rows("out", out)
    residual_rows = None if residual is None else in_rows("residual", residual)
    if x.numel() == 0:
        return out
    if x.is_cuda:
        norm_with_triton(x_rows, weight, eps, residual_rows, out_rows)
    else:
        out.copy_(reference.rms_norm(x, weight, eps, residual=residual))
    return out


def in_rows(name: str, tensor: Tensor) -> Tensor:
    """Returns the tensor as [groups, rows, N], without a copy.

    Raises ValueError if that needs a copy, or if the elements of a row are not contiguous.
    """
    shape = (1, 1, *tensor.shape)
    try:
        shaped = tensor.view(math.prod(shape[:-2]), *shape[-2:])
    except RuntimeError:
        shaped = None
    if shaped is None or shaped.stride(2) != 1:
        raise ValueError(f"{name}: expected rows at even distances, elements contiguous, got strides {tensor.stride()}")
    return shaped


# Elements that a program holds, so that several short rows, such as single heads, share a program.
ELEMENTS = 1024


def norm_with_triton(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: Tensor) -> None:
    """Norm rows on CUDA or in Triton's interpreter, in one launch.

    x, residual, out: [G, R, N] of one float dtype, with any strides of groups and rows. weight: [N], like x.
    eps: added to the mean of squares. `residual` becomes residual + x, which is normed; `out` may be x.
    """
    # Imported here because a CPU machine may have no triton.
    import triton

    from kernels.rms_norm.kernel import rms_norm_kernel

    groups, rows, columns = x.shape
    width = triton.next_power_of_2(columns)
    tile_rows = max(1, ELEMENTS // width)
    into = x if residual is None else residual
    rms_norm_kernel[(groups * triton.cdiv(rows, tile_rows),)](
        x,
        into,
        weight,
        out,
        rows,
        *x.stride()[:2],
        *into.stride()[:2],
        *out.stride()[:2],
        eps,
        COLUMNS=columns,
        WIDTH=width,
        TILE_ROWS=tile_rows,
        HAS_RESIDUAL=residual is not None,
        # With elements of 16 bits: two loads of 16 bytes per thread.
        num_warps=max(2, min(16, tile_rows * width // 512)),
        enable_fp_fusion=True,
    )
