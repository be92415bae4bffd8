"""Compiles the decoder for this machine, once; later processes load the same library.

`python -m kernels.cpu_decoder.build FOLDER` builds it in advance. The compiler's flags in CXXFLAGS come after ours:
CXXFLAGS=-march=x86-64-v3 limits the library to AVX2. Each compiler, set of flags and kind of processor has a library of
its own. A machine without a compiler loads the newest library of its flags and kind of processor.
"""

import argparse
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).parent
SOURCES = (*sorted(path.name for path in _HERE.glob("*.h")), "decoder.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS: tuple[str, ...] = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-pthread")


class BuildError(Exception):
    """The decoder cannot be compiled or loaded here; the message is one sentence for operators."""


class NoCompilerError(BuildError):
    """This machine has no C++ compiler, which is needed."""


def load(folder: Path) -> ctypes.CDLL:
    """Loads the compiled decoder, kept in `folder`. Raises BuildError, or NoCompilerError if it has to be compiled."""
    library = compiled(folder)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"the compiled decoder cannot be loaded: {error}") from error


def compiled(folder: Path, flags: tuple[str, ...] = FLAGS) -> Path:
    """Returns the file of the decoder in `folder`, compiled if it is not there. Raises like `load`."""
    flags = _with_environment(flags)
    beginning = f"decoder-{_key(flags)}"
    try:
        compiler = find_compiler()
    except NoCompilerError:
        # Compiled before the compiler was removed, or on a machine with an equal processor.
        built = sorted(folder.glob(f"{beginning}-*.so"), key=lambda path: path.stat().st_mtime)
        if not built:
            raise
        return built[-1]
    library = folder / f"{beginning}-{_version(compiler)}.so"
    if not library.exists():
        _compile(compiler, flags, library)
    return library


def digest() -> str:
    """Returns a digest of the decoder's sources, compiler, flags and processor. Raises NoCompilerError."""
    return f"{_key(_with_environment(FLAGS))}-{_version(find_compiler())}"


def find_compiler() -> str:
    """Returns the first available C++ compiler of those known. Raises NoCompilerError."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NoCompilerError(f"there is no C++ compiler here (looked for {', '.join(COMPILERS)})")
    return compiler


def _with_environment(flags: tuple[str, ...]) -> tuple[str, ...]:
    return (*flags, *shlex.split(os.environ.get("CXXFLAGS", "")))


def _key(flags: tuple[str, ...]) -> str:
    """Returns a digest of sources, flags and processor: several machines may share the folder."""
    digest = hashlib.sha256(b"".join([*((_HERE / name).read_bytes() for name in SOURCES), _processor()]))
    digest.update(" ".join(flags).encode())
    return digest.hexdigest()[:16]


def _version(compiler: str) -> str:
    """Returns a digest of what a compiler says of its version."""
    said = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    return hashlib.sha256(said).hexdigest()[:16]


def _processor() -> bytes:
    """Returns bytes that differ between processors with different instructions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_bytes().splitlines() if info.exists() else []
    names = (b"flags", b"Features", b"model name")
    features = [next((line for line in lines if line.startswith(name)), b"") for name in names]
    return b"\n".join([platform.machine().encode(), *features])


def _compile(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=library.parent) as scratch:
            built = Path(scratch, library.name)
            command = [compiler, *flags, "-o", str(built), str(_HERE / SOURCES[-1])]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no reason was given"]
                raise BuildError(f"{compiler} cannot compile the decoder: {lines[0]}")
            # Atomically: another process may be looking for the library.
            built.replace(library)
    except OSError as error:
        raise BuildError(f"the decoder cannot be compiled: {error}") from error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m kernels.cpu_decoder.build", description="Compiles the CPU decoder for this machine."
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), help="where the library is kept; default: here")
    try:
        load(parser.parse_args().folder)
    except BuildError as error:
        sys.exit(str(error))
