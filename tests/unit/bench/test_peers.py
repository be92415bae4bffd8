"""Peers are driven, named with the reason when they cannot be, and compared as the table says."""

import sys
from pathlib import Path

import pytest

from bench.peers.__main__ import report
from bench.peers.processes import PeerError, PeerProcess
from bench.peers.set_up import ADAPTERS, Peer
from bench.workloads import Case

CASE = Case("T", "", own=(2, 3), output_tokens=2)
PROMPTS = [[5, 6], [7, 8, 9]]
ADAPTER = f"""
import sys
sys.path.insert(0, {str(ADAPTERS)!r})
import jobs

answers = jobs.answers()
model, dtype, threads, cache = jobs.arguments()
print("an engine's chatter")

def run(prompts, count, reuse):
    BODY

jobs.serve(f"engine of {{model}} in {{dtype}}", run, answers)
"""


def peer(tmp_path: Path, body: str) -> PeerProcess:
    script = tmp_path / "adapter.py"
    script.write_text(ADAPTER.replace("BODY", body))
    return PeerProcess(Peer("fake", (), str(script)), Path(sys.executable), Path("m"), "float32", tmp_path / "cache")


def test_a_peer_gets_the_prompts_and_gives_times_and_tokens(tmp_path: Path) -> None:
    body = "return [[0.5, 1.0]] * len(prompts), [[sum(prompt), int(reuse)] for prompt in prompts]"
    with peer(tmp_path, body) as process:
        assert process.version == "engine of m in float32"
        for _ in range(2):
            done = process.run(CASE, PROMPTS, 2)
            assert done.outputs == [[11, 1], [24, 1]]
            assert done.times.output_rate == 4.0
            assert done.times.prompt_tokens == 5


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return [[0.5]] * 2, [[1]] * 2", r"gave \[1\] tokens for 2"),
        ("return [[0.5, 1.0]], [[1, 2]]", "gave"),
        ("raise MemoryError('too small')", "MemoryError: too small"),
        ("sys.exit()", "it ended"),
    ],
    ids=["too few tokens", "a request lost", "an exception", "a silent end"],
)
def test_a_peer_that_fails_says_why(tmp_path: Path, body: str, reason: str) -> None:
    with peer(tmp_path, body) as process, pytest.raises(PeerError, match=reason):
        process.run(CASE, PROMPTS, 2)


def record(engine: str, case: str, figure: float, repeat: int = 1) -> dict[str, object]:
    return {
        "dtype": "float32",
        "engine": engine,
        "case": case,
        "repeat": repeat,
        "output_tokens_per_s": figure,
        "inter_token_mean_ms": figure,
        "seconds": 200 / figure,
        "others_cpu": figure / 1000,
        "limit_s": 1.0,
        "limit_step_ms": 5.0,
    }


def test_ratios_are_by_the_best_peer_and_larger_is_better() -> None:
    records = [
        *(record("kvkeep", "W1", figure, repeat) for repeat, figure in enumerate((100, 1, 120), 1)),
        record("slow", "W1", 25),
        record("fast", "W1", 50),
        record("kvkeep", "W4", 10),
        record("slow", "W4", 40),
        record("fast", "W4", 15),
    ]
    shown = report(records, {"absent float32": "not installed"})
    rows = {cells[1]: cells for cells in (line.split() for line in shown.splitlines()) if "float32" in cells[:1]}
    assert rows["W1"] == ["float32", "W1", "tokens/s", "100.0", "25.0", "50.0", "fast", "2.00", "200.0", "50%"]
    assert rows["W4"] == ["float32", "W4", "ms", "per", "token", "10.0", "40.0", "15.0", "fast", "1.50", "5.0", "50%"]
    assert "other processes took 3% of the cores during a run, 12% at most" in shown
    assert "not measured: absent float32: not installed" in shown
