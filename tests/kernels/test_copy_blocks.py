"""copy_blocks copies the named blocks in all layers and touches no other, on every backend of this machine."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.copy_blocks import reference
from kernels.copy_blocks.launch import copy_blocks, copy_with_triton

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
SHAPES = {
    "one layer": (1, 6, 4, 1, 8),
    "3 layers, odd head size": (3, 7, 2, 3, 5),
    "block of several pieces": (2, 6, 16, 3, 64),
}


def copy(
    backend: str, shape: tuple[int, ...], sources: list[int], targets: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The caches after the op and after its reference: each [2, L, N, B, Hkv, D]."""
    caches = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    caches[:, :, 2] = float("nan")
    caches = caches.to(dtype)
    expected = caches.clone()
    device = "cuda" if backend == "cuda" else "cpu"
    caches = caches.to(device)
    pairs = [torch.tensor(blocks, dtype=torch.int64) for blocks in (sources, targets)]
    op = copy_with_triton if backend == "interpreter" else copy_blocks
    op(caches[0], caches[1], *(blocks.to(device) for blocks in pairs))
    reference.copy_blocks(expected[0], expected[1], *pairs)
    return caches.cpu(), expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_layer_of_the_named_blocks_is_copied(
    run_on: Callable[..., tuple[Tensor, Tensor]], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    got, expected = run_on(copy, shape, [0, 5, 0], [3, 1, 4], dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_blocks_of_8_bits_are_copied_bit_by_bit(backend: str) -> None:
    caches = torch.arange(2 * 6 * 4 * 8).to(torch.int8).view(2, 1, 6, 4, 1, 8).to(backend)
    expected = caches.clone()
    expected[:, :, [3, 1]] = expected[:, :, [0, 5]]
    float8 = caches.view(torch.float8_e4m3fn)
    copy_blocks(float8[0], float8[1], torch.tensor([0, 5], device=backend), torch.tensor([3, 1], device=backend))
    assert torch.equal(caches, expected)


def test_a_block_never_written_is_copied_as_it_is(run_on: Callable[..., tuple[Tensor, Tensor]]) -> None:
    got, _ = run_on(copy, (2, 6, 4, 1, 8), [2], [1], torch.float32)
    assert got[:, :, 1].isnan().all()
