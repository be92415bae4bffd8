"""Bounds of retention requests: the operator's bounds, and checks of callers' requests."""

from __future__ import annotations

from itertools import pairwise

from cachemgr.retention.priority import HINT, SESSION
from cachemgr.types import ManagerConfig, Retention
from protos.errors import InvalidField

MAX_PRIORITY = 100
# The limit for one request.
MAX_RANGES = 64
# The limit of google.protobuf.Duration, in seconds.
MAX_DURATION = 315_576_000_000.0
# The duration, in seconds, of leases that sessions request without a duration, since the end of a session is never
# announced. The session's next request begins a new lease. Also for hints without a session, which cannot be revoked.
MAX_SESSION_SECONDS = 86_400.0


def bounded(holder: str, priority: int, duration: float | None, config: ManagerConfig) -> tuple[int, float | None]:
    """Limits priority and duration to the operator's bounds; leases of sessions and hints always end."""
    longest = config.max_retention_seconds
    if duration is None and holder.startswith((SESSION, HINT)):
        duration = MAX_SESSION_SECONDS
    if longest and (duration is None or duration > longest):
        duration = longest
    return min(priority, config.max_retention_priority), duration


def check_retention(retention: Retention) -> None:
    """Raises InvalidField, with the field's path, for contradictory retention requests."""
    check_priority("retention.decode_retention_priority", retention.decode_priority)
    if retention.decode_duration is not None:
        check_duration("retention.decode_retention_duration", retention.decode_duration)
        if retention.decode_priority is None:
            raise InvalidField("retention.decode_retention_duration", "needs decode_retention_priority")
    if len(retention.ranges) > MAX_RANGES:
        raise InvalidField("retention.ranges", f"must be at most {MAX_RANGES}")
    for index, part in enumerate(retention.ranges):
        path = f"retention.ranges[{index}]"
        if part.start < 0:
            raise InvalidField(f"{path}.start", "must not be negative")
        if part.end is not None and part.end <= part.start:
            raise InvalidField(f"{path}.end", "must be greater than start")
        check_priority(f"{path}.retention_priority", part.priority)
        if part.duration is not None:
            check_duration(f"{path}.retention_duration", part.duration)
    ordered = sorted(enumerate(retention.ranges), key=lambda item: item[1].start)
    for (index, before), (other, after) in pairwise(ordered):
        if before.end is None:
            raise InvalidField(f"retention.ranges[{index}].end", "may be absent on the last range only")
        if after.start < before.end:
            raise InvalidField(f"retention.ranges[{other}].start", f"overlaps ranges[{index}]")


def check_duration(path: str, duration: float) -> None:
    """Raises InvalidField for a duration, in seconds, that is out of range."""
    if not 0 < duration <= MAX_DURATION:
        raise InvalidField(path, "must be greater than zero, and at most 10,000 years")


def check_priority(path: str, priority: int | None) -> None:
    """Raises InvalidField for a priority that is out of range."""
    if priority is not None and not 0 <= priority <= MAX_PRIORITY:
        raise InvalidField(path, f"must be between 0 and {MAX_PRIORITY}")
