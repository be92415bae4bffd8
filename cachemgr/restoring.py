"""Putting back what a store remembers of an executor, as far as it still has it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from cachemgr import siblings
from cachemgr.api import TierKind
from cachemgr.block import Block
from cachemgr.keys import TOKEN_BYTES, child_key
from cachemgr.leases import leases_of
from cachemgr.records import USED_LAST
from cachemgr.retention import MAX_PRIORITY, NO_PRIORITY, Wish

if TYPE_CHECKING:
    from cachemgr.journal import IndexJournal
    from cachemgr.leases import LeaseBook
    from cachemgr.records import BlockRecord
    from cachemgr.registry import Executor


def restore(executor: Executor, remembered: Iterable[BlockRecord], journal: IndexJournal, leases: LeaseBook) -> None:
    """Fills the empty pools of an executor that nothing was known of."""
    restorer = _Restorer(executor, journal, leases)
    records = sorted(remembered, key=lambda record: record.depth)
    for pool in executor.pools:
        # Numbers of uses go on where they were: those of lower tiers are in the store.
        mine = [record.last_use for record in records if record.group == pool.spec.group]
        pool.uses = max((use for use in mine if use != USED_LAST), default=0) + mine.count(USED_LAST)
    last_uses = [pool.uses for pool in executor.pools]
    for record in records:
        last_use = record.last_use
        if last_use == USED_LAST and record.group < len(last_uses):
            # The tail is the first to go.
            last_use = last_uses[record.group]
            last_uses[record.group] -= 1
        restorer.put_back(record, last_use)
    for pool in executor.pools:
        pool.find_empty()


class _Restorer:
    """Takes records parents first. The journal hears of those that are not where it has them."""

    def __init__(self, executor: Executor, journal: IndexJournal, leases: LeaseBook) -> None:
        self._executor = executor
        self._journal = journal
        self._leases = leases
        self._used: set[tuple[int, TierKind, int]] = set()

    def put_back(self, record: BlockRecord, last_use: int) -> None:
        """Adopts a block where its bytes are; among equal priorities one whose last use is smaller goes first."""
        found = self._believed(record) if record.group < len(self._executor.pools) else None
        if (found is None or found.place != record.place) and record.place not in self._used:
            self._journal.removed(self._executor.executor_id, *record.place)
        if found is None:
            return
        self._used.add(found.place)
        if found.backup is not None:
            self._used.add((found.group, found.backup.tier, found.backup.slot))
        block = self._adopt(found, last_use)
        # The user of a lease whose clock had not started is gone: it runs from now on.
        starts = any(lease.duration is not None and lease.remaining is None for lease in record.leases)
        # A lease that another covers is not restored.
        fewer = record.leases and sum(1 for _ in leases_of(block)) < len(record.leases)
        if found != record or starts or fewer:
            current = partial(self._executor.pools[found.group].current_record, block)
            self._journal.stored(self._executor.executor_id, *found.place, current)

    def _believed(self, record: BlockRecord) -> BlockRecord | None:
        """The record with the place where its bytes are; None when they are gone, or it cannot be right."""
        if not self._is_sound(record):
            return None
        below = record.below()
        if below is not None and not self._is_filled(below):
            below = None
        if record.tier is not TierKind.DEVICE or not self._is_on_device(record):
            return below
        backups = self._executor.pools[record.group].backups
        is_backed_up = below is not None and backups.tier is not None and below.tier is backups.tier.kind
        return record if is_backed_up else record._replace(backup=None)

    def _is_sound(self, record: BlockRecord) -> bool:
        """Whether it can be true: its key is that of its tokens behind the parent, and so on."""
        pool = self._executor.pools[record.group]
        if any(not NO_PRIORITY <= lease.priority <= MAX_PRIORITY for lease in record.leases):
            return False
        full = pool.block_size * TOKEN_BYTES
        if not TOKEN_BYTES <= len(record.tokens) <= full or record.key in pool.index:
            return False
        if (record.parent_key is None) != (record.depth == 0):
            return False
        parent_key = record.parent_key
        if parent_key is None:
            parent_key = self._executor.domain(record.salt, record.adapter_id).key
        parent = pool.index.get(parent_key)
        if parent is not None and (parent.depth != record.depth - 1 or len(parent.tokens) != full):
            return False
        gap = pool.bare.get(record.key)
        if gap is not None and any(child.depth != record.depth + 1 for child in siblings.each(gap)):
            return False
        return child_key(parent_key, record.tokens, record.extra) == record.key

    def _is_on_device(self, record: BlockRecord) -> bool:
        """Whether no step has written to the slot since, and what it stands on is on the device, too."""
        pool, spec = self._executor.pools[record.group], self._executor.spec
        steps = spec.last_write_steps[record.group] if spec.last_write_steps else ()
        if not 1 <= record.slot <= len(steps) or record.place in self._used:
            return False
        if record.parent_key is not None and pool.window is None:
            parent = pool.index.get(record.parent_key)
            if parent is None or not pool.is_on_device(parent):
                return False
        return steps[record.slot - 1] <= record.stored_step

    def _is_filled(self, record: BlockRecord) -> bool:
        """Whether a lower slot was filled by the copy that is remembered.

        What it stands on may be lost: that is computed again by whoever needs it.
        """
        slots = self._executor.spec.generations(record.tier, record.group)
        if not 1 <= record.slot <= len(slots) or record.place in self._used:
            return False
        return slots[record.slot - 1] == record.generation != 0

    def _adopt(self, record: BlockRecord, last_use: int) -> Block:
        executor, pool, leases = self._executor, self._executor.pools[record.group], self._leases
        domain = executor.domain(record.salt, record.adapter_id, record.tenant_id, record.session_id, record.extra)
        tier = pool.tiers[record.tier]
        block = Block(tier.offset + record.slot)
        block.recency = last_use
        tier.fill(block.slot, record.generation)
        # The newest comes first in a record, and in a list that grows at its beginning.
        for lease in reversed(record.leases):
            wish = Wish(lease.holder, lease.priority, lease.duration, lease.offload_min_priority)
            leases.restore(pool, block, wish, lease.remaining)
        parent_key = domain.key if record.parent_key is None else record.parent_key
        pool.adopt(block, record.key, parent_key, record.tokens, record.depth, domain, record.stored_step)
        if record.backup is not None:
            below = pool.tiers[record.backup.tier]
            pool.backups.places[block] = below.offset + record.backup.slot
            below.fill(below.offset + record.backup.slot, record.backup.generation)
        return block
