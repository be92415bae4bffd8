"""How the compiled decoder keeps weights: in as few bytes as give every one of them back."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.cpu_decoder.launch import Decoder
from kernels.cpu_decoder.reference import step
from kernels.weights import Weights
from tests.kernels.decoder_cases import BARS, KINDS, Case, World, build_world, error_of, library, quantized

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


@dataclass(frozen=True)
class Columns:
    """Of the output matrix: [T, V] as the decoder has them, and as they were."""

    found: Tensor
    expected: Tensor


def columns_of(
    library: ctypes.CDLL,
    change: Callable[[Tensor], Tensor],
    tokens: int,
    dtype: torch.dtype,
    products: bool | None = None,
) -> Columns:
    """Layers add nothing, and a token's hidden state is 8 at one place, so that logits are 8 times a column."""
    case = Case((tokens,), (tokens,), hidden=64, vocabulary=70, tied=False)
    world = build_world(case, dtype)
    layers = [
        replace(one, out=torch.zeros_like(one.out), down=torch.zeros_like(one.down)) for one in world.weights.layers
    ]
    head = change(world.weights.head.float()).to(dtype)
    weights = replace(
        world.weights, epsilon=0, embedding=torch.eye(70, 64), final_norm=torch.ones(64), head=head, layers=layers
    )
    ids = torch.arange(tokens) % 64
    decoder = Decoder(library, weights, dtype, 2, products=products)
    decoder.bind(world.caches)
    logits = decoder.step(ids, *world.arguments[1:5], torch.arange(tokens))
    return Columns(logits / 8, head.T[ids].float())


@pytest.mark.parametrize("tokens", [1, 9, 30, 64, 300])
@pytest.mark.parametrize("change", [published, with_outliers, scattered])
@AS
def test_every_bit_of_a_float_comes_back(
    library: ctypes.CDLL, kind: torch.dtype, change: Callable[[Tensor, torch.dtype], Tensor], tokens: int
) -> None:
    columns = columns_of(library, lambda head: change(head, kind).float(), tokens, torch.float32)
    assert columns.found.equal(columns.expected)


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


QUANTIZED = pytest.mark.parametrize(("way", "size"), [("Q4_0", 0.63), ("Q4_1", 0.63), ("Q8_0", 1.07)])


@ROWS
@KINDS
@QUANTIZED
def test_what_was_quantized_takes_no_more_than_that(
    library: ctypes.CDLL, queries: tuple[int, ...], dtype: torch.dtype, products: bool, way: str, size: float
) -> None:
    world = world_of(queries, lambda matrix: quantized(matrix, way).to(dtype).to(matrix.dtype), dtype)
    found, taken = error(library, world, dtype, products)
    assert found < BARS[dtype]
    assert taken < size


@pytest.mark.parametrize("tokens", [1, 4, 9, 30, 64, 300])
@KINDS
@QUANTIZED
def test_every_bit_of_what_was_quantized_comes_back(
    library: ctypes.CDLL, tokens: int, dtype: torch.dtype, products: bool, way: str, size: float
) -> None:
    columns = columns_of(library, lambda head: quantized(head, way), tokens, dtype, products)
    assert columns.found.equal(columns.expected)


@pytest.mark.parametrize("tokens", [1, 9, 64])
@KINDS
@QUANTIZED
def test_a_weight_that_is_no_number_stays_none_among_quantized_ones(
    library: ctypes.CDLL, tokens: int, dtype: torch.dtype, products: bool, way: str, size: float
) -> None:
    def change(head: Tensor) -> Tensor:
        head = quantized(head, way)
        head[40, 5] = torch.nan
        return head

    columns = columns_of(library, change, tokens, dtype, products)
    assert columns.found[:, 40].isnan().all()
    others = torch.arange(70) != 40
    assert columns.found[:, others].equal(columns.expected[:, others])


def test_a_single_weight_that_came_of_something_else_comes_back_too(library: ctypes.CDLL) -> None:
    def change(head: Tensor) -> Tensor:
        head = quantized(head, "Q4_1")
        head[40, 33] *= 1 + 2**-22
        return head

    columns = columns_of(library, change, 9, torch.float32)
    assert columns.found.equal(columns.expected)


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
