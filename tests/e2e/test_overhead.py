"""The benchmark of the separate process: both wirings serve, with the same work and no model."""

import subprocess
import sys
from pathlib import Path

from bench.result import read
from tests.support.patience import patience

# So many tokens that the second sequence begins long before the first one ends.
SEQUENCES, TOKENS = 2, 256


def test_both_wirings_do_the_same_work(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    arguments = ["--sequences", str(SEQUENCES), "--step-ms", "2", "--repeats", "1"]
    command = [sys.executable, "-m", "bench.overhead", *arguments, "--output-tokens", str(TOKENS)]
    done = subprocess.run(
        [*command, "--json", str(results)], capture_output=True, text=True, timeout=patience(60), check=False
    )
    assert not done.returncode, done.stderr
    own, inside = read(results)["runs"]
    assert "cachemgr" in own["processor"]
    assert "cachemgr" not in inside["processor"]
    for one in (own, inside):
        # No token is sampled twice, and no step is empty. There are more steps than TOKENS if a sequence came later.
        assert one["sampled"] == SEQUENCES * TOKENS
        assert TOKENS <= one["steps"] <= one["sampled"]
        assert one["running"] == SEQUENCES
    assert "steps of 2 ms" in done.stdout
