"""The calls that restore the state that is copied to Redis."""

from typing import Protocol

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.types import PinRecord, Restored
from protos.kvcache.v1 import kvcache_pb2 as pb


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
