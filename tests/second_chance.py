"""Runs tests, and each that failed once more, alone: `python -m tests.second_chance ARGUMENTS OF PYTEST`.

For tests that start processes: a machine that is busy with others may starve one of them. A test that passes alone is
FLAKY. It is printed, and a line about it is added to build/gate/flaky.jsonl. The run fails when a test fails twice, and
when more than MOST_FLAKY tests are flaky: then the fault is not the machine's.

Tests of files that differ from those of the branch BASE run twice more, and must pass each time: one that fails now and
then must not get in.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

KEPT = Path("build/gate/flaky.jsonl")
MOST_FLAKY = 2
# The branch of landed commits, also in a clone of a checkout that is on a different branch.
BASE = "origin/main"
RUNS_OF_CHANGED = 3
# A fault of everything needs no second look at each test.
MOST_FAILED = 8


class Failures:
    """Plug-in that collects the ids of tests that failed, also in a phase before or after their call."""

    def __init__(self) -> None:
        # In the order in which they failed, each once.
        self.tests: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tests[report.nodeid] = None


def main(arguments: Sequence[str]) -> int:
    """The exit status: that of pytest, or 0 when all tests that failed are flaky, and few."""
    failures = Failures()
    status = int(pytest.main([*arguments], plugins=[failures]))
    if not status and (changed := changed_files()):
        status = _run_again(arguments, changed)
    if status != pytest.ExitCode.TESTS_FAILED or not failures.tests:
        return status
    if len(failures.tests) > MOST_FAILED:
        print(f"{len(failures.tests)} tests failed: too many for a second chance")
        return status
    flaky = [test for test in failures.tests if _passes_alone(test)]
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    with KEPT.open("a") as file:
        for test in flaky:
            print(f"FLAKY {test} - failed beside others, passed alone")
            file.write(json.dumps({"test": test, "time": time.strftime("%FT%TZ", time.gmtime())}) + "\n")
    again = [test for test in failures.tests if test not in flaky]
    for test in again:
        print(f"FAILED {test} - twice, the second time alone")
    if len(flaky) > MOST_FLAKY:
        print(f"FAILED {len(flaky)} tests are flaky, more than {MOST_FLAKY}")
        return status
    return status if again else 0


def changed_files() -> list[str]:
    """Files of tests that differ from those of BASE; none if there is no such branch."""
    command = ["git", "diff", "--name-only", "--diff-filter=d", f"{BASE}...HEAD", "--", "*/test_*.py"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else []


def _run_again(arguments: Sequence[str], files: Sequence[str]) -> int:
    """The status of the first run of these files that fails; 0 when all pass, or none of their tests is meant."""
    for number in range(2, RUNS_OF_CHANGED + 1):
        print(f"\n== run {number} of {RUNS_OF_CHANGED} of what is new or changed: {' '.join(files)}", flush=True)
        done = subprocess.run([sys.executable, "-m", "pytest", *arguments, *files], check=False)
        if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return done.returncode
    return 0


def _passes_alone(test: str) -> bool:
    print(f"\n== again, alone: {test}", flush=True)
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", test]
    return subprocess.run(command, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
