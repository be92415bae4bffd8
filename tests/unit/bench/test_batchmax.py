"""Batches by formula and as seen, and what output keeps."""

import pytest

from bench.batchmax import Run, formula, methods, smallest_budget
from bench.quality import rouge_2
from tests.support.generation import Output


@pytest.mark.parametrize(
    ("method", "peak", "batch"),
    [("FKV", 1_064, 7), ("ED", 1_001, 8), ("BM 256", 256, 32), ("BM 1024", 1_024, 8), ("BM 2048", 1_064, 7)],
)
def test_the_largest_batch_is_the_pool_by_what_a_sequence_takes_at_its_peak(method: str, peak: int, batch: int) -> None:
    [found] = [one for one in methods([256, 1_024, 2_048]) if one.name == method]
    assert found.peak_tokens(1_000, 64) == peak
    assert formula(8_192 // 16, [peak] * 100) == batch


def test_sequences_of_different_lengths_fit_in_their_order() -> None:
    assert formula(4, [16, 17, 16]) == 3
    assert formula(4, [17, 17, 1]) == 2
    assert formula(1, [17]) == 0


def test_rouge_2_is_the_share_of_common_pairs_of_words() -> None:
    assert rouge_2("Call me Ishmael.", "call me, Ishmael") == 1
    assert rouge_2("a b c", "a b d") == 0.5
    assert rouge_2("a b a b", "a b") == 2 / 4
    assert rouge_2("a b", "b a") == 0
    assert rouge_2("", "one") == 1


def test_the_smallest_budget_is_one_above_which_all_are_good() -> None:
    def row(budget: int, score: float) -> dict[str, object]:
        return {"method": f"BM {budget}", "budget": budget, "rouge_2": score}

    others = [{"method": "FKV", "budget": None, "rouge_2": 1.0}]
    assert smallest_budget([*others, row(256, 0.99), row(512, 0.5), row(768, 0.97), row(1_024, 1.0)]) == 768
    assert smallest_budget([*others, row(256, 0.9)]) is None


def test_a_runs_batch_is_who_had_blocks_before_the_first_end() -> None:
    outputs = [
        Output(token_ids=[1, 1, 1], started=0.0, token_times=[1.0, 2.0, 3.0]),
        Output(token_ids=[1, 1, 1], started=0.0, token_times=[1.5, 2.5, 3.5]),
        Output(token_ids=[1], started=0.0, token_times=[5.0]),
    ]
    made = Run(outputs, [(0.5, 3), (1.2, 2), (2.9, 2), (3.1, 1), (5.0, 0)])
    assert (made.prompts_at_once, made.batch) == (3, 2)
    # Between 1.5 and 3 s.
    assert made.decode_rate == 3 / 1.5
    assert made.rate == 7 / 5
