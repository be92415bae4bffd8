"""Epochs of processes: each start of a process has a larger epoch, the time of the start in nanoseconds.

Peers refuse epochs older than one they have seen, so a far-future epoch would lock out every later process of that
name.
"""

from __future__ import annotations

import time

from protos.errors import InvalidField

# Allowed clock skew between machines.
AHEAD_SECONDS = 3600


def check_epoch(field: str, epoch: int, newest: int = 0) -> None:
    """Raises InvalidField, naming `field`, if no process can have chosen this epoch yet.

    newest: the last known epoch under this name. If the clock was set back, the next process uses newest + 1.
    """
    if epoch > max(newest, time.time_ns()) + AHEAD_SECONDS * 1_000_000_000:
        raise InvalidField(field, f"must be at most {AHEAD_SECONDS} s, in nanoseconds, ahead of the time here")
