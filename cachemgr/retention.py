"""Wishes of a request for its blocks: checked once, then asked per block."""

from bisect import bisect_right
from itertools import pairwise
from typing import NamedTuple

from cachemgr.api import Retention
from cachemgr.errors import InvalidField

MAX_PRIORITY = 100
DEFAULT_PRIORITY = 35
# What google.protobuf.Duration holds, in seconds.
MAX_DURATION = 315_576_000_000.0

# How names of holders begin.
SESSION, REQUEST = "session/", "request/"


class Wish(NamedTuple):
    """What one holder asks for one block. `duration` in seconds, None for no end."""

    holder: str
    priority: int
    duration: float | None = None

    @property
    def endless(self) -> bool:
        """Whether neither time nor a later wish of the same holder can end it."""
        return self.duration is None and self.holder.startswith(REQUEST)


class Wishes:
    """What one request asks for, by position of a block's first token."""

    __slots__ = ("_decode", "_ends", "_prompt_tokens", "_starts", "_wishes")

    def __init__(self, retention: Retention, prompt_tokens: int, holder: str) -> None:
        ordered = sorted(retention.ranges, key=lambda wish: wish.start)
        self._starts = [wish.start for wish in ordered]
        self._ends = [prompt_tokens if wish.end is None else wish.end for wish in ordered]
        self._wishes = [Wish(holder, wish.priority, wish.duration) for wish in ordered]
        self._decode = (
            None
            if retention.decode_priority is None
            else Wish(holder, retention.decode_priority, retention.decode_duration)
        )
        self._prompt_tokens = prompt_tokens

    def at(self, position: int) -> Wish | None:
        """The wish for a block that begins at this position."""
        if position >= self._prompt_tokens:
            return self._decode
        index = bisect_right(self._starts, position) - 1
        if index >= 0 and position < self._ends[index]:
            return self._wishes[index]
        return None


def check(retention: Retention) -> None:
    """Raises InvalidField with the field's path for wishes that mean nothing."""
    _check_priority("retention.decode_retention_priority", retention.decode_priority)
    if retention.decode_duration is not None:
        check_duration("retention.decode_retention_duration", retention.decode_duration)
        if retention.decode_priority is None:
            raise InvalidField("retention.decode_retention_duration", "needs decode_retention_priority")
    for index, wish in enumerate(retention.ranges):
        path = f"retention.ranges[{index}]"
        if wish.start < 0:
            raise InvalidField(f"{path}.start", "must not be negative")
        if wish.end is not None and wish.end <= wish.start:
            raise InvalidField(f"{path}.end", "must be greater than start")
        _check_priority(f"{path}.retention_priority", wish.priority)
        if wish.duration is not None:
            check_duration(f"{path}.retention_duration", wish.duration)
    ordered = sorted(enumerate(retention.ranges), key=lambda item: item[1].start)
    for (index, before), (other, after) in pairwise(ordered):
        if before.end is None:
            raise InvalidField(f"retention.ranges[{index}].end", "may be absent on the last range only")
        if after.start < before.end:
            raise InvalidField(f"retention.ranges[{other}].start", f"overlaps ranges[{index}]")


def check_duration(path: str, duration: float) -> None:
    """Raises InvalidField for a time that is none."""
    if not 0 < duration <= MAX_DURATION:
        raise InvalidField(path, "must be greater than zero, and at most 10,000 years")


def _check_priority(path: str, priority: int | None) -> None:
    if priority is not None and not 0 <= priority <= MAX_PRIORITY:
        raise InvalidField(path, f"must be between 0 and {MAX_PRIORITY}")
