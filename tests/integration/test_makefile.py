"""The Makefile as people use it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.stack import ROOT
from tests.support.patience import patience


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment whose interpreter only prints its arguments."""
    interpreter = tmp_path / "bin/python"
    interpreter.parent.mkdir()
    interpreter.write_text('#!/bin/sh\necho "$@"\ncat\n')
    interpreter.chmod(0o755)
    return tmp_path


# What a make above this one may have been given, which is not this one's concern.
INHERITED = {
    *("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS"),
    *("ARGS", "PROMPT", "PYTHON", "SYSTEM_TORCH", "TORCH_INDEX_URL", "VENV"),
    *("XDG_CACHE_HOME", "XDG_STATE_HOME", "KVKEEP_EXECUTOR_CACHE_DIR"),
}


def make(*arguments: str, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in INHERITED}
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )


def test_help_comes_first_and_names_every_target() -> None:
    shown = make().stdout
    assert shown == make("help").stdout
    targets = "setup run-stack generate test test-all coverage chaos lint fix types proto verify-protos"
    targets += " bench bench-NAME exactness eval-eviction peers pictures"
    for target in (*targets.split(), "clean"):
        assert f"  {target} " in shown


@pytest.mark.parametrize("prompt", ["plain", 'it\'s "this" $HOME $$ $(shell echo x) `id` # \\ %s', "two\nlines"])
@pytest.mark.parametrize("origin", ["argument", "environment"])
def test_prompt_arrives_as_it_was_given(venv: Path, prompt: str, origin: str) -> None:
    if origin == "argument":
        done = make("generate", f"VENV={venv}", f"PROMPT={prompt}")
    else:
        done = make("generate", f"VENV={venv}", PROMPT=prompt)
    assert done.stdout == f"-m scheduler.generate -\n{prompt}", done.stderr


def test_generate_takes_an_address(venv: Path) -> None:
    done = make("generate", f"VENV={venv}", "PROMPT=x", "ARGS=--address unix:/s")
    assert done.stdout == "-m scheduler.generate --address unix:/s -\nx", done.stderr


def test_generate_without_a_prompt_says_how(venv: Path) -> None:
    done = make("generate", f"VENV={venv}")
    assert done.returncode != 0
    assert 'PROMPT="What is the capital of France?"' in done.stderr


def test_missing_and_old_pythons_are_refused_with_a_sentence(tmp_path: Path) -> None:
    assert "there is no python9.9" in make("setup", "PYTHON=python9.9").stderr
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.8.18\nexit 1\n')
    old.chmod(0o755)
    done = make("setup", f"PYTHON={old}")
    assert done.returncode != 0
    assert "Python 3.11 or newer" in done.stderr
    assert "Python 3.8.18" in done.stderr


def test_clean_says_what_is_left_and_how_to_uninstall(tmp_path: Path) -> None:
    home, cache, state = (tmp_path / name for name in ("home", "home/.cache/kvkeep", "a state"))
    checkout = tmp_path / "checkout"
    (checkout / ".venv/bin").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", checkout)
    variables = {
        "HOME": str(home),
        "KVKEEP_STATE_DIR": str(state),
        "KVKEEP_EXECUTOR_HOST_CACHE_DIR": str(tmp_path / "x"),
    }
    nothing = make("clean", folder=checkout, **variables)
    assert (nothing.stdout, nothing.stderr) == ("", "")
    assert [path.name for path in checkout.iterdir()] == ["Makefile"]
    for folder in (cache, state):
        folder.mkdir(parents=True)
    said = make("clean", folder=checkout, **variables).stdout
    assert f"  rm -rf {cache} {tmp_path}/a\\ state\n" in said
    assert cache.exists()
    assert state.exists()
