"""Ports of the copy in Redis: the state that it copies, and the calls that restore that state."""

from collections.abc import Iterable
from typing import Protocol

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.operators.operator_journal import Entry, Kind
from cachemgr.types import PinRecord, Restored
from protos.kvcache.v1 import kvcache_pb2 as pb


class Source(Protocol):
    """The state that is copied: `Queries` of the manager."""

    @property
    def now(self) -> float:
        """The manager's time in seconds."""

    def knows_executor(self, executor_id: str) -> bool:
        """Whether an executor is registered."""

    def records(self, executor_id: str) -> Iterable[BlockRecord]:
        """Every indexed block of an executor."""

    def entries(self, kind: Kind, executor_id: str = "") -> Iterable[Entry]:
        """All entries of a kind; for pins, only the executor's."""

    def entry(self, kind: Kind, name: str, executor_id: str = "") -> Entry | None:
        """One entry, or None."""


class Restoring(Protocol):
    """The calls that restore stored state; each call is in the operation log."""

    def restore_operators(self, stored: pb.StoredOperators) -> None:
        """Restores rules, quotas and shares."""

    def restore_blocks(self, executor_id: str, executor_epoch: int, stored: list[BlockRecord]) -> None:
        """Restores a part of an executor's blocks."""

    def end_recovery(self, executor_id: str, executor_epoch: int, pins: list[PinRecord]) -> Restored:
        """Ends the restoring of blocks and restores these pins; returns how many blocks are then cached."""

    def is_recovering(self, executor_id: str) -> bool:
        """Whether stored blocks of an executor have yet to be restored."""
