"""The retention requests of one sequence, looked up per block and answered with receipts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from cachemgr.retention.bounds import bounded
from cachemgr.retention.priority import NO_PRIORITY, RetentionRequest
from cachemgr.retention.rule_book import Rule
from cachemgr.types import ManagerConfig, Outcome, Receipt, Retention


class SequenceRetention:
    """A sequence's retention requests, or else the rules' requests, by position of a block's first token."""

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
        # Positions of prompt blocks that already have too many leases with a higher priority or more time.
        self.refused: set[int] = set()
        self._has_own = bool(retention.ranges) or retention.decode_priority is not None
        # Each rule with its match at the time of the request; a rule whose match has changed since no longer applies.
        self.rules = tuple((rule, rule.spec.match) for rule in rules)

    def at(self, position: int) -> RetentionRequest | None:
        """The retention request for the block that begins at this token position."""
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
        """Applies the first rule that covers the block and has a retention request.

        If the sequence sets nothing, the rule's request counts. Otherwise, the rule only adds its offload floor to the
        sequence's own request for the block; a block without such a request gets no floor.
        """
        for rule, match in self.rules:
            ruled = rule.request() if rule.spec.match == match and rule.covers(position) else None
            if ruled is None:
                continue
            if not self._has_own:
                return ruled
            return None if own is None else own._replace(offload_min_priority=ruled.offload_min_priority)
        return own

    def state(self) -> list[object]:
        """Returns the content, for a dump of the state."""
        rules = [rule.spec.name for rule, _ in self.rules]
        return [
            list(zip(self._starts, self._ends, self._requests, strict=True)),
            self._decode,
            self._prompt_tokens,
            rules,
        ]

    def pin(self) -> tuple[Rule, float] | None:
        """The first rule that pins, and for how long, if the request itself sets nothing."""
        for rule, match in self.rules:
            duration = rule.spec.action.pin_duration if rule.spec.match == match else None
            if duration is not None and not rule.deleted and not self._has_own:
                return rule, duration
        return None

    def receipts(
        self, retention: Retention, block_size: int, *, no_store: bool, config: ManagerConfig
    ) -> list[Receipt]:
        """Returns one receipt per retention request, in order, or one per rule that applies instead."""
        found = []
        holder = self._holder
        for index, part in enumerate(retention.ranges):
            end = self._prompt_tokens if part.end is None else min(part.end, self._prompt_tokens)
            blocks = max(0, -(-end // block_size) - -(-part.start // block_size))
            reasons = []
            if part.start >= self._prompt_tokens:
                reasons.append(f"it begins after the prompt's {self._prompt_tokens} tokens")
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
    return f"{blocks} of its blocks have too many leases of a higher priority or more time"
