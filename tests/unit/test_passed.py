"""Tests that passed with the same sources are not run again in CI."""

from pathlib import Path

import pytest

from tests.support import passed

pytest_plugins = ["pytester"]

CONFTEST = """
import os, pathlib
from tests.support import passed

passed.GROUPS = {{"test_some.py": ()}}
passed.digest = lambda group: pathlib.Path({folder!r}, "digest").read_text()

def pytest_configure(config):
    config.pluginmanager.register(passed.Passed(pathlib.Path({folder!r}, "kept")))
"""
TESTS = """
import pathlib
import pytest

@pytest.mark.parametrize("number", range(3))
def test_right(number):
    pass

def test_wrong():
    assert pathlib.Path({folder!r}, "mended").exists()

@pytest.fixture
def torn():
    yield
    assert pathlib.Path({folder!r}, "mended").exists()

def test_torn_down(torn):
    pass
"""


@pytest.fixture
def folder(pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(passed, "GROUPS", passed.GROUPS)
    monkeypatch.setattr(passed, "digest", passed.digest)
    pytester.makeconftest(CONFTEST.format(folder=str(tmp_path)))
    pytester.makepyfile(test_some=TESTS.format(folder=str(tmp_path)), test_other="def test_always(): pass")
    (tmp_path / "digest").write_text("one")
    return tmp_path


def run(pytester: pytest.Pytester, *arguments: str) -> dict[str, int]:
    outcomes = pytester.runpytest("-p", "no:cacheprovider", "-p", "no:asyncio", *arguments).parseoutcomes()
    # Plug-ins are loaded already: that they cannot be rewritten is of no interest.
    outcomes.pop("warnings", None)
    return outcomes


def test_only_what_passed_is_left_out(pytester: pytest.Pytester, folder: Path) -> None:
    assert run(pytester) == {"passed": 5, "failed": 1, "errors": 1}
    assert run(pytester) == {"passed": 2, "failed": 1, "errors": 1, "skipped": 3}
    (folder / "mended").touch()
    assert run(pytester) == {"passed": 3, "skipped": 3}
    assert run(pytester) == {"passed": 1, "skipped": 5}


def test_a_changed_source_runs_all_again_and_the_former_is_known_too(pytester: pytest.Pytester, folder: Path) -> None:
    (folder / "mended").touch()
    run(pytester)
    (folder / "digest").write_text("two")
    assert run(pytester, "-k", "right") == {"passed": 3, "deselected": 3}
    assert run(pytester) == {"passed": 3, "skipped": 3}
    (folder / "digest").write_text("one")
    assert run(pytester) == {"passed": 1, "skipped": 5}


def test_few_digests_are_kept(pytester: pytest.Pytester, folder: Path) -> None:
    (folder / "mended").touch()
    for number in range(passed.KEPT + 2):
        (folder / "digest").write_text(str(number))
        run(pytester)
    assert len(list((folder / "kept").iterdir())) == passed.KEPT


def test_each_group_has_tests_and_a_digest_that_a_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group in passed.GROUPS:
        assert (passed.ROOT / group).exists()
    names = {path.relative_to(passed.ROOT).as_posix() for path in passed._files(passed.COMMON)}
    assert {"kernels/cpu_decoder/attention.h", "kernels/store_kv/kernel.py", "tests/kernels/test_decoder.py"} <= names
    changed = tmp_path / "kernel.py"
    monkeypatch.setattr(passed, "ROOT", tmp_path)
    monkeypatch.setattr(passed, "COMMON", ("kernel.py",))
    digests = set()
    for text in ("a", "b", "a"):
        changed.write_text(text)
        digests.add(passed.digest.__wrapped__("tests/kernels/"))
    assert len(digests) == 2


def test_other_flags_of_the_compiler_run_all_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXXFLAGS", raising=False)
    plain = passed.digest.__wrapped__("tests/kernels/")
    monkeypatch.setenv("CXXFLAGS", "-march=x86-64-v3")
    assert passed.digest.__wrapped__("tests/kernels/") != plain
