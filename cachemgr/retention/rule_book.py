"""Operators' rules for requests: which rules match a request. `SequenceRetention` applies them.

Priorities of rules count if a request sets no retention. Otherwise, the first rule for a block only adds its offload
floor to the request's own lease; blocks without such a lease get no floor.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from hashlib import sha256
from itertools import product
from typing import TYPE_CHECKING

from cachemgr.errors import RuleExistsError, StaleRuleError, UnknownRuleError
from cachemgr.retention.bounds import check_duration, check_priority
from cachemgr.retention.priority import NO_PRIORITY, RULE, RetentionRequest
from cachemgr.types import RetentionRule, RuleAction, RuleMatch
from cachemgr.validation import check_id
from protos.errors import InvalidField
from protos.kvcommon.tokens import pack, packed_bytes

if TYPE_CHECKING:
    from array import array

    from cachemgr.types import AdmitRequest

# Salt, tenant and adapter, None for all.
_Scope = tuple[str | None, str | None, int | None]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# The limit on rules for the same prompts, whatever their block ranges: an admission checks each rule for each block.
MAX_ALIKE = 64
FIELDS = ("order", "match", "action")


class Rule:
    """A rule and its present state. The sequences to which it applies refer to it, and see every change."""

    __slots__ = ("deleted", "spec")

    def __init__(self, spec: RetentionRule) -> None:
        self.spec = spec
        self.deleted = False

    @property
    def holder(self) -> str:
        """The holder of the rule's leases."""
        return RULE + self.spec.name

    def covers(self, position: int) -> bool:
        """Whether the rule applies to a block that begins at this token position."""
        match = self.spec.match
        if self.deleted or position < match.start:
            return False
        if match.prefix_token_ids and position >= len(match.prefix_token_ids):
            return False
        return match.end is None or position < match.end

    def request(self) -> RetentionRequest | None:
        """The rule's retention request for the blocks that it covers; None without a priority or an offload floor."""
        action = self.spec.action
        if action.priority is None and action.offload_min_priority is None:
            return None
        priority = NO_PRIORITY if action.priority is None else action.priority
        return RetentionRequest(self.holder, priority, action.duration, action.offload_min_priority)


def _position(rule: Rule) -> tuple[int, str]:
    """The rule's position among all rules; the first rule with an action counts."""
    return rule.spec.order, rule.spec.name


class _Group:
    """Rules for the same salt, tenant and adapter, by digest of the required prefix."""

    __slots__ = ("by_prefix", "lengths")

    def __init__(self) -> None:
        self.by_prefix: dict[bytes, list[Rule]] = {}
        # The number of prefixes of each length in bytes.
        self.lengths: Counter[int] = Counter()

    def add(self, rule: Rule, prefix: bytes) -> None:
        rules = self.by_prefix.setdefault(sha256(prefix).digest(), [])
        if not rules:
            self.lengths[len(prefix)] += 1
        rules.append(rule)

    def remove(self, rule: Rule, prefix: bytes) -> None:
        digest = sha256(prefix).digest()
        self.by_prefix[digest].remove(rule)
        if not self.by_prefix[digest]:
            del self.by_prefix[digest]
            self.lengths[len(prefix)] -= 1
            if not self.lengths[len(prefix)]:
                del self.lengths[len(prefix)]

    def about(self, packed: memoryview) -> Iterator[Rule]:
        """Yields the rules for a prompt: hashes the prompt once, with one lookup per prefix length."""
        digest, end = sha256(), 0
        for length in sorted(self.lengths):
            if length > len(packed):
                break
            digest.update(packed[end:length])
            end = length
            yield from self.by_prefix.get(digest.digest(), ())


class RuleBook:
    """All rules in order. Finds the rules for a request without looking at all rules.

    `next_number` gives numbers that no earlier manager gave, so that different states never have the same etag.
    """

    def __init__(self, next_number: Callable[[], int]) -> None:
        self._next_number = next_number
        self._rules: dict[str, Rule] = {}
        self._ordered: list[Rule] = []
        self._groups: dict[_Scope, _Group] = {}

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
            raise UnknownRuleError(f"there is no rule {name!r}", fields={field: "is not known"})
        return rule

    def is_deleted(self, holder: str) -> bool:
        """Whether a lease's holder is a deleted rule; stored blocks may still have such leases."""
        return holder.startswith(RULE) and holder.removeprefix(RULE) not in self._rules

    def for_request(self, request: AdmitRequest, tokens: array[int]) -> list[Rule]:
        """Rules for a request with these tokens, in order."""
        if not self._groups:
            return []
        packed = memoryview(packed_bytes(tokens))
        scopes = {*product((None, request.salt), (None, request.tenant_id), (None, request.adapter_id))}
        groups = filter(None, map(self._groups.get, scopes))
        return sorted((rule for group in groups for rule in group.about(packed)), key=_position)

    def new(self, spec: RetentionRule) -> Rule:
        """Makes a checked rule that is not in force yet. Raises InvalidField, RuleExistsError."""
        check_spec(spec)
        if spec.name in self._rules:
            raise RuleExistsError(f"there is a rule {spec.name}", fields={"rule.name": "is in use"})
        self._check_alike(spec.match)
        return Rule(spec)

    def add(self, rule: Rule) -> None:
        """Puts a checked rule in force."""
        self._stamp(rule, rule.spec)
        self._enter(rule)

    def restore(self, spec: RetentionRule) -> None:
        """Puts a stored rule in force with its etag, unless a rule with its name exists."""
        if spec.name not in self._rules:
            self._enter(Rule(spec))

    def changed(self, spec: RetentionRule, mask: tuple[str, ...]) -> RetentionRule:
        """The rule as it would be after a change of the fields in the mask.

        Raises UnknownRuleError, StaleRuleError, InvalidField.
        """
        known = self.get(spec.name, "rule.name").spec
        _check_etag("rule.etag", spec.etag, known.etag)
        result = known
        for index, path in enumerate(mask):
            result = _with_field(result, spec, path, index)
        check_spec(result)
        if _prompt_of(result.match) != _prompt_of(known.match):
            self._check_alike(result.match)
        return result

    def update(self, spec: RetentionRule) -> None:
        """Puts a checked change in force."""
        rule = self._rules[spec.name]
        self._take_out(rule)
        self._stamp(rule, spec)
        self._enter(rule)

    def get_for_delete(self, name: str, etag: str) -> Rule:
        """Returns a rule that is to be deleted. Raises UnknownRuleError, StaleRuleError."""
        rule = self.get(name)
        _check_etag("etag", etag, rule.spec.etag)
        return rule

    def remove(self, rule: Rule) -> None:
        rule.deleted = True
        self._take_out(rule)

    def _stamp(self, rule: Rule, spec: RetentionRule) -> None:
        rule.spec = replace(spec, etag=str(self._next_number()))

    def _check_alike(self, match: RuleMatch) -> None:
        scope, prefix = _prompt_of(match)
        group = self._groups.get(scope)
        if group is not None and len(group.by_prefix.get(sha256(prefix).digest(), ())) >= MAX_ALIKE:
            raise InvalidField("rule.match", f"has the salt, tenant, adapter and prefix of {MAX_ALIKE} rules already")

    def _enter(self, rule: Rule) -> None:
        self._rules[rule.spec.name] = rule
        insort(self._ordered, rule, key=_position)
        scope, prefix = _prompt_of(rule.spec.match)
        self._groups.setdefault(scope, _Group()).add(rule, prefix)

    def _take_out(self, rule: Rule) -> None:
        del self._rules[rule.spec.name]
        del self._ordered[bisect_left(self._ordered, _position(rule), key=_position)]
        scope, prefix = _prompt_of(rule.spec.match)
        group = self._groups[scope]
        group.remove(rule, prefix)
        if not group.by_prefix:
            del self._groups[scope]


def _prompt_of(match: RuleMatch) -> tuple[_Scope, bytes]:
    return (match.salt, match.tenant_id, match.adapter_id), packed_bytes(pack(match.prefix_token_ids))


def _check_etag(field: str, given: str, current: str) -> None:
    if given and given != current:
        raise StaleRuleError("the etag of the rule is outdated", fields={field: f"is not the current {current}"})


def _with_field(known: RetentionRule, given: RetentionRule, path: str, index: int) -> RetentionRule:
    whole, _, part = path.partition(".")
    if path not in ALL_PATHS:
        raise InvalidField(f"update_mask.paths[{index}]", f"must be one of {', '.join(ALL_PATHS)}")
    if not part:
        return replace(known, **{whole: getattr(given, whole)})
    name = _PARTS[whole][part]
    return replace(known, **{whole: replace(getattr(known, whole), **{name: getattr(getattr(given, whole), name)})})


# Maps names of fields in messages to their names here.
_IN_MESSAGES = {"priority": "retention_priority", "duration": "retention_duration"}
_PARTS = {
    whole: {_IN_MESSAGES.get(field.name, field.name): field.name for field in fields(part)}
    for whole, part in (("match", RuleMatch), ("action", RuleAction))
}
ALL_PATHS = (*FIELDS, *(f"{whole}.{part}" for whole, parts in _PARTS.items() for part in parts))


def check_spec(spec: RetentionRule) -> None:
    """Raises InvalidField for a contradictory rule."""
    if not _NAME.fullmatch(spec.name):
        raise InvalidField("rule.name", "must be 1 to 64 letters, digits, '-', '_' or '.'")
    match, action = spec.match, spec.action
    for field in ("salt", "tenant_id"):
        value = getattr(match, field)
        if value is not None:
            check_id(f"rule.match.{field}", value)
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
    if action.eviction_policy is not None:
        action.eviction_policy.check("rule.action.eviction_policy")
    if action == RuleAction():
        raise InvalidField("rule.action", "must say what to do")
