"""draw_tokens against its definition, on every backend of this machine."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.draw_tokens import reference
from kernels.draw_tokens.launch import draw_tokens, draw_with_triton


@dataclass(frozen=True)
class Case:
    """Logits and the parameters that all rows share."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    vocab: int = 333
    scale: float = 3.0
    # Rounded to quarters, so that many are equal.
    ties: bool = False
    # Every other token is ruled out.
    masked: bool = False


CASES = {
    "plain": Case(),
    "cold": Case(temperature=0.05),
    "hot": Case(temperature=4.0),
    "the coldest": Case(temperature=1e-30),
    "top-k": Case(top_k=7),
    "top-k of one": Case(top_k=1),
    "top-k of all": Case(top_k=333),
    "top-k among equal ones": Case(top_k=7, top_p=0.8, ties=True),
    "top-p": Case(top_p=0.7),
    "top-p, nearly all": Case(top_p=0.9999),
    "top-p, next to nothing": Case(top_p=1e-6),
    "top-p, flat": Case(top_p=0.6, scale=0.01),
    "min-p": Case(min_p=0.2),
    "min-p of 1": Case(min_p=1.0),
    "all of them": Case(1.4, 40, 0.8, 0.05),
    "masked": Case(top_k=20, top_p=0.9, masked=True),
    "several tiles": Case(top_k=700, top_p=0.95, vocab=9001),
    "several tiles, plain": Case(vocab=8192),
    "few tokens": Case(top_p=0.8, vocab=3),
}
ROWS = 6
PROBLEMS = [
    *((case, torch.float32) for case in CASES.values()),
    *((CASES[name], dtype) for name in ("all of them", "masked") for dtype in (torch.bfloat16, torch.float16)),
]


def problem(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, more than are drawn from, the rows, and their parameters."""
    generator = torch.Generator().manual_seed(case.vocab)
    logits = torch.randn(ROWS + 5, case.vocab + 8, generator=generator)[:, : case.vocab] * case.scale
    if case.ties:
        logits = (logits * 4).round() / 4
    if case.masked:
        logits[:, ::2] = -torch.inf
    rows = torch.randperm(ROWS + 5, generator=generator)[:ROWS]
    parameters = torch.tensor([[case.temperature, case.top_k, case.top_p, case.min_p, 0.0]] * ROWS).double()
    parameters[:, 4] = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    # The first and the last token that may be drawn.
    parameters[:2, 4] = torch.tensor([0.0, 1 - 2.0**-53])
    return logits.to(dtype), rows, parameters


def draw(backend: str, case: Case, dtype: torch.dtype) -> Tensor:
    """Ids, [ROWS]."""
    device = "cuda" if backend == "cuda" else "cpu"
    given = [one.to(device) for one in problem(case, dtype)]
    return (draw_with_triton if backend == "interpreter" else draw_tokens)(*given).cpu()


@pytest.mark.parametrize(
    ("case", "dtype"), PROBLEMS, ids=[*CASES, *(f"{dtype} {case.top_k}" for case, dtype in PROBLEMS[len(CASES) :])]
)
def test_it_draws_what_its_definition_says(run_on: Callable[..., Tensor], case: Case, dtype: torch.dtype) -> None:
    logits, rows, parameters = problem(case, dtype)
    ids = run_on(draw, case, dtype)
    expected = reference.draw_tokens(logits[rows], parameters)
    # Numbers at the very ends of the line are where rounding decides.
    assert torch.equal(ids[2:], expected[2:])
    for row, token in enumerate(ids.tolist()[:2]):
        kept = reference.kept_tokens(logits[rows[row]], case.temperature, case.top_k, case.top_p, case.min_p)
        assert kept[token] > 0


def test_no_rows_are_drawn() -> None:
    nothing = torch.empty(0, 5, dtype=torch.float64)
    assert draw_tokens(torch.zeros(2, 9), torch.empty(0, dtype=torch.int64), nothing).tolist() == []


LOGITS, ROW, PARAMETERS = torch.zeros(2, 9), torch.zeros(1, dtype=torch.int64), torch.ones(1, 5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((LOGITS[0], ROW, PARAMETERS), "logits: expected"),
        ((LOGITS.double(), ROW, PARAMETERS), "logits: expected torch.float32 or"),
        ((torch.zeros(9, 2).t(), ROW, PARAMETERS), "logits: expected the elements of a row side by side"),
        ((LOGITS, ROW.int(), PARAMETERS), "rows: expected torch.int64"),
        ((LOGITS, ROW, PARAMETERS.float()), "parameters: expected torch.float64"),
        ((LOGITS, ROW, PARAMETERS[:, :4]), r"parameters: expected \[P, 5\]"),
        ((LOGITS, torch.zeros(2, dtype=torch.int64), PARAMETERS), "parameters: expected"),
    ],
)
def test_a_wrong_argument_is_named(given: tuple[Tensor, Tensor, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_tokens(*given)
