"""attention_scores against its float64 reference, on every backend of this machine."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.attention_scores import reference
from kernels.attention_scores.launch import attention_scores, score_with_triton
from kernels.quantization import LARGEST
from tests.kernels.attention_cases import NAN, Case, Problem, build, exact

MIXED = Case()
LONG = Case(queries=(70, 1), lengths=(310, 270), query_heads=3, kv_heads=1, block_size=16)
ALL = (1000,) * 9
CASES: dict[str, tuple[Case, tuple[int, ...]]] = {
    "decode": (Case((1, 1, 0, 1), (3, 150, 20, 64), query_heads=8), ALL),
    "mixed, all queries": (MIXED, ALL),
    "mixed, the last 8 of a sequence": (MIXED, (8,) * 5),
    "mixed, of some sequences none": (MIXED, (1, 0, 3, 0, 1)),
    "prompt": (LONG, ALL),
    "prompt, window": (replace(LONG, window=100), ALL),
    "the last 8 of a prompt, window": (replace(LONG, window=100), (8, 8)),
    "window, soft cap and sinks": (replace(MIXED, window=11, softcap=1.5, sinks=True), ALL),
    "head size 80, no groups": (replace(MIXED, head_dim=80, query_heads=2), ALL),
    **{f"{cache} cache": (replace(MIXED, cache=cache), ALL) for cache in LARGEST},
}
BARS = {torch.float32: 1e-5, torch.bfloat16: 2e-3}


def score(backend: str, case: Case, counted: tuple[int, ...], problem: Problem) -> tuple[Tensor, Tensor]:
    device = "cuda" if backend == "cuda" else "cpu"
    lse = torch.zeros(problem.query.shape[:2], dtype=torch.float64)
    exact(case, problem, lse)
    lse[sum(case.queries) :] = NAN
    counts = torch.tensor(counted[: len(case.lengths)], dtype=torch.int32, device=device)
    out, squares = torch.full((2, len(case.lengths), case.kv_heads, columns(case)), NAN, device=device)
    op = score_with_triton if backend == "interpreter" else attention_scores
    op(
        problem.query.to(device),
        problem.k_cache.to(device),
        problem.batch(case, device),
        lse.float().to(device),
        counts,
        problem.args(case, device),
        out=out,
        squares=squares,
    )
    return out.cpu(), squares.cpu()


def columns(case: Case) -> int:
    return max(case.lengths) + 3


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize(("case", "counted"), CASES.values(), ids=CASES.keys())
def test_weights_of_the_counted_queries_are_summed(
    run_on: Callable[..., tuple[Tensor, Tensor]], case: Case, counted: tuple[int, ...], dtype: torch.dtype
) -> None:
    case = replace(case, dtype=dtype)
    problem = build(case)
    truths = reference.attention_scores(
        problem.query.double(),
        problem.k_cache,
        list(case.queries),
        list(case.lengths),
        problem.tables,
        list(counted),
        columns(case),
        problem.args(case),
    )
    got, squares = run_on(score, case, counted, problem)
    for values, truth in zip((got, squares), truths, strict=True):
        assert float((values.double() - truth).norm() / truth.norm()) < BARS[dtype]
    if not case.sinks:
        rows = [min(count, queries) for count, queries in zip(counted, case.queries, strict=False)]
        expected = torch.tensor(rows)[:, None].expand(-1, case.kv_heads) * (case.query_heads / case.kv_heads)
        torch.testing.assert_close(got.sum(2), expected.float(), rtol=2 * BARS[dtype], atol=0)


def test_scores_have_a_column_per_key_when_no_slot_is_given() -> None:
    problem = build(MIXED)
    lse = torch.zeros(problem.query.shape[:2])
    counted = torch.zeros(len(MIXED.lengths), dtype=torch.int32)
    batch = problem.batch(MIXED, "cpu")
    scores = attention_scores(problem.query, problem.k_cache, batch, lse, counted, problem.args(MIXED))
    assert scores.shape == (len(MIXED.lengths), MIXED.kv_heads, max(MIXED.lengths))
    assert not scores.any()
