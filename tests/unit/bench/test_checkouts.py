"""Figures of two checkouts in turns."""

from bench.checkouts import compared
from bench.runs import Run, Times, Usage
from bench.workloads import CASES


def _run(seconds: float, output: list[int]) -> Run:
    """One request: its first token after a tenth of the time, its second token at the end."""
    return Run(Times([[seconds / 10, seconds]], prompt_tokens=4), Usage(cpu_seconds={"executor": 1.0}), [output], 0)


def test_a_ratio_is_of_the_two_runs_of_a_repeat() -> None:
    # The machine becomes three times slower; this checkout takes half as long as the other in each repeat.
    pairs = [[_run(1, [1, 2]), _run(2, [1, 2])], [_run(3, [1, 2]), _run(6, [1, 3])], [_run(3, [1]), _run(6, [1])]]
    figures = compared(CASES[0], pairs)
    assert figures["ratio"]["output_tokens_per_s"] == [2, 2, 2]
    assert figures["ratio"]["inter_token_mean_ms"] == [0.5, 0.5, 0.5]
    assert (figures["this"]["first_token_mean_s"], figures["other"]["first_token_mean_s"]) == (0.3, 0.6)
    assert figures["different_outputs"] == 1
    assert figures["this"]["cpu_s"] == {"executor": 1.0}


def test_one_repeat_has_its_ratio_as_every_quartile() -> None:
    figures = compared(CASES[0], [[_run(1, [1]), _run(4, [1])]])
    assert figures["ratio"]["output_tokens_per_s"] == [4, 4, 4]
