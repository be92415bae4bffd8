"""Changes that Redis has not seen yet: coalesced, bounded, synchronous. The manager reports them here."""

import asyncio
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.operators.operator_journal import Kind
from cachemgr.types import Slot, TierKind

# Returns the present block of a slot, or None.
Current = Callable[[], BlockRecord | None]
# A hash of operators' entries: their kind and, for pins, the executor.
Hash = tuple[Kind, str]
# With this many changed blocks, they are written at once.
FLUSH_AT = 2_000


@dataclass(slots=True)
class Changes:
    """The changes that one executor's hash in Redis lacks.

    `blocks` maps slots to functions that return the block, or to None if a block left the index. With `cleared`, the
    hash is first emptied and takes `epoch`. With `resync`, changes are incomplete and everything must be rewritten.
    """

    epoch: int
    cleared: bool = False
    resync: bool = False
    blocks: dict[Slot, Current | None] = field(default_factory=dict)


class PendingBlocks:
    """Collects changes of at most `bound` blocks; an executor whose change exceeds the bound is marked for a resync."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._pending = 0
        self._changes: dict[str, Changes] = {}

    @property
    def pending(self) -> int:
        """Number of blocks waiting to be written."""
        return self._pending

    def is_pending(self, executor_id: str, slot: Slot) -> bool:
        """Whether a slot's block has not been written yet."""
        changes = self._changes.get(executor_id)
        return changes is not None and (changes.cleared or slot in changes.blocks)

    def clear(self, executor_id: str, epoch: int) -> None:
        """Notes that the executor has this epoch and no indexed block."""
        self._drop(executor_id)
        self._changes[executor_id] = Changes(epoch, cleared=True)

    def put(self, executor_id: str, epoch: int, slot: Slot, current: Current | None) -> None:
        """Notes that a block entered the index in a slot, or left the index (None)."""
        changes = self._changes.setdefault(executor_id, Changes(epoch))
        if changes.resync:
            return
        if slot not in changes.blocks:
            self._pending += 1
        changes.blocks[slot] = current
        if self._pending > self._bound:
            self.resync(executor_id, epoch)

    def resync(self, executor_id: str, epoch: int) -> None:
        """Drops the executor's changes, and has its whole index written next."""
        self._drop(executor_id)
        self._changes[executor_id] = Changes(epoch, cleared=True, resync=True)

    def drop(self, executor_id: str) -> bool:
        """Forgets an executor's changes; returns whether there were any."""
        had = executor_id in self._changes
        self._drop(executor_id)
        return had

    def take(self, unread: Container[str] = ()) -> tuple[str, Changes] | None:
        """Hands out the changes of the executor that waits longest, or None. Changes of `unread` executors wait."""
        executor_id = next((one for one in self._changes if one not in unread), None)
        if executor_id is None:
            return None
        changes = self._changes[executor_id]
        self._drop(executor_id)
        return executor_id, changes

    def requeue(self, executor_id: str, failed: Changes) -> None:
        """Requeues changes that were not written; changes since then are newer and win."""
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


class PendingEntries:
    """Collects names of changed operators' entries. Beyond `bound` names, a hash is written as a whole."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._changed: dict[Hash, dict[str, None]] = {}
        self._whole: set[Hash] = set()

    @property
    def pending(self) -> int:
        """Number of entries waiting to be written."""
        return sum(map(len, self._changed.values()))

    @property
    def hashes(self) -> list[Hash]:
        """The hashes with changes."""
        return list({**dict.fromkeys(self._whole), **self._changed})

    def put(self, kind: Kind, name: str, executor_id: str = "") -> None:
        """Notes that an entry is new, changed, or deleted."""
        self._changed.setdefault((kind, executor_id), {})[name] = None
        if self.pending > self._bound:
            self.rewrite(kind, executor_id)

    def rewrite(self, kind: Kind, executor_id: str = "") -> None:
        """Has the hash written as a whole, soon."""
        self._changed.pop((kind, executor_id), None)
        self._whole.add((kind, executor_id))

    def is_pending(self, kind: Kind, name: str, executor_id: str = "") -> bool:
        """Whether an entry has not been written yet."""
        return name in self._changed.get((kind, executor_id), ()) or (kind, executor_id) in self._whole

    def take(self, hash_: Hash) -> list[str] | None:
        """Hands out the changed names of a hash; None if the hash is to be written as a whole."""
        names = list(self._changed.pop(hash_, ()))
        if hash_ in self._whole:
            self._whole.discard(hash_)
            return None
        return names

    def requeue(self, hash_: Hash, names: list[str]) -> None:
        """Requeues names that were not written."""
        self._changed[hash_] = {**dict.fromkeys(names), **self._changed.get(hash_, {})}


class PendingChanges:
    """The journal that a manager reports to. Nothing here blocks or fails."""

    def __init__(self, max_pending: int = 200_000, flush_at: int = FLUSH_AT) -> None:
        """`max_pending` limits blocks and entries, each; at `flush_at` blocks, `is_large` is set."""
        self.blocks = PendingBlocks(max_pending)
        self.entries = PendingEntries(max_pending)
        # The last epoch of each executor that the manager has accepted.
        self.epochs: dict[str, int] = {}
        # Executors whose registration has not been written yet.
        self.arrived: set[str] = set()
        self.has_changed = asyncio.Event()
        self.is_large = asyncio.Event()
        self._flush_at = flush_at

    @property
    def pending(self) -> int:
        """Number of blocks and entries whose change is not in Redis yet."""
        return self.blocks.pending + self.entries.pending

    def cleared(self, executor_id: str, epoch: int) -> None:
        """Notes that the executor starts an epoch with an empty index."""
        self.registered(executor_id, epoch)
        self.blocks.clear(executor_id, epoch)
        self.note()

    def registered(self, executor_id: str, epoch: int) -> None:
        """Notes that the manager has accepted an epoch."""
        self.epochs[executor_id] = epoch
        self.arrived.add(executor_id)

    def stored(self, executor_id: str, group: int, tier: TierKind, slot: int, current: Current) -> None:
        """Notes that a block entered a slot or changed there; it is read at the time of writing."""
        self._put(executor_id, (group, tier, slot), current)

    def removed(self, executor_id: str, group: int, tier: TierKind, slot: int) -> None:
        """Notes that the block left its slot or the index."""
        self._put(executor_id, (group, tier, slot), None)

    def operator_changed(self, kind: Kind, name: str, executor_id: str = "") -> None:
        """Notes that an entry is new, changed, or deleted. Such rare but important changes are written at once."""
        self.entries.put(kind, name, executor_id)
        self.has_changed.set()
        self.is_large.set()

    def replace(self, executor_id: str, epoch: int) -> None:
        """Has everything of an executor written again, soon."""
        self.epochs[executor_id] = epoch
        self.blocks.resync(executor_id, epoch)
        self.entries.rewrite(Kind.PIN, executor_id)
        self.note()

    def note(self) -> None:
        """Notes that there is something to write."""
        self.has_changed.set()
        if self.blocks.pending >= self._flush_at:
            self.is_large.set()

    def _put(self, executor_id: str, slot: Slot, current: Current | None) -> None:
        self.blocks.put(executor_id, self.epochs.get(executor_id, 0), slot, current)
        self.note()
