"""rms_norm against transformers' own module, on every backend of this machine."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.rms_norm.launch import in_rows, norm_with_triton, rms_norm
from tests.kernels.attention_cases import spread

# Rows, heads (0: none) and columns.
SHAPES = {
    "a hidden state of 576": (7, 0, 576),
    "one row": (1, 0, 64),
    "2,048 columns": (3, 0, 2048),
    "40 rows of one column": (40, 0, 1),
    "9 heads of 64": (5, 9, 64),
    "one head of 80": (5, 1, 80),
    "20 heads of 100": (3, 20, 100),
}
# Two of the last digit of each type: the normed value and its product with the weight are rounded.
BARS = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def norm(backend: str, shape: tuple[int, int, int], dtype: torch.dtype, residual: bool, in_place: bool) -> list[Tensor]:
    """What was normed, the residual after it, and the rest of the tensor whose part was normed."""
    device = "cuda" if backend == "cuda" else "cpu"
    whole, x, weight = tensors(shape, dtype, device)
    summed = spread(x.shape, 2).to(device, dtype) if residual else None
    out = x if in_place else torch.full(x.shape, float("nan"), dtype=dtype, device=device)
    if backend == "interpreter":
        rows = None if summed is None else in_rows("residual", summed)
        norm_with_triton(in_rows("x", x), weight, 1e-5, rows, in_rows("out", out))
    else:
        rms_norm(x, weight, 1e-5, residual=summed, out=out)
    return [one.cpu() for one in (out, x if summed is None else summed, whole[:, x[0].numel() :])]


def tensors(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """[T, more than N], a view [T, N] or [T, H, N] of its beginning, and a weight [N]."""
    rows, heads, columns = shape
    width = max(1, heads) * columns
    whole = spread((rows, width + 24), 0).to(device, dtype)
    x = whole[:, :width].unflatten(1, (heads, columns)) if heads else whole[:, :width]
    return whole, x, spread((columns,), 1).to(device, dtype)


@pytest.mark.parametrize("residual", [False, True], ids=["in place", "with a residual"])
@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_it_is_llamas_norm(
    run_on: Callable[..., list[Tensor]], shape: tuple[int, int, int], dtype: torch.dtype, residual: bool
) -> None:
    # Not for the processes of the kernels, which need long enough to start.
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    whole, x, weight = tensors(shape, dtype, "cpu")
    module = LlamaRMSNorm(shape[2], 1e-5)
    module.weight.data = weight
    summed = spread(x.shape, 2).to(dtype) + x if residual else x
    normed, left, rest = run_on(norm, shape, dtype, residual, not residual)
    if residual:
        assert torch.equal(left, summed)
    assert torch.equal(rest, whole[:, x[0].numel() :])
    torch.testing.assert_close(normed, module(summed).detach(), rtol=BARS[dtype], atol=1e-6)


def test_packed_tokens_of_a_batch_of_one_are_normed() -> None:
    x = spread((1, 5, 16), 0)
    assert torch.equal(rms_norm(x, torch.ones(16), 1e-6)[0], rms_norm(x[0], torch.ones(16), 1e-6))
