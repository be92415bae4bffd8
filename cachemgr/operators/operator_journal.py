"""Operators' entries that outlive a manager: rules, quotas, shares of pools, and pins."""

from __future__ import annotations

import enum
from typing import Protocol

from cachemgr.types import PinRecord, PoolShare, Quota, RetentionRule


class Kind(enum.Enum):
    RULE = "rules"
    QUOTA = "quotas"
    SHARE = "shares"
    PIN = "pins"


Entry = RetentionRule | Quota | PoolShare | PinRecord


def entry_name(entry: Entry) -> str:
    """The name of an entry, unique within its kind."""
    if isinstance(entry, Quota):
        field = "tenant_id" if entry.tenant_id is not None else "salt"
        return f"{field}/{getattr(entry, field)}"
    return entry.pool_id if isinstance(entry, PoolShare) else entry.name


class OperatorJournal(Protocol):
    """Receives every change of an entry at once. Must not fail or block."""

    def operator_changed(self, kind: Kind, name: str, executor_id: str = "") -> None:
        """Notes that the entry of this name is new, changed, or deleted. `executor_id` is set for pins."""


class NoOperatorJournal:
    """A journal that keeps nothing."""

    def operator_changed(self, kind: Kind, name: str, executor_id: str = "") -> None:
        """Ignores the change."""
