"""Every benchmark is listed in one line, and its result names the versions and the machine."""

import ast
import json

import pytest

from bench import trace
from bench.__main__ import benchmarks
from bench.result import COLUMNS, Result, pretty

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
    found = json.loads(kept.read_text())
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
