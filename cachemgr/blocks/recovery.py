"""Blocks after the loss or restart of their executor: carried over in lower tiers, or restored from a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from cachemgr.blocks.block import Block, account_of
from cachemgr.blocks.block_record import USED_LAST
from cachemgr.blocks.prefix_tree import children_of, covering_child
from cachemgr.retention.bounds import MAX_PRIORITY
from cachemgr.retention.leases import leases_of
from cachemgr.retention.priority import NO_PRIORITY, OTHER_WEIGHTS, WEIGHTS, RetentionRequest
from cachemgr.types import RemovalCause, TierKind
from protos.kvcommon.block_keys import child_key
from protos.kvcommon.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from cachemgr.blocks.block_pool import BlockPool, PoolListener
    from cachemgr.blocks.block_record import BlockRecord, IndexJournal
    from cachemgr.blocks.cache_scopes import CacheScopes
    from cachemgr.blocks.tier import Tier
    from cachemgr.retention.leases import LeaseBook
    from cachemgr.types import ExecutorSpec, ForgetTarget, PoolSpec, Slot

_DEPTH, _RECENCY = attrgetter("depth"), attrgetter("recency")
# Tier, slot, and the ticket of the copy that filled it.
_LowerSlot = tuple[TierKind, int, int]


class ForgottenBlocks(Protocol):
    """Blocks that were forgotten before they were read."""

    def means(self, record: BlockRecord) -> bool:
        """Whether a stored block is forgotten."""

    def add(self, target: ForgetTarget) -> None:
        """Adds the stored blocks that a later call forgets."""


def restart(
    pool: BlockPool,
    spec: PoolSpec,
    listener: PoolListener,
    filled: Mapping[TierKind, Sequence[int]],
    held: Mapping[Block, int],
    zeroing: Iterable[int],
) -> None:
    """Resets a pool after its executor restarted. Blocks stay only if `filled` confirms a copy in a lower slot.

    `filled` has the tickets that filled the slots of each lower tier. Blocks that stay keep the references `held`;
    callers must end all other references first. Lower indexes in `zeroing` are overwritten, unless a block stays there.
    """
    tree = pool.tree
    staying = {block: index for block in tree.by_key.values() if (index := _slot_below(pool, block, filled))}
    for block in tree.by_key.values():
        if block not in staying:
            pool.lose(block)
    moved = [block for block, (kind, slot, _) in staying.items() if pool.tiers[kind].offset + slot != block.index]
    for block in sorted(filter(pool.is_on_device, moved), key=_DEPTH, reverse=True):
        if block.refs:
            pool.lru_clock += 1
            block.recency = pool.lru_clock
    parents = {block: block.parent.key for block in staying if block.parent is not None}
    dirty = [(tier.kind, index - tier.offset) for index in zeroing if (tier := pool.tier_at(index)) is not pool.device]
    counters = [tier.counters for tier in pool.tiers]
    pool.start_empty(spec, listener)
    for tier, before in zip(pool.tiers, counters, strict=True):
        tier.counters = before
    for block, index in staying.items():
        _move_in(pool, block, index, held.get(block, 0))
    _link_again(pool, parents)
    _zero_again(pool, dirty)
    _find_empty(pool)
    for block, (kind, _, _) in staying.items():
        pool.tiers[kind].counters.restored += 1
        pool.report_stored(block)
    for block in sorted(staying, key=_RECENCY):
        pool.release(block)
    for block in moved:
        if block.parent is not None:
            pool.report_updated(block)


def _slot_below(pool: BlockPool, block: Block, filled: Mapping[TierKind, Sequence[int]]) -> _LowerSlot | None:
    """The slot of a lower tier that holds a block's bytes."""
    for index in (block.index, *pool.write_through.indexes_of(block)):
        tier = pool.tier_at(index)
        slot, generation = index - tier.offset, tier.generation(index)
        slots = filled.get(tier.kind, ())
        if slot <= len(slots) and slots[slot - 1] == generation != 0:
            return tier.kind, slot, generation
    return None


def _move_in(pool: BlockPool, block: Block, index: _LowerSlot, held: int) -> None:
    """Moves a block to the slot that holds its bytes, with one extra reference."""
    kind, slot, generation = index
    tier = pool.tiers[kind]
    block.detach()
    block.index = tier.offset + slot
    tier.fill(block.index, generation)
    block.refs = held + 1
    pool.blocks[block.index] = block
    tier.used += 1
    tier.accounts.count(account_of(block), blocks=1, used=1)
    tier.indexed += 1


def _link_again(pool: BlockPool, parents: Mapping[Block, bytes]) -> None:
    pool.tree.by_key.update((block.key, block) for block in parents)
    for block, key in parents.items():
        pool.tree.link(block, pool.tree.as_parent(key))
    for block in parents:
        pool.count_children_in_tier(block)


def _zero_again(pool: BlockPool, slots: Iterable[tuple[TierKind, int]]) -> None:
    for kind, slot in slots:
        tier = pool.tiers[kind]
        if slot <= tier.size and pool.blocks[tier.offset + slot] is None:
            _zero(pool, tier, slot)


def _find_empty(pool: BlockPool) -> None:
    for tier in pool.tiers:
        indexes = range(tier.offset + 1, tier.offset + tier.size + 1)
        tier.set_empty(index for index in indexes if pool.blocks[index] is None)


def _zero(pool: BlockPool, tier: Tier, slot: int) -> None:
    block = Block(tier.offset + slot)
    pool.blocks[block.index] = block
    pool.zero(block)


class Recovery:
    """Restores stored blocks one by one, parents before children, while sequences already use the pools.

    A stored block counts if its slot kept its content until the executor registered and has not been allocated since.
    `Tier.unread` has these slots. Every difference from the record is reported to the journal.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        pools: Sequence[BlockPool],
        scopes: CacheScopes,
        journal: IndexJournal,
        leases: LeaseBook,
        is_deleted_rule: Callable[[str], bool],
        forgotten: ForgottenBlocks,
        purged: list[Callable[[BlockRecord], bool]],
    ) -> None:
        """`spec` has the contents of the slots. `is_deleted_rule` takes the holder of a lease.

        `purged` has filters for blocks that were purged before they were read.
        """
        self._spec = spec
        self._pools = pools
        self._scopes = scopes
        self._journal = journal
        self._leases = leases
        self._is_deleted_rule = is_deleted_rule
        self.forgotten = forgotten
        self.purged = purged
        self._forgotten_keys: set[bytes] = set()
        # Former device blocks get a recency that counts down from here; every new use gets a larger recency.
        self._last_uses = [pool.lru_clock for pool in pools]
        for pool in pools:
            group = pool.spec.group
            steps = spec.last_write_steps[group] if spec.last_write_steps else ()
            for tier in pool.tiers:
                filled = steps if tier is pool.device else spec.generations(tier.kind, group)
                # The spec has the contents of all slots of a tier, or of none.
                if len(filled):
                    tier.await_stored_blocks(filled)

    def purge(self, is_meant: Callable[[BlockRecord], bool]) -> None:
        """Has the stored blocks that are meant, and their descendants, overwritten instead of restored."""
        self.purged.append(is_meant)

    def overwrite(self, slots: Iterable[Slot]) -> None:
        """Overwrites slots that were forgotten before the executor was lost, unless they are in use again."""
        for group, kind, slot in slots:
            if group >= len(self._pools):
                continue
            pool = self._pools[group]
            tier = pool.tiers[kind]
            # The device of a new process holds none of the former bytes.
            if tier.is_unread(slot) and (tier is not pool.device or self._spec.last_write_steps[group][slot - 1]):
                self._zero(pool, tier, slot)

    def restore(self, record: BlockRecord) -> None:
        """Adopts a stored block in the slot that holds its bytes; reports a block without valid bytes as removed.

        Has a forgotten or purged block overwritten instead. Within a priority, lower blocks keep their LRU order, and
        former device blocks, whose last uses are unknown, are evicted in the reverse order of these calls.
        """
        pool = self._pools[record.group] if record.group < len(self._pools) else None
        if pool is not None and ((is_forgotten := self._is_forgotten(record)) or self._is_purged(record)):
            if is_forgotten or pool.window is None:
                # Its descendants go, too, even if its own bytes are lost.
                self._forgotten_keys.add(record.key)
            self._leave(record)
            self._overwrite(pool, record)
            return
        found = None if pool is None else self._believed(record)
        if pool is None or (found is None or found.tier_slot != record.tier_slot):
            self._leave(record)
        if pool is None or found is None:
            return
        if found.last_use == USED_LAST:
            # The tail is evicted first.
            found = found._replace(last_use=self._last_uses[record.group])
            self._last_uses[record.group] -= 1
        block = self._adopt(found)
        for lease in leases_of(block):
            if self._is_deleted_rule(lease.request.holder):
                self._leases.revoke(pool, block, lease.request.holder, RemovalCause.RULE_CHANGED)
        # The block may be in the slot of its write-through copy. Clocks of its leases may have started, leases may have
        # ended with a deleted rule or outdated weights, and leases may come from a block that the block covers.
        stored = pool.record(block)
        if stored is None or _timeless(stored) != _timeless(record):
            self._journal.stored(self._spec.executor_id, *found.tier_slot, partial(pool.record, block))

    def end(self) -> None:
        """Ends the recovery: no stored block follows, so all remaining slots are empty."""
        for pool in self._pools:
            for tier in pool.tiers:
                tier.end_stored_blocks()

    def _leave(self, record: BlockRecord) -> None:
        """Reports a record as removed, unless a block now in its slot has already been reported."""
        if record.group < len(self._pools):
            pool = self._pools[record.group]
            tier = pool.tiers[record.tier]
            block = pool.blocks[tier.offset + record.slot] if 1 <= record.slot <= tier.size else None
            if block is not None and block.parent is not None:
                return
        self._journal.removed(self._spec.executor_id, *record.tier_slot)

    def _overwrite(self, pool: BlockPool, record: BlockRecord) -> None:
        """Overwrites the slots that may hold the bytes of a stored block."""
        group = record.group
        if record.key not in pool.tree.by_key:
            pool.removals.add(record.key, RemovalCause.FORGOTTEN, self._leases.now)
        for at in (record, record.lower_copy):
            tier = None if at is None else pool.tiers[at.tier]
            if at is None or tier is None or tier.unread is None or not tier.is_unread(at.slot):
                continue
            if tier is not pool.device and self._spec.generations(tier.kind, group)[at.slot - 1] != at.generation:
                # The slot was filled for a different block.
                continue
            self._zero(pool, tier, at.slot)

    def _zero(self, pool: BlockPool, tier: Tier, slot: int) -> None:
        assert tier.unread is not None
        tier.unread.exclude(slot)
        _zero(pool, tier, slot)

    def _is_forgotten(self, record: BlockRecord) -> bool:
        return record.parent_key in self._forgotten_keys or self.forgotten.means(record)

    def _is_purged(self, record: BlockRecord) -> bool:
        return any(is_meant(record) for is_meant in self.purged)

    def _believed(self, record: BlockRecord) -> BlockRecord | None:
        """The record with the slot that holds its bytes; None if the bytes are lost or the record is unsound."""
        if not self._is_sound(record):
            return None
        below = record.below()
        if below is not None and not self._is_filled(below):
            below = None
        if record.tier is not TierKind.DEVICE or not self._is_on_device(record):
            return below
        tier = self._pools[record.group].write_through.tier
        has_copy = below is not None and tier is not None and below.tier is tier.kind
        return record if has_copy else record._replace(lower_copy=None)

    def _is_sound(self, record: BlockRecord) -> bool:
        """Whether the key matches the tokens and the parent, and the block fits into the tree."""
        pool = self._pools[record.group]
        if any(not NO_PRIORITY <= lease.priority <= MAX_PRIORITY for lease in record.leases):
            return False
        full = pool.block_size * TOKEN_BYTES
        if (
            not TOKEN_BYTES <= len(record.tokens) <= full
            or record.key in pool.tree.by_key
            or record.key in pool.pending
        ):
            return False
        if (record.parent_key is None) != (record.depth == 0):
            return False
        parent_key = record.parent_key
        if parent_key is None:
            parent_key = self._scopes.of(record.salt, record.adapter_id, weight_version=record.weight_version).key
        parent = pool.tree.by_key.get(parent_key)
        if parent is not None and (parent.depth != record.depth - 1 or len(parent.tokens) != full):
            return False
        gap = pool.tree.tombstones.get(record.key)
        if gap is not None and any(child.depth != record.depth + 1 for child in children_of(gap)):
            return False
        node = pool.tree.node(parent_key)
        if len(record.tokens) < full and node is not None and covering_child(node, record.tokens, record.extra):
            return False
        return child_key(parent_key, record.tokens, record.extra) == record.key

    def _is_on_device(self, record: BlockRecord) -> bool:
        """Whether no step wrote to the slot after `stored_step`. Full attention also needs the parent on the device."""
        pool = self._pools[record.group]
        if not pool.device.is_unread(record.slot):
            return False
        if record.parent_key is not None and pool.window is None:
            parent = pool.tree.by_key.get(record.parent_key)
            if parent is None or not pool.is_on_device(parent):
                return False
        return self._spec.last_write_steps[record.group][record.slot - 1] <= record.stored_step

    def _is_filled(self, record: BlockRecord) -> bool:
        """Whether the copy on record filled a lower slot that may hold this block. The parent may be lost."""
        pool = self._pools[record.group]
        if not pool.tiers[record.tier].is_unread(record.slot):
            return False
        if pool.window is None:
            # No block lies in a higher tier than its parent.
            parent, gap = pool.tree.by_key.get(record.parent_key or b""), pool.tree.tombstones.get(record.key)
            if parent is not None and pool.tier_of(parent).kind > record.tier:
                return False
            if gap is not None and any(pool.tier_of(child).kind < record.tier for child in children_of(gap)):
                return False
        return self._spec.generations(record.tier, record.group)[record.slot - 1] == record.generation != 0

    def _adopt(self, record: BlockRecord) -> Block:
        pool, leases = self._pools[record.group], self._leases
        scope = self._scopes.of(
            record.salt,
            record.adapter_id,
            record.tenant_id,
            record.session_id,
            record.extra,
            record.weight_version,
        )
        tier = pool.tiers[record.tier]
        block = Block(tier.offset + record.slot)
        block.recency = record.last_use
        for at in (record, record.lower_copy):
            unread = None if at is None else pool.tiers[at.tier].unread
            if at is not None and unread is not None:
                unread.exclude(at.slot)
        tier.fill(block.index, record.generation)
        is_of_other_weights = record.weight_version != self._scopes.weight_version
        if is_of_other_weights:
            leases.restore(pool, block, OTHER_WEIGHTS, None)
        # Records list the newest lease first; restoring in reverse keeps this order, as new leases are put first.
        for lease in reversed(record.leases):
            if is_of_other_weights or lease.holder == WEIGHTS:
                continue
            request = RetentionRequest(lease.holder, lease.priority, lease.duration, lease.offload_min_priority)
            leases.restore(pool, block, request, lease.remaining)
        parent_key = scope.key if record.parent_key is None else record.parent_key
        pool.adopt(block, record.key, parent_key, record.tokens, record.depth, scope, record.stored_step)
        if record.lower_copy is not None:
            below = pool.tiers[record.lower_copy.tier]
            pool.write_through.copies[block] = below.offset + record.lower_copy.slot
            below.fill(below.offset + record.lower_copy.slot, record.lower_copy.generation)
        return block


def _timeless(record: BlockRecord) -> BlockRecord:
    """The record without the passing of time: only whether each lease's clock runs."""
    if not record.leases:
        return record
    leases = [lease._replace(remaining=None if lease.remaining is None else 0.0) for lease in record.leases]
    return record._replace(leases=tuple(leases))
