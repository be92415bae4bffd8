"""compact_kv moves the named slots of each layer and head and touches no other, on every backend of this machine."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.compact_kv import reference
from kernels.compact_kv.launch import compact_kv, compact_with_triton

FLOAT8 = torch.float8_e4m3fn
SHAPES = {
    "one layer, one head": (1, 6, 4, 1, 8),
    "3 layers, odd head size": (3, 7, 2, 3, 5),
    "3 heads of 64": (2, 12, 16, 3, 64),
    "head size 80": (2, 6, 8, 2, 80),
}


def compact(
    backend: str, shape: tuple[int, ...], slots: list[Tensor], dtype: torch.dtype, *, overlap: bool = True
) -> tuple[Tensor, Tensor]:
    """The caches' bytes after the op and after its reference: each [2, L, N, B, Hkv, D * bytes of an element]."""
    noise = torch.randint(-128, 128, (2, *shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.int8)
    expected = noise.clone().view(dtype)
    caches = noise.clone().to("cuda" if backend == "cuda" else "cpu").view(dtype)
    op = compact_with_triton if backend == "interpreter" else compact_kv
    op(caches[0], caches[1], *(one.to(caches.device) for one in slots), overlap=overlap)
    reference.compact_kv(expected[0], expected[1], *slots)
    assert not torch.equal(expected.view(torch.int8), noise)
    return caches.view(torch.int8).cpu(), expected.view(torch.int8)


def chosen(shape: tuple[int, ...], count: int, *, layers: bool = True, heads: bool = True, seed: int = 0) -> Tensor:
    """Slots in any order, [1 or L, 1 or Hkv, count]: alike where layers and heads share them."""
    generator = torch.Generator().manual_seed(seed)
    leading = (shape[0] if layers else 1, shape[3] if heads else 1)
    orders = torch.rand(*leading, shape[1] * shape[2], generator=generator).argsort(-1)
    return orders[..., :count]


Run = Callable[..., tuple[Tensor, Tensor]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, FLOAT8], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_each_layer_and_head_moves_its_own(run_on: Run, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    slots = [chosen(shape, 9, seed=seed) for seed in (1, 2)]
    got, expected = run_on(compact, shape, slots, dtype)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("of_targets", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("of_sources", [(False, False), (True, False), (False, True)], ids=str)
def test_layers_and_heads_may_go_alike(
    run_on: Run, of_sources: tuple[bool, bool], of_targets: tuple[bool, bool]
) -> None:
    shape = SHAPES["3 layers, odd head size"]
    sources = chosen(shape, 5, layers=of_sources[0], heads=of_sources[1], seed=1)
    targets = chosen(shape, 5, layers=of_targets[0], heads=of_targets[1], seed=2)
    got, expected = run_on(compact, shape, [sources, targets], torch.float32)
    assert torch.equal(got, expected)


OVERLAPS = {
    "towards smaller ones": (torch.arange(1, 60), torch.arange(59)),
    "towards larger ones": (torch.arange(59), torch.arange(1, 60)),
    "a ring": (torch.arange(60), torch.arange(60).roll(1)),
    "some stay": (torch.tensor([0, 1, 5, 9, 30]), torch.arange(5)),
    "one to many": (torch.zeros(60, dtype=torch.int64), torch.arange(60)),
}


@pytest.mark.parametrize(("sources", "targets"), OVERLAPS.values(), ids=OVERLAPS.keys())
def test_all_sources_are_read_before_a_target_is_written(run_on: Run, sources: Tensor, targets: Tensor) -> None:
    # More than the slots of one program.
    got, expected = run_on(compact, SHAPES["3 heads of 64"], [sources[None, None], targets[None, None]], torch.float32)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FLOAT8], ids=str)
def test_slots_that_do_not_overlap_need_no_memory(run_on: Run, dtype: torch.dtype) -> None:
    shape = SHAPES["3 heads of 64"]
    slots = chosen(shape, 80, seed=1)
    # The last ten slots stay where they are.
    sources, targets = slots[..., :40], torch.cat([slots[..., 40:70], slots[..., 30:40]], -1)
    got, expected = run_on(partial(compact, overlap=False), shape, [sources, targets], dtype)
    assert torch.equal(got, expected)


def test_slots_may_be_views(run_on: Run) -> None:
    shape = SHAPES["3 heads of 64"]
    slots = [chosen(shape, 10, seed=seed).transpose(0, 2).contiguous().transpose(0, 2)[..., ::2] for seed in (1, 2)]
    got, expected = run_on(compact, shape, slots, torch.bfloat16)
    assert torch.equal(got, expected)
