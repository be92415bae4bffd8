"""The source and the target of a copy in Redis, for tests of the copy alone."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from redis.asyncio import Redis

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.operators.operator_journal import Entry, Kind
from cachemgr.persistence.pending_changes import PendingChanges
from cachemgr.persistence.reading import Reading
from cachemgr.persistence.redis_index import IndexStore
from cachemgr.types import PinRecord, Restored, Slot
from protos.kvcache.v1 import kvcache_pb2 as pb


@dataclass
class Copied:
    """An index that is copied and restored. Every executor is registered, unless `here` names the registered ones."""

    index: dict[Slot, BlockRecord] = field(default_factory=dict)
    now: float = 100.0
    here: set[str] | None = None
    # Whether a registered executor still waits for its blocks.
    is_waiting: bool = True
    put_back_blocks: list[BlockRecord] = field(default_factory=list)

    def knows_executor(self, executor_id: str) -> bool:
        return self.here is None or executor_id in self.here

    def records(self, executor_id: str) -> Iterable[BlockRecord]:
        return list(self.index.values())

    def entries(self, kind: Kind, executor_id: str = "") -> Iterable[Entry]:
        return ()

    def entry(self, kind: Kind, name: str, executor_id: str = "") -> Entry | None:
        return None

    def restore_operators(self, stored: pb.StoredOperators) -> None:
        raise AssertionError("nothing of operators is written")

    def restore_blocks(self, executor_id: str, executor_epoch: int, stored: list[BlockRecord]) -> None:
        self.put_back_blocks += stored
        for record in stored:
            self.index.setdefault(record.tier_slot, record)

    def end_recovery(self, executor_id: str, executor_epoch: int, pins: list[PinRecord]) -> Restored:
        return Restored(len(self.put_back_blocks), 0)

    def is_recovering(self, executor_id: str) -> bool:
        return self.is_waiting


# Each manager's epoch is newer than those of the managers before it.
_epochs = itertools.count(1)


class CopiedStore:
    """The store during one manager's life, and the queue for the manager's changes."""

    def __init__(self, redis: Redis, copied: Copied | None = None, *, max_pending: int = 50, interval: float = 0.01):
        self.copied = copied or Copied()
        self.queue = PendingChanges(max_pending)
        self.store = IndexStore(redis, self.queue, self.copied, self.copied, epoch=next(_epochs), interval=interval)

    def note(self, executor_id: str, record: BlockRecord) -> None:
        """A block entered the index."""
        self.queue.stored(executor_id, *record.tier_slot, lambda: record)

    async def register(self, executor_id: str, epoch: int) -> tuple[Reading, list[BlockRecord]]:
        """Registers an executor and restores what Redis has of it."""
        reading = await self.store.recall(executor_id)
        assert reading.is_complete.is_set()
        self.store.registered(executor_id, epoch)
        self.copied.put_back_blocks = []
        await self.store.restore(reading)
        return reading, self.copied.put_back_blocks


def block(slot: int, depth: int = 0, group: int = 0, step: int = 3) -> BlockRecord:
    salt = None if slot % 2 else "salt\x00ü"
    return BlockRecord(group, slot, bytes([slot % 256] * 32), None, depth, bytes(12), salt, 0, step)
