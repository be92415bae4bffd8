"""The envelope of hints and the retention that hints ask for, before any hint is carried out.

The envelope has the format of vLLM and Dynamo: protocol_version "0.1", message_id, and actions with action_id,
action_type, action_version and a payload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cachemgr.retention.bounds import MAX_DURATION, MAX_PRIORITY
from cachemgr.types import HintAction, Hints, Retention, RetentionRange
from cachemgr.validation import check_id
from protos.errors import InvalidField

if TYPE_CHECKING:
    from cachemgr.types import AdmitRequest

PROTOCOL_VERSION = ACTION_VERSION = "0.1"
MAX_ACTIONS = 64


def check(path: str, hints: Hints) -> None:
    """Raises InvalidField for an envelope that cannot be read; each action is answered separately."""
    if hints.protocol_version != PROTOCOL_VERSION:
        raise InvalidField(f"{path}.protocol_version", f'must be "{PROTOCOL_VERSION}"')
    if not hints.actions:
        raise InvalidField(f"{path}.actions", "must not be empty")
    if len(hints.actions) > MAX_ACTIONS:
        raise InvalidField(f"{path}.actions", f"must be at most {MAX_ACTIONS}")
    for index, action in enumerate(hints.actions):
        check_id(f"{path}.actions[{index}].action_id", action.action_id)


def with_retention(request: AdmitRequest) -> AdmitRequest:
    """Returns the request with its hints' retention, unless it already has a retention. Raises InvalidField."""
    if request.hints is None:
        return request
    check("hints", request.hints)
    return replace(request, retention=_asked_retention(request.hints)) if request.retention == Retention() else request


def _asked_retention(hints: Hints) -> Retention:
    """The retention that the first Retain asks for, including for blocks that are yet to be computed."""
    for action in hints.actions:
        if action.action_type == "Retain" and action.action_version == ACTION_VERSION:
            try:
                priority, seconds = (
                    priority_of(action.payload, "priority", None),
                    seconds_of(action.payload, required=False),
                )
            except PayloadError:
                continue
            if priority is not None:
                return Retention((RetentionRange(0, None, priority, seconds),), priority, seconds)
    return Retention()


class PayloadError(ValueError):
    """A payload lacks a value that its action needs, or has an invalid value."""


def gives_retention(action: HintAction) -> bool:
    """Whether an action is valid and sets the holder's retention request: Retain, or Demote without a tier."""
    payload = action.payload
    try:
        if action.action_version != ACTION_VERSION:
            return False
        if action.action_type == "Retain":
            seconds_of(payload, required=False)
            return priority_of(payload, "priority", None) is not None
        return (
            action.action_type == "Demote" and "tier" not in payload and priority_of(payload, "priority", 0) is not None
        )
    except PayloadError:
        return False


def priority_of(payload: Mapping[str, Any], field: str, default: int | None) -> int | None:
    value = payload.get(field, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer():
        raise PayloadError(f"{field} must be a whole number")
    if not 0 <= value <= MAX_PRIORITY:
        raise PayloadError(f"{field} must be between 0 and {MAX_PRIORITY}")
    return int(value)


def seconds_of(payload: Mapping[str, Any], *, required: bool) -> float | None:
    value = payload.get("duration_seconds")
    if value is None and not required:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_DURATION:
        raise PayloadError("duration_seconds must be a number greater than zero, and at most 10,000 years")
    return float(value)
