"""Retention requests: their priorities and their holders."""

from __future__ import annotations

from typing import NamedTuple

DEFAULT_PRIORITY = 35
# The priority of a retention request that sets none.
NO_PRIORITY = -1

# Prefixes of holders' names.
SESSION, REQUEST, RULE, PIN, HINT = "session/", "request/", "rule/", "pin/", "hint/"
# Holder of the lease of a block whose weights are not its executor's current weights.
WEIGHTS = "weights"


def priority_or_default(priority: int) -> int:
    """DEFAULT_PRIORITY for NO_PRIORITY."""
    return DEFAULT_PRIORITY if priority == NO_PRIORITY else priority


class RetentionRequest(NamedTuple):
    """A holder's request for one block. `duration` in seconds, None for no end."""

    holder: str
    priority: int
    duration: float | None = None
    # Blocks of a lower priority are dropped rather than offloaded; None leaves the decision to the setting.
    offload_min_priority: int | None = None


# Replaces all requests of a block whose weights are outdated, so that it is evicted before all other blocks.
OTHER_WEIGHTS = RetentionRequest(WEIGHTS, 0)
