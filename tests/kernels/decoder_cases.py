"""What the compiled decoder is tried with: shapes, weights and steps."""

import ctypes
import platform
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from kernels.cpu_decoder import build
from kernels.cpu_decoder.launch import Decoder, TokenGroup
from kernels.quantization import LARGEST, quantize
from kernels.scores import SequenceScores
from kernels.stored import StoredMatrix, StoredRows
from kernels.weights import LayerWeights, Weights

BARS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
# The types that a decoder computes in: for bfloat16, the processor's own products if it has any.
COMPUTED = {
    "float32": (torch.float32, False),
    "bfloat16 widened": (torch.bfloat16, False),
    "bfloat16 products": (torch.bfloat16, True),
}
KINDS = pytest.mark.parametrize(("dtype", "products"), COMPUTED.values(), ids=COMPUTED.keys())
EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
# A number that was computed a little differently may round to a different one of the 256, a larger difference.
EIGHT_BIT_BARS = {torch.float32: 3e-3, torch.bfloat16: 6e-2}


def compiled_decoder(folder: Path) -> ctypes.CDLL:
    """The decoder, built in `folder`. Skips without a compiler only: sources that do not compile are a failure."""
    try:
        return build.load(folder)
    except build.NoCompilerError as error:
        pytest.skip(str(error))


# Lanes of a vector of float32, by the instructions of x86 that the decoder is compiled for.
LANES = {8: "x86-64-v3", 16: "x86-64-v4"}


def flags_for(lanes: int) -> tuple[str, ...]:
    """Compiler flags for vectors of this many lanes. Skips if the processor has no such vectors."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the processor is no x86")
    if lanes == 16 and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the processor has no vectors of 16 lanes")
    return tuple(f"-march={LANES[lanes]}" if flag.startswith("-march") else flag for flag in build.FLAGS)


def decoder_for(lanes: int, folder: Path) -> ctypes.CDLL:
    """The decoder with vectors of this many lanes, built in `folder`. Skips if the processor has no such vectors."""
    with pytest.MonkeyPatch.context() as environment:
        # Which count after these.
        environment.delenv("CXXFLAGS", raising=False)
        return ctypes.CDLL(str(build.compiled(folder, flags_for(lanes))))


@dataclass(frozen=True)
class Case:
    """queries: tokens computed per sequence; lengths: with those before. windows: per group, layers take turns.

    shared: blocks at the beginning that all sequences have in common. evicted: by how much each sequence's positions
    are ahead of its slots. counted: how many of its last rows count.
    """

    queries: tuple[int, ...] = (1, 5, 1, 20)
    lengths: tuple[int, ...] = (40, 5, 33, 70)
    q_heads: int = 3
    kv_heads: int = 1
    head_dim: int = 64
    hidden: int = 64
    intermediate: int = 96
    vocabulary: int = 97
    layers: int = 2
    windows: tuple[int | None, ...] = (None,)
    block_size: int = 16
    shared: int = 0
    tied: bool = True
    bias: bool = False
    head_norms: bool = False
    threads: int = 2
    evicted: tuple[int, ...] = (0,) * 12
    counted: tuple[int, ...] = ()


CASES = {
    "chunks and single tokens": Case(),
    "one token with no past": Case((1,), (1,)),
    "one row": Case((1,), (130,)),
    "as many rows as a tile holds, and one more": Case((13,), (13,)),
    "a prompt of several units": Case((150, 1), (150, 3)),
    "a chunk far behind its beginning": Case((70,), (300,)),
    "no groups of heads": Case(q_heads=2, kv_heads=2),
    "9 query heads over 3": Case(q_heads=9, kv_heads=3),
    "more query heads than fit a unit": Case(q_heads=100, kv_heads=1, head_dim=32),
    "head size 32": Case(head_dim=32),
    "head size 96": Case(head_dim=96),
    "head size 128": Case(head_dim=128),
    "blocks of two": Case(block_size=2),
    "blocks larger than a run of keys": Case(block_size=128),
    "one layer": Case(layers=1),
    "window": Case(windows=(9,)),
    "window of one": Case(windows=(1,)),
    "windowed and full layers": Case((1, 50, 1), (100, 90, 20), windows=(21, None), layers=4),
    "a window in a long chunk": Case((200,), (230,), windows=(70,)),
    "one prefix for all": Case((1, 1, 5, 1), (90, 81, 100, 95), shared=5),
    "one prefix and many rows": Case((40, 1, 40), (120, 81, 130), shared=5),
    "one prefix, equal prompts": Case((1,) * 12, (81,) * 12, shared=5),
    "one prefix, of which one computes some": Case((60, 10), (100, 90), shared=5),
    "one prefix and windows": Case((1, 1, 5), (90, 81, 100), shared=5, windows=(9, None)),
    "output matrix of its own": Case(tied=False),
    "biases": Case(bias=True),
    "norms per head": Case(head_norms=True),
    "one thread": Case(threads=1),
    "more threads than cores": Case(threads=5),
    "blocks of rows": Case((290,), (300,), bias=True),
    "blocks of rows, one thread": Case((290,), (300,), threads=1),
    "blocks of rows, more threads than cores": Case((290, 1), (300, 40), threads=5),
    "a long context": Case((1,), (1100,)),
    "a chunk behind a long context": Case((40, 1), (700, 20), threads=5),
    "long contexts of several heads": Case((4, 1, 1), (1300, 900, 20), q_heads=9, kv_heads=3, threads=5),
    "long contexts behind one prefix": Case((1, 1, 3), (1200, 1100, 1300), shared=5, threads=5),
    "long windows": Case((3, 1), (1500, 30), windows=(700, None), threads=3),
    "slots that are not positions": Case(evicted=(7, 0, 100, 1)),
    "slots that are not positions, one prefix": Case((1, 1, 5, 1), (90, 81, 100, 95), shared=5, evicted=(0, 9, 64, 3)),
    "slots that are not positions, several units": Case((150, 1), (200, 3), evicted=(33, 9)),
}
COUNTED = {
    "single tokens": Case((1, 1, 1), (1, 64, 150), counted=(1, 1, 1)),
    "chunks and single tokens, all rows": Case(counted=(1, 5, 1, 20)),
    "the last rows": Case(counted=(0, 2, 1, 8)),
    "some sequences": Case(counted=(0, 5, 0, 3)),
    "several heads": Case(q_heads=9, kv_heads=3, counted=(1, 5, 0, 20)),
    "more query heads than fit a unit": Case((5,), (70,), q_heads=100, kv_heads=1, head_dim=32, counted=(3,)),
    "several units": Case((150, 1), (200, 3), q_heads=9, kv_heads=3, counted=(150, 1)),
    "rows of two units of several": Case((190, 1), (190, 3), counted=(70, 0), threads=5),
    "units with few rows": Case((3, 2), (130, 65), q_heads=2, kv_heads=1, counted=(2, 1)),
    "a prefix shared beside": Case((1, 1, 5, 1, 1), (90, 81, 100, 95, 97), shared=5, counted=(0, 1, 2, 0, 0)),
    "slots that are not positions": Case((1, 70, 2), (130, 90, 40), evicted=(500, 3, 8), counted=(1, 70, 2)),
    "one thread": Case((150, 1), (200, 90), counted=(150, 1), threads=1),
}


@dataclass
class World:
    """A random model and batch. caches hold what is no number wherever no query may look; of 8 bits, the largest one.

    scales: of caches of 8 bits, [Hkv, D] each.
    """

    weights: Weights
    caches: list[tuple[Tensor, Tensor]]
    arguments: tuple[Tensor, Tensor, Tensor, Tensor, list[TokenGroup], Tensor]
    scales: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def copied_caches(self, dtype: torch.dtype | None = None) -> list[tuple[Tensor, Tensor]]:
        """The caches, for another decoder to write."""
        return [(k.to(dtype, copy=True), v.to(dtype, copy=True)) for k, v in self.caches]


def build_weights(case: Case) -> Weights:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64) / shape[-1] ** 0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, dtype=torch.float64)

    width, dim = case.q_heads * case.head_dim, case.head_dim
    qkv = width + 2 * case.kv_heads * dim
    layers = [
        LayerWeights(
            input_norm=norm(case.hidden),
            post_norm=norm(case.hidden),
            qkv=random(qkv, case.hidden) * 2,
            out=random(case.hidden, width),
            gate_up=torch.cat([random(case.intermediate, case.hidden) for _ in ("gate", "up")]),
            down=random(case.hidden, case.intermediate),
            group=number % len(case.windows),
            qkv_bias=torch.randn(qkv, dtype=torch.float64) if case.bias else None,
            q_norm=norm(dim) if case.head_norms else None,
            k_norm=norm(dim) if case.head_norms else None,
        )
        for number in range(case.layers)
    ]
    return Weights(
        q_heads=case.q_heads,
        kv_heads=case.kv_heads,
        head_dim=dim,
        epsilon=1e-5,
        attention_scale=dim**-0.5,
        rotary_scale=1.1,
        frequencies=1e4 ** -(torch.arange(0, dim, 2) / dim),
        embedding=None if case.tied else torch.randn(case.vocabulary, case.hidden, dtype=torch.float64),
        head=torch.randn(case.vocabulary, case.hidden, dtype=torch.float64),
        final_norm=norm(case.hidden),
        layers=layers,
    )


def build_world(case: Case, dtype: torch.dtype) -> World:
    """Random, the same every time, and with values that `dtype`, of the caches, holds."""
    torch.manual_seed(5)
    size = case.block_size
    counts = [-(-length // size) for length in case.lengths]
    total = sum(counts) + 1
    numbers = (torch.randperm(total - 1) + 1).to(torch.int32).split(counts)
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for table, own in zip(tables, numbers, strict=True):
        table[: len(own)] = own
        table[: case.shared] = numbers[0][: case.shared]
    firsts = [length - count for length, count in zip(case.lengths, case.queries, strict=True)]
    cache_positions = torch.cat([torch.arange(a, b) for a, b in zip(firsts, case.lengths, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(case.queries))
    slots = tables[owner, cache_positions // size].long() * size + cache_positions % size
    positions = cache_positions + torch.tensor(case.evicted)[owner]
    caches, scales = [], []
    for _ in range(case.layers):
        pair = [torch.full((total, size, case.kv_heads, case.head_dim), torch.nan, dtype=torch.float64) for _ in "kv"]
        for cache in pair:
            for table, first in zip(tables, firsts, strict=True):
                for at in range(first):
                    cache[table[at // size], at % size] = torch.randn(case.kv_heads, case.head_dim)
        if dtype in EIGHT_BITS:
            # Of three deviations and more, so that some are cut off.
            shape = case.kv_heads, case.head_dim
            scale = [torch.linspace(3, 6 + n, shape[0] * shape[1]).view(shape) / LARGEST[dtype][1] for n in range(2)]
            scales.append((scale[0], scale[1]))
            pair = [quantize(cache.nan_to_num(1e9), one, dtype) for cache, one in zip(pair, scale, strict=True)]
        caches.append((pair[0].to(dtype), pair[1].to(dtype)))
    groups = [TokenGroup(slots, tables, window) for window in case.windows]
    ids = torch.randint(case.vocabulary, (len(slots),))
    starts = torch.tensor([0, *accumulate(case.queries)], dtype=torch.int32)
    rows = torch.cat([starts[1:].long() - 1, torch.tensor([0])])
    return World(build_weights(case), caches, (ids, positions, cache_positions, starts, groups, rows), scales)


def changed(world: World, change: Callable[[Tensor], Tensor]) -> World:
    """With other weights in all matrices."""
    names = ("qkv", "out", "gate_up", "down")
    layers = [replace(one, **{name: change(getattr(one, name)) for name in names}) for one in world.weights.layers]
    return replace(world, weights=replace(world.weights, head=change(world.weights.head), layers=layers))


def decoder_of(
    library: ctypes.CDLL,
    world: World,
    dtype: torch.dtype = torch.float32,
    threads: int = 2,
    products: bool | None = None,
) -> Decoder:
    """A decoder with a world's weights, bound to its caches."""
    decoder = Decoder(library, world.weights, dtype, threads, products=products)
    decoder.bind(world.caches, world.scales)
    return decoder


def first_alone(decoder: Decoder, world: World) -> Tensor:
    """Logits [V] of a world's first sequence, which has one token, without the others."""
    ids, positions, cache_positions, _, groups, _ = world.arguments
    logits = decoder.step(
        ids[:1],
        positions[:1],
        cache_positions[:1],
        torch.tensor([0, 1], dtype=torch.int32),
        [replace(group, slots=group.slots[:1], tables=group.tables[:1]) for group in groups],
        torch.tensor([0]),
    )
    return logits[0]


def quantized(matrix: Tensor, way: str) -> Tensor:
    """As ggml's quantization of that name leaves weights."""
    kind = GGMLQuantizationType[way]
    floats = matrix.float()
    # A group of nothing but 0, and one of one value.
    floats[0, :32], floats[1, 32:64] = 0, floats[1, 32]
    return torch.from_numpy(quants.dequantize(quants.quantize(floats.numpy(), kind), kind))


def stored(matrix: Tensor, way: str) -> StoredMatrix:
    """A matrix as a GGUF file of that type has it."""
    blocks = quants.quantize(matrix.float().numpy(), GGMLQuantizationType[way])
    return StoredMatrix(StoredRows(torch.from_numpy(blocks).view(torch.uint8), way, matrix.shape[1]))


def error_of(computed: Tensor, expected: Tensor) -> float:
    """Root mean square error relative to the expected values."""
    return float((computed.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def scores_of(case: Case, dtype: torch.dtype) -> list[SequenceScores]:
    """Tensors for the scores that a case counts, full of NaN."""

    def empty(number: int) -> Tensor:
        return torch.full((case.layers, case.kv_heads, case.lengths[number]), torch.nan, dtype=dtype)

    return [
        SequenceScores(empty(number), empty(number), rows, number) for number, rows in enumerate(case.counted) if rows
    ]
