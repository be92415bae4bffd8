"""Compiles the decoder for this machine, once; later processes find what was built.

`python -m kernels.decoder.build FOLDER` builds it ahead of need.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HEADERS = (
    "vector",
    "team",
    "codes",
    "squeezed",
    "linear",
    "matmul",
    "units",
    "kept",
    "columns",
    "attention",
    "pooled",
    "step",
)
SOURCES = (*(f"{name}.h" for name in HEADERS), "decoder.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-pthread")
_HERE = Path(__file__).parent


class BuildError(Exception):
    """The decoder cannot be compiled or loaded here; the message is one sentence for people."""


class NoCompilerError(BuildError):
    """This machine has no C++ compiler."""


def load(folder: Path) -> ctypes.CDLL:
    """The compiled decoder, kept in `folder`. Raises BuildError, NoCompilerError without a compiler."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NoCompilerError(f"there is no C++ compiler here (looked for {', '.join(COMPILERS)})")
    library = folder / f"decoder-{_key(compiler)}.so"
    if not library.exists():
        _compile(compiler, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"the compiled decoder cannot be loaded: {error}") from error


def _key(compiler: str) -> str:
    """Changes with the sources, the compiler and the processor: the folder may be shared by several machines."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256(b"".join([*((_HERE / name).read_bytes() for name in SOURCES), version, _processor()]))
    digest.update(" ".join(FLAGS).encode())
    return digest.hexdigest()[:16]


def _processor() -> bytes:
    """Whatever tells processors with other instructions apart."""
    info = Path("/proc/cpuinfo")
    lines = info.read_bytes().splitlines() if info.exists() else []
    names = (b"flags", b"Features", b"model name")
    told = [next((line for line in lines if line.startswith(name)), b"") for name in names]
    return b"\n".join([platform.machine().encode(), *told])


def _compile(compiler: str, library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=library.parent) as scratch:
            built = Path(scratch, library.name)
            command = [compiler, *FLAGS, "-o", str(built), str(_HERE / SOURCES[-1])]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no reason was given"]
                raise BuildError(f"{compiler} cannot compile the decoder: {lines[0]}")
            # In one move: another process may be looking for it.
            built.replace(library)
    except OSError as error:
        raise BuildError(f"the decoder cannot be compiled: {error}") from error


if __name__ == "__main__":
    try:
        load(Path(sys.argv[1] if len(sys.argv) > 1 else os.curdir))
    except BuildError as error:
        sys.exit(str(error))
