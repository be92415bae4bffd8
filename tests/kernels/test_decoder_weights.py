"""How the compiled decoder keeps weights: in as few bytes as give every one of them back."""

import ctypes
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.decoder.launch import Decoder, Weights
from kernels.decoder.reference import step
from tests.kernels.decoder_cases import BARS, KINDS, Case, World, build_world, error_of, library

__all__ = ["library"]

# Rows that one part holds, several parts, and several blocks of rows.
QUERIES = {"one row": (1,), "a part": (1,) * 9, "several parts": (30,), "a block": (100,), "blocks": (150, 150)}
ROWS = pytest.mark.parametrize("queries", QUERIES.values(), ids=QUERIES.keys())


# What floats were published in: bytes that a weight takes where it can be squeezed, and where not.
PUBLISHED = {torch.bfloat16: (1.7, 2.001), torch.float16: (2.7, 4.001), torch.float32: (3.7, 4.001)}
AS = pytest.mark.parametrize("kind", PUBLISHED, ids=["bfloat16", "float16", "float32"])


def published(matrix: Tensor, kind: torch.dtype = torch.bfloat16) -> Tensor:
    """As most models are: in 16 bits."""
    return matrix.to(kind).double()


def scattered(matrix: Tensor, kind: torch.dtype = torch.bfloat16) -> Tensor:
    """Weights of which no 16 upper bytes are those of many."""
    return published(matrix, kind) * 2.0 ** torch.randint(-90, 9, matrix.shape)


def with_outliers(matrix: Tensor, kind: torch.dtype = torch.bfloat16) -> Tensor:
    """Among weights that lie close together some that lie nowhere near, and zeros."""
    far, some = scattered(matrix, kind), torch.rand(matrix.shape)
    return torch.where(some < 0.003, far, torch.where(some < 0.01, 0, published(matrix, kind)))


def world_of(queries: tuple[int, ...], change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> World:
    lengths = tuple(40 + count for count in queries)
    world = build_world(Case(queries, lengths, hidden=192, intermediate=480, vocabulary=500), dtype)
    layers = [
        replace(one, **{name: change(getattr(one, name)) for name in ("qkv", "out", "gate_up", "down")})
        for one in world.weights.layers
    ]
    return replace(world, weights=replace(world.weights, head=change(world.weights.head), layers=layers))


def elements(library: ctypes.CDLL, weights: Weights) -> int:
    """Weights of all matrices, with those that fill up their last tiles."""
    tile = library.decoder_tile()
    matrices = [weights.head, *(m for one in weights.layers for m in (one.qkv, one.out, one.gate_up, one.down))]
    return sum(-(-n // tile) * tile * k for n, k in (matrix.shape for matrix in matrices))


def error(library: ctypes.CDLL, world: World, dtype: torch.dtype, products: bool | None = None) -> tuple[float, float]:
    """Of a step's logits, and how many bytes a weight takes."""
    caches = [(k.double(), v.double()) for k, v in world.caches]
    expected = step(world.weights, *world.arguments, caches)
    decoder = Decoder(library, world.weights, dtype, 2, products=products)
    decoder.bind(world.caches)
    logits = decoder.step(*world.arguments)
    assert expected.isfinite().all()
    return error_of(logits, expected), decoder.weight_bytes / elements(library, world.weights)


@ROWS
@AS
def test_floats_take_little_more_than_what_they_were_published_in(
    library: ctypes.CDLL, queries: tuple[int, ...], kind: torch.dtype
) -> None:
    world = world_of(queries, lambda matrix: published(matrix, kind), torch.float32)
    found, size = error(library, world, torch.float32)
    assert found < BARS[torch.float32]
    squeezed, plain = PUBLISHED[kind]
    assert size < (squeezed if library.decoder_can_squeeze() else plain)


@pytest.mark.parametrize("tokens", [1, 9, 30, 64, 300])
@pytest.mark.parametrize("change", [published, with_outliers, scattered])
@AS
def test_every_bit_of_a_float_comes_back(
    library: ctypes.CDLL, kind: torch.dtype, change: Callable[[Tensor, torch.dtype], Tensor], tokens: int
) -> None:
    """Layers add nothing, and a token's hidden state is 8 at one place, so that logits are 8 times a column."""
    case = Case((tokens,), (tokens,), hidden=64, vocabulary=70, tied=False)
    world = build_world(case, torch.float32)
    layers = [
        replace(one, out=torch.zeros_like(one.out), down=torch.zeros_like(one.down)) for one in world.weights.layers
    ]
    head = change(world.weights.head, kind).float()
    weights = replace(
        world.weights, epsilon=0, embedding=torch.eye(70, 64), final_norm=torch.ones(64), head=head, layers=layers
    )
    ids = torch.arange(tokens) % 64
    decoder = Decoder(library, weights, torch.float32, 2)
    decoder.bind(world.caches)
    logits = decoder.step(ids, *world.arguments[1:5], torch.arange(tokens))
    assert torch.equal(logits / 8, head.T[ids])


@ROWS
@KINDS
def test_what_does_not_fit_in_stays_as_it_was(
    library: ctypes.CDLL, queries: tuple[int, ...], dtype: torch.dtype, products: bool
) -> None:
    found, size = error(library, world_of(queries, with_outliers, dtype), dtype, products)
    assert found < BARS[dtype]
    if library.decoder_can_squeeze():
        # Neither all of it as it was, nor nothing.
        assert 1.6 < size < 1.95


@AS
def test_what_cannot_be_squeezed_takes_no_more_than_before(library: ctypes.CDLL, kind: torch.dtype) -> None:
    world = world_of((1, 20), lambda matrix: scattered(matrix, kind), torch.float32)
    found, size = error(library, world, torch.float32)
    assert found < BARS[torch.float32]
    assert size < PUBLISHED[kind][1]


@pytest.mark.parametrize("dtype", BARS, ids=["float32", "bfloat16"])
def test_a_weight_that_is_no_number_spoils_its_own_column_alone(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    world = world_of((20,), published, dtype)
    whole = Decoder(library, world.weights, dtype, 2)
    whole.bind(world.caches)
    expected = whole.step(*world.arguments)
    unused = next(number for number in range(500) if number not in world.arguments[0])
    world.weights.head[unused, 3] = torch.nan
    broken = Decoder(library, world.weights, dtype, 2)
    broken.bind(world.caches)
    logits = broken.step(*world.arguments)
    assert logits[:, unused].isnan().all()
    others = torch.arange(500) != unused
    assert torch.equal(logits[:, others], expected[:, others])
