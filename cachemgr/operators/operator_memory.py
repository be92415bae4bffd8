"""What outlives a manager beside its blocks: rules, quotas, shares of pools, and pins."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cachemgr.types import PoolShare, Quota, RetentionRule

if TYPE_CHECKING:
    from cachemgr.operators.state import ManagerState
    from cachemgr.sequences.clients import Executor


class Kind(enum.Enum):
    """What there is."""

    RULE = "rules"
    QUOTA = "quotas"
    SHARE = "shares"
    PIN = "pins"


class PinRecord(NamedTuple):
    """A pin; `remaining` in seconds, `blocks` as groups and keys, root first."""

    name: str
    owner: str
    remaining: float
    blocks: tuple[tuple[int, bytes], ...]

    @property
    def number(self) -> int:
        """Pins are numbered as they are made."""
        return int(self.name.partition("-")[2])


Entry = RetentionRule | Quota | PoolShare | PinRecord


def entry_name(entry: Entry) -> str:
    """The field of its hash."""
    if isinstance(entry, Quota):
        field = "tenant_id" if entry.tenant_id is not None else "salt"
        return f"{field}/{getattr(entry, field)}"
    return entry.pool_id if isinstance(entry, PoolShare) else entry.name


class OperatorJournal(Protocol):
    """Hears of every change of what operators said, at once. Must not fail or block."""

    def operator_changed(self, kind: Kind, name: str, executor_id: str = "") -> None:
        """The entry of this name is new, another, or gone. `executor_id` is set for pins."""


class NoOperatorJournal:
    """Keeps nothing."""

    def operator_changed(self, kind: Kind, name: str, executor_id: str = "") -> None:
        """Forgets it."""


_KINDS = {RetentionRule: Kind.RULE, Quota: Kind.QUOTA, PoolShare: Kind.SHARE}


class OperatorMemory:
    """Tells the journal of what operators change, and pins again what an earlier manager had pinned."""

    def __init__(self, state: ManagerState, journal: OperatorJournal) -> None:
        self._state = state
        self._journal = journal

    def tell(self, entry: RetentionRule | Quota | PoolShare) -> None:
        """The journal hears of an entry that has changed or is gone."""
        self._journal.operator_changed(_KINDS[type(entry)], entry_name(entry))

    def hear_of_pins(self, executor: Executor) -> None:
        """From now on the journal hears of each pin of an executor."""
        executor.holds.on_pin = partial(self._pin_changed, executor.executor_id)

    def restore_pins(self, executor: Executor, pins: Iterable[PinRecord]) -> None:
        """Pins the blocks again that have come back, oldest pin first."""
        now = self._state.leases.now
        for pin in sorted(pins, key=lambda pin: pin.number):
            blocks = [
                (executor.pools[group], block)
                for group, key in pin.blocks
                if group < len(executor.pools) and (block := executor.pools[group].index.get(key)) is not None
            ]
            if blocks and pin.remaining > 0:
                executor.holds.restore(pin.name, blocks, pin.owner, now + pin.remaining)
            else:
                self._pin_changed(executor.executor_id, pin.name)
        executor.holds.keep_budget(now)

    def lose_pins(self, executor: Executor) -> None:
        """What an executor had pinned is about to be gone for good."""
        for hold in executor.holds:
            if hold.pin:
                self._pin_changed(executor.executor_id, hold.name)

    def _pin_changed(self, executor_id: str, name: str) -> None:
        self._journal.operator_changed(Kind.PIN, name, executor_id)
