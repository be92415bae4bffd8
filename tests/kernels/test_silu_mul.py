"""silu_mul against transformers' own words, on every backend of this machine."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.silu_mul import reference
from kernels.silu_mul.launch import silu_mul, silu_mul_with_triton
from tests.kernels.attention_cases import spread

# Two of the last digit of each type: SiLU and the product are rounded. The smallest that float16 has leaves 3e-5 of a
# product with some hundreds.
BARS = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def activate(backend: str, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The result and its inputs; rows lie further apart than they are long."""
    whole = spread((shape[0], 2 * shape[1] + 24), 0).to("cuda" if backend == "cuda" else "cpu", dtype)
    gate_up = whole[:, : 2 * shape[1]]
    if backend == "interpreter":
        out = torch.full(shape, float("nan"), dtype=dtype)
        silu_mul_with_triton(gate_up, out)
    else:
        out = silu_mul(gate_up)
    return out.cpu(), gate_up.cpu()


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("shape", [(7, 1536), (1, 64), (3, 100), (2, 2500)], ids=str)
def test_it_is_llamas_activation(
    run_on: Callable[..., tuple[Tensor, Tensor]], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    out, gate_up = run_on(activate, shape, dtype)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), reference.silu_mul(gate_up.double()), rtol=BARS[dtype], atol=3e-5)


def test_no_rows_are_activated() -> None:
    assert silu_mul(torch.empty(0, 8)).shape == (0, 4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.empty(4), "gate_up: expected"),
        (torch.empty(2, 5), "gate_up: expected an even number of columns, got 5"),
        (torch.empty(4, 6).t(), "gate_up: expected the elements of a row side by side"),
    ],
    ids=["one dimension", "odd", "columns"],
)
def test_a_wrong_argument_is_named(wrong: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        silu_mul(wrong)
