"""Generates the stubs beside the .proto files, or verifies both: `python ops/stubs.py generate|verify`."""

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = Path(sys.executable).parent
PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")
OUTPUTS = ("--python_out", "--pyi_out", "--grpc_python_out", "--mypy_grpc_out")


def run(command: Sequence[str]) -> tuple[int, str]:
    """Status and output of a command in the checkout; the environment's tools, with protoc's plug-ins, come first."""
    environment = {**os.environ, "PATH": f"{TOOLS}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def protos() -> list[str]:
    """The .proto files, relative to the checkout."""
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("protos/**/*.proto"))


def stubs(folder: Path) -> dict[str, str]:
    """Generated files below a folder's protos/ with their text."""
    found = (path for pattern in PATTERNS for path in folder.glob(f"protos/**/{pattern}"))
    return {str(path.relative_to(folder)): path.read_text() for path in found}


def generate(folder: Path) -> int:
    """Writes the stubs of all .proto files into a folder; returns protoc's exit status."""
    outputs = [f"{option}={folder}" for option in OUTPUTS]
    code, text = run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *protos()])
    if code:
        print(text, file=sys.stderr)
    return code


def compare() -> int:
    """Prints the differences of the checkout's stubs from their .proto files; returns the exit status, 0 for none."""
    with tempfile.TemporaryDirectory() as scratch:
        if code := generate(Path(scratch)):
            return code
        wanted, found = stubs(Path(scratch)), stubs(ROOT)
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) == found.get(name):
            continue
        difference = difflib.unified_diff(
            found.get(name, "").splitlines(), wanted.get(name, "").splitlines(), name, "generated", lineterm="", n=0
        )
        print(*list(difference)[:10], sep="\n")
    if wanted != found:
        print("the stubs are not those of the .proto files: make proto")
        return 1
    print(f"stubs: {len(wanted)} files are those of {len(protos())} .proto files")
    return 0


def base() -> str:
    """The revision that callers may still use: the last tag, else the previous commit; empty if there is none."""
    for command in (["git", "describe", "--tags", "--abbrev=0"], ["git", "rev-parse", "--verify", "--quiet", "HEAD~1"]):
        code, text = run(command) if shutil.which("git") else (1, "")
        if code == 0:
            return text.strip()
    return ""


def check_with_buf() -> int:
    """Checks the style of the .proto files, and that no caller of the base revision breaks."""
    code, text = run(["buf", "lint"])
    print(text or "buf lint: clean\n", end="")
    revision = base()
    if not revision or run(["git", "ls-tree", revision, "buf.yaml"])[1] == "":
        print("buf breaking: no earlier revision to compare with")
        return code
    broken, text = run(["buf", "breaking", "--against", f".git#ref={revision}"])
    print(text or f"buf breaking: nothing breaks against {revision[:12]}\n", end="")
    return code or broken


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="The stubs beside the .proto files.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("generate", help="write them")
    commands.add_parser("verify", help="compare the stubs, check the .proto files, and that no earlier caller breaks")
    if parser.parse_args(arguments).command == "generate":
        return generate(ROOT)
    return compare() | check_with_buf()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
