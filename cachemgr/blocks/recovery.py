"""Putting back what a store remembers of an executor, as far as it still has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from cachemgr.blocks import children as siblings
from cachemgr.blocks.block import Block
from cachemgr.blocks.block_keys import TOKEN_BYTES, child_key
from cachemgr.blocks.block_record import USED_LAST
from cachemgr.retention.leases import leases_of
from cachemgr.retention.priority import DEFAULT_PRIORITY, MAX_PRIORITY, NO_PRIORITY, Wish
from cachemgr.types import RemovalCause, TierKind

if TYPE_CHECKING:
    from cachemgr.blocks.block_pool import Pool
    from cachemgr.blocks.block_record import BlockRecord
    from cachemgr.blocks.journal import IndexJournal
    from cachemgr.blocks.tier import Tier
    from cachemgr.operators.forget_history import ForgottenBefore
    from cachemgr.retention.leases import LeaseBook
    from cachemgr.sequences.clients import Executor
    from cachemgr.types import ExecutorSpec, Slot


class Recovery:
    """Puts back remembered blocks one by one, parents before children, while sequences use the pools already.

    A remembered block counts if its slot is still as the executor has told it at its registration, and has not been
    allocated since: `Tier.unread` has the slots of which both is true. The journal hears of each block that is not
    where it has it.
    """

    def __init__(
        self,
        executor: Executor,
        spec: ExecutorSpec,
        journal: IndexJournal,
        leases: LeaseBook,
        is_deleted_rule: Callable[[str], bool],
        forgotten: ForgottenBefore,
        purged: list[Callable[[BlockRecord], bool]],
    ) -> None:
        """`spec` tells what the slots hold. `is_deleted_rule` says of a lease's holder that its rule is gone.

        `purged` means blocks that were dropped before they were read, and grows with `purge`.
        """
        self._executor = executor
        self._spec = spec
        self._journal = journal
        self._leases = leases
        self._is_deleted_rule = is_deleted_rule
        # Blocks that were forgotten, or purged, before they were read.
        self.forgotten = forgotten
        self.purged = purged
        self._forgotten_keys: set[bytes] = set()
        # All uses since are later ones. Blocks without a known time of use count down from here.
        self._last_uses = [pool.uses for pool in executor.pools]
        for pool in executor.pools:
            group = pool.spec.group
            steps = spec.last_write_steps[group] if spec.last_write_steps else ()
            for tier in pool.tiers:
                filled = steps if tier is pool.device else spec.generations(tier.kind, group)
                # Nothing is told of a tier, or something of each slot.
                if len(filled):
                    tier.await_remembered(filled)

    def purge(self, is_meant: Callable[[BlockRecord], bool]) -> None:
        """Remembered blocks that are meant, and what stands on them, are overwritten instead of put back."""
        self.purged.append(is_meant)

    def overwrite(self, slots: Iterable[Slot]) -> None:
        """Zeroes slots that were forgotten before the executor was lost: nobody got them since."""
        for group, kind, slot in slots:
            if group >= len(self._executor.pools):
                continue
            pool = self._executor.pools[group]
            tier = pool.tiers[kind]
            # The device of a new process has nothing of before.
            if tier.is_unread(slot) and (tier is not pool.device or self._spec.last_write_steps[group][slot - 1]):
                self._zero(pool, tier, slot)

    def put_back(self, record: BlockRecord) -> None:
        """Adopts a block where its bytes are; among equal priorities the least recently used one is evicted first."""
        executor_id = self._executor.executor_id
        pools = self._executor.pools
        pool = pools[record.group] if record.group < len(pools) else None
        if pool is not None and self._is_forgotten(record):
            # What stands on it goes, too, also where its own bytes are lost.
            self._forgotten_keys.add(record.key)
            self._leave(record)
            self._overwrite(pool, record)
            return
        found = None if pool is None else self._believed(record)
        if pool is None or (found is None or found.place != record.place):
            self._leave(record)
        if pool is None or found is None:
            return
        if found.last_use == USED_LAST:
            # The tail is evicted first.
            found = found._replace(last_use=self._last_uses[record.group])
            self._last_uses[record.group] -= 1
        block = self._adopt(found)
        for lease in leases_of(block):
            if self._is_deleted_rule(lease.wish.holder):
                self._leases.revoke(pool, block, lease.wish.holder, RemovalCause.RULE_CHANGED)
        # It may lie where its copy was, and its leases may run now, be covered, or come from a block that it covers.
        if _timeless(pool.record(block)) != _timeless(record):
            self._journal.stored(executor_id, *found.place, partial(pool.current_record, block))

    def end(self) -> None:
        """No remembered block will come any more: slots in which none was are empty."""
        for pool in self._executor.pools:
            for tier in pool.tiers:
                tier.end_remembered()

    def _leave(self, record: BlockRecord) -> None:
        """The store's block is not there any more. Of what is there now the journal has heard."""
        pools, place = self._executor.pools, None
        if record.group < len(pools):
            pool = pools[record.group]
            tier = pool.tiers[record.tier]
            place = tier.offset + record.slot if 1 <= record.slot <= tier.size else None
            block = None if place is None else pool.blocks[place]
            if block is not None and block.parent is not None:
                return
        self._journal.removed(self._executor.executor_id, *record.place)

    def _overwrite(self, pool: Pool, record: BlockRecord) -> None:
        """Zeroes what a remembered block may have left, whether it could be put back or not."""
        group = record.group
        if record.key not in pool.index:
            pool.lost.add(record.key, RemovalCause.FORGOTTEN, self._leases.now, "", DEFAULT_PRIORITY)
        for at in (record, record.backup):
            tier = None if at is None else pool.tiers[at.tier]
            if at is None or tier is None or tier.unread is None or not tier.is_unread(at.slot):
                continue
            if tier is not pool.device and self._spec.generations(tier.kind, group)[at.slot - 1] != at.generation:
                # It was filled for another block.
                continue
            self._zero(pool, tier, at.slot)

    def _zero(self, pool: Pool, tier: Tier, slot: int) -> None:
        assert tier.unread is not None
        tier.unread.settle(slot)
        block = Block(tier.offset + slot)
        pool.blocks[block.slot] = block
        pool.zero(block)

    def _is_forgotten(self, record: BlockRecord) -> bool:
        if record.parent_key in self._forgotten_keys or self.forgotten.means(record):
            return True
        return any(is_meant(record) for is_meant in self.purged)

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
        if not TOKEN_BYTES <= len(record.tokens) <= full or record.key in pool.index or record.key in pool.pending:
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
        node = pool.node(parent_key)
        if len(record.tokens) < full and node is not None and siblings.covering(node, record.tokens, record.extra):
            return False
        return child_key(parent_key, record.tokens, record.extra) == record.key

    def _is_on_device(self, record: BlockRecord) -> bool:
        """Whether no step has written to the slot since, and what it stands on is on the device, too."""
        pool = self._executor.pools[record.group]
        if not pool.device.is_unread(record.slot):
            return False
        if record.parent_key is not None and pool.window is None:
            parent = pool.index.get(record.parent_key)
            if parent is None or not pool.is_on_device(parent):
                return False
        return self._spec.last_write_steps[record.group][record.slot - 1] <= record.stored_step

    def _is_filled(self, record: BlockRecord) -> bool:
        """Whether a lower slot was filled by the copy that is remembered, and may hold this block.

        What it stands on may be lost: that is computed again by whoever needs it.
        """
        pool = self._executor.pools[record.group]
        if not pool.tiers[record.tier].is_unread(record.slot):
            return False
        if pool.window is None:
            # No block lies in a higher tier than its parent.
            parent, gap = pool.index.get(record.parent_key or b""), pool.bare.get(record.key)
            if parent is not None and pool.tier_of(parent).kind > record.tier:
                return False
            if gap is not None and any(pool.tier_of(child).kind < record.tier for child in siblings.each(gap)):
                return False
        return self._spec.generations(record.tier, record.group)[record.slot - 1] == record.generation != 0

    def _adopt(self, record: BlockRecord) -> Block:
        executor, pool, leases = self._executor, self._executor.pools[record.group], self._leases
        domain = executor.domain(record.salt, record.adapter_id, record.tenant_id, record.session_id, record.extra)
        tier = pool.tiers[record.tier]
        block = Block(tier.offset + record.slot)
        block.recency = record.last_use
        for at in (record, record.backup):
            unread = None if at is None else pool.tiers[at.tier].unread
            if at is not None and unread is not None:
                unread.settle(at.slot)
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


def _timeless(record: BlockRecord) -> BlockRecord:
    """What a store must be told of: not that time passes, but whether a lease's clock runs."""
    if not record.leases:
        return record
    leases = [lease._replace(remaining=None if lease.remaining is None else 0.0) for lease in record.leases]
    return record._replace(leases=tuple(leases))
