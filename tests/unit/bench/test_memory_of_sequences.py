"""What is worked out of the memory that sequences hold: in blocks, contiguous, and with windows that adapt."""

import pytest

from bench import memory_saved
from bench.research.eviction.adaptive import Report
from protos.generation.v1 import generation_pb2 as pb
from tests.support.generation import Output


def test_waste_is_what_is_held_without_a_token() -> None:
    seen = memory_saved.Seen(
        [
            (0.0, [("r0", 0, 2)], 2),
            (0.1, [("r0", 20, 3), ("r1", 5, 1)], 3),
            (0.4, [("r0", 30, 3)], 3),
        ],
        1600,
    )
    asked = [pb.StreamGenerateRequest(request_id=f"r{n}", max_tokens=40) for n in range(2)]
    outputs = [Output([1] * 10, usage=pb.Usage(prompt_tokens=prompt)) for prompt in (20, 5)]
    kept = memory_saved.figures(seen, asked, outputs, 1000)
    rows = {row["way"]: row for row in kept["rows"]}
    # A sequence counts from its first computed token on.
    assert kept["sequences"][0] == {
        "request": "r0",
        "tokens": 30,
        "flat": 60,
        memory_saved.FLAT_MODEL: 975,
        memory_saved.FLAT_REQUEST: 35,
        memory_saved.BLOCKS: 23,
        memory_saved.NEEDED: 7,
    }
    assert rows[memory_saved.BLOCKS]["most"] == 64
    assert rows[memory_saved.BLOCKS]["wasted"] == pytest.approx(1 - 55 / 112)
    assert rows[memory_saved.FLAT_REQUEST]["waste_mean"] == (35 + 40) / 2
    assert kept["shared"] == pytest.approx(1 - 96 / 112)
    assert [point["at"] for point in kept["course"]] == [0.0, 0.4]
    runs = {memory_saved.BLOCKS: seen}
    kept["savings"] = memory_saved.savings(runs, memory_saved.flat_tokens(asked, outputs), 1000)
    assert "outputs had 25 % of their max_tokens" in memory_saved.show(kept)


def test_savings_are_of_the_sequences_that_every_run_has_seen() -> None:
    plain = memory_saved.Seen([(0.0, [("a", 30, 2), ("b", 60, 4)], 6), (0.1, [("a", 32, 4)], 4)], 1600)
    window = memory_saved.Seen([(0.0, [("a", 30, 1), ("c", 10, 1)], 2)], 1600)
    halved = memory_saved.Seen([(0.0, [("a", 30, 3), ("b", 0, 4)], 7)], 800)
    runs = {memory_saved.BLOCKS: plain, "window": window, "8 bits": halved}
    rows = {row["way"]: row for row in memory_saved.savings(runs, {"a": 64, "b": 96}, 1000)}
    # A token takes 100 bytes.
    assert {way: row["bytes"] for way, row in rows.items()} == {
        memory_saved.FLAT_MODEL: 100_000,
        memory_saved.FLAT_REQUEST: 6400,
        memory_saved.BLOCKS: 3 * 1600,
        "window": 1600,
        "8 bits": 3 * 800,
    }
    assert rows["window"]["of_contiguous"] == 0.25
    assert rows["8 bits"]["most_in_pool"] == 7 * 800
    assert rows[memory_saved.FLAT_MODEL]["most_in_pool"] is None


def test_without_a_sequence_that_has_begun_nothing_is_worked_out() -> None:
    nothing = memory_saved.Seen([(0.0, [], 0), (0.1, [("r0", 0, 2)], 2)], 1600)
    asked = [pb.StreamGenerateRequest(request_id="r0", max_tokens=40)]
    outputs = [Output([1], usage=pb.Usage(prompt_tokens=5))]
    with pytest.raises(memory_saved.NothingSeenError):
        memory_saved.figures(nothing, asked, outputs, 1000)
    with pytest.raises(memory_saved.NothingSeenError):
        memory_saved.savings({memory_saved.BLOCKS: nothing}, {"r0": 45}, 1000)


def test_the_same_requests_again_have_outputs_as_long_and_find_no_blocks() -> None:
    asked = memory_saved.requests(3)
    outputs = [Output([1] * count) for count in (7, 0, 30)]
    made = memory_saved.again(asked, outputs, "window", memory_saved.WINDOW)
    assert [one.max_tokens for one in made] == [7, 1, 30]
    assert [one.chat for one in made] == [one.chat for one in asked]
    assert all(one.ignore_eos and one.cache.salt == "window" for one in made)
    assert all(one.eviction_policy == memory_saved.WINDOW for one in made)
    assert not memory_saved.again(asked, outputs, "8 bits", None)[0].HasField("eviction_policy")


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
