"""Retention requests: their priorities and their holders."""

from __future__ import annotations

from typing import NamedTuple

DEFAULT_PRIORITY = 35
# Of a retention request that sets no priority.
NO_PRIORITY = -1

# How names of holders begin.
SESSION, REQUEST, RULE, PIN, HINT = "session/", "request/", "rule/", "pin/", "hint/"
# Holder of the lease of a block of other weights than those of its executor.
WEIGHTS = "weights"


class RetentionRequest(NamedTuple):
    """A holder's request for one block. `duration` in seconds, None for no end."""

    holder: str
    priority: int
    duration: float | None = None
    # Blocks of a lower priority are dropped rather than offloaded; None leaves it to the setting.
    offload_min_priority: int | None = None


# What a block of other weights has in place of all other requests: such blocks are evicted before all others.
OTHER_WEIGHTS = RetentionRequest(WEIGHTS, 0)
