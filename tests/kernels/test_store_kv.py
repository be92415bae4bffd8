"""store_kv writes the named slots and nothing else, on every backend of this machine."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.quantization import LARGEST
from kernels.store_kv import reference
from kernels.store_kv.launch import store_kv, store_with_triton
from tests.kernels.attention_cases import spread

SHAPES = {
    "one token, one head": (1, 1, 16, 4),
    "3 heads of 64": (7, 3, 64, 16),
    "head size 80": (5, 2, 80, 8),
    "5 heads of 24, blocks of two": (9, 5, 24, 2),
}


def store(
    backend: str, shape: tuple[int, int, int, int], slots: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The caches after the op and after its reference, NaN where nothing was written: each [2, N, B, Hkv, D]."""
    tokens, heads, head_dim, block_size = shape
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, heads, tokens, head_dim, generator=generator).to(dtype).transpose(1, 2)
    device = "cuda" if backend == "cuda" else "cpu"
    blocks = max(slots) // block_size + 2
    caches = torch.full((2, blocks, block_size, heads, head_dim), float("nan"), dtype=dtype, device=device)
    expected = caches.cpu().clone()
    slot_mapping = torch.tensor(slots, dtype=torch.int64)
    op = store_with_triton if backend == "interpreter" else store_kv
    op(key.to(device), value.to(device), caches[0], caches[1], slot_mapping.to(device))
    reference.store_kv(key, value, expected[0], expected[1], slot_mapping)
    return caches.cpu(), expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_named_slots_are_written_and_others_left(
    run_on: Callable[..., tuple[Tensor, Tensor]], shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    slots = [(5 * token + 3) % 47 for token in range(shape[0])]
    got, expected = run_on(store, shape, slots, dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_slot_minus_one_writes_nothing(run_on: Callable[..., tuple[Tensor, Tensor]]) -> None:
    got, expected = run_on(store, (5, 2, 16, 4), [-1, 6, -1, 2, -1], torch.float32)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert int((~got[0].isnan()).sum()) == 2 * 2 * 16


def store_quantized(backend: str, dtype: torch.dtype, activations: torch.dtype) -> tuple[Tensor, Tensor]:
    """The caches' bytes after the op and after its reference."""
    device = "cuda" if backend == "cuda" else "cpu"
    key, value = (spread((64, 2, 16), seed).to(activations) for seed in (0, 1))
    k_scale, v_scale = torch.tensor([0.5, 0.013, 2.0, 0.3, 0.07]).repeat(13)[:64].view(2, 2, 16)
    caches = torch.full((2, 20, 4, 2, 16), 99, dtype=torch.int8, device=device).view(dtype)
    expected = caches.cpu().clone()
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(0))[:64]
    slots[5] = -1
    op = store_with_triton if backend == "interpreter" else store_kv
    scales = {"k_scale": k_scale.to(device), "v_scale": v_scale.to(device)}
    op(key.to(device), value.to(device), caches[0], caches[1], slots.to(device), **scales)
    reference.store_kv(key, value, expected[0], expected[1], slots, k_scale, v_scale)
    return caches.view(torch.int8).cpu(), expected.view(torch.int8)


@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_what_8_bits_hold_is_rounded_and_saturated(
    run_on: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype, activations: torch.dtype
) -> None:
    got, expected = run_on(store_quantized, dtype, activations)
    assert torch.equal(got, expected)


def test_the_even_value_is_taken_of_two_as_near(run_on: Callable[..., Tensor]) -> None:
    assert run_on(halves).tolist() == [0, 2, 2, -2, 127, -128, 127, -128]


def halves(backend: str) -> Tensor:
    device = "cuda" if backend == "cuda" else "cpu"
    key = torch.tensor([0.5, 1.5, 2.5, -1.5, 126.6, -127.6, 1e9, -1e9], device=device)[None, None]
    caches = torch.zeros(2, 1, 2, 1, 8, dtype=torch.int8, device=device)
    one = torch.ones(1, 8, device=device)
    op = store_with_triton if backend == "interpreter" else store_kv
    op(key, key, caches[0], caches[1], torch.zeros(1, dtype=torch.int64, device=device), k_scale=one, v_scale=one)
    return caches[0, 0, 0, 0].cpu()
