"""A test that starts processes may fail once: then it runs again alone, and is said to be flaky."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.patience import patience

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pathlib

import pytest

def fails(times, name):
    marks = pathlib.Path(name)
    marks.write_text(marks.read_text() + "x" if marks.exists() else "x")
    assert len(marks.read_text()) > times

@pytest.mark.parametrize("number", range({flaky}))
def test_flaky(number):
    fails(1, f"flaky-{{number}}")

@pytest.mark.parametrize("number", range({broken}))
def test_broken(number):
    fails(2, f"broken-{{number}}")

@pytest.fixture
def late():
    yield
    fails(1, "late")

@pytest.mark.skipif({late} == 0, reason="not asked for")
def test_late(late):
    pass

def test_right():
    pass
"""


def run(
    folder: Path, *, flaky: int = 0, broken: int = 0, late: int = 0, files: Sequence[str] = ("test_some.py",)
) -> tuple[int, str, list[str]]:
    """The status, the output, and the tests that are kept as flaky."""
    (folder / "test_some.py").write_text(TESTS.format(flaky=flaky, broken=broken, late=late))
    done = subprocess.run(
        [sys.executable, "-m", "tests.second_chance", "-q", *files],
        cwd=folder,
        # Other plug-ins take most of the time.
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patience(60),
        check=False,
    )
    kept = folder / "build/gate/flaky.jsonl"
    lines = kept.read_text().splitlines() if kept.exists() else []
    return done.returncode, done.stdout, [json.loads(line)["test"] for line in lines]


def test_a_run_without_failures_keeps_nothing(tmp_path: Path) -> None:
    status, _, kept = run(tmp_path)
    assert (status, kept) == (0, [])


@pytest.mark.parametrize("late", [0, 1], ids=["in its call", "after its call"])
def test_what_passes_alone_is_flaky_and_the_run_passes(tmp_path: Path, late: int) -> None:
    status, said, kept = run(tmp_path, flaky=1 - late, late=late)
    test = "test_some.py::test_late" if late else "test_some.py::test_flaky[0]"
    assert (status, kept) == (0, [test]), said
    assert f"FLAKY {test}" in said


def test_what_fails_twice_fails_the_run(tmp_path: Path) -> None:
    status, said, kept = run(tmp_path, flaky=1, broken=1)
    assert (status, kept) == (1, ["test_some.py::test_flaky[0]"])
    assert "FAILED test_some.py::test_broken[0] - twice" in said


def test_many_flaky_tests_fail_the_run(tmp_path: Path) -> None:
    status, said, kept = run(tmp_path, flaky=3)
    assert (status, len(kept)) == (1, 3)
    assert "3 tests are flaky" in said


def test_what_is_new_or_changed_runs_three_times_and_must_pass_each_time(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    run(tmp_path)
    git("init", "-q")
    git("add", "test_some.py")
    git("commit", "-qm", "first")
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    _, said, _ = run(tmp_path)
    assert "run 2 of 3" not in said
    (tmp_path / "tests").mkdir()
    new = tmp_path / "tests/test_new.py"
    for most, expected in ((3, 0), (2, 1)):
        new.write_text(
            f"import pathlib\n\ndef test_new():\n    runs = pathlib.Path('runs')\n"
            f"    runs.write_text(runs.read_text() + 'x' if runs.exists() else 'x')\n"
            f"    assert len(runs.read_text()) <= {most}\n"
        )
        git("add", "tests")
        git("commit", "-qm", "new")
        (tmp_path / "runs").unlink(missing_ok=True)
        status, said, _ = run(tmp_path, files=["test_some.py", "tests/test_new.py"])
        assert status == expected, said
        assert "run 3 of 3 of what is new or changed: tests/test_new.py" in said


def test_when_many_fail_there_is_no_second_chance(tmp_path: Path) -> None:
    status, said, kept = run(tmp_path, flaky=9)
    assert (status, kept) == (1, [])
    assert "too many" in said
