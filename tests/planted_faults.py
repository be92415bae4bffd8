"""Plants the faults of planted_faults.toml one at a time in a copy of the checkout: which tests catch each?

python -m tests.planted_faults [WORD ...] plants those whose description has all words. A fault is caught when a test of
its service or kernel fails. The exit status is 1 when one is missed, or no longer applies.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tests.stack import ROOT

# The tests of each service, those that fail soonest first.
TESTS = {
    "cachemgr": ("tests/conformance", "tests/unit/cachemgr", "tests/unit/cachemgr_service"),
    "scheduler": ("tests/unit/scheduler", "tests/unit/router"),
}
# Further tests of a kernel than those in its own file.
FURTHER = {"paged_attention": ("tests/kernels/test_shares.py",)}
_LEFT_OUT = shutil.ignore_patterns(".*", "build", "__pycache__", "*.egg-info")


def plant(fault: dict[str, str], checkout: Path) -> str:
    """Plants a fault and takes it back; returns the test that caught it, or why none did."""
    file = checkout / fault["file"]
    source = file.read_text()
    if source.count(fault["old"]) != 1:
        return "NO LONGER APPLIES"
    file.write_text(source.replace(fault["old"], fault["new"]))
    try:
        for tests in tests_of(fault["file"]):
            caught = failing_test(tests, checkout)
            if caught:
                return caught
    finally:
        file.write_text(source)
    return "MISSED"


def tests_of(file: str) -> tuple[str, ...]:
    """The tests of a changed file: folders, or files for a kernel."""
    part, name, *_ = Path(file).parts
    return (f"tests/kernels/test_{name}.py", *FURTHER.get(name, ())) if part == "kernels" else TESTS[part]


def failing_test(tests: str, checkout: Path) -> str:
    """The first failing test of a folder or file; empty when all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "auto", "-m", "not model", tests]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    run = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if not run.returncode:
        return ""
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].partition(" - ")[0] if lines else f"pytest ended with status {run.returncode}"


def main() -> None:
    faults = tomllib.loads((ROOT / "tests/planted_faults.toml").read_text())["fault"]
    chosen = [fault for fault in faults if all(word in fault["what"] for word in sys.argv[1:])]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder, "checkout")
        shutil.copytree(ROOT, checkout, ignore=_LEFT_OUT)
        for fault in chosen:
            found.append(plant(fault, checkout))
            print(f"{fault['what']}: {found[-1]}", flush=True)
    missed = sum(not result.startswith(("FAILED", "ERROR", "pytest")) for result in found)
    print(f"{len(found) - missed} of {len(found)} faults are caught")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
