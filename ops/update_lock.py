"""Rewrites ops/constraints.txt: `make update-lock`.

Installs all packages of the project and its developers, in the newest versions that pyproject.toml allows, into a
temporary environment, and writes down the versions. Nothing else changes the file.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from progress import Progress
from set_up import CONSTRAINTS, SERVICES, Environment, SetUpError

HEADER = (
    "# The versions of everything that `make` installs, written by `make update-lock`.",
    "# The ranges that are supported stand in pyproject.toml.",
)


def lock(frozen: str) -> str:
    """The file's text, from the output of `pip freeze`. Drops labels such as +cpu: one lock serves all devices."""
    lines = (line.partition("+")[0].lower().replace("_", "-") for line in frozen.splitlines())
    return "\n".join([*HEADER, *sorted(line for line in lines if "==" in line), ""])


def changes(old: str, new: str) -> list[str]:
    """The differences, a line for each distribution."""
    versions = [
        dict(line.split("==") for line in text.splitlines() if "==" in line and not line.startswith("#"))
        for text in (old, new)
    ]
    before, after = versions
    return [
        f"{name}: {before.get(name, 'new')} -> {after.get(name, 'gone')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def held(text: str) -> str:
    """The lock's line for torch, to keep its version: a newer torch may bring gigabytes for CUDA along."""
    return next(line for line in text.splitlines() if line.startswith("torch=="))


def install(environment: Environment, packages: list[str], progress: Progress) -> str:
    """Makes an environment with the newest versions; returns the text of its lock. Raises SetUpError."""
    environment.make(progress)
    with progress.step("installing the newest versions"):
        environment.pip([*packages, "--editable", f".[{SERVICES},executor,dev]"], progress)
    command = [str(environment.python), "-m", "pip", "freeze", "--exclude-editable"]
    return lock(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="make update-lock",
        description="Writes the newest versions of all that is installed to ops/constraints.txt.",
    )
    parser.add_argument(
        "--try",
        dest="kept",
        type=Path,
        metavar="FOLDER",
        help="only make an environment of the newest versions, but with the same torch",
    )
    kept: Path | None = parser.parse_args().kept
    old = CONSTRAINTS.read_text()
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(kept or Path(folder, "venv"), system_torch=False, this_python=False)
        try:
            new = install(environment, ["--upgrade", held(old)] if kept else [], Progress())
        except SetUpError as error:
            print(f"the lock is unchanged: {error}", file=sys.stderr)
            return 1
    if not kept:
        CONSTRAINTS.write_text(new)
    print(*(changes(old, new) or ["nothing changed"]), sep="\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the lock is unchanged")
