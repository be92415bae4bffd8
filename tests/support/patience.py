"""How long a test waits: the only place where the deadlines of tests come from.

A deadline in a test catches only things that hang. No test asserts how soon something happens, because the time depends
on the machine and its other work.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

# Less than the 300 s after which pytest ends a test: the complaint of the test itself says more.
LONGEST_SECONDS = 240.0
# Child processes find the factor here. Processes of kvkeep refuse names that begin with KVKEEP_ and are no settings.
VARIABLE = "TESTS_SPEED_FACTOR"
# Seconds that `_measured_seconds` takes on one idle core of an AMD EPYC 7003.
REFERENCE_SECONDS = 0.3
_TURNS = 2_500_000


def patience(seconds: float) -> float:
    """How long a test waits for something that usually takes `seconds`."""
    return min(LONGEST_SECONDS, 4 * seconds * speed_factor())


def speed_factor() -> float:
    """How many times slower this machine is than the reference; 1 where the machine is faster.

    The first process that asks measures the factor; its child processes and the workers of pytest inherit it.
    """
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{max(1.0, _measured_seconds() / REFERENCE_SECONDS):.2f}"
    return float(os.environ[VARIABLE])


def _measured_seconds() -> float:
    """Seconds of some bytecode and of the start of a child process, beside all other present work."""
    begin = time.monotonic()
    total = 0
    for turn in range(_TURNS):
        total += turn * turn % 7
    subprocess.run([sys.executable, "-I", "-c", ""], check=True)
    return time.monotonic() - begin
