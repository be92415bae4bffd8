"""Operators' rules: what happens to the blocks of requests that say nothing themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from cachemgr.admin_api import RetentionRule, RuleAction
from cachemgr.errors import InvalidField, RuleExistsError, StaleRuleError, UnknownRuleError
from cachemgr.keys import pack
from cachemgr.policies import check_rule
from cachemgr.retention import NO_PRIORITY, RULE, Wish, check_duration, check_priority
from cachemgr.validation import check_id

if TYPE_CHECKING:
    from cachemgr.api import AdmitRequest

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
FIELDS = ("order", "match", "action")


class Rule:
    """A rule and its present state; sequences that it applies to refer to it, and see every change."""

    __slots__ = ("deleted", "spec")

    def __init__(self, spec: RetentionRule) -> None:
        self.spec = spec
        self.deleted = False

    @property
    def holder(self) -> str:
        """Who holds the leases that it gives."""
        return RULE + self.spec.name

    def applies_to(self, request: AdmitRequest) -> bool:
        """Whether it is about a request."""
        match = self.spec.match
        return (
            match.salt in (None, request.salt)
            and match.tenant_id in (None, request.tenant_id)
            and match.adapter_id in (None, request.adapter_id)
            and tuple(request.token_ids[: len(match.prefix_token_ids)]) == match.prefix_token_ids
        )

    def covers(self, position: int) -> bool:
        """Whether it is about a block that begins at this position."""
        match = self.spec.match
        if self.deleted or position < match.start:
            return False
        if match.prefix_token_ids and position >= len(match.prefix_token_ids):
            return False
        return match.end is None or position < match.end

    def wish(self) -> Wish | None:
        """What it wishes for the blocks that it covers."""
        action = self.spec.action
        if action.priority is None and action.offload_min_priority is None:
            return None
        priority = NO_PRIORITY if action.priority is None else action.priority
        return Wish(self.holder, priority, action.duration, action.offload_min_priority)


class RuleBook:
    """All rules, in the order in which they are asked.

    `next_number` gives numbers that no earlier manager gave: an etag is never that of another state of a rule.
    """

    def __init__(self, next_number: Callable[[], int]) -> None:
        self._next_number = next_number
        self._rules: dict[str, Rule] = {}
        self._ordered: list[Rule] = []

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._ordered)

    def __len__(self) -> int:
        return len(self._rules)

    def __contains__(self, name: str) -> bool:
        return name in self._rules

    def get(self, name: str, field: str = "name") -> Rule:
        """One rule. Raises UnknownRuleError."""
        rule = self._rules.get(name)
        if rule is None:
            raise UnknownRuleError(f"no rule {name}", fields={field: "is not known"})
        return rule

    def for_request(self, request: AdmitRequest) -> list[Rule]:
        """Rules that are about a request, in order."""
        return [rule for rule in self._ordered if rule.applies_to(request)]

    def new(self, spec: RetentionRule) -> Rule:
        """Checks a rule that is to be made. Raises InvalidField, RuleExistsError."""
        check_spec(spec)
        if spec.name in self._rules:
            raise RuleExistsError(f"there is a rule {spec.name}", fields={"rule.name": "is in use"})
        return Rule(spec)

    def add(self, rule: Rule) -> None:
        """Makes a checked rule."""
        self._stamp(rule, rule.spec)
        self._rules[rule.spec.name] = rule
        self._sort()

    def restore(self, spec: RetentionRule) -> None:
        """Puts a rule back as it was, with its etag; one of that name that is there already stays."""
        if spec.name not in self._rules:
            self._rules[spec.name] = Rule(spec)
            self._sort()

    def changed(self, spec: RetentionRule, mask: tuple[str, ...]) -> RetentionRule:
        """A rule as it would be after a change of the fields in the mask. Raises what `get` and a check raise."""
        known = self.get(spec.name, "rule.name").spec
        _check_etag("rule.etag", spec.etag, known.etag)
        result = known
        for index, path in enumerate(mask or FIELDS):
            result = _with_field(result, spec, path, index)
        check_spec(result)
        return result

    def update(self, spec: RetentionRule) -> None:
        """Puts a checked change in place."""
        self._stamp(self._rules[spec.name], spec)
        self._sort()

    def doomed(self, name: str, etag: str) -> Rule:
        """A rule that is to be deleted. Raises UnknownRuleError, StaleRuleError."""
        rule = self.get(name)
        _check_etag("etag", etag, rule.spec.etag)
        return rule

    def remove(self, rule: Rule) -> None:
        """Deletes a rule."""
        rule.deleted = True
        del self._rules[rule.spec.name]
        self._sort()

    def _stamp(self, rule: Rule, spec: RetentionRule) -> None:
        rule.spec = replace(spec, etag=str(self._next_number()))

    def _sort(self) -> None:
        self._ordered = sorted(self._rules.values(), key=lambda rule: (rule.spec.order, rule.spec.name))


def _check_etag(field: str, given: str, current: str) -> None:
    if given and given != current:
        raise StaleRuleError("the rule has changed since", fields={field: f"is not the current {current}"})


def _with_field(known: RetentionRule, given: RetentionRule, path: str, index: int) -> RetentionRule:
    whole, _, part = path.partition(".")
    if path not in ALL_PATHS:
        raise InvalidField(f"update_mask.paths[{index}]", f"must be one of {', '.join(ALL_PATHS)}")
    if not part:
        return replace(known, **{whole: getattr(given, whole)})
    name = _PARTS[whole][part]
    return replace(known, **{whole: replace(getattr(known, whole), **{name: getattr(getattr(given, whole), name)})})


# Fields as messages name them, and as they are named here.
_PARTS = {
    "match": {
        "salt": "salt",
        "tenant_id": "tenant_id",
        "adapter_id": "adapter_id",
        "prefix_token_ids": "prefix_token_ids",
        "start": "start",
        "end": "end",
    },
    "action": {
        "retention_priority": "priority",
        "retention_duration": "duration",
        "pin_duration": "pin_duration",
        "no_store": "no_store",
        "offload_min_priority": "offload_min_priority",
        "eviction_policy": "eviction_policy",
    },
}
ALL_PATHS = (*FIELDS, *(f"{whole}.{part}" for whole, parts in _PARTS.items() for part in parts))


def check_spec(spec: RetentionRule) -> None:
    """Raises InvalidField for a rule that means nothing."""
    if not _NAME.fullmatch(spec.name):
        raise InvalidField("rule.name", "must be 1 to 64 letters, digits, '-', '_' or '.'")
    match, action = spec.match, spec.action
    if match.salt == "":
        raise InvalidField("rule.match.salt", "must not be empty; leave it out for all")
    if match.tenant_id is not None:
        check_id("rule.match.tenant_id", match.tenant_id)
    try:
        pack(match.prefix_token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidField("rule.match.prefix_token_ids", "must be numbers from 0 to 4294967295") from error
    if match.start < 0:
        raise InvalidField("rule.match.start", "must not be negative")
    if match.end is not None and match.end <= match.start:
        raise InvalidField("rule.match.end", "must be greater than start")
    check_priority("rule.action.retention_priority", action.priority)
    check_priority("rule.action.offload_min_priority", action.offload_min_priority)
    for field, duration in (("retention_duration", action.duration), ("pin_duration", action.pin_duration)):
        if duration is not None:
            check_duration(f"rule.action.{field}", duration)
    if action.duration is not None and action.priority is None:
        raise InvalidField("rule.action.retention_duration", "needs retention_priority")
    check_rule(action.eviction_policy, "rule.action.eviction_policy")
    if action == RuleAction():
        raise InvalidField("rule.action", "must say what to do")
