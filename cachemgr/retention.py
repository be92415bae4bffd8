"""Wishes of a request for its blocks: checked once, then asked per block."""

from bisect import bisect_right
from itertools import pairwise

from cachemgr.api import Retention
from cachemgr.errors import InvalidField

MAX_PRIORITY = 100
DEFAULT_PRIORITY = 35


class Wishes:
    """The priorities that one request asks for, by position of a block's first token."""

    __slots__ = ("_decode", "_ends", "_priorities", "_prompt_tokens", "_starts")

    def __init__(self, retention: Retention, prompt_tokens: int) -> None:
        ordered = sorted(retention.ranges, key=lambda wish: wish.start)
        self._starts = [wish.start for wish in ordered]
        self._ends = [prompt_tokens if wish.end is None else wish.end for wish in ordered]
        self._priorities = [wish.priority for wish in ordered]
        self._decode = retention.decode_priority
        self._prompt_tokens = prompt_tokens

    def at(self, position: int) -> int | None:
        """The priority wished for a block that begins at this position; None: no wish."""
        if position >= self._prompt_tokens:
            return self._decode
        index = bisect_right(self._starts, position) - 1
        if index >= 0 and position < self._ends[index]:
            return self._priorities[index]
        return None


def check(retention: Retention) -> None:
    """Raises InvalidField with the field's path for wishes that mean nothing."""
    _check_priority("retention.decode_retention_priority", retention.decode_priority)
    for index, wish in enumerate(retention.ranges):
        path = f"retention.ranges[{index}]"
        if wish.start < 0:
            raise InvalidField(f"{path}.start", "must not be negative")
        if wish.end is not None and wish.end <= wish.start:
            raise InvalidField(f"{path}.end", "must be greater than start")
        _check_priority(f"{path}.retention_priority", wish.priority)
    ordered = sorted(enumerate(retention.ranges), key=lambda item: item[1].start)
    for (index, before), (other, after) in pairwise(ordered):
        if before.end is None:
            raise InvalidField(f"retention.ranges[{index}].end", "may be absent on the last range only")
        if after.start < before.end:
            raise InvalidField(f"retention.ranges[{other}].start", f"overlaps ranges[{index}]")


def _check_priority(path: str, priority: int | None) -> None:
    if priority is not None and not 0 <= priority <= MAX_PRIORITY:
        raise InvalidField(path, f"must be between 0 and {MAX_PRIORITY}")
