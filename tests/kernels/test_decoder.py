"""The compiled decoder against its float64 reference, and what becomes of machines and models it is not for."""

import ctypes
import os
import stat
import time
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.decoder import build
from kernels.decoder.launch import Decoder, LayerWeights, Sums, TokenGroup, Weights, obstacle
from kernels.decoder.reference import step
from tests.stack import model_cache

BARS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", BARS, ids=["float32", "bfloat16"])


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    try:
        return build.load(model_cache() / "compiled")
    except build.BuildError as error:
        pytest.skip(str(error))


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
    """A random model and batch. caches hold what is no number wherever no query may look."""

    weights: Weights
    caches: list[tuple[Tensor, Tensor]]
    arguments: tuple[Tensor, Tensor, Tensor, Tensor, list[TokenGroup], Tensor]


def _weights(case: Case) -> Weights:
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
    """Random, the same every time, and with values that `dtype` holds."""
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
    slot_numbers = torch.cat([torch.arange(a, b) for a, b in zip(firsts, case.lengths, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(case.queries))
    slots = tables[owner, slot_numbers // size].long() * size + slot_numbers % size
    positions = slot_numbers + torch.tensor(case.evicted)[owner]
    caches = []
    for _ in range(case.layers):
        pair = [torch.full((total, size, case.kv_heads, case.head_dim), torch.nan, dtype=torch.float64) for _ in "kv"]
        for cache in pair:
            for table, first in zip(tables, firsts, strict=True):
                for at in range(first):
                    cache[table[at // size], at % size] = torch.randn(case.kv_heads, case.head_dim)
        caches.append((pair[0].to(dtype), pair[1].to(dtype)))
    groups = [TokenGroup(slots, tables, window) for window in case.windows]
    ids = torch.randint(case.vocabulary, (len(slots),))
    starts = torch.tensor([0, *accumulate(case.queries)], dtype=torch.int32)
    rows = torch.cat([starts[1:].long() - 1, torch.tensor([0])])
    return World(_weights(case), caches, (ids, positions, slot_numbers, starts, groups, rows))


def error_of(computed: Tensor, expected: Tensor) -> float:
    """Root mean square error relative to what was expected."""
    return float((computed.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@DTYPES
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_error_stays_below_the_bar(library: ctypes.CDLL, case: Case, dtype: torch.dtype) -> None:
    world = build_world(case, dtype)
    if reason := obstacle(library, world.weights, dtype):
        pytest.skip(reason)
    expected_caches = [(k.double(), v.double()) for k, v in world.caches]
    expected = step(world.weights, *world.arguments, expected_caches)
    decoder = Decoder(library, world.weights, dtype, case.threads)
    decoder.bind(world.caches)
    logits = decoder.step(*world.arguments)
    assert expected.isfinite().all()
    assert error_of(logits, expected) < BARS[dtype]
    for pair, expected_pair in zip(world.caches, expected_caches, strict=True):
        for cache, expected_cache in zip(pair, expected_pair, strict=True):
            assert torch.equal(cache.isnan(), expected_cache.isnan()), "no other slot is written"
            assert error_of(cache.nan_to_num(), expected_cache.nan_to_num()) < BARS[dtype]


def sums_of(case: Case, dtype: torch.dtype) -> list[Sums]:
    """Places for what a case counts, full of what is no number."""
    return [
        Sums(number, rows, *torch.full((2, case.layers, case.kv_heads, case.lengths[number]), torch.nan, dtype=dtype))
        for number, rows in enumerate(case.counted)
        if rows
    ]


@DTYPES
@pytest.mark.parametrize("case", COUNTED.values(), ids=COUNTED.keys())
def test_attention_is_counted(library: ctypes.CDLL, case: Case, dtype: torch.dtype) -> None:
    world = build_world(case, dtype)
    if reason := obstacle(library, world.weights, dtype):
        pytest.skip(reason)
    expected, sums = sums_of(case, torch.float64), sums_of(case, torch.float32)
    logits = step(world.weights, *world.arguments, [(k.double(), v.double()) for k, v in world.caches], expected)
    decoder = Decoder(library, world.weights, dtype, case.threads)
    decoder.bind(world.caches)
    assert error_of(decoder.step(*world.arguments, sums), logits) < BARS[dtype]
    for one, truth in zip(sums, expected, strict=True):
        assert truth.squares is not None
        assert one.squares is not None
        assert error_of(one.weights, truth.weights) < BARS[dtype]
        assert error_of(one.squares, truth.squares) < BARS[dtype]
        group = case.q_heads / case.kv_heads
        torch.testing.assert_close(one.weights.sum(2), torch.full((case.layers, case.kv_heads), group * one.rows))


@pytest.mark.parametrize("case", COUNTED.values(), ids=COUNTED.keys())
def test_counting_changes_nothing_else_and_is_the_same_every_time(library: ctypes.CDLL, case: Case) -> None:
    case = replace(case, shared=0)
    world, sums = build_world(case, torch.float32), sums_of(case, torch.float32)
    decoder = Decoder(library, world.weights, torch.float32, case.threads)
    decoder.bind(world.caches)
    uncounted = decoder.step(*world.arguments)
    assert torch.equal(decoder.step(*world.arguments, sums), uncounted)
    for _ in range(20):
        again = [replace(one, squares=None) for one in sums_of(case, torch.float32)]
        decoder.step(*world.arguments, again)
        assert all(torch.equal(one.weights, other.weights) for one, other in zip(again, sums, strict=True))


def test_a_row_does_not_depend_on_the_others(library: ctypes.CDLL) -> None:
    whole = build_world(Case((1, 1, 30), (90, 81, 100), shared=5), torch.float32)
    decoder = Decoder(library, whole.weights, torch.float32, 2)
    decoder.bind(whole.caches)
    ids, positions, slot_numbers, _, groups, _ = whole.arguments
    together = decoder.step(*whole.arguments)
    alone = decoder.step(
        ids[:1],
        positions[:1],
        slot_numbers[:1],
        torch.tensor([0, 1], dtype=torch.int32),
        [replace(group, slots=group.slots[:1], tables=group.tables[:1]) for group in groups],
        torch.tensor([0]),
    )
    assert error_of(alone[0], together[0].double()) < 1e-5


def test_slot_minus_one_stores_nowhere(library: ctypes.CDLL) -> None:
    world = build_world(Case((2,), (2,)), torch.float32)
    *inputs, groups, rows = world.arguments
    decoder = Decoder(library, world.weights, torch.float32, 1)
    decoder.bind(world.caches)
    decoder.step(*inputs, [replace(groups[0], slots=torch.tensor([-1, groups[0].slots[1]]))], rows)
    assert int(world.caches[0][0].isfinite().all(-1).sum()) == 1


def test_a_step_of_nothing_has_no_logits(library: ctypes.CDLL) -> None:
    world = build_world(Case((1,), (1,)), torch.float32)
    decoder = Decoder(library, world.weights, torch.float32, 1)
    decoder.bind(world.caches)
    none = torch.zeros(0, dtype=torch.int64)
    groups = [TokenGroup(none, torch.zeros(0, 0, dtype=torch.int32))]
    assert decoder.step(none, none, none, torch.zeros(1, dtype=torch.int32), groups, none).shape == (0, 97)


def test_wrong_arguments_are_named(library: ctypes.CDLL) -> None:
    world = build_world(Case(), torch.float32)
    decoder = Decoder(library, world.weights, torch.float32, 1)
    ids, positions, slot_numbers, starts, groups, rows = world.arguments
    sums = sums_of(Case(counted=(1,)), torch.float32)[0]
    with pytest.raises(ValueError, match="no caches"):
        decoder.step(*world.arguments)
    with pytest.raises(ValueError, match=r"k_cache.*float32"):
        decoder.bind([(k.bfloat16(), v.bfloat16()) for k, v in world.caches])
    decoder.bind(world.caches)
    with pytest.raises(ValueError, match="positions"):
        decoder.step(ids, positions[1:], slot_numbers, starts, groups, rows)
    with pytest.raises(ValueError, match="slot_numbers"):
        decoder.step(ids, positions, slot_numbers.int(), starts, groups, rows)
    with pytest.raises(ValueError, match="token_ids"):
        decoder.step(ids.int(), positions, slot_numbers, starts, groups, rows)
    with pytest.raises(ValueError, match="slots"):
        decoder.step(ids, positions, slot_numbers, starts, [replace(groups[0], slots=positions[1:])], rows)
    with pytest.raises(ValueError, match="tables"):
        decoder.step(ids, positions, slot_numbers, starts, [replace(groups[0], tables=groups[0].tables[1:])], rows)
    with pytest.raises(ValueError, match=r"sums.weights: expected \[L, Hkv, T\]"):
        decoder.step(*world.arguments, [replace(sums, weights=sums.weights[:, :, 1:])])
    with pytest.raises(ValueError, match="sums: expected 1 to 1 rows, got 2"):
        decoder.step(*world.arguments, [replace(sums, rows=2)])
    with pytest.raises(ValueError, match="sums: attention is not counted"):
        decoder.step(ids, positions, slot_numbers, starts, [replace(groups[0], window=9)], rows, [sums])


@pytest.mark.parametrize(
    ("case", "dtype", "words"),
    [
        (Case(head_dim=8), torch.float32, "head size 8"),
        (Case(intermediate=100), torch.float32, "widths"),
        (Case(), torch.float16, "float16"),
    ],
)
def test_a_model_it_is_not_for_is_told(library: ctypes.CDLL, case: Case, dtype: torch.dtype, words: str) -> None:
    weights = _weights(case)
    assert words in obstacle(library, weights, dtype)
    with pytest.raises(ValueError, match=words):
        Decoder(library, weights, dtype, 1)


def test_threads_that_lose_their_cores_change_nothing(library: ctypes.CDLL) -> None:
    # With more threads than cores some are always displaced, and others do their pieces, too.
    shape = Case((1, 1), (40, 90), hidden=512, intermediate=1024, q_heads=8, kv_heads=2, vocabulary=2000, layers=8)
    world = build_world(replace(shape, threads=5), torch.float32)
    decoder = Decoder(library, world.weights, torch.float32, 5)
    decoder.bind(world.caches)
    first = decoder.step(*world.arguments)
    assert all(torch.equal(decoder.step(*world.arguments), first) for _ in range(200))


def test_it_tells_what_the_time_went_to(library: ctypes.CDLL) -> None:
    world = build_world(Case(), torch.float32)
    decoder = Decoder(library, world.weights, torch.float32, 2)
    decoder.bind(world.caches)
    assert set(decoder.seconds.values()) == {0.0}
    begin = time.perf_counter()
    decoder.step(*world.arguments)
    once = decoder.seconds
    assert min(once.values()) > 0
    assert sum(once.values()) < time.perf_counter() - begin
    decoder.step(*world.arguments)
    assert all(decoder.seconds[kind] > seconds for kind, seconds in once.items())


def test_without_a_compiler_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler"):
        build.load(tmp_path)


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'decoder.cpp:1: error: no such luck' >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    with pytest.raises(build.BuildError, match="no such luck"):
        build.load(tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())


def test_what_was_built_is_found_again(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.load(model_cache() / "compiled") is not library
