"""Becomes another program that gets SIGTERM when the process that started it ends, however that happens.

A program of its own, run as `python end_with_parent.py PARENT PROGRAM ARGUMENT…`: what a process runs between fork and
exec must not touch Python's or gRPC's locks, which other threads may hold.
"""

import argparse
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replaces this process by the program, or ends when the parent is gone already."""
    parser = argparse.ArgumentParser(
        prog="end_with_parent.py",
        description="Becomes another program that gets SIGTERM when PARENT, which must have started it, ends.",
        allow_abbrev=False,
    )
    parser.add_argument("parent", metavar="PARENT", type=int, help="number of the process that starts this one")
    parser.add_argument("program", metavar="PROGRAM", help="path of the program")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="what the program is given")
    asked = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == asked.parent:
        os.execv(asked.program, [asked.program, *asked.arguments])  # noqa: S606 - our own command line


if __name__ == "__main__":
    main()
