"""Retention requests for blocks: checked once, looked up per block, and answered with receipts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from cachemgr.types import ManagerConfig, Outcome, Receipt, Retention
from protos.errors import InvalidField

if TYPE_CHECKING:
    from cachemgr.retention.rules import Rule

MAX_PRIORITY = 100
# Of one request.
MAX_RANGES = 64
DEFAULT_PRIORITY = 35
# Of a retention request that sets no priority.
NO_PRIORITY = -1
# What google.protobuf.Duration holds, in seconds.
MAX_DURATION = 315_576_000_000.0

# How names of holders begin.
SESSION, REQUEST, RULE, PIN, HINT = "session/", "request/", "rule/", "pin/", "hint/"
# Holder of a lease that stands for those of several.
SHARED = "shared"
# Longest lease of a session, in seconds: the end of a session is never announced. Its next request begins a new lease.
# It bounds a hint without a session, too, whose request cannot be taken back.
MAX_SESSION_SECONDS = 86_400.0


class RetentionRequest(NamedTuple):
    """A holder's request for one block. `duration` in seconds, None for no end."""

    holder: str
    priority: int
    duration: float | None = None
    # Blocks of a lower priority are dropped rather than offloaded; None leaves it to the setting.
    offload_min_priority: int | None = None


class RetentionPlan:
    """The retention requests of a sequence, else those of rules, by position of a block's first token."""

    __slots__ = (
        "_decode",
        "_ends",
        "_has_own",
        "_holder",
        "_prompt_tokens",
        "_requests",
        "_starts",
        "refused",
        "rules",
    )

    def __init__(
        self,
        retention: Retention,
        prompt_tokens: int,
        holder: str,
        rules: Sequence[Rule] = (),
        config: ManagerConfig | None = None,
    ) -> None:
        config = config or ManagerConfig()
        ordered = sorted(retention.ranges, key=lambda part: part.start)
        self._starts = [part.start for part in ordered]
        self._ends = [prompt_tokens if part.end is None else min(part.end, prompt_tokens) for part in ordered]
        self._requests = [
            RetentionRequest(holder, *bounded(holder, part.priority, part.duration, config)) for part in ordered
        ]
        self._decode = (
            None
            if retention.decode_priority is None
            else RetentionRequest(
                holder, *bounded(holder, retention.decode_priority, retention.decode_duration, config)
            )
        )
        self._prompt_tokens = prompt_tokens
        self._holder = holder
        # Positions of blocks of the prompt that have too many leases of a higher priority.
        self.refused: set[int] = set()
        self._has_own = bool(retention.ranges) or retention.decode_priority is not None
        # With the match of each when the request came: a rule whose match has changed since no longer applies.
        self.rules = tuple((rule, rule.spec.match) for rule in rules)

    def at(self, position: int) -> RetentionRequest | None:
        """The retention request for the block that begins at this position, in tokens."""
        request = self._own(position)
        return request if not self.rules else self._ruled(position, request)

    def _own(self, position: int) -> RetentionRequest | None:
        if position >= self._prompt_tokens:
            return self._decode
        index = bisect_right(self._starts, position) - 1
        if index >= 0 and position < self._ends[index]:
            return self._requests[index]
        return None

    def _ruled(self, position: int, own: RetentionRequest | None) -> RetentionRequest | None:
        """Rules set priorities only where a request sets nothing at all; their offload floors always count."""
        for rule, match in self.rules:
            ruled = rule.request() if rule.spec.match == match and rule.covers(position) else None
            if ruled is None:
                continue
            if not self._has_own:
                return ruled
            return None if own is None else own._replace(offload_min_priority=ruled.offload_min_priority)
        return own

    def state(self) -> list[object]:
        """Its content, for a dump of the state."""
        rules = [rule.spec.name for rule, _ in self.rules]
        return [
            list(zip(self._starts, self._ends, self._requests, strict=True)),
            self._decode,
            self._prompt_tokens,
            rules,
        ]

    def pin(self) -> tuple[Rule, float] | None:
        """The first rule that pins, and for how long, when the request says nothing itself."""
        for rule, match in self.rules:
            duration = rule.spec.action.pin_duration if rule.spec.match == match else None
            if duration is not None and not rule.deleted and not self._has_own:
                return rule, duration
        return None

    def receipts(
        self, retention: Retention, block_size: int, *, no_store: bool, config: ManagerConfig
    ) -> list[Receipt]:
        """One receipt per retention request, in their order, or one per rule that applies instead."""
        found = []
        holder = self._holder
        for index, part in enumerate(retention.ranges):
            end = self._prompt_tokens if part.end is None else min(part.end, self._prompt_tokens)
            blocks = max(0, -(-end // block_size) - -(-part.start // block_size))
            reasons = []
            if part.start >= self._prompt_tokens:
                reasons.append(f"it begins behind the prompt's {self._prompt_tokens} tokens")
            elif not blocks:
                reasons.append(f"no block of {block_size} tokens begins in it")
            refused = sum(part.start <= position < end for position in self.refused)
            if refused:
                reasons.append(_refusal(refused))
                blocks -= refused
            if blocks and not reasons and part.end is not None and part.end > self._prompt_tokens:
                reasons.append(f"it ends with the prompt's {self._prompt_tokens} tokens")
            asked = part.priority, part.duration
            found.append(_receipt(holder, f"ranges[{index}]", asked, blocks, reasons, no_store=no_store, config=config))
        if retention.decode_priority is not None:
            asked = retention.decode_priority, retention.decode_duration
            found.append(_receipt(holder, "decode", asked, None, [], no_store=no_store, config=config))
        if not self._has_own:
            found += self._rule_receipts(block_size, no_store=no_store, config=config)
        return found

    def _rule_receipts(self, block_size: int, *, no_store: bool, config: ManagerConfig) -> list[Receipt]:
        counts: dict[RetentionRequest, list[int]] = {}
        for position in range(0, self._prompt_tokens, block_size) if self.rules else ():
            request = self.at(position)
            if request is not None:
                counts.setdefault(request, [0, 0])[position in self.refused] += 1
        return [
            _receipt(
                request.holder,
                request.holder,
                (request.priority, request.duration),
                granted,
                [_refusal(refused)] if refused else [],
                no_store=no_store,
                config=config,
            )
            for request, (granted, refused) in counts.items()
            if request.priority != NO_PRIORITY
        ]


def bounded(holder: str, priority: int, duration: float | None, config: ManagerConfig) -> tuple[int, float | None]:
    """Priority and duration within the operator's bounds; leases of sessions and hints always end."""
    longest = config.max_retention_seconds
    if duration is None and holder.startswith((SESSION, HINT)):
        duration = MAX_SESSION_SECONDS
    if longest and (duration is None or duration > longest):
        duration = longest
    return min(priority, config.max_retention_priority), duration


def _receipt(
    holder: str,
    request: str,
    asked: tuple[int, float | None],
    blocks: int | None,
    reasons: list[str],
    *,
    no_store: bool,
    config: ManagerConfig,
) -> Receipt:
    if no_store:
        reasons, blocks = ["the request leaves nothing in the cache"], 0
    if blocks == 0:
        return Receipt(request, Outcome.REJECTED, reasons[0])
    granted = bounded(holder, *asked, config)
    if granted[0] != asked[0]:
        reasons.append(f"the priority is at most {granted[0]}")
    if granted[1] != asked[1]:
        reasons.append(f"the duration is at most {granted[1]:g} s")
    outcome = Outcome.CLIPPED if reasons else Outcome.GRANTED
    return Receipt(request, outcome, "; ".join(reasons), granted[0], granted[1], blocks or 0)


def _refusal(blocks: int) -> str:
    return f"{blocks} of its blocks have too many leases of a higher priority"


def check(retention: Retention) -> None:
    """Raises InvalidField with the field's path for contradictory retention requests."""
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
