"""The workloads are those of the table, the limits are right arithmetic, the gate is strict and tables line up."""

import pytest

from bench import gate, limits
from bench.limits import Limits, ModelShape, work
from bench.runs import Times, percentile
from bench.serving import show
from bench.tables import table
from bench.workloads import CASES, Case, Corpus, chosen
from tests.support.reference import TIE, Reference

BY_NAME = {case.name: case for case in CASES}
# Two layers with a hidden size of 4: 4 x (4 + 2 x 2) + 4 x 4 + 2 x 8 x 4 + 8 x 4 weights in each.
TINY = ModelShape(layers=2, hidden=4, intermediate=8, heads=2, kv_heads=1, head_dim=2, vocabulary=10)
LAYER = 4 * 8 + 4 * 4 + 16 * 4 + 8 * 4


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """A token for each character, as wide as a word."""
    return Corpus(lambda text: [hash_of(word) for word in text.split()])


def hash_of(word: str) -> int:
    value = 0
    for character in word:
        value = (value * 131 + ord(character)) % 49_999
    return value


def test_cases_have_the_lengths_of_the_table() -> None:
    assert {name: (case.requests, sum(case.prompt_tokens), case.output_tokens) for name, case in BY_NAME.items()} == {
        "W1": (32, 9_288, 64),
        "W2-off": (32, 34_279, 32),
        "W2-on": (32, 34_279, 32),
        "W3": (4, 1_024, 1_024),
        "W4": (1, 128, 128),
    }
    assert 32 <= min(BY_NAME["W1"].own) <= max(BY_NAME["W1"].own) <= 512
    assert 32 <= min(BY_NAME["W2-on"].own) <= max(BY_NAME["W2-on"].own) <= 64


def test_prompts_are_the_same_each_time_and_of_the_right_lengths(corpus: Corpus) -> None:
    for case in CASES:
        prompts = corpus.prompts(case, 1)
        assert prompts == corpus.prompts(case, 1)
        assert [len(prompt) for prompt in prompts] == list(case.prompt_tokens)
    assert corpus.prompts(BY_NAME["W2-on"], 1) == corpus.prompts(BY_NAME["W2-off"], 1)


def test_a_cache_finds_no_block_of_another_variant_or_request(corpus: Corpus) -> None:
    beginnings = [
        tuple(prompt[case.shared :][:16])
        for case in CASES
        if case.reuse
        for variant in range(4)
        for prompt in corpus.prompts(case, variant)
    ]
    assert len(set(beginnings)) == len(beginnings)
    shared = [{tuple(prompt[:1024]) for prompt in corpus.prompts(BY_NAME["W2-on"], variant)} for variant in range(4)]
    assert [len(one) for one in shared] == [1] * 4
    assert len(set.union(*shared)) == 4


def test_cases_are_chosen_by_workload_or_name() -> None:
    assert [case.name for case in chosen(["W4", "W2"])] == ["W2-off", "W2-on", "W4"]
    assert [case.name for case in chosen(["W2-on"])] == ["W2-on"]
    with pytest.raises(ValueError, match="no workload W5"):
        chosen(["W1", "W5"])


def test_work_of_one_request_counts_every_product_and_every_byte() -> None:
    case = Case("T", "", own=(3,), output_tokens=3)
    needed = work(TINY, case, "bfloat16")
    # Five tokens are fed: three of the prompt, two that were sampled; the third sampled one is not.
    assert needed.flops == 2 * 2 * LAYER * 5 + 2 * 40 * 3 + 4 * 2 * 2 * 2 * (1 + 2 + 3 + 4 + 5)
    # Three steps read the weights; two of them K and V of 4 and of 5 tokens, 2 x 2 layers x 1 head x 2 elements each.
    assert needed.bytes == 2 * (3 * (2 * LAYER + 40) + 8 * (4 + 5))
    assert needed.step_bytes == 2 * (2 * LAYER + 40 + 8 * 4.5)
    assert needed.step_flops == 2 * (2 * LAYER + 40) + 32 * 4.5


def test_a_shared_prefix_counts_once_where_it_is_reused() -> None:
    once = Case("T", "", own=(2, 2), output_tokens=2, shared=4)
    twice = Case("T", "", own=(2, 2), output_tokens=2, shared=4, reuse=False)
    reused, computed = work(TINY, once, "float32"), work(TINY, twice, "float32")
    assert computed.flops - reused.flops == 2 * 2 * LAYER * 4 + 32 * (1 + 2 + 3 + 4)
    assert computed.bytes - reused.bytes == 4 * 8 * 4
    assert computed.step_flops == reused.step_flops


def test_float32_reads_twice_what_bfloat16_reads() -> None:
    for case in CASES:
        assert work(TINY, case, "float32").bytes == 2 * work(TINY, case, "bfloat16").bytes


def test_the_limit_is_the_slower_of_arithmetic_and_memory() -> None:
    needed = limits.Work(flops=6e9, bytes=2e9, step_flops=1e9, step_bytes=8e9)
    rates = Limits(threads=2, matrix_gflops=2.0, layer_gflops={1: 1.0}, output_gflops=1.0, read_gbs=4.0)
    assert rates.seconds(needed) == 3.0
    assert rates.step_seconds(needed) == 2.0


def test_the_best_of_two_measurements_is_the_better_figure_each() -> None:
    first = Limits(2, 100.0, {1: 5.0, 4: 9.0}, 3.0, 30.0)
    second = Limits(2, 90.0, {1: 6.0, 4: 8.0}, 4.0, 20.0)
    assert first.best(second) == Limits(2, 100.0, {1: 6.0, 4: 9.0}, 4.0, 30.0)


def test_times_are_summed_up_over_requests() -> None:
    times = Times([[1.0, 2.0, 4.0], [2.0, 3.0]], prompt_tokens=8)
    summary = times.summary()
    assert summary["seconds"] == 4.0
    assert summary["output_tokens_per_s"] == 5 / 4
    assert summary["total_tokens_per_s"] == 13 / 4
    assert summary["first_token_mean_s"] == 1.5
    assert summary["inter_token_mean_ms"] == pytest.approx(4000 / 3)
    assert summary["inter_token_p50_ms"] == 1000
    assert summary["inter_token_p99_ms"] == 2000


def test_percentiles_are_values_that_were_seen() -> None:
    values = list(range(100, 0, -1))
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 51, 100, 100]


REFERENCE = Reference([5, 6, 7], [2.0, 0.3, 2.0])


@pytest.mark.parametrize(
    ("output", "margin", "wrong", "near"),
    [
        ([5, 6, 7], TIE, 0, 0),
        ([5, 9, 9], TIE, 1, 0),
        ([5, 9, 9], 0.5, 0, 1),
        ([9, 6, 7], 0.5, 1, 0),
        ([5, 6], 0.5, 1, 0),
        ([5, 6, 7, 8], 0.5, 1, 0),
    ],
    ids=["equal", "no tie", "within rounding", "beyond rounding", "too short", "too long"],
)
def test_the_gate_lets_through_only_what_rounding_explains(
    output: list[int], margin: float, wrong: int, near: int
) -> None:
    found, close = gate.differences("x", [REFERENCE], [output], margin)
    assert (len(found), len(close)) == (wrong, near)


def test_the_sample_is_of_requests_over_the_whole_range() -> None:
    assert {name: gate.sample(case) for name, case in BY_NAME.items() if case.reuse} == {
        "W1": [0, 8, 16, 24],
        "W2-on": [0, 8, 16, 24],
        "W3": [0, 1, 2, 3],
        "W4": [0],
    }


def test_tables_line_up() -> None:
    assert table(["", "of\nlimit"], [["W1", "9%"], ["W2-off", "100%"]]) == (
        "           of\n        limit\nW1         9%\nW2-off   100%"
    )


def test_speed_is_shown_as_medians_of_the_repeats() -> None:
    figures = {
        "seconds": 2.0,
        "total_tokens_per_s": 30.0,
        "first_token_mean_s": 0.5,
        "first_token_p99_s": 0.9,
        "inter_token_mean_ms": 30.0,
        "inter_token_p50_ms": 29.0,
        "inter_token_p99_ms": 41.0,
        "kv_blocks": 7,
        "cached_tokens": 0,
        "others_cpu": 0.02,
        "cpu_s": {"executor": 3.0},
        "resident_mb": {"executor": 900.0},
        "kind_s": {"qkv": 0.5, "attention": 1.5},
        "limit_s": 0.5,
        "limit_step_ms": 10.0,
    }
    records = [{"dtype": "float32", "case": "W1", "output_tokens_per_s": rate, **figures} for rate in (10, 90, 20)]
    shown = show(records, ["2 threads"])
    rows = [line.split() for line in shown.splitlines() if line.startswith("W1") and "MB" not in line]
    assert rows[1] == ["W1", "2.00", "25.0%", "75.0%"]
    assert rows[0] == ["W1", "20.0", "30", "25%", "0.50", "0.90", "30.0", "29.0", "41.0", "3.00", "7", "0", "2%"]
    assert "float32, medians of 3" in shown
    assert "3.00 s   900 MB" in shown
