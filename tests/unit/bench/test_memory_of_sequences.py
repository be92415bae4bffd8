"""What is worked out of the memory that sequences hold: in blocks, contiguous, and with windows that adapt."""

import pytest

from bench import paging
from bench.eviction.adaptive import Report
from protos.generation.v1 import generation_pb2 as pb
from tests.support.generation import Output


def test_waste_is_what_is_held_without_a_token() -> None:
    seen = paging.Seen(
        [
            (0.0, [("r0", 0, 2)], 2),
            (0.1, [("r0", 20, 3), ("r1", 5, 1)], 3),
            (0.4, [("r0", 30, 3)], 3),
        ]
    )
    asked = [pb.StreamGenerateRequest(request_id=f"r{n}", max_tokens=40) for n in range(2)]
    outputs = [Output([1] * 10, usage=pb.Usage(prompt_tokens=prompt)) for prompt in (20, 5)]
    kept = paging.figures(seen, asked, outputs, 1000)
    rows = {row["way"]: row for row in kept["rows"]}
    # A sequence counts from its first computed token on.
    assert kept["sequences"]["r0"] == {
        "tokens": 30,
        "flat": 60,
        paging.FLAT_MODEL: 975,
        paging.FLAT_REQUEST: 35,
        paging.BLOCKS: 23,
        paging.NEEDED: 7,
    }
    assert rows[paging.BLOCKS]["most"] == 64
    assert rows[paging.BLOCKS]["wasted"] == pytest.approx(1 - 55 / 112)
    assert rows[paging.FLAT_REQUEST]["waste_mean"] == (35 + 40) / 2
    assert kept["shared"] == pytest.approx(1 - 96 / 112)
    assert [point["at"] for point in kept["course"]] == [0.0, 0.4]
    assert "outputs had 25 % of their max_tokens" in paging.show(kept)


def test_an_adaptive_window_is_compared_with_fixed_ones_of_as_much_memory() -> None:
    def records(name: str, slots: int, nll: float, right: bool) -> list[dict[str, object]]:
        one = {"policy": name, "slots": slots}
        return [one | {"kind": "near", "nll": nll}, one | {"kind": "far", "right": right}]

    report = Report(
        [
            *records("full cache", 1000, 1.0, True),
            *records("adaptive, 0.97", 150, 1.1, True),
            *records("fixed, 100", 100, 1.4, False),
            *records("fixed, 200", 200, 1.2, True),
        ]
    )
    assert report.found("adaptive, 0.97") == 1
    assert report.at_equal_memory(150, "mixed", "found") == 0.5
    assert report.at_equal_memory(50, "mixed", "found") == 0
    assert report.at_equal_memory(500, "mixed", "found") == 1
    low, high = report.perplexity("fixed, 200"), report.perplexity("fixed, 100")
    assert report.at_equal_memory(175, "near", "perplexity") == pytest.approx(0.25 * high + 0.75 * low)
    assert "adaptive, 0.97, mixed" in report.text()
