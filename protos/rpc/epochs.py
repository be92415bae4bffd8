"""Epochs of processes: each start of a process has a larger one, the time of the start in nanoseconds.

Whoever sees an epoch refuses older ones from then on. So one of the far future would keep every later process of
that name away.
"""

from __future__ import annotations

import time

from protos.errors import InvalidField

# For clocks of machines that differ.
AHEAD_SECONDS = 3600


def check_epoch(field: str, epoch: int, newest: int = 0) -> None:
    """Raises InvalidField, which names the field, for an epoch that no process can have chosen by now.

    newest: that of an earlier process of the name; where the clock was set back since, a later one chooses the next.
    """
    if epoch > max(newest, time.time_ns()) + AHEAD_SECONDS * 1_000_000_000:
        raise InvalidField(field, f"must be at most {AHEAD_SECONDS} s, in nanoseconds, ahead of the time here")
