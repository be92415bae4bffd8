"""The compiled decoder against its float64 reference, and its refusal of unsuitable machines and models."""

import ctypes
import os
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.cpu_decoder import build
from kernels.cpu_decoder.launch import AdapterSpan, Decoder, TokenGroup, obstacle
from kernels.cpu_decoder.reference import step
from kernels.weights import LayerAdapter, LowRank
from tests.kernels.decoder_cases import (
    BARS,
    CASES,
    KINDS,
    Case,
    build_weights,
    build_world,
    compiled_decoder,
    decoder_of,
    error_of,
    first_alone,
    scores_of,
)
from tests.stack import model_cache


@KINDS
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_error_stays_below_the_bar(library: ctypes.CDLL, case: Case, dtype: torch.dtype, products: bool) -> None:
    world = build_world(case, dtype)
    if reason := obstacle(library, world.weights, dtype):
        pytest.skip(reason)
    expected_caches = [(k.double(), v.double()) for k, v in world.caches]
    expected = step(world.weights, *world.arguments, expected_caches)
    decoder = decoder_of(library, world, dtype, case.threads, products)
    logits = decoder.step(*world.arguments)
    assert expected.isfinite().all()
    assert error_of(logits, expected) < BARS[dtype]
    for pair, expected_pair in zip(world.caches, expected_caches, strict=True):
        for cache, expected_cache in zip(pair, expected_pair, strict=True):
            assert torch.equal(cache.isnan(), expected_cache.isnan()), "no other slot is written"
            assert error_of(cache.nan_to_num(), expected_cache.nan_to_num()) < BARS[dtype]


def test_a_row_does_not_depend_on_the_others(library: ctypes.CDLL) -> None:
    whole = build_world(Case((1, 1, 30), (90, 81, 100), shared=5), torch.float32)
    decoder = decoder_of(library, whole)
    together = decoder.step(*whole.arguments)
    assert error_of(first_alone(decoder, whole), together[0].double()) < 1e-5


@KINDS
@pytest.mark.parametrize("queries", [1, 40])
def test_invariant_computation_reads_nothing_before_a_window(
    library: ctypes.CDLL, queries: int, dtype: torch.dtype, products: bool
) -> None:
    """Runs of keys begin before it, where blocks may be another sequence's by now."""
    case = Case((queries,), (230,), windows=(70,))
    world = build_world(case, dtype)
    first_seen = 230 - queries - 70 + 1
    for pair in world.caches:
        for cache in pair:
            for slot in range(first_seen):
                cache[world.arguments[4][0].tables[0, slot // 16], slot % 16] = torch.nan
    decoder = decoder_of(library, world, dtype, 2, products)
    expected = decoder.step(*world.arguments)
    decoder.invariant = True
    assert expected.isfinite().all()
    assert error_of(decoder.step(*world.arguments), expected.double()) < BARS[dtype]


def test_slot_minus_one_stores_nowhere(library: ctypes.CDLL) -> None:
    world = build_world(Case((2,), (2,)), torch.float32)
    tokens, positions, cache_positions, query_start, [group], rows = world.arguments
    nowhere = replace(group, slots=torch.tensor([-1, group.slots[1]]))
    decoder = decoder_of(library, world, torch.float32, 1)
    decoder.step(tokens, positions, cache_positions, query_start, [nowhere], rows)
    assert int(world.caches[0][0].isfinite().all(-1).sum()) == 1


def test_a_step_of_nothing_has_no_logits(library: ctypes.CDLL) -> None:
    world = build_world(Case((1,), (1,)), torch.float32)
    decoder = decoder_of(library, world, torch.float32, 1)
    none = torch.zeros(0, dtype=torch.int64)
    groups = [TokenGroup(none, torch.zeros(0, 0, dtype=torch.int32))]
    assert decoder.step(none, none, none, torch.zeros(1, dtype=torch.int32), groups, none).shape == (0, 97)


def test_a_chunk_without_rows_has_no_logits(library: ctypes.CDLL) -> None:
    world = build_world(Case((30,), (30,)), torch.bfloat16)
    decoder = decoder_of(library, world, torch.bfloat16)
    *inputs, _ = world.arguments
    assert decoder.step(*inputs, torch.zeros(0, dtype=torch.int64)).shape == (0, 97)
    assert bool(world.caches[1][0].isfinite().any()), "its keys are stored all the same"


def test_wrong_arguments_are_named(library: ctypes.CDLL) -> None:
    world = build_world(Case(), torch.float32)
    unbound = Decoder(library, world.weights, torch.float32, 1)
    with pytest.raises(ValueError, match="no caches"):
        unbound.step(*world.arguments)
    with pytest.raises(ValueError, match=r"k_cache.*float32"):
        unbound.bind([(k.half(), v.half()) for k, v in world.caches])
    decoder = decoder_of(library, world)
    names = ("token_ids", "positions", "cache_positions", "query_start", "groups", "rows")
    right = dict(zip(names, world.arguments, strict=True))
    ids, positions, cache_positions, _, (group,), rows = world.arguments
    scores = scores_of(Case(counted=(1,)), torch.float32)[0]
    for words, wrong in (
        ("positions", {"positions": positions[1:]}),
        ("cache_positions", {"cache_positions": cache_positions.int()}),
        ("token_ids", {"token_ids": ids.int()}),
        ("slots", {"groups": [replace(group, slots=positions[1:])]}),
        ("slots: expected a contiguous", {"groups": [replace(group, slots=group.slots.repeat_interleave(2)[::2])]}),
        ("tables", {"groups": [replace(group, tables=group.tables[1:])]}),
        (r"scores.weights: expected \[L, Hkv, T\]", {"scores": [replace(scores, weights=scores.weights[:, :, 1:])]}),
        ("scores: expected 1 to 1 rows, got 2", {"scores": [replace(scores, rows=2)]}),
        ("scores: attention is not scored", {"groups": [replace(group, window=9)], "scores": [scores]}),
        ("out", {"out": torch.empty(len(rows) + 1, decoder.vocabulary)}),
    ):
        with pytest.raises(ValueError, match=words):
            decoder.step(**right | wrong)


def test_logits_go_where_they_are_wanted(library: ctypes.CDLL) -> None:
    world = build_world(Case((1, 30), (90, 100)), torch.float32)
    decoder = decoder_of(library, world)
    place = torch.full((5, decoder.vocabulary), torch.nan)
    rows = len(world.arguments[-1])
    logits = decoder.step(*world.arguments, out=place[:rows])
    assert logits.data_ptr() == place.data_ptr()
    assert torch.equal(place[:rows], decoder.step(*world.arguments))
    assert place[rows:].isnan().all()


@pytest.mark.parametrize(
    ("case", "dtype", "words"),
    [
        (Case(head_dim=8), torch.float32, "head size 8"),
        (Case(intermediate=100), torch.float32, "widths"),
        (Case(), torch.float16, "float16"),
    ],
)
def test_a_model_it_is_not_for_is_named(library: ctypes.CDLL, case: Case, dtype: torch.dtype, words: str) -> None:
    weights = build_weights(case)
    assert words in obstacle(library, weights, dtype)
    with pytest.raises(ValueError, match=words):
        Decoder(library, weights, dtype, 1)


def test_threads_that_lose_their_cores_change_nothing(library: ctypes.CDLL) -> None:
    # With more threads than cores some are always displaced, and others do their pieces, too.
    shape = Case((1, 1), (40, 90), hidden=512, intermediate=1024, q_heads=8, kv_heads=2, vocabulary=2000, layers=8)
    world = build_world(replace(shape, threads=5), torch.float32)
    decoder = decoder_of(library, world, torch.float32, 5)
    first = decoder.step(*world.arguments)
    assert all(torch.equal(decoder.step(*world.arguments), first) for _ in range(200))


def test_it_counts_what_the_time_is_spent_on(library: ctypes.CDLL) -> None:
    world = build_world(Case(), torch.float32)
    decoder = decoder_of(library, world)
    assert set(decoder.seconds.values()) == {0.0}
    begin = time.perf_counter()
    decoder.step(*world.arguments)
    once = decoder.seconds
    assert min(once.values()) > 0
    assert sum(once.values()) < time.perf_counter() - begin
    decoder.step(*world.arguments)
    assert all(decoder.seconds[kind] > seconds for kind, seconds in once.items())


def test_without_a_compiler_the_reason_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.NoCompilerError, match=r"no C\+\+ compiler"):
        build.load(tmp_path)


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'decoder.cpp:1: error: no such luck' >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    with pytest.raises(build.BuildError, match="no such luck"):
        build.load(tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())


def put_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str = "1") -> Path:
    """Puts a compiler of empty libraries into a folder and the path; returns the file of its arguments."""
    compiler, given = folder / "c++", folder / "given"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit\necho "$@" > {given}\n'
        'while [ "$1" != -o ]; do shift; done\n: > "$2"\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder) + os.pathsep + os.environ["PATH"])
    monkeypatch.delenv("CXXFLAGS", raising=False)
    return given


def test_what_was_built_is_found_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = []
    for version in ("1", "2"):
        put_compiler(tmp_path, monkeypatch, version)
        libraries.append(build.compiled(tmp_path / "kept"))
    older, newer = libraries
    assert older != newer
    os.utime(older, (1, 1))
    monkeypatch.setenv("PATH", "/nowhere")
    assert build.compiled(tmp_path / "kept") == newer
    os.utime(newer, (0, 0))
    assert build.compiled(tmp_path / "kept") == older
    monkeypatch.setattr(build, "_processor", lambda: b"another")
    with pytest.raises(build.NoCompilerError):
        build.compiled(tmp_path / "kept")


def test_flags_of_the_environment_come_last_and_make_a_library_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = put_compiler(tmp_path, monkeypatch)
    plain = build.compiled(tmp_path / "kept")
    monkeypatch.setenv("CXXFLAGS", "-march=x86-64-v3 -g1")
    assert build.compiled(tmp_path / "kept") != plain
    words = given.read_text().split()
    assert words.index("-march=native") < words.index("-march=x86-64-v3") < words.index("-g1")


def test_tests_of_sources_that_do_not_compile_fail_and_are_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "SOURCES", (*build.SOURCES[:-1], "no_such_source.cpp"))
    monkeypatch.setattr(build, "_key", lambda *_: "broken")
    with pytest.raises(build.BuildError, match="cannot compile"):
        compiled_decoder(tmp_path / "kept")


def test_what_was_built_is_found_again(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.load(model_cache() / "compiled") is not library


# Layers of two adapters, and which tokens each is for.
SPANS = {
    "one adapter, all tokens": [(0, 0, 27)],
    "two adapters and the base": [(0, 1, 6), (1, 7, 27)],
    "the same adapter twice": [(1, 0, 1), (1, 6, 7)],
}


def random_adapter(case: Case, rank: int, *, some: bool) -> list[LayerAdapter]:
    """some: whether it changes only some projections, and the values of its matrices stay the same in bfloat16."""
    hidden, width, keys = case.hidden, case.q_heads * case.head_dim, case.kv_heads * case.head_dim

    def part(inputs: int, outputs: int, rank: int = rank) -> LowRank:
        a, b = torch.randn(rank, inputs) / inputs**0.5, torch.randn(outputs, rank) / rank**0.5
        return LowRank(a.bfloat16().float(), b.bfloat16().float(), 0.7) if some else LowRank(a, b, 1.3)

    if some:
        none = LayerAdapter()
        changed = LayerAdapter(qkv=(part(hidden, width), None, part(hidden, keys)), gate_up=(None, part(hidden, 96)))
        return [changed, none]
    return [
        LayerAdapter(
            qkv=(part(hidden, width), part(hidden, keys, 2), part(hidden, keys)),
            out=(part(width, hidden),),
            gate_up=(part(hidden, 96, rank + 3), part(hidden, 96)),
            down=(part(96, hidden),),
        )
        for _ in range(case.layers)
    ]


@KINDS
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS.keys())
def test_adapters_add_to_the_products_of_their_tokens_alone(
    library: ctypes.CDLL, spans: list, threads: int, dtype: torch.dtype, products: bool
) -> None:
    case = Case(bias=True)
    world = build_world(case, dtype)
    adapters = [random_adapter(case, 16, some=False), random_adapter(case, 5, some=True)]
    expected_caches = [(k.double(), v.double()) for k, v in world.caches]
    doubles = [[_doubled(layer) for layer in layers] for layers in adapters]
    given = [(doubles[at], begin, end) for at, begin, end in spans]
    expected = step(world.weights, *world.arguments, expected_caches, adapters=given)
    decoder = decoder_of(library, world, dtype, threads, products)
    compiled = [decoder.adapter(layers) for layers in adapters]
    logits = decoder.step(*world.arguments, (), [AdapterSpan(compiled[at], *bounds) for at, *bounds in spans])
    plain = step(world.weights, *world.arguments, [(k.clone(), v.clone()) for k, v in expected_caches])
    assert error_of(plain, expected) > 0.1
    assert error_of(logits, expected) < BARS[dtype]
    for pair, expected_pair in zip(world.caches, expected_caches, strict=True):
        for cache, expected_cache in zip(pair, expected_pair, strict=True):
            assert error_of(cache.nan_to_num(), expected_cache.nan_to_num()) < BARS[dtype]


def _doubled(layer: LayerAdapter) -> LayerAdapter:
    def parts(name: str) -> tuple[LowRank | None, ...]:
        return tuple(
            None if part is None else LowRank(part.a.double(), part.b.double(), part.scale)
            for part in getattr(layer, name)
        )

    return LayerAdapter(parts("qkv"), parts("out"), parts("gate_up"), parts("down"))


def test_an_adapter_that_does_not_fit_is_refused(library: ctypes.CDLL) -> None:
    case = Case()
    decoder = decoder_of(library, build_world(case, torch.float32))
    narrow = replace(random_adapter(case, 4, some=True)[0], down=(LowRank(torch.ones(4, 95), torch.ones(64, 4), 1.0),))
    with pytest.raises(ValueError, match=r"layer 1, down: expected A \[R, 96\] and B \[64, R\], got \[4, 95\]"):
        decoder.adapter([LayerAdapter(), narrow])


@pytest.mark.parametrize("span", [(0, 0), (-1, 3), (3, 28)])
def test_a_span_that_is_none_is_refused(library: ctypes.CDLL, span: tuple[int, int]) -> None:
    case = Case()
    world = build_world(case, torch.float32)
    decoder = decoder_of(library, world)
    adapter = decoder.adapter(random_adapter(case, 4, some=True))
    with pytest.raises(ValueError, match="is no span of 27 tokens"):
        decoder.step(*world.arguments, (), [AdapterSpan(adapter, *span)])
