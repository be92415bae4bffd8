"""Every program of the checkout describes itself on --help, and refuses unknown arguments before it starts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack import ROOT
from tests.support.patience import patience

FOLDERS = ("cachemgr", "executor", "kernels", "kvctl", "ops", "protos", "scheduler")
# Programs of the tests that people run by hand.
BY_HAND = ("tests.support.peer_fields",)
# Processes with settings: the page that lists them.
SETTINGS = (
    *("ops/run_stack.py", "ops/ray_fleet.py", "cachemgr", "executor", "executor.prepare"),
    *("scheduler", "scheduler.frontend", "scheduler.router", "protos.rpc.probe"),
)
# What these ask for before they look at the rest.
NEEDED = {
    "ops/certs.py": ["/proc/none"],
    "ops/ray_fleet.py": ["--stop"],
    "ops/set_up.py": ["/proc/none"],
    "ops/stubs.py": ["verify"],
    "protos.rpc.probe": ["executor"],
    "scheduler.frontend": ["0", "0", "0"],
    "tests.support.peer_fields": ["none.whl"],
    "protos.rpc.tokens": ["new", "--role", "scheduler"],
}


def programs() -> list[str]:
    """Modules by their names, scripts by their paths."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            is_program = path.name == "__main__.py" or '\nif __name__ == "__main__":' in path.read_text()
            if is_program:
                module = name.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
                found.append(name if folder == "ops" else module)
    return [*found, *BY_HAND]


def run(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program where torch cannot be imported and nothing can be written or started."""
    (folder / "torch.py").write_text('raise SystemExit("torch was imported")\n')
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")}
    environment |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "KVKEEP_STATE_DIR": "/proc/none", "COLUMNS": "100"}
    line = [program] if program.endswith(".py") else ["-m", program]
    return subprocess.run(
        [sys.executable, *line, *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )


def test_the_programs_are_found() -> None:
    assert {"ops/run_stack.py", "ops/stubs.py", "cachemgr", "executor", "scheduler", "scheduler.generate"} < set(
        programs()
    )


@pytest.mark.parametrize("program", programs())
def test_help_describes_a_program_and_starts_nothing(program: str, tmp_path: Path) -> None:
    done = run(tmp_path, program, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.match("usage: ", done.stdout.lstrip(), re.IGNORECASE)
    assert len(done.stdout.splitlines()) > 3
    assert ("docs/settings.md" in done.stdout) == (program in SETTINGS)


@pytest.mark.parametrize("program", ["cachemgr", "executor", "scheduler", "scheduler.router"])
def test_help_of_a_service_imports_no_library(program: str) -> None:
    """The libraries of a service take a second or more."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", program, "--help"],
        env={"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=True,
    )
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert not imported & {"grpc", "pydantic", "structlog", "redis", "fastapi", "numpy", "uvloop", "asyncio"}


@pytest.mark.parametrize("program", programs())
def test_an_unknown_argument_is_named_and_starts_nothing(program: str, tmp_path: Path) -> None:
    done = run(tmp_path, program, *NEEDED.get(program, ()), "--bogus")
    assert done.returncode == 2, done.stderr
    assert "--bogus" in done.stderr
    assert done.stdout == ""


def test_the_cache_managers_help_names_its_subcommand(tmp_path: Path) -> None:
    assert "replay" in run(tmp_path, "cachemgr", "--help").stdout
    assert "FILE" in run(tmp_path, "cachemgr", "replay", "--help").stdout
    missing = run(tmp_path, "cachemgr", "replay")
    assert (missing.returncode, "FILE" in missing.stderr) == (2, True)
