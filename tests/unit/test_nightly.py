"""What the nightly run makes of the output of its programs."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import nightly
from tests.chaos.report import Report
from tests.nightly import Night, Part
from tests.stack import ROOT
from tests.support.patience import patience

PYTEST = """
tests/unit/test_a.py ..F
FAILED tests/unit/test_a.py::test_it[1] - assert 1 == 2
ERROR tests/unit/test_b.py::test_that
FAILED tests/unit/test_a.py::test_it[1] - twice, the second time alone
FAILED 3 tests are flaky, more than 2
1 failed
"""


def test_tests_that_failed_are_named_once() -> None:
    assert nightly.failed_tests(PYTEST) == ["tests/unit/test_a.py::test_it[1]", "tests/unit/test_b.py::test_that"]


def test_times_that_break_a_promise_are_compared_between_runs() -> None:
    report = Report("mixed", seed=1)
    report.note_time("cachemgr, killed at 12.5 s: seconds until an admission", 3.0, 2.0)
    report.note_time("cachemgr, killed at 31.1 s: seconds until an admission", 5.0, 2.0)
    report.note_time("time to the first token, cached to cold", 0.4, 0.5)
    assert nightly.slow_times(report.text()) == {"cachemgr: seconds until an admission": 2.5}


def test_a_part_runs_on_without_ci_and_keeps_what_it_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    night = Night(tmp_path, share=1.0)
    code = "import os; print(os.environ.get('CI'), os.environ['MINE']); raise SystemExit(3)"
    assert night.run("some", [sys.executable, "-c", code], MINE="yes") == (3, "None yes\n")
    assert (tmp_path / "some.log").read_text() == "None yes\n"


def test_random_lives_have_new_seeds_that_are_printed(tmp_path: Path) -> None:
    night = Night(tmp_path, share=1e-6)
    part = nightly.lives(night)
    assert part.result == "failed"
    assert "--seconds must be greater than 0" in part.notes[0]
    night.share = 0.001
    part = nightly.lives(night)
    assert (part.result, part.notes[-1].endswith("0 failed")) == ("passed", True)
    assert f"lives from seed {night.seed} on" in (tmp_path / "lives.log").read_text()


def test_the_page_says_what_failed() -> None:
    parts = [Part("random lives", seconds=60.0), Part("chaos", status=1, seconds=90.0, notes=["seed 7: FAULT lost"])]
    text = nightly.page(parts)
    assert "| random lives | passed | 1.0 |" in text
    assert "| chaos | failed | 1.5 |" in text
    assert text.endswith("## chaos\n\n- seed 7: FAULT lost\n")


def test_the_options_are_explained_and_a_wrong_one_is_named() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.nightly", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(60), check=False)

    assert "--only PART" in run("--help").stdout
    wrong = run("--minutes", "0")
    assert (wrong.returncode, wrong.stderr.splitlines()[-1]) == (
        2,
        "make nightly: error: --minutes must be greater than 0",
    )
