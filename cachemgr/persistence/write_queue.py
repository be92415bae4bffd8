"""Changes of the index that Redis has not seen yet: coalesced per block, bounded, synchronous."""

from collections.abc import Callable, Container
from dataclasses import dataclass, field

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.types import TierKind

# Group, tier and slot.
Place = tuple[int, TierKind, int]
# Tells what is at a place when it is called; None when nothing is.
Current = Callable[[], BlockRecord | None]


@dataclass(slots=True)
class Changes:
    """What one executor's hash in Redis lacks.

    `blocks` maps places to who tells what is there, None where a block left the index. With `cleared` the hash
    is emptied first and takes `epoch`. With `resync` the changes are incomplete: everything must be written again.
    """

    epoch: int
    cleared: bool = False
    resync: bool = False
    blocks: dict[Place, Current | None] = field(default_factory=dict)


class WriteBehind:
    """Collects changes. Never holds more than `bound` blocks: beyond it an executor is marked for a resync."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._pending = 0
        self._changes: dict[str, Changes] = {}

    @property
    def pending(self) -> int:
        """Blocks waiting to be written."""
        return self._pending

    def is_pending(self, executor_id: str, place: Place) -> bool:
        """Whether what is at a place has yet to be written."""
        changes = self._changes.get(executor_id)
        return changes is not None and (changes.cleared or place in changes.blocks)

    def clear(self, executor_id: str, epoch: int) -> None:
        """The executor has no indexed block, and this epoch."""
        self._drop(executor_id)
        self._changes[executor_id] = Changes(epoch, cleared=True)

    def put(self, executor_id: str, epoch: int, place: Place, current: Current | None) -> None:
        """A block entered the index at a place, or left it (None)."""
        changes = self._changes.setdefault(executor_id, Changes(epoch))
        if changes.resync:
            return
        if place not in changes.blocks:
            self._pending += 1
        changes.blocks[place] = current
        if self._pending > self._bound:
            self.resync(executor_id, epoch)

    def resync(self, executor_id: str, epoch: int) -> None:
        """Forgets the executor's changes; what is written next is everything."""
        self._drop(executor_id)
        self._changes[executor_id] = Changes(epoch, cleared=True, resync=True)

    def drop(self, executor_id: str) -> bool:
        """Forgets an executor's changes; whether there were any."""
        had = executor_id in self._changes
        self._drop(executor_id)
        return had

    def take(self, unread: Container[str] = ()) -> tuple[str, Changes] | None:
        """Hands out the changes of one executor, the one that waits longest. Those of `unread` executors wait."""
        executor_id = next((one for one in self._changes if one not in unread), None)
        if executor_id is None:
            return None
        changes = self._changes[executor_id]
        self._drop(executor_id)
        return executor_id, changes

    def give_back(self, executor_id: str, failed: Changes) -> None:
        """Takes back changes that were not written; what happened since then is newer and wins."""
        newer = self._changes.get(executor_id)
        if newer is not None and newer.cleared:
            return
        if failed.resync:
            self.resync(executor_id, failed.epoch)
            return
        self._drop(executor_id)
        blocks = failed.blocks if newer is None else {**failed.blocks, **newer.blocks}
        self._changes[executor_id] = Changes(failed.epoch, cleared=failed.cleared, blocks=blocks)
        self._pending += len(blocks)
        if self._pending > self._bound:
            self.resync(executor_id, failed.epoch)

    def _drop(self, executor_id: str) -> None:
        dropped = self._changes.pop(executor_id, None)
        if dropped is not None:
            self._pending -= len(dropped.blocks)
