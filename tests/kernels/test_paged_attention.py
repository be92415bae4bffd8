"""Paged attention against its float64 reference, on every backend of this machine."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels.paged_attention import cpu
from kernels.paged_attention.launch import PagedBatch, paged_attention
from kernels.paged_attention.tiling import TileSizes
from kernels.quantization import LARGEST
from tests.kernels.attention_cases import Case, attend, attend_and_keep, build, error_ratio, exact

BARS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
MIXED = Case()
LONG = Case(queries=(150, 1), lengths=(160, 140), query_heads=3, kv_heads=1, block_size=16)
SHARED = Case((1, 1, 5, 1, 1, 12), (45, 41, 50, 24, 70, 44), query_heads=9, kv_heads=3, shared=6)
CASES = {
    "one token with no past": Case((1,), (1,)),
    "decode, lengths far apart": Case((1, 1, 1, 1), (3, 150, 17, 16)),
    "decode, many of one length": Case((1,) * 9, (31,) * 9),
    "whole prompts": Case((7, 33), (7, 33)),
    "chunks after a cached prefix": Case((5, 16), (45, 32)),
    "chunks, single tokens and an absent sequence": MIXED,
    "absent sequences only around one": Case((0, 0, 3, 0), (0, 9, 3, 12)),
    "prompt longer than a tile": LONG,
    "blocks of two": replace(MIXED, block_size=2),
    "blocks larger than a key tile": replace(LONG, block_size=128),
    "head size 64, 9 query heads over 3": replace(MIXED, query_heads=9, kv_heads=3, head_dim=64),
    "head size 80": replace(MIXED, head_dim=80),
    "head size 96": replace(MIXED, head_dim=96),
    "head size 8": replace(MIXED, head_dim=8),
    "no groups": replace(MIXED, query_heads=3, kv_heads=3),
    "one KV head for all": replace(MIXED, query_heads=7, kv_heads=1),
    "group larger than a tile of single tokens": replace(MIXED, query_heads=20, kv_heads=1),
    "window smaller than a block": replace(MIXED, window=3),
    "window of one": replace(MIXED, window=1),
    "window that starts inside a block": replace(MIXED, window=10),
    "window longer than every sequence": replace(MIXED, window=500),
    "window and a long prompt": replace(LONG, window=37),
    "one prefix for all": SHARED,
    "one prefix, a window inside it": replace(SHARED, window=30),
    "one prefix, and all options": replace(SHARED, window=35, softcap=1.5, sinks=True),
    "prompt longer than a tile, and one that shares it": replace(
        LONG, queries=(300, 1, 7), lengths=(310, 200, 180), shared=9
    ),
    "soft cap": replace(MIXED, softcap=2.0),
    "soft cap far above the logits": replace(MIXED, softcap=3000.0),
    "sinks": replace(MIXED, sinks=True),
    "window, soft cap and sinks": replace(MIXED, window=11, softcap=1.5, sinks=True),
    "window, soft cap and sinks in a long prompt": replace(LONG, window=130, softcap=5.0, sinks=True),
}
# Cases of the Triton kernels alone: tiles so small that every way through them is taken, shares of the keys.
FEW_KEYS = TileSizes(rows=16, tokens=4, keys=16, num_warps=4, num_stages=2)
SHARED_OUT = replace(FEW_KEYS, splits=4)
DECODE = Case((1, 1, 0, 1, 1), (3, 150, 20, 64, 65), query_heads=8)
TRITON_CASES = {
    "decode, no split": replace(DECODE, sizes=FEW_KEYS),
    "decode, 4 splits": replace(DECODE, sizes=SHARED_OUT),
    "decode, 4 splits, bfloat16": replace(DECODE, dtype=torch.bfloat16, sizes=SHARED_OUT),
    "decode, 32 splits, one of few keys": replace(
        DECODE, queries=(1, 1), lengths=(3, 150), kv_heads=1, sizes=replace(SHARED_OUT, tokens=2, splits=32)
    ),
    "decode, 4 splits, window": replace(DECODE, window=50, sizes=SHARED_OUT),
    "decode, 4 splits, window, soft cap and sinks": replace(
        DECODE, window=37, softcap=1.5, sinks=True, sizes=SHARED_OUT
    ),
    "decode, 4 splits, group of 1": replace(DECODE, query_heads=2, sizes=replace(SHARED_OUT, tokens=16)),
    "decode, 4 splits, group of 8, head size 128": replace(
        DECODE, kv_heads=1, head_dim=128, block_size=16, sizes=replace(SHARED_OUT, tokens=2)
    ),
    "decode, 4 splits, head size 80, blocks of 32": replace(DECODE, head_dim=80, block_size=32, sizes=SHARED_OUT),
    "decode, 2 splits, head size 256, blocks of 64": replace(
        DECODE, head_dim=256, block_size=64, sizes=replace(SHARED_OUT, splits=2)
    ),
    "chunks, 4 splits": replace(MIXED, sizes=replace(SHARED_OUT, tokens=5)),
    "prompts, one key tile less than the window": replace(
        LONG, queries=(90, 1), window=33, sizes=replace(FEW_KEYS, tokens=5)
    ),
    "prompts, 4 splits, window, soft cap and sinks": replace(
        LONG, queries=(90, 1), window=130, softcap=5.0, sinks=True, sizes=replace(SHARED_OUT, tokens=5)
    ),
    "prompts in large tiles, bfloat16": replace(
        LONG,
        queries=(50, 1),
        query_heads=4,
        dtype=torch.bfloat16,
        sizes=TileSizes(rows=128, tokens=32, keys=64, num_warps=8, num_stages=3),
    ),
}
QUANTIZED = {
    "as it comes": MIXED,
    "3 KV heads, bfloat16": replace(
        MIXED, query_heads=9, kv_heads=3, head_dim=64, window=11, softcap=1.5, sinks=True, dtype=torch.bfloat16
    ),
    "one prefix for all": SHARED,
    "4 splits, bfloat16": replace(DECODE, sizes=SHARED_OUT, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("case", TRITON_CASES.values(), ids=TRITON_CASES.keys())
@pytest.mark.parametrize("run_on", ["interpreter", "cuda"], indirect=True)
def test_error_stays_below_the_bar_however_the_work_is_cut(run_on: Callable[..., float], case: Case) -> None:
    assert run_on(error_ratio, case) < BARS[case.dtype]


@pytest.mark.parametrize("cache", LARGEST, ids=str)
@pytest.mark.parametrize("case", QUANTIZED.values(), ids=QUANTIZED.keys())
def test_error_over_8_bits_stays_below_the_same_bar(
    run_on: Callable[..., float], case: Case, cache: torch.dtype
) -> None:
    assert run_on(error_ratio, replace(case, cache=cache)) < BARS[case.dtype]


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    "options", [{}, {"window": 11, "softcap": 1.5, "sinks": True}, {"cache": torch.int8}], ids=["plain", "all", "int8"]
)
def test_the_sum_of_the_softmax_is_kept_when_asked_for(
    run_on: Callable[..., tuple[torch.Tensor, torch.Tensor]], options: dict[str, object], splits: int
) -> None:
    case = replace(MIXED, sizes=replace(FEW_KEYS, tokens=5, splits=splits), **options)
    problem = build(case)
    out, lse = run_on(attend_and_keep, case, problem, True)
    expected = torch.zeros(problem.query.shape[:2], dtype=torch.float64)
    truth = exact(case, problem, expected)
    rows = sum(case.queries)
    torch.testing.assert_close(lse[:rows].double(), expected[:rows], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[:rows].double(), truth, rtol=1e-4, atol=1e-5)
    assert lse[rows:].isnan().all()


@pytest.mark.parametrize("run_on", ["interpreter", "cuda"], indirect=True)
def test_what_a_sequence_gets_does_not_depend_on_the_lengths_of_others(run_on: Callable[..., torch.Tensor]) -> None:
    case = replace(DECODE, sizes=SHARED_OUT)
    problem = build(case)
    shorter = replace(case, lengths=(1, 150, 7, 30, 65))
    both = [run_on(attend, one, problem) for one in (case, shorter)]
    assert torch.equal(both[0][[1, 3]], both[1][[1, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_error_stays_below_the_bar(run_on: Callable[..., float], case: Case, dtype: torch.dtype) -> None:
    assert run_on(error_ratio, replace(case, dtype=dtype)) < BARS[dtype]


@pytest.mark.parametrize("options", [{}, {"window": 11, "softcap": 1.5, "sinks": True}], ids=["plain", "all options"])
def test_float16_error_stays_below_its_bar(run_on: Callable[..., float], options: dict[str, object]) -> None:
    assert run_on(error_ratio, replace(MIXED, dtype=torch.float16, **options)) < BARS[torch.float16]


def test_a_sequence_gets_the_same_result_alone_as_in_company(run_on: Callable[..., torch.Tensor]) -> None:
    case = Case((1, 1, 20, 1), (40, 33, 30, 38))
    problem = build(case)
    together = run_on(attend, case, problem)
    first = 0
    for index, queries in enumerate(case.queries):
        alone = replace(case, queries=(queries,), lengths=(case.lengths[index],))
        rows = slice(first, first + queries)
        single = replace(problem, query=problem.query[rows], tables=[problem.tables[index]])
        torch.testing.assert_close(run_on(attend, alone, single), together[rows], rtol=1e-5, atol=1e-6)
        first += queries


def test_out_is_made_when_none_is_given() -> None:
    case = Case((2,), (6,))
    problem = build(case)
    batch, args = problem.batch(case, "cpu"), problem.args(case)
    made = paged_attention(problem.query, problem.k_cache, problem.v_cache, batch, args)
    assert torch.equal(made[:2], attend("torch", case, problem)[:2])


def test_lengths_are_read_from_the_device_when_the_host_has_none() -> None:
    problem = build(MIXED)
    full = problem.batch(MIXED, "cpu")
    batch = PagedBatch(full.query_start, full.seq_lens, full.block_tables, full.max_query_len, full.max_seq_len)
    out = paged_attention(problem.query, problem.k_cache, problem.v_cache, batch, problem.args(MIXED))
    rows = sum(MIXED.queries)
    assert torch.equal(out[:rows], attend("torch", MIXED, problem)[:rows])


def test_layers_of_a_step_share_what_is_derived_from_the_batch() -> None:
    batch = build(MIXED).batch(MIXED, "cpu")
    assert batch.once("key", list) is batch.once("key", list)
    assert batch.once("key", list) is not batch.once("other key", list)


def test_blocks_outside_the_window_are_not_gathered() -> None:
    case = Case((1, 30), (100, 90), window=9)
    tiles = cpu.plan(build(case).batch(case, "cpu"), case.window, case.block_size, torch.float32)
    # Of the first sequence the keys 91 to 99, of the second 52 to 89; blocks of four.
    assert sorted(tile.columns for tile in tiles) == [3 * 4, 10 * 4]


def test_sequences_of_similar_length_share_a_call_and_others_do_not() -> None:
    case = Case((1,) * 6, (100, 10, 97, 9, 300, 10))
    tiles = cpu.plan(build(case).batch(case, "cpu"), None, case.block_size, torch.float32)
    assert sorted(tile.sequences for tile in tiles) == [1, 2, 3]


def test_sequences_of_one_prefix_share_a_call_and_its_keys_once() -> None:
    case = Case((1, 1, 3), (90, 85, 92), shared=20)
    (tile,) = cpu.plan(build(case).batch(case, "cpu"), None, case.block_size, torch.float32)
    assert sorted(tile.rows.tolist()) == [0, 1, 2, 3, 4]
    assert tile.columns == (20 + 3 + 2 + 3) * case.block_size


def test_sequences_share_no_call_where_it_would_cost_more_than_it_saves() -> None:
    case = Case((1,) * 8, (100,) * 8, shared=9)
    tiles = cpu.plan(build(case).batch(case, "cpu"), None, case.block_size, torch.float32)
    assert [(tile.sequences, tile.columns) for tile in tiles] == [(8, 100)]


def test_a_sequence_that_computes_no_numbers_spoils_none_that_shares_its_prefix(
    run_on: Callable[..., torch.Tensor],
) -> None:
    case = Case((1, 1, 3), (90, 85, 92), shared=20)
    problem = build(case)
    clean = run_on(attend, case, problem)
    problem.k_cache[problem.tables[1][-1]] = float("nan")
    problem.v_cache[problem.tables[1][-1]] = float("inf")
    spoiled = run_on(attend, case, problem)
    for row in (0, 2, 3, 4):
        torch.testing.assert_close(spoiled[row], clean[row], rtol=1e-5, atol=1e-6)
    assert spoiled[1].isnan().any()
