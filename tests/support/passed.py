"""Tests that compute the same from the same sources: CI runs them again only when their inputs have changed.

A test that has passed is kept by its id, under a digest of everything that it depends on: sources, installed versions,
processor and compiler. Such tests wait for nothing and start no service; their result is a function of these inputs.
"""

import functools
import hashlib
import json
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from kernels.cpu_decoder import build
from tests.support.skips import PASSED_BEFORE

ROOT = Path(__file__).resolve().parents[2]
# Files and folders that every test depends on.
COMMON = ("pyproject.toml", "tests/conftest.py", "tests/stack.py", "tests/kernels", "kernels")
_OF_EXECUTOR = ("executor", "protos", "tests/support", "tests/unit/executor")
# Beginnings of node ids, and what the tests depend on beside COMMON.
GROUPS: dict[str, tuple[str, ...]] = {
    "tests/kernels/": (),
    "tests/unit/executor/test_token_eviction.py": _OF_EXECUTOR,
    "tests/unit/executor/test_exactness.py": _OF_EXECUTOR,
    "tests/unit/executor/test_cuda_decoder.py": _OF_EXECUTOR,
}
# Digests of a group that are kept: branches take turns.
KEPT = 4


def group_of(node_id: str) -> str | None:
    """The group of a test; None for a test that always runs."""
    return next((group for group in GROUPS if node_id.startswith(group)), None)


class Passed:
    """Plug-in that skips tests that have passed before, and records tests that pass. folder: of the records."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = {group: self._read(group) for group in {group_of(item.nodeid) for item in items} if group}
        for item in items:
            group = group_of(item.nodeid)
            if group and item.nodeid in known[group]:
                item.add_marker(pytest.mark.skip(reason=PASSED_BEFORE))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.passed and report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Records passed tests. Workers leave this to the process that gets their results."""
        if hasattr(session.config, "workerinput"):
            return
        for group in GROUPS:
            new = {test for test in self._passed - self._failed if test.startswith(group)}
            if new:
                self._write(group, self._read(group) | new)

    def _file(self, group: str) -> Path:
        return self._folder / f"{group.strip('/').replace('/', '.')}-{digest(group)}.json"

    def _read(self, group: str) -> set[str]:
        file = self._file(group)
        return set(json.loads(file.read_text())) if file.exists() else set()

    def _write(self, group: str, tests: set[str]) -> None:
        file = self._file(group)
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(".new")
        scratch.write_text(json.dumps(sorted(tests)))
        scratch.replace(file)
        others = sorted(
            file.parent.glob(file.name.rpartition("-")[0] + "-*.json"), key=lambda path: path.stat().st_mtime
        )
        for old in others[:-KEPT]:
            old.unlink(missing_ok=True)


@functools.cache
def digest(group: str) -> str:
    """A digest of everything that the tests of a group depend on."""
    known = hashlib.sha256()
    for path in sorted(_files((*COMMON, *GROUPS[group]))):
        known.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    for line in _surroundings():
        known.update(line.encode() + b"\0")
    return known.hexdigest()[:16]


def _files(names: tuple[str, ...]) -> Iterator[Path]:
    for name in names:
        path = ROOT / name
        found = path.rglob("*") if path.is_dir() else (path,)
        yield from (one for one in found if one.is_file() and one.suffix != ".pyc")


def _surroundings() -> Iterator[str]:
    yield sys.version
    yield from sorted(f"{one.metadata['Name']}=={one.version}" for one in distributions())
    # The processor, the compiler and its flags.
    try:
        yield build.digest()
    except build.NoCompilerError as error:
        yield str(error)
