"""rotate_keys makes a key of position p one of position p - delta, on every backend of this machine."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.quantization import LARGEST, quantize
from kernels.rotary_store.reference import rotate
from kernels.rotate_keys import reference
from kernels.rotate_keys.launch import rotate_keys, rotate_with_triton

FLOAT8 = torch.float8_e4m3fn
SHAPE = (2, 5, 8, 3, 64)
SHAPES = {
    "one layer, one head": (1, 6, 8, 1, 8),
    "3 heads of 64": SHAPE,
    "head size 80": (2, 5, 8, 2, 80),
    "head size 10": (3, 20, 2, 3, 10),
    "more than a CPU rotates at once": (8, 5, 8, 4, 256),
}
SLOTS = 37
# What elements are at most, and by which part of that a result may be off: the dtype rounds a key twice.
MAGNITUDES = {torch.int8: 80.0, FLOAT8: 100.0}
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.01, torch.float16: 1.5e-3, torch.int8: 0.016, FLOAT8: 0.22}

Run = Callable[..., Tensor]


def turn(backend: str, *arguments: Tensor) -> Tensor:
    """The cache after the op."""
    device = "cuda" if backend == "cuda" else "cpu"
    cache, *others = (one.clone().to(device) for one in arguments)
    op = {"interpreter": rotate_with_triton, "reference": reference.rotate_keys}.get(backend, rotate_keys)
    op(cache, *others)
    return cache.cpu()


def frequencies_of(shape: tuple[int, ...]) -> Tensor:
    return 1.0 / (10000.0 ** (torch.arange(0, shape[4], 2, dtype=torch.float32) / shape[4]))


def keys_at(shape: tuple[int, ...], positions: Tensor, dtype: torch.dtype) -> Tensor:
    """A cache of random keys of these positions, [L, Hkv, slots of a layer], each rotated and rounded once."""
    magnitude = MAGNITUDES.get(dtype, 1.0)
    keys = (torch.rand(shape, generator=torch.Generator().manual_seed(0)).double() * 2 - 1) * magnitude
    angles = positions.transpose(1, 2).double().unflatten(1, shape[1:3])[..., None] * frequencies_of(shape).double()
    angles = torch.cat([angles, angles], -1)
    rotated = rotate(keys, angles.cos(), angles.sin())
    return quantize(rotated, torch.ones(shape[3:]), dtype) if dtype in LARGEST else rotated.to(dtype)


def chosen(shape: tuple[int, ...], layers: bool, heads: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Slots in any order and deltas, some of them 0: [1 or L, 1 or Hkv, n] each."""
    leading = (shape[0] if layers else 1, shape[3] if heads else 1)
    slots = torch.rand(*leading, shape[1] * shape[2], generator=generator).argsort(-1)[..., :SLOTS]
    deltas = torch.randint(0, 900, slots.shape, generator=generator)
    return slots, deltas * (torch.rand(slots.shape, generator=generator) < 0.8)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_key_turned_back_is_that_of_the_smaller_position(
    run_on: Run, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    arguments, expected = gap(shape, dtype)
    close_to(run_on(turn, *arguments), expected)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_so_says_the_reference(dtype: torch.dtype) -> None:
    arguments, expected = gap(SHAPE, dtype)
    close_to(turn("reference", *arguments), expected)


def gap(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor]:
    """The op's arguments, and the cache whose keys have the smaller positions from the start."""
    generator = torch.Generator().manual_seed(1)
    slots, deltas = chosen(shape, True, True, generator)
    positions = torch.randint(900, 3000, (shape[0], shape[3], shape[1] * shape[2]), generator=generator)
    expected = keys_at(shape, positions.scatter_add(2, slots, -deltas), dtype)
    return (keys_at(shape, positions, dtype), slots, deltas, frequencies_of(shape)), expected


def close_to(got: Tensor, expected: Tensor) -> None:
    tolerance = ROUNDING[got.dtype] * MAGNITUDES.get(got.dtype, 1.0)
    torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("of", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_it_does_what_its_reference_does(run_on: Run, of: tuple[bool, bool], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    cache = keys_at(SHAPE, torch.zeros(SHAPE[0], SHAPE[3], SHAPE[1] * SHAPE[2]), dtype)
    arguments = (cache, *chosen(SHAPE, *of, generator), frequencies_of(SHAPE))
    got = run_on(turn, *arguments).float()
    expected = turn("reference", *arguments).float()
    # Sines and cosines may differ in their last bit, and with them what a result is rounded to.
    step = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.int8: 0, FLOAT8: 2**-3}[dtype]
    torch.testing.assert_close(got, expected, rtol=step, atol=1.0 if dtype == torch.int8 else 1e-6)
    if dtype != torch.float32:
        assert (got != expected).float().mean() < 0.001


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_keys_that_do_not_move_keep_their_bytes(run_on: Run, dtype: torch.dtype) -> None:
    width = SHAPE[4] * dtype.itemsize
    noise = torch.randint(-128, 128, (*SHAPE[:-1], width), generator=torch.Generator().manual_seed(3)).to(torch.int8)
    slots, deltas = torch.arange(40)[None, None], torch.zeros(1, 1, 40, dtype=torch.int64)
    deltas[..., 7] = 5
    got = run_on(turn, noise.view(dtype), slots, deltas, frequencies_of(SHAPE)).view(torch.int8)
    stays = torch.arange(40) != 7
    got, noise = (bytes_.flatten(1, 2) for bytes_ in (got, noise))
    assert torch.equal(got[:, stays], noise[:, stays])
    assert not torch.equal(got[:, ~stays], noise[:, ~stays])


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_keys_of_8_bits_stay_within_their_range(run_on: Run, dtype: torch.dtype) -> None:
    largest = LARGEST[dtype][1]
    cache = torch.full((1, 1, 2, 1, 2), largest).to(dtype)
    one = torch.ones(1, 1, 1, dtype=torch.int64)
    got = run_on(turn, cache, one, one, torch.tensor([torch.pi / 4])).float()
    torch.testing.assert_close(got[0, 0, 1, 0], torch.tensor([largest, 0.0]), rtol=0, atol=1e-4)
