"""Becomes another program that gets SIGTERM when the process that started it ends, however that happens.

A program of its own, run as `python end_with_parent.py PARENT PROGRAM ARGUMENT…`: what a process runs between fork and
exec must not touch Python's or gRPC's locks, which other threads may hold.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: str, program: str, *arguments: str) -> None:
    """Replaces this process by the program, or ends when the parent is gone already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == int(parent):
        os.execv(program, [program, *arguments])  # noqa: S606 - our own command line


if __name__ == "__main__":
    main(*sys.argv[1:])
