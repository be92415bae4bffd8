"""A full or read-only folder is named in one line, with its setting and a remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack import ROOT
from tests.support.patience import patience
from tests.support.ports import free_address
from tests.support.storage import KINDS, broken

ADVICE = {"full": "free some room there", "read-only": "make it writable"}
# The program, the setting of the folder, and the beginning of the line.
CASES = {
    "the stack": (["ops/run_stack.py"], "KVKEEP_STATE_DIR", "run-stack: "),
    "the executor": (["-m", "executor"], "KVKEEP_EXECUTOR_CACHE_DIR", "executor: "),
}


def run(line: list[str], **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")}
    environment |= {f"KVKEEP_{name}_ADDRESS": free_address() for name in ("CACHEMGR", "CACHEMGR_ADMIN", "EXECUTOR")}
    environment |= {"PYTHONPATH": str(ROOT), "KVKEEP_LOG_LEVEL": "error"} | settings
    return subprocess.run(
        [sys.executable, *line],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_an_unwritable_folder_is_named(case: str, kind: str, tmp_path: Path) -> None:
    line, setting, begin = CASES[case]
    with broken(kind, tmp_path / "broken") as folder:
        done = run(line, **{setting: str(folder / "inside")})
    assert done.returncode == 1
    [said] = done.stderr.splitlines()
    assert said.startswith(begin)
    for part in (str(folder), KINDS[kind], ADVICE[kind], setting):
        assert part in said


def test_an_operation_log_in_a_read_only_folder_is_named(tmp_path: Path) -> None:
    with broken("read-only", tmp_path / "broken") as folder:
        done = run(
            ["-m", "cachemgr"],
            KVKEEP_STATE_DIR=str(tmp_path / "state"),
            KVKEEP_CACHEMGR_OPERATION_LOG=str(folder / "operations.log"),
        )
    assert done.returncode == 1
    [said] = done.stderr.splitlines()
    for part in (str(folder), "Read-only file system", "KVKEEP_CACHEMGR_OPERATION_LOG"):
        assert part in said


def test_a_tier_without_space_is_reported_before_the_model_is_loaded(tmp_path: Path) -> None:
    """The folder of the model is none, which would be reported when it is loaded."""
    for tier in ("HOST", "DISK"):
        done = run(
            ["-m", "executor"],
            KVKEEP_EXECUTOR_MODEL="/no/such/model",
            **{
                f"KVKEEP_EXECUTOR_{tier}_CACHE_SIZE": "900TiB",
                f"KVKEEP_EXECUTOR_{tier}_CACHE_DIR": str(tmp_path / "tier"),
            },
        )
        assert done.returncode == 1
        assert f"KVKEEP_EXECUTOR_{tier}_CACHE_SIZE" in done.stderr
        assert "Traceback" not in done.stderr
    with broken("read-only", tmp_path / "broken") as folder:
        done = run(
            ["-m", "executor"],
            KVKEEP_EXECUTOR_MODEL="/no/such/model",
            KVKEEP_EXECUTOR_DISK_CACHE_SIZE="1MiB",
            KVKEEP_EXECUTOR_DISK_CACHE_DIR=str(folder / "tier"),
        )
    # One on broken storage is left out, so that the rest is tried.
    assert "the model /no/such/model does not exist" in done.stderr
