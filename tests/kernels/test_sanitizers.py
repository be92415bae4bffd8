"""The compiled decoder under the sanitizers of the compiler: no wrong address, no undefined behaviour, no data race."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernels.cpu_decoder import build
from tests.kernels.decoder_cases import compiled_decoder
from tests.stack import ROOT, model_cache


@dataclass(frozen=True)
class Sanitizer:
    """runtime: what has to be loaded before Python. fault: C++ code with a fault, and words of the report on it."""

    flags: tuple[str, ...]
    runtime: str
    options: dict[str, str]
    fault: str
    words: str


# Checks as calls rather than in place compile in a third of the time.
OUTLINED = ("--param", "asan-instrumentation-with-call-threshold=0")
# Python itself leaves memory allocated at its end.
MEMORY = {"ASAN_OPTIONS": "detect_leaks=0"}
BOTH = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", *OUTLINED)
SANITIZERS = {
    "address": Sanitizer(
        BOTH,
        "libasan.so",
        MEMORY,
        "int fault(int at) { int *volatile some = new int[4]; return some[at + 3]; }",
        "heap-buffer-overflow",
    ),
    "undefined": Sanitizer(BOTH, "libasan.so", MEMORY, "int fault(int by) { return 1 << (by + 31); }", "runtime error"),
    "thread": Sanitizer(
        ("-fsanitize=thread",),
        "libtsan.so",
        # What torch and Python do is seen in part only, and so cannot be judged.
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1"},
        # Often, as the detector misses one that happens once.
        "volatile int n; void count() { for (int i = 0; i < 100000; i++) n = n + 1; }"
        "int fault(int) { std::thread a(count), b(count); a.join(), b.join(); return n; }",
        "data race",
    ),
}


def flags_of(sanitizer: Sanitizer) -> tuple[str, ...]:
    """The flags of the decoder, compiled sooner, and with line numbers."""
    return (*(flag for flag in build.FLAGS if flag != "-O3"), "-O1", "-g1", *sanitizer.flags)


def run(sanitizer: Sanitizer, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python under the sanitizer."""
    asked = [build.find_compiler(), f"-print-file-name={sanitizer.runtime}"]
    runtime = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(runtime).is_absolute(), f"the compiler has no {sanitizer.runtime}"
    command = [sys.executable, *arguments]
    # The detector of races does not support addresses as random as some kernels make them.
    fixed = ["setarch", "-R"]
    if not subprocess.run([*fixed, "true"], capture_output=True, check=False).returncode:
        command = fixed + command
    environment = os.environ | sanitizer.options | {"LD_PRELOAD": runtime, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("sanitizer", SANITIZERS.values(), ids=SANITIZERS)
def test_a_fault_is_reported(sanitizer: Sanitizer, tmp_path: Path) -> None:
    compiled_decoder(model_cache() / "compiled")
    source, library = tmp_path / "fault.cpp", tmp_path / "fault.so"
    source.write_text(f'#include <thread>\nextern "C" {{ {sanitizer.fault} }}\n')
    subprocess.run([build.find_compiler(), *flags_of(sanitizer), "-o", str(library), str(source)], check=True)
    done = run(sanitizer, "-c", f"import ctypes; ctypes.CDLL({str(library)!r}).fault(1)")
    assert done.returncode
    assert sanitizer.words in done.stderr


# Compiling takes a while if the processor has other work.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["address", "thread"])
def test_the_decoder_has_nothing_to_report(name: str) -> None:
    folder = model_cache() / "compiled"
    compiled_decoder(folder)
    libraries = build.compiled(folder, flags_of(SANITIZERS[name])), build.compiled(folder)
    done = run(SANITIZERS[name], "-m", "tests.kernels.sanitized", *map(str, libraries))
    assert not done.returncode, done.stderr[:8000]
    assert "results are equal" in done.stdout
