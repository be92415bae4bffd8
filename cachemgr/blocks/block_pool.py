"""One pool: its slots in all tiers, the references to its blocks, and its prefix tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from cachemgr import slices
from cachemgr.blocks.block import Block, account_of
from cachemgr.blocks.block_record import USED_LAST, BlockRecord, CopyRecord, LeaseRecord
from cachemgr.blocks.eviction import Eviction, evict
from cachemgr.blocks.hit_counters import TokenMeter
from cachemgr.blocks.offload import Offloader, WriteThrough
from cachemgr.blocks.prefix_tree import PrefixTree, children_of, covered_children, longer_sibling
from cachemgr.blocks.removal_history import NO_OWNER, RemovalHistory, UseTimes
from cachemgr.blocks.tier import Tier
from cachemgr.retention.leases import effective_priority, leases_of, offload_floor
from cachemgr.retention.priority import DEFAULT_PRIORITY
from cachemgr.slices import pop_batches
from cachemgr.types import BlockView, EventKind, LeftBlocks, PoolSpec, RemovalCause, TierKind
from protos.kvcommon.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from cachemgr.blocks.block import CacheScope, Writer
    from cachemgr.blocks.block_record import IndexJournal
    from cachemgr.blocks.events import EventLog
    from cachemgr.blocks.lost_blocks import LostBlocks
    from cachemgr.blocks.offload import CopyTicket
    from cachemgr.retention.leases import LeaseBook
    from cachemgr.retention.priority import RetentionRequest
    from cachemgr.slices import Slices

# Read once: reading a member of an enum takes as long as adding a block to the eviction order.
_DROPPED, _OFFLOADED = Eviction.DROPPED, Eviction.OFFLOADED
_STORED, _REMOVED, _UPDATED = EventKind.STORED, EventKind.REMOVED, EventKind.UPDATED
_new = tuple.__new__

# For these causes, no windowed blocks are discarded: each group covers, overwrites or truncates its own blocks.
_REPLACED = (RemovalCause.COVERED, RemovalCause.OVERWRITTEN, RemovalCause.TRUNCATED)
_LOST = RemovalCause.EXECUTOR_LOST

_EVICTABLE = "one of the cached blocks can be evicted: the ancestors of a referenced block are referenced, too"


class PoolListener(Protocol):
    """The executor's side of a pool: opens and cancels copies, and follows blocks that sequences refer to."""

    def offloading(self, pool: BlockPool, block: Block, occupant: Block, writer: Writer | None) -> CopyTicket:
        """Opens the copy of a block that moves to a lower tier. The copy takes over the block's reference.

        `occupant` has the block's old slot. The offload makes room for `writer`, or if None, for no sequence.
        """

    def offload_recalled(self, ticket: CopyTicket, writer: Writer) -> None:
        """Cancels a copy to a lower tier that no scheduler knows of yet."""

    def superseded(self, pool: BlockPool, old: Block, block: Block) -> None:
        """Notes that a device block has replaced an equal block in the prefix tree."""

    def zeroing(self, pool: BlockPool, block: Block) -> None:
        """Requests that the slot of a block, which has one reference, is overwritten."""

    def withheld(self, pool: BlockPool, block: Block) -> None:
        """Requests that the slot of a block is overwritten before other pools may use its memory."""


class BlockPool:
    """Owns the blocks of one layer group of one executor.

    A slot is empty (no block, its index in a queue), used (references) or cached (in the prefix tree, no references).
    A device slot may also be withheld. A lower slot may hold a write-through copy, which counts as free.
    With full attention, a cached block is evictable when no child lies in the same tier; children never lie in a
    higher tier. Callers keep every ancestor of a referenced device block referenced, so that all cached blocks of the
    device can be evicted, leaf by leaf.
    """

    def __init__(
        self,
        executor_id: str,
        spec: PoolSpec,
        block_size: int,
        events: EventLog,
        leases: LeaseBook,
        journal: IndexJournal,
        listener: PoolListener,
        *,
        windowed: Sequence[BlockPool] = (),
        offload_min_priority: int = 0,
        write_through: bool = True,
        lost_blocks: int,
    ) -> None:
        """`windowed`: pools in which a block is useless unless this pool has the block with the same key."""
        self.pool_id = f"{executor_id}/{spec.group}"
        self.executor_id = executor_id
        self.window = spec.attention_window
        self.block_size = block_size
        self.offload_min_priority = offload_min_priority
        self.tree = PrefixTree()
        # Blocks that running sequences fill, by their future keys.
        self.pending: dict[bytes, Block] = {}
        # Used blocks whose slots are overwritten before they become empty.
        self.zero_on_free: set[Block] = set()
        self.removals = RemovalHistory(lost_blocks)
        # Set by `abandon`: leases of the pool's blocks no longer count.
        self.is_lost = False
        self.tokens = TokenMeter()
        # Leases that lasted, until they expired or their holder replaced them; and leases that ended before.
        self.honoured_leases = self.broken_leases = 0
        # Counts changes of the pool's share of memory.
        self.share_number = 0
        self.lru_clock = 0
        self.use_times = UseTimes()
        self._writes_through = write_through
        self._windowed = windowed
        self._events = events
        self._leases = leases
        self._journal = journal
        # A list for each running change of accounts. Each block that replaces an equal block in the index is added to
        # these lists: the change may not have reached the replaced block.
        self.superseding: list[list[Block]] = []
        self._set_up(spec, listener)
        events.add(EventKind.CREATED, BlockView.of_pool(self.pool_id))

    def _set_up(self, spec: PoolSpec, listener: PoolListener) -> None:
        self.spec = spec
        disk = Tier(TierKind.DISK, spec.num_blocks + spec.host_blocks, spec.disk_blocks)
        below_host = disk if disk.size else None
        host = Tier(TierKind.HOST, spec.num_blocks, spec.host_blocks, below_host)
        self.device = Tier(TierKind.DEVICE, 0, spec.num_blocks, host if host.size else below_host)
        self.tiers = (self.device, host, disk)
        self._has_lower = host.size + disk.size > 0
        # By index, which numbers the slots of all tiers consecutively: the block in the slot; None without a block.
        self.blocks: list[Block | None] = [None] * (disk.offset + disk.size + 1)
        self._listener = listener
        self.write_through = WriteThrough(self, enabled=self._writes_through)
        self.offloader = Offloader(self, self.write_through, listener)
        # Occupants of slots that are to be withheld once their former blocks have been copied to a lower tier.
        self._leaving: set[Block] = set()

    # Where blocks are

    def tier_of(self, block: Block) -> Tier:
        device, host, disk = self.tiers
        if block.index <= device.size:
            return device
        return host if block.index <= disk.offset else disk

    def tier_at(self, index: int) -> Tier:
        return next(tier for tier in self.tiers if index <= tier.offset + tier.size)

    def is_on_device(self, block: Block) -> bool:
        return block.index <= self.device.size

    def is_evictable(self, block: Block) -> bool:
        """Whether a cached block is in the eviction order of its tier."""
        return self.window is not None or not block.children_in_tier

    def view(self, block: Block) -> BlockView:
        parent, depth, device = block.parent, block.depth, self.device
        tier = device if block.index <= device.size else self.tier_of(block)
        key = parent_key = tokens = b""
        if parent is not None:
            key, tokens = block.key, block.tokens
            if depth:
                parent_key = parent.key
        # Takes half the time of BlockView(...); runs for each block that is stored or removed.
        return _new(
            BlockView,
            (
                self.pool_id,
                block.index - tier.offset,
                key,
                parent_key,
                tokens,
                block.refs,
                block.priority,
                depth,
                tier.kind,
                block.scope,
                0,
                None,
            ),
        )

    def listed(self, block: Block) -> BlockView:
        """Returns `view` with the number of prefix hits, and the seconds since the last use of a cached block."""
        used = block.refs or not block.recency
        return self.view(block)._replace(hits=block.hits, idle=None if used else self.idle_seconds(block))

    def idle_seconds(self, block: Block) -> float:
        """Returns the seconds since a cached block's last use."""
        return max(0.0, self._leases.now - self.use_times.at(block.recency))

    # Slots and references

    def allocate(self, writer: Writer | None) -> Block:
        """Returns a device block with one reference and no content, for `writer`. Requires a free block.

        Without an empty slot, or at the account's ceiling, evicts a cached block, which is offloaded or dropped.
        """
        device = self.device
        scope = None if writer is None else writer.scope
        account = None if scope is None else scope.account
        moved: Block | None = None
        if (device.empty or device.unread) and not device.accounts.wants_own(account):
            block = Block(device.take_empty(), writer)
        else:
            victim = device.accounts.victim(account) if device.accounts.shares else device.accounts.order.first()
            assert victim is not None, _EVICTABLE
            slot = victim.index
            way = evict(self, device, victim, writer)
            if way is _DROPPED:
                # Reused: a new object would take a tenth of the eviction's time.
                block = victim
                block.writer = writer
            else:
                block = Block(slot, writer)
                moved = victim if way is _OFFLOADED else None
        block.refs = 1
        block.scope = scope
        self.blocks[block.index] = block
        device.used += 1
        device.counters.allocated += 1
        if account is not None:
            device.accounts.count(account, blocks=1, used=1)
        if moved is not None:
            self.offloader.begin(moved, block, writer)
        return block

    def acquire(self, block: Block) -> None:
        if not block.refs:
            tier, account = self.tier_of(block), account_of(block)
            tier.used += 1
            tier.cached -= 1
            if account is not None:
                tier.accounts.count(account, used=1)
            if block.lru_prev is not None:
                tier.accounts.delist(block, account)
        block.refs += 1

    def release(self, block: Block) -> None:
        """Removes a reference. Without references, an indexed block becomes cached; any other block frees its slot.

        A partly filled block is discarded instead of cached if a sibling begins with all of its tokens.
        """
        block.refs -= 1
        if block.refs:
            return
        tier, account = self.tier_of(block), account_of(block)
        tier.used -= 1
        if account is not None:
            tier.accounts.count(account, used=-1)
        if block.parent is None:
            if block.lease is not None:
                self._leases.forget(block)
            self._empty(tier, block)
            return
        tier.cached += 1
        if len(block.tokens) < self.block_size * TOKEN_BYTES:
            longer = longer_sibling(block.parent, block)
            if longer is not None:
                # The block was in use when its longer sibling was stored.
                self._pass_on(block, longer)
                return
        on_device = tier is self.device
        if on_device:
            self.lru_clock += 1
            block.recency = self.lru_clock
            self.use_times.note(self.lru_clock, self._leases.now)
        if self.is_evictable(block):
            tier.accounts.enlist(block, account, newest=on_device)
        if block.lease is not None and self._leases.start(block):
            self.report_stored(block)

    def _pass_on(self, block: Block, longer: Block) -> None:
        """Discards a partly filled cached block; a longer sibling takes over its leases."""
        had_leases = block.lease is not None
        self._leases.move(block, longer)
        self.discard(block, RemovalCause.COVERED)
        if had_leases:
            if not longer.refs:
                self._leases.start(longer)
            self.reprioritise(longer)
            self._leases.announce(self, longer)

    def _empty(self, tier: Tier, block: Block) -> None:
        """Frees the slot of a block that is neither used nor in the prefix tree.

        The slot stays reserved if a copy needs the slot, or if the slot must be overwritten first.
        """
        if tier.accounts.shares:
            tier.accounts.count(account_of(block), blocks=-1)
        if self._has_lower:
            if self.offloader.reserve(block):
                tier.used += 1
                return
            if self.write_through.inherit(block):
                return
        if self.zero_on_free and block in self.zero_on_free:
            self.zero_on_free.discard(block)
            self.zero(block)
            return
        self.blocks[block.index] = None
        tier.empty.append(block.index)

    def zero(self, block: Block) -> None:
        """Reserves the slot of a block that is neither used nor in the prefix tree until the slot is overwritten."""
        block.refs = 1
        block.scope = None
        self.tier_of(block).used += 1
        self._listener.zeroing(self, block)

    def take_over(self, block: Block, writer: Writer) -> None:
        """Takes a cached leaf of the device out of the prefix tree and passes it to a writer, with its content."""
        self.acquire(block)
        self.unlink(block, RemovalCause.OVERWRITTEN, writer)
        self.own(block, writer)

    def own(self, block: Block, writer: Writer) -> None:
        """Lets a writer fill a used device block that is not in the prefix tree."""
        self.device.accounts.count(account_of(block), blocks=-1, used=-1)
        block.writer, block.scope = writer, writer.scope
        self.device.accounts.count(account_of(block), blocks=1, used=1)

    # The share of memory

    def resize(self, total: int, written: Iterable[int] | None = None) -> None:
        """Changes how many device slots may be used. Only free slots are withheld, empty slots before cached blocks.

        If pools share memory, withheld slots are overwritten. `written`: the empty slots that need this; None for all.
        """
        self.set_total(total)
        # All at once: a registration may withhold millions.
        self._withhold(min(self.device.num_empty, self.device.to_withhold), written)
        while self.can_withhold:
            self.withhold_part()

    def withhold_in_slices(self) -> Slices[LeftBlocks]:
        """Withholds free slots after `set_total`. Returns how many blocks had to leave."""
        offloaded, dropped = 0, Counter[TierKind]()
        while self.can_withhold:
            offloaded -= self.device.counters.offloaded
            dropped.subtract(self._removed())
            self.withhold_part()
            offloaded += self.device.counters.offloaded
            dropped.update(self._removed())
            yield
        return LeftBlocks(offloaded, dict(+dropped))

    def _removed(self) -> dict[TierKind, int]:
        """Counts the blocks removed from the index so far, per tier."""
        return {tier.kind: sum(tier.counters.removed) for tier in self.tiers}

    def estimate_left(self, total: int) -> Slices[LeftBlocks]:
        """Estimates how many blocks leave if `total` slots may be used.

        Ignores quotas, and descendants in lower tiers.
        """
        device, copies = self.device, len(self.write_through.copies)
        leaving = sum(self.blocks[occupant.index] is occupant for occupant in self._leaving)
        owed = device.total - total + device.to_withhold - device.num_empty - leaving
        count = min(device.cached, max(0, owed))
        lower = [tier for tier in self.tiers[1:] if tier.size]
        if not count or not lower:
            return LeftBlocks(0, {TierKind.DEVICE: count} if count else {})
        unwanted, room = 0, copies + sum(tier.num_empty for tier in lower)
        for keys in pop_batches(list(self.tree.by_key)):
            unwanted += sum(self._is_unwanted_below(key) for key in keys)
            yield
        # Blocks of a low priority leave first.
        lost = min(count, unwanted)
        beyond = max(0, count - lost - room)
        lost_below = min(beyond, lower[-1].cached)
        lost += beyond - lost_below
        dropped = {TierKind.DEVICE: lost, lower[-1].kind: lost_below}
        return LeftBlocks(count - lost, {tier: blocks for tier, blocks in dropped.items() if blocks})

    def _is_unwanted_below(self, key: bytes) -> bool:
        """Whether the block with this key is cached on the device and would be dropped rather than offloaded."""
        block = self.tree.by_key.get(key)
        if block is None or block.refs or not self.is_on_device(block):
            return False
        return block.priority < offload_floor(block, self.offload_min_priority)

    @property
    def can_withhold(self) -> bool:
        """Whether a slot can be withheld now. Slots whose blocks are being copied to a lower tier do not count."""
        device = self.device
        if device.to_withhold <= 0:
            return False
        if device.num_empty:
            return True
        if device.to_withhold <= len(self._leaving):
            # Occupants whose copies have ended no longer count: their slots have been freed.
            self._leaving = {occupant for occupant in self._leaving if self.blocks[occupant.index] is occupant}
        return device.cached > 0 and device.to_withhold > len(self._leaving)

    def set_total(self, total: int) -> None:
        """Sets how many slots may be used. Allocation stops at this total at once; slots are withheld later."""
        device = self.device
        if device.total < total:
            device.release_withheld(total - device.total)
        device.to_withhold += device.total - total
        self.share_number += 1

    def withhold_part(self) -> None:
        """Withholds some of the unused slots that are to be withheld."""
        device = self.device
        most = slices.CHANGES if self.spec.share_blocks else slices.LOOKS
        self._withhold(min(device.num_empty, device.to_withhold, most))
        for _ in range(slices.CHANGES):
            if device.num_empty or not self.can_withhold:
                break
            victim = device.accounts.victim(None)
            assert victim is not None, _EVICTABLE
            self._give_up(victim)
            self._withhold(min(device.num_empty, device.to_withhold))

    def _give_up(self, victim: Block) -> None:
        """Offloads an evictable block if it may be offloaded, as every eviction does; drops it otherwise."""
        slot = victim.index
        if not self._has_lower or not self.offloader.demote(victim):
            self.discard_subtree(victim, RemovalCause.POOL_SHRUNK)
        elif (occupant := self.blocks[slot]) is not None:
            self._leaving.add(occupant)

    def _withhold(self, count: int, written: Iterable[int] | None = None) -> None:
        device = self.device
        before = len(device.withheld)
        device.to_withhold -= count
        device.withhold(count)
        if self.spec.share_blocks:
            gone = device.withheld[before:]
            for index in gone if written is None else sorted({*written}.intersection(gone)):
                self._clear(index)

    def _clear(self, index: int) -> None:
        self.device.clearing.add(index)
        self._listener.withheld(self, Block(index))

    def cleared(self, index: int, *, done: bool) -> None:
        """Notes that the executor has overwritten a withheld slot; after a failure, requests the overwriting again."""
        self.device.clearing.discard(index)
        if not done:
            self._clear(index)

    # The prefix tree

    def store(
        self, block: Block, key: bytes, parent_key: bytes, tokens: bytes, depth: int, scope: CacheScope, step: int
    ) -> None:
        """Enters a used block into the prefix tree, after its lease is granted. The key must not be in use."""
        self._enter(block, key, parent_key, tokens, depth, scope, step)
        self.report_stored(block)

    def adopt(
        self, block: Block, key: bytes, parent_key: bytes, tokens: bytes, depth: int, scope: CacheScope, step: int
    ) -> None:
        """Enters a stored block as cached. Its slot must be free.

        With full attention, the parent of a device block must be on the device.
        """
        tier = self.tier_of(block)
        self.blocks[block.index] = block
        tier.cached += 1
        tier.counters.restored += 1
        tier.accounts.count(scope.account, blocks=1)
        block.scope = scope
        self._enter(block, key, parent_key, tokens, depth, scope, step)
        if block.children is not None:
            # Its children were restored earlier.
            self.count_children_in_tier(block)
        if self.is_evictable(block):
            tier.accounts.enlist(block, scope.account, newest=False)

    def _enter(
        self, block: Block, key: bytes, parent_key: bytes, tokens: bytes, depth: int, scope: CacheScope, step: int
    ) -> None:
        tree = self.tree
        parent = tree.as_parent(parent_key)
        self.zero_on_free.discard(block)
        self.offloader.drained(block)
        block.key = key
        block.tokens = tokens
        block.depth = depth
        if account_of(block) is not scope.account:
            # Quotas have changed since its allocation.
            self.rebook(block, scope)
        block.scope = scope
        # A sequence that took the block over may not have run a step yet.
        block.stored_step = max(block.stored_step, step)
        block.hits = 0
        block.lease_ended = False
        block.parent = parent
        for shorter in covered_children(parent, tokens, scope.extra):
            if not shorter.refs:
                self._leases.move(shorter, block)
                self.discard(shorter, RemovalCause.COVERED)
                block.priority = effective_priority(block)
        if (
            self.window is None
            and isinstance(parent, Block)
            and (block.index <= self.device.size or self.tier_of(parent) is self.tier_of(block))
        ):
            # The parent of a device block is on the device, too.
            parent.children_in_tier += 1
            if parent.lru_prev is not None:
                self.tier_of(parent).accounts.delist(parent, account_of(parent))
        tree.link(block, parent)
        self.tier_of(block).indexed += 1
        if self._has_lower:
            self.write_through.enqueue(block)
        self.removals.discard(key)
        self._events.add(_STORED, self.view(block))
        if block.lease is not None:
            self._leases.announce(self, block)

    def rebook(self, block: Block, scope: CacheScope) -> None:
        """Counts a block against the account of `scope`, which differs from the block's scope only in the account."""
        tier, before = self.tier_of(block), account_of(block)
        is_listed, is_used = block.lru_prev is not None, int(block.refs > 0)
        if is_listed:
            tier.accounts.delist(block, before)
        tier.accounts.count(before, blocks=-1, used=-is_used)
        block.scope = scope
        tier.accounts.count(scope.account, blocks=1, used=is_used)
        if is_listed:
            tier.accounts.enlist(block, scope.account, newest=False)
        self.offloader.offer(block)

    def supersede(self, block: Block, old: Block, step: int) -> None:
        """Replaces a block of the prefix tree by an equal used device block, which takes over children and leases."""
        parent, tier, device = old.parent, self.tier_of(old), self.device
        assert parent is not None
        self.offloader.drained(block)
        self.report_removed(tier, old)
        # From now on, the block counts against the account of the block that it replaces.
        device.accounts.count(account_of(block), blocks=-1, used=-1)
        block.key, block.tokens, block.depth, block.scope = old.key, old.tokens, old.depth, old.scope
        block.hits = old.hits
        block.lease_ended = False
        device.accounts.count(account_of(block), blocks=1, used=1)
        block.stored_step = max(block.stored_step, step)
        self.tree.replace(old, block)
        self.count_children_in_tier(block)
        if self.window is None and isinstance(parent, Block) and tier is not device:
            parent.children_in_tier += 1
            if parent.lru_prev is not None:
                device.accounts.delist(parent, account_of(parent))
        tier.indexed -= 1
        device.indexed += 1
        self._leases.move(old, block)
        block.priority = effective_priority(block)
        for superseding in self.superseding:
            superseding.append(block)
        self._listener.superseded(self, old, block)
        if self._has_lower:
            self.write_through.superseded(old, block)
        if not old.refs:
            if old.lru_prev is not None:
                tier.accounts.delist(old, account_of(old))
            tier.cached -= 1
            self._empty(tier, old)
        old.priority = DEFAULT_PRIORITY
        self.report_updated(block)
        self.report_stored(block)

    def count_children_in_tier(self, block: Block) -> None:
        """With full attention: counts the block's children in the same tier."""
        if self.window is None:
            tier = self.tier_of(block)
            block.children_in_tier = sum([self.tier_of(child) is tier for child in children_of(block)])

    def report_updated(self, block: Block) -> None:
        self._events.add(_UPDATED, self.view(block))

    def child_left(self, parent: Block, tier: Tier) -> None:
        """Updates a block of this tier after a child has left the tier."""
        parent.children_in_tier -= 1
        if parent.children_in_tier:
            return
        if parent.refs:
            self.offloader.offer(parent)
        elif parent.lru_prev is None:
            if tier.accounts.shares:
                tier.accounts.enlist(parent, account_of(parent), newest=False)
            else:
                tier.accounts.order.insert(parent)

    def discard(self, block: Block, cause: RemovalCause) -> None:
        """Removes a block from the prefix tree and frees a cached block's slot. With full attention: leaves only."""
        tier = self.tier_of(block)
        if block.lru_prev is not None:
            tier.accounts.delist(block, account_of(block))
        self.unlink(block, cause, None)
        if not block.refs:
            tier.cached -= 1
            self._empty(tier, block)

    def discard_subtree(self, block: Block, cause: RemovalCause) -> None:
        """Like `discard`; with full attention, discards all descendants first."""
        if self.window is None and block.children is not None:
            self.lose_children(block)
        self.discard(block, cause)

    def lose_children(self, block: Block) -> None:
        for child in self.tree.descendants(block):
            self.discard(child, RemovalCause.PARENT_EVICTED)

    def unlink(self, block: Block, cause: RemovalCause, writer: Writer | None) -> None:
        """Removes a block from the prefix tree and leaves its slot to the caller."""
        view = self.view(block)
        device = self.device
        # Most pools have no other tier.
        tier = device if block.index <= device.size else self.tier_of(block)
        lease_ended = block.lease_ended and block.lease is None
        if block.lease is not None:
            self._leases.break_all(block, view, cause)
        parent = block.parent
        assert parent is not None
        self.tree.unlink(block, parent)
        if (
            self.window is None
            and isinstance(parent, Block)
            and (parent.index <= device.size if tier is device else self.tier_of(parent) is tier)
        ):
            self.child_left(parent, tier)
        tier.indexed -= 1
        # Its leases may have passed to a different block, and its slot may stay reserved for a copy.
        block.priority = DEFAULT_PRIORITY
        for_sequence_id, owner = "", NO_OWNER
        if writer is not None:
            for_sequence_id, owner = writer.sequence_id, writer.scope.owner
        tier.counters.removed[cause] += 1
        self.removals.add(block.key, cause, self._leases.now, for_sequence_id, view.priority, owner, lease_ended)
        self._events.add(_REMOVED, view, cause, None, for_sequence_id)
        self.report_removed(tier, block)
        if self._has_lower and tier is device:
            self.write_through.end(block)
        if self._windowed and cause not in _REPLACED:
            for pool in self._windowed:
                # A windowed block can never match without the full-attention block of the same key.
                useless = pool.tree.by_key.get(block.key)
                if useless is not None and not useless.refs:
                    pool.discard(useless, RemovalCause.PARENT_EVICTED)

    # Leases

    def grant(self, block: Block, request: RetentionRequest | None) -> bool:
        """Grants a lease to a block that is in the prefix tree or about to enter the tree. True without a request.

        False if the block already has the maximum number of leases, and all of them outrank the new lease.
        """
        return request is None or self._leases.grant(self, block, request)

    def reprioritise(self, block: Block) -> BlockView:
        """Updates the priority of a block whose leases have changed; its recency stays."""
        priority = effective_priority(block)
        changed = priority != block.priority
        if changed:
            if self._has_lower and priority > block.priority:
                self.write_through.enqueue(block)
            if block.lru_prev is None:
                block.priority = priority
                self.offloader.offer(block)
            else:
                tier, account = self.tier_of(block), account_of(block)
                tier.accounts.delist(block, account)
                block.priority = priority
                tier.accounts.enlist(block, account, newest=False)
        view = self.view(block)
        if changed:
            self._events.add(_UPDATED, view)
        self.report_stored(block)
        return view

    # The journal

    def report_stored(self, block: Block) -> None:
        """Reports to the journal that a block has arrived in its slot, or has changed."""
        device = self.device
        tier = device if block.index <= device.size else self.tier_of(block)
        for listener in self._events.quiet_listeners:
            listener.changed_quietly(self.pool_id, block.key)
        # Not the record itself: most blocks change again before it is read.
        current = partial(self.record, block)
        self._journal.stored(self.executor_id, self.spec.group, tier.kind, block.index - tier.offset, current)

    def report_removed(self, tier: Tier, block: Block) -> None:
        """Reports to the journal that a block leaves its slot."""
        self._journal.removed(self.executor_id, self.spec.group, tier.kind, block.index - tier.offset)

    def record(self, block: Block) -> BlockRecord | None:
        """Returns a block as the store keeps it; None if the block has left the prefix tree."""
        if block.parent is None:
            return None
        scope, tier = block.scope, self.tier_of(block)
        assert scope is not None
        return BlockRecord(
            group=self.spec.group,
            tier=tier.kind,
            slot=block.index - tier.offset,
            generation=tier.generation(block.index),
            lower_copy=self._copy_record(block) if self.write_through.copies else None,
            last_use=USED_LAST if tier is self.device else block.recency,
            key=block.key,
            parent_key=block.parent.key if block.depth else None,
            depth=block.depth,
            tokens=block.tokens,
            salt=scope.salt,
            adapter_id=scope.adapter_id,
            tenant_id=scope.tenant_id,
            session_id=scope.session_id,
            extra=scope.extra,
            weight_version=scope.weight_version,
            stored_step=block.stored_step,
            leases=() if block.lease is None else self._lease_records(block),
        )

    def _copy_record(self, block: Block) -> CopyRecord | None:
        index, tier = self.write_through.copies.get(block), self.write_through.tier
        if index is None or tier is None:
            return None
        return CopyRecord(tier.kind, index - tier.offset, tier.generation(index))

    def _lease_records(self, block: Block) -> tuple[LeaseRecord, ...]:
        return tuple(
            LeaseRecord(
                lease.request.holder,
                lease.request.priority,
                lease.request.duration,
                None if lease.deadline is None else lease.remaining(self._leases.now),
                lease.request.offload_min_priority,
            )
            for lease in leases_of(block)
        )

    def records(self) -> Iterator[BlockRecord]:
        """Yields the records of all indexed blocks by index. Blocks may change during the iteration."""
        for block in self.blocks:
            record = None if block is None else self.record(block)
            if record is not None:
                yield record

    # The end of the executor

    def lose_all(self) -> None:
        """Empties every slot after the loss of the executor. The journal keeps blocks that may be restored later."""
        for block in self.tree.by_key.values():
            self.lose(block)
        self.start_empty(self.spec, self._listener)

    def abandon(self, lost_blocks: LostBlocks) -> None:
        """Like `lose_all`, but in constant time and without an event for each block."""
        self.is_lost = True
        lost_blocks.add(self.blocks, self.tree.by_key)
        self.blocks, self.tree = [], PrefixTree()
        self.start_empty(self.spec, self._listener)

    def lose(self, block: Block) -> None:
        view = self.view(block)
        if block.lease is not None:
            self._leases.break_all(block, view, _LOST)
        self.tier_of(block).counters.removed[_LOST] += 1
        self.removals.add(block.key, _LOST, self._leases.now, priority=view.priority)
        self._events.add(EventKind.REMOVED, view, _LOST)
        block.detach()

    def start_empty(self, spec: PoolSpec, listener: PoolListener) -> None:
        """Makes all slots empty. The caller then re-enters the blocks that stay."""
        for block in self.blocks:
            # Leases were already granted to blocks that were shared before they were computed.
            if block is not None and block.parent is None and block.lease is not None:
                self._leases.forget(block)
        self.tree = PrefixTree()
        self.pending.clear()
        self.zero_on_free.clear()
        self._set_up(spec, listener)
