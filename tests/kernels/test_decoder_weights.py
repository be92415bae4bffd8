"""How the compiled decoder keeps weights: in as few bytes as give every one of them back."""

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.cpu_decoder.reference import step
from kernels.weights import Weights
from tests.kernels.decoder_cases import BARS, COMPUTED, Case, World, build_world, decoder_of, error_of, quantized

Change = Callable[[Tensor], Tensor]
# Rows that one part holds, several parts, and several blocks of rows.
QUERIES = {"one row": (1,), "a part": (1,) * 9, "several parts": (30,), "a block": (100,), "blocks": (150, 150)}


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


def world_of(queries: tuple[int, ...], change: Change, dtype: torch.dtype) -> World:
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
    decoder = decoder_of(library, world, dtype, 2, products)
    logits = decoder.step(*world.arguments)
    assert expected.isfinite().all()
    return error_of(logits, expected), decoder.weight_bytes / elements(library, world.weights)


FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Bytes of a weight, by what it was published in: where it can be squeezed, and where not.
PUBLISHED = dict(zip(FLOATS, ((1.7, 2.001), (2.7, 4.001), (3.7, 4.001)), strict=True))
GGML = {"Q4_0": 0.63, "Q4_1": 0.63, "Q8_0": 1.07}


@dataclass(frozen=True)
class Kept:
    """Weights that a decoder computes with, and which bytes one takes; `plain`: at most, without squeezing."""

    change: Change
    dtype: torch.dtype = torch.float32
    products: bool = False
    least: float = 0.0
    most: float = math.inf
    plain: float = math.inf


def as_computed(matrix: Tensor, way: str, dtype: torch.dtype) -> Tensor:
    return quantized(matrix, way).to(dtype).to(matrix.dtype)


KEPT = {
    **{
        f"published {kind}": Kept(partial(published, kind=kind), most=most, plain=plain)
        for kind, (most, plain) in PUBLISHED.items()
    },
    # Neither all of it as it was, nor nothing.
    **{f"outliers, {name}": Kept(with_outliers, *kind, 1.6, 1.95) for name, kind in COMPUTED.items()},
    **{
        f"{way}, {name}": Kept(partial(as_computed, way=way, dtype=kind[0]), *kind, most=size, plain=size)
        for way, size in GGML.items()
        for name, kind in COMPUTED.items()
    },
}


@pytest.mark.parametrize("queries", QUERIES.values(), ids=QUERIES.keys())
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT.keys())
def test_a_weight_takes_no_more_bytes_than_it_needs(library: ctypes.CDLL, kept: Kept, queries: tuple[int, ...]) -> None:
    found, size = error(library, world_of(queries, kept.change, kept.dtype), kept.dtype, kept.products)
    assert found < BARS[kept.dtype]
    assert kept.least < size < kept.most if library.decoder_can_squeeze() else size < kept.plain


@pytest.mark.parametrize("kind", FLOATS)
def test_weights_that_cannot_be_squeezed_take_no_more_than_plain_ones(library: ctypes.CDLL, kind: torch.dtype) -> None:
    world = world_of((1, 20), partial(scattered, kind=kind), torch.float32)
    found, size = error(library, world, torch.float32)
    assert found < BARS[torch.float32]
    assert size < PUBLISHED[kind][1]


def with_nan(head: Tensor, way: str | None = None) -> Tensor:
    """Published or quantized weights, one of which is no number."""
    head = quantized(head, way) if way else published(head)
    head[40, 5] = torch.nan
    return head


def with_stranger(head: Tensor) -> Tensor:
    """A single weight that came of something else."""
    head = quantized(head, "Q4_1")
    head[40, 33] *= 1 + 2**-22
    return head


HEADS = {
    **{
        f"{change.__name__} {kind}": Kept(partial(change, kind=kind))
        for change in (published, with_outliers, scattered)
        for kind in FLOATS
    },
    **{
        f"{change.__name__} {way}, {name}": Kept(partial(change, way=way), *kind)
        for change in (quantized, with_nan)
        for way in GGML
        for name, kind in COMPUTED.items()
    },
    "one of something else": Kept(with_stranger),
    **{f"with_nan {dtype}": Kept(with_nan, dtype) for dtype in BARS},
}


@pytest.mark.parametrize("tokens", [1, 4, 9, 30, 64, 300])
@pytest.mark.parametrize("kept", HEADS.values(), ids=HEADS.keys())
def test_every_bit_of_a_weight_is_restored(library: ctypes.CDLL, kept: Kept, tokens: int) -> None:
    """Layers add nothing, and a token's hidden state is 8 at one element, so that logits are 8 times a column."""
    case = Case((tokens,), (tokens,), hidden=64, vocabulary=70, tied=False)
    world = build_world(case, kept.dtype)
    layers = [
        replace(one, out=torch.zeros_like(one.out), down=torch.zeros_like(one.down)) for one in world.weights.layers
    ]
    head = kept.change(world.weights.head.float()).to(kept.dtype)
    changes = {"epsilon": 0, "embedding": torch.eye(70, 64), "final_norm": torch.ones(64), "head": head}
    world = replace(world, weights=replace(world.weights, layers=layers, **changes))
    ids = torch.arange(tokens) % 64
    decoder = decoder_of(library, world, kept.dtype, products=kept.products)
    logits = decoder.step(ids, *world.arguments[1:5], torch.arange(tokens))
    expected = head.T[ids].float()
    # A weight that is no number spoils its own column alone.
    expected[:, head.isnan().any(1)] = torch.nan
    assert (logits / 8).nan_to_num(7).equal(expected.nan_to_num(7))
