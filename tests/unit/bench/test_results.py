"""Every benchmark is listed in one line, and its result names the versions and the machine."""

import ast
import json

import pytest

from bench import trace
from bench.__main__ import benchmarks
from bench.result import COLUMNS, Result, middle, pretty, read, spread

BENCHMARKS = benchmarks()
# "  NAME             " and the description.
WIDTH = 120 - 19


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_has_a_description_of_one_line_and_writes_a_result(name: str) -> None:
    parsed = ast.parse(BENCHMARKS[name].read_text())
    description = (ast.get_docstring(parsed) or "").splitlines()[0]
    assert 20 < len(description) <= WIDTH
    assert description.endswith(".")
    imported = [node for node in ast.walk(parsed) if isinstance(node, ast.ImportFrom) and node.module == "bench.result"]
    assert "Result" in {alias.name for node in imported for alias in node.names}


def test_a_replayed_trace_leaves_its_figures_beside_machine_commit_and_versions(tmp_path, monkeypatch) -> None:
    rows = [
        {"timestamp": 1000 * number, "input_length": 600, "output_length": 3, "hash_ids": [0, number]}
        for number in range(1, 4)
    ]
    recorded, kept = tmp_path / "trace.jsonl", tmp_path / "kept" / "trace.json"
    recorded.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("TRACE", str(recorded))
    monkeypatch.setattr("sys.argv", ["bench trace", "--block-size", "16", "--json", str(kept)])
    assert trace.main() == 0
    found = read(kept)
    assert set(found) >= vars(Result("", {})).keys() - {"figures"}
    assert found["settings"] == {"block_size": 16, "ghosts": None, "requests": None, "trace": "trace.jsonl"}
    assert {one["hit_tokens"] for one in found["sizes"]["replays"]} == {2 * 512}
    assert {one["leases"]["granted"] > 0 for one in found["agents"]["replays"]} == {True, False}


def test_a_result_is_written_in_few_lines_without_loss() -> None:
    row = {"name": "a, b: [c", "values": [number / 7 for number in range(30)], "of": None, "is": True}
    values = {"rows": [row, row], 3: {}, "empty": [], "deep": {"one": {"two": [[1, 2], [3, 4]] * 30}}}
    written = pretty(values)
    assert json.loads(written) == json.loads(json.dumps(values))
    lines = written.splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert len(lines) < 60
    assert pretty([1, {"a": 2}]) == '[1, {"a": 2}]'


def test_a_written_result_has_five_digits_and_names_the_columns_of_rows_once(tmp_path) -> None:
    rows = [{"case": "one", "seconds": 2 / 3, "count": 1234567}, {"case": "two", "spread": {"median": 1e-7 / 3}}]
    written = Result("x", {"rows": rows, "one": rows[:1]}).write(tmp_path / "x.json")
    kept = json.loads(written.read_text())
    assert kept["rows"] == {
        "columns": ["case", "seconds", "count", "spread"],
        "rows": [["one", 0.66666, 1234567, None], ["two", None, None, {"median": 3.3333e-08}]],
    }
    assert kept["one"] == [{"case": "one", "seconds": 0.66666, "count": 1234567}]
    assert read(written)["rows"] == [
        {"case": "one", "seconds": 0.66666, "count": 1234567},
        {"case": "two", "spread": {"median": 3.3333e-08}},
    ]


@pytest.mark.parametrize(
    ("measured", "kept"), [(0.1, 0.1), (0.1 + 0.2, 0.3), (1.04349, 1.0434), (1.04351, 1.0436), (-2.50001, -2.5001)]
)
def test_a_kept_number_rounds_as_the_measured_one(tmp_path, measured: float, kept: float) -> None:
    written = Result("x", {"one": measured}).write(tmp_path / "x.json")
    assert read(written)["one"] == kept
    assert f"{kept:.3f}" == f"{measured:.3f}"


def test_repeats_are_summed_up_by_their_middle_and_their_spread() -> None:
    repeats = [{"engine": "a", "seconds": second, "by": {"x": [second, 1]}} for second in (3.0, 1.0, 2.0)]
    assert middle(repeats) == {"engine": "a", "seconds": 2.0, "by": {"x": [2.0, 1]}}
    assert spread([3.0, 1.0]) == {"median": 2.0, "lowest": 1.0, "highest": 3.0, "repeats": 2}
