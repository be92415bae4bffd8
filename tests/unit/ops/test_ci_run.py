"""`.ci/run` runs every part, also after one that failed, and its last lines name all that is red."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.stack import ROOT
from tests.support.patience import patience

PARTS = ("tools", "setup", "lint", "types", "verify-protos", "test-core", "test-stacks", "fuzz-manager")
PROGRAMS = ("redis-server", "prometheus", "systemd-analyze", "chromium", "g++")
RED = {
    "setup": "no space left on device",
    "lint": "kvctl/app.py:3:1: F401 unused import",
    "types": "kvctl/app.py:9: error: Incompatible return value",
    "verify-protos": "the stubs of kvcache.proto are old: make proto",
    "test-core": "FAILED tests/unit/test_a.py::test_one - assert 1 == 2\\nERROR tests/unit/test_b.py",
    "test-stacks": "FLAKY tests/e2e/test_c.py::test_slow - failed once\\nFAILED tests/e2e/test_d.py::test_two - twice",
    "fuzz-manager": "again: python -m tests.fuzz.cache_manager --first 17 --lives 1",
}


def run(folder: Path, red: Mapping[str, str]) -> tuple[int, str]:
    """The status and the output of `.ci/run` in a project whose parts fail in this way."""
    (folder / ".ci").mkdir(exist_ok=True)
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    recipes = (
        f"{part}:\n\t@printf 'begin of {part}\\n{red[part]}\\n'; exit 1\n"
        if part in red
        else f"{part}:\n\t@echo {part} is well\n"
        for part in PARTS
    )
    (folder / "Makefile").write_text(f".PHONY: {' '.join(PARTS)}\n" + "".join(recipes))
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name in PROGRAMS:
        (programs / name).write_text("#!/bin/sh\necho 1.0\n")
        (programs / name).chmod(0o755)
    done = subprocess.run(
        ["bash", ".ci/run"],
        cwd=folder,
        env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patience(30),
        check=False,
    )
    return done.returncode, done.stdout


def test_all_parts_run_and_the_machine_is_named_first_and_last(tmp_path: Path) -> None:
    status, said = run(tmp_path, {})
    assert status == 0, said
    assert [f"{part} is well" in said for part in PARTS] == [True] * len(PARTS)
    assert said.count("== machine") == said.count("instructions") == 2
    assert said.splitlines()[-1].startswith("all parts passed in ")


@pytest.mark.parametrize("part", RED)
def test_a_red_part_is_named_with_what_is_red_and_the_others_run(tmp_path: Path, part: str) -> None:
    status, said = run(tmp_path, {part: RED[part]})
    assert status == 1
    assert [f"{other} is well" in said for other in PARTS if other != part] == [True] * (len(PARTS) - 1)
    end = said[said.rindex("== machine") :]
    assert f"red in {part}:" in end
    for line in RED[part].split("\\n"):
        assert line in end
    assert end.splitlines()[-1].startswith(f"failed in: {part}, after ")


def test_everything_red_is_in_the_last_lines(tmp_path: Path) -> None:
    status, said = run(tmp_path, RED)
    assert status == 1
    end = said[said.rindex("== machine") :]
    for part, lines in RED.items():
        assert f"red in {part}:" in end
        assert all(line in end for line in lines.split("\\n"))
    failed = end.splitlines()[-1].removeprefix("failed in: ").partition(", after")[0]
    assert all(part in failed for part in RED)


def test_without_an_environment_nothing_else_runs(tmp_path: Path) -> None:
    status, said = run(tmp_path, {"tools": "no network"})
    assert status == 1
    assert "red in tools:" in said
    assert "lint is well" not in said
