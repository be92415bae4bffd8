"""The workloads match the table, the limits are computed correctly, the gate is strict and tables line up."""

import pytest

from bench import gate, limits
from bench.limits import Limits, ModelShape, work
from bench.runs import Times
from bench.workloads import CASES, Case, Corpus
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
def test_the_gate_passes_only_differences_within_rounding(
    output: list[int], margin: float, wrong: int, near: int
) -> None:
    found, close = gate.differences("x", [REFERENCE], [output], margin)
    assert (len(found), len(close)) == (wrong, near)
