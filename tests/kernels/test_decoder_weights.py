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
from kernels.stored import StoredMatrix, StoredRows, joined
from kernels.weights import Weights
from tests.kernels.decoder_cases import (
    BARS,
    COMPUTED,
    Case,
    World,
    build_world,
    changed,
    decoder_of,
    error_of,
    quantized,
    stored,
)

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
    """Weights that lie close together, except some that lie nowhere near, and zeros."""
    far, some = scattered(matrix, kind), torch.rand(matrix.shape)
    return torch.where(some < 0.003, far, torch.where(some < 0.01, 0, published(matrix, kind)))


def world_of(queries: tuple[int, ...], change: Change, dtype: torch.dtype) -> World:
    lengths = tuple(40 + count for count in queries)
    return changed(build_world(Case(queries, lengths, hidden=192, intermediate=480, vocabulary=500), dtype), change)


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
# Bytes of a weight by the type in which it was published: if it can be squeezed, and if not.
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


def with_matrices(world: World, change: Callable[[Tensor, str], object], of_layers: str, of_head: str) -> World:
    """A world with changed matrices, and with a separate, changed embedding."""
    names = ("qkv", "out", "gate_up", "down")
    layers = [
        replace(one, **{name: change(getattr(one, name), of_layers) for name in names}) for one in world.weights.layers
    ]
    ends = {name: change(getattr(world.weights, name), of_head) for name in ("head", "embedding")}
    return replace(world, weights=replace(world.weights, layers=layers, **ends))


@pytest.mark.parametrize(
    ("of_layers", "of_head"),
    [("Q4_0", "Q4_0"), ("Q4_1", "Q8_0"), ("Q8_0", "Q8_0"), ("BF16", "F16"), ("F32", "F32"), ("Q4_0", "Q6_K")],
)
@pytest.mark.parametrize(("dtype", "products"), COMPUTED.values(), ids=COMPUTED.keys())
def test_a_files_blocks_are_computed_as_their_floats_are(
    library: ctypes.CDLL, of_layers: str, of_head: str, dtype: torch.dtype, products: bool
) -> None:
    case = Case((1, 30), (41, 70), hidden=256, intermediate=480, vocabulary=500, tied=False)
    world = build_world(case, dtype)

    def file(matrix: Tensor, way: str) -> StoredMatrix:
        if way != "Q6_K":
            return stored(matrix, way)
        # Its quantizer is none of the library's: any codes, with scales that are numbers.
        blocks = torch.randint(256, (len(matrix), matrix.shape[1] // 256 * 210), dtype=torch.uint8)
        blocks[:, 208:] = torch.tensor([0.001], dtype=torch.float16).view(torch.uint8)
        return StoredMatrix(StoredRows(blocks, way, matrix.shape[1]))

    torch.manual_seed(3)
    direct = with_matrices(world, file, of_layers, of_head)
    torch.manual_seed(3)
    floats = with_matrices(world, lambda *given: file(*given).floats(torch.float32), of_layers, of_head)
    logits = []
    for one in (direct, floats):
        own = replace(one, caches=[(k.clone(), v.clone()) for k, v in one.caches])
        logits.append(decoder_of(library, own, dtype, products=products).step(*own.arguments))
    assert logits[0].isfinite().all()
    assert logits[0].equal(logits[1])


def test_an_embedding_in_codes_stays_in_them(library: ctypes.CDLL) -> None:
    case = Case((1,), (1,), hidden=64, vocabulary=500, tied=False)
    world = with_matrices(build_world(case, torch.float32), stored, "Q8_0", "Q8_0")
    decoder = decoder_of(library, world)
    embedding = -(-500 // library.decoder_tile()) * library.decoder_tile() * 64
    assert decoder.weight_bytes < GGML["Q8_0"] * (elements(library, world.weights) + embedding)


def test_rows_of_several_tensors_in_an_order_of_their_own() -> None:
    matrix = torch.randn(70, 64)
    order = torch.randperm(40)
    first, second = stored(matrix[:40], "Q4_0").parts[0], stored(matrix[40:], "Q8_0").parts[0]
    mixed = joined([StoredMatrix(replace(first, order=order)), StoredMatrix(second)])
    parts = StoredMatrix(first).floats(torch.float32)[order], StoredMatrix(second).floats(torch.float32)
    expected = torch.cat(parts)
    assert mixed.codes is None
    assert mixed.floats(torch.float32).equal(expected)
    ids = torch.tensor([3, 39, 3])
    assert StoredMatrix(replace(first, order=order)).rows(ids, torch.float32).equal(expected[ids])


def test_a_scale_that_is_no_number_is_refused(library: ctypes.CDLL) -> None:
    world = with_matrices(build_world(Case((1,), (1,), tied=False), torch.float32), stored, "Q4_0", "Q4_0")
    head = world.weights.head
    assert isinstance(head, StoredMatrix)
    head.parts[0].data[5, :2] = torch.tensor([torch.inf], dtype=torch.float16).view(torch.uint8)
    with pytest.raises(ValueError, match="a scale of a matrix in Q4_0"):
        decoder_of(library, world)
