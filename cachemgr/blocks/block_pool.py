"""One pool: its slots in all tiers, their references, and its prefix index."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from cachemgr.blocks import steps
from cachemgr.blocks.block import Block, Node
from cachemgr.blocks.events import EventLog
from cachemgr.blocks.eviction import Way
from cachemgr.blocks.eviction_history import LostBlocks, UseTimes
from cachemgr.blocks.journal import IndexJournal
from cachemgr.blocks.restart import Restarting
from cachemgr.blocks.steps import Steps
from cachemgr.blocks.tier import Tier, account_of
from cachemgr.blocks.write_through import Backups
from cachemgr.retention.leases import LeaseBook
from cachemgr.sequences.sequence import Sequence
from cachemgr.telemetry.counters import TokenMeter
from cachemgr.types import BlockView, EventKind, PoolSpec, RemovalCause, TierKind

if TYPE_CHECKING:
    from cachemgr.sequences.transfers import Ticket

# Looked up once, not for each block that is taken.
_OUT, _BY_COPY = Way.OUT, Way.BY_COPY

TAKEABLE = "every block without references may be taken: what a referenced block stands on is referenced too"


class Pool(Restarting):
    """Owns the blocks of one layer group of one executor.

    A block is empty (no object, its place in a queue), used (references) or cached (indexed, no references). With full
    attention a block is in the order of loss when no child lies in its own tier; children never lie in a higher one.
    Callers keep every indexed ancestor of a referenced device block referenced, so that all cached blocks of the
    device can be taken, leaf by leaf.

    `on_moved` hears of a block that has moved down, of the block that has its old place now, and for whom; the moved
    block's reference is the copy's. `on_recalled` hears of one whose copy is called off before anybody was told of it.
    `on_doomed` hears of a block whose slot must be overwritten, with a reference.
    """

    def __init__(
        self,
        executor_id: str,
        spec: PoolSpec,
        block_size: int,
        events: EventLog,
        leases: LeaseBook,
        journal: IndexJournal,
        *,
        offload_min_priority: int = 0,
        write_through: bool = True,
        lost_blocks: int = 0,
    ) -> None:
        self.pool_id = f"{executor_id}/{spec.group}"
        self.executor_id = executor_id
        self.spec = spec
        self.window = spec.attention_window
        self.block_size = block_size
        self._write_through = write_through
        self._make_tiers()
        # Indexed blocks by key, and nodes without a block that indexed blocks stand on.
        self.index: dict[bytes, Block] = {}
        self.bare: dict[bytes, Node] = {}
        # Blocks that a sequence has promised to fill, by the key that they will have.
        self.pending: dict[bytes, Block] = {}
        # Blocks in lower tiers whose bytes are on their way, with the copies; no sequence may count on them.
        self.moving: dict[Block, Ticket] = {}
        # Blocks that are not computed yet, in slots that the bytes of others have yet to leave.
        self.leaving: dict[Block | None, Ticket] = {}
        # Blocks in use whose bytes must not outlive their use.
        self.doomed: set[Block] = set()
        self.lost = LostBlocks(lost_blocks)
        # Whether leases of its blocks mean nothing any more.
        self.is_lost = False
        self.tokens = TokenMeter()
        # Leases that ended by time or by their holder, and leases whose block was lost before.
        self.honoured_leases = self.broken_leases = 0
        # Counts changes of the pool's share of memory.
        self.share_number = 0
        self.uses = 0
        self.use_times = UseTimes()
        # Lists that hear of each block that takes the place of another in the index.
        self.successors: list[list[Block]] = []
        self.on_moved: Callable[[Block, Block, Sequence | None], None] | None = None
        self.on_recalled: Callable[[Block, Sequence], None] | None = None
        # Called with a block in a lower tier and the device block that takes its place in the index.
        self.on_superseded: Callable[[Block, Block], None] | None = None
        # Called with the key of a block that is lost.
        self.on_gone: Callable[[bytes], None] | None = None
        self.on_doomed: Callable[[Block], None] | None = None
        # Called with a slot that the pool may no longer use, and whose memory others may have once it is overwritten.
        self.on_withheld: Callable[[Block], None] | None = None
        self.offload_min_priority = offload_min_priority
        self._events = events
        self._leases = leases
        self._journal = journal
        events.add(EventKind.CREATED, BlockView.of_pool(self.pool_id))

    def _make_tiers(self) -> None:
        spec = self.spec
        disk = Tier(TierKind.DISK, spec.num_blocks + spec.host_blocks, spec.disk_blocks)
        below_host = disk if disk.size else None
        host = Tier(TierKind.HOST, spec.num_blocks, spec.host_blocks, below_host)
        self.device = Tier(TierKind.DEVICE, 0, spec.num_blocks, host if host.size else below_host)
        self.tiers = (self.device, host, disk)
        self._has_lower = host.size + disk.size > 0
        # By place: the slots of all tiers in one row.
        self.blocks: list[Block | None] = [None] * (disk.offset + disk.size + 1)
        self.backups = Backups(self, write_through=self._write_through)

    @property
    def free(self) -> int:
        """Device blocks that may be taken."""
        return self.device.free

    # Slots and references

    def take(self, writer: Sequence | None) -> Block:
        """A device block with one reference and no content. Only call it when one is free.

        What it takes the place of moves to a lower tier or is lost, for the sake of `writer`.
        """
        device = self.device
        domain = None if writer is None else writer.domain
        account = None if domain is None else domain.account
        moved: Block | None = None
        if (device.empty or device.unread) and not device.wants_own(account):
            block = Block(device.take_empty(), writer)
        else:
            victim = device.victim(account) if device.shares else device.order.first()
            assert victim is not None, TAKEABLE
            slot = victim.slot
            way = self._vacate(device, victim, writer)
            if way is _OUT:
                # Its object serves again: to make one takes a tenth of an eviction.
                block = victim
                block.writer = writer
            else:
                block = Block(slot, writer)
                moved = victim if way is _BY_COPY else None
        block.refs = 1
        block.domain = domain
        self.blocks[block.slot] = block
        device.used += 1
        device.counters.allocated += 1
        if account is not None:
            device.count(account, blocks=1, used=1)
        if moved is not None:
            self._moved(moved, block, writer)
        return block

    def retain(self, block: Block) -> None:
        """Adds a reference."""
        if not block.refs:
            tier, account = self.tier_of(block), account_of(block)
            tier.used += 1
            tier.cached -= 1
            if account is not None:
                tier.count(account, used=1)
            if block.older is not None:
                tier.delist(block, account)
        block.refs += 1

    def drop(self, block: Block) -> None:
        """Takes a reference back. The last one makes an indexed block cached and any other empty."""
        block.refs -= 1
        if block.refs:
            return
        tier, account = self.tier_of(block), account_of(block)
        tier.used -= 1
        if account is not None:
            tier.count(account, used=-1)
        if block.parent is None:
            if block.lease is not None:
                self._leases.forget(block)
            self._empty(tier, block)
            return
        tier.cached += 1
        longer = self._longer(block)
        if longer is not None:
            # It was the longest when it entered the index, and in use when it no longer was.
            self._pass_on(block, longer)
            return
        on_device = tier is self.device
        if on_device:
            self.uses += 1
            block.recency = self.uses
            self.use_times.note(self.uses, self._leases.now)
        if self._is_evictable(block):
            tier.enlist(block, account, newest=on_device)
        if block.lease is not None and self._leases.start(block):
            self.write(block)

    def _empty(self, tier: Tier, block: Block) -> None:
        """Gives the slot of a block back that is neither used nor in the index."""
        if tier.shares:
            tier.count(account_of(block), blocks=-1)
        if self.leaving and block in self.leaving:
            # Not before the copy has run.
            self.leaving.pop(block).holds_source = True
            block.refs, block.domain = 1, None
            tier.used += 1
            return
        if self._has_lower and self.backups.inherit(block):
            return
        if self.doomed and block in self.doomed:
            self.doomed.discard(block)
            self.zero(block)
            return
        self.blocks[block.slot] = None
        tier.empty.append(block.slot)

    def zero(self, block: Block) -> None:
        """Keeps the slot of a block that is neither used nor in the index until its bytes are overwritten."""
        assert self.on_doomed is not None
        block.refs = 1
        block.domain = None
        self.tier_of(block).used += 1
        self.on_doomed(block)

    def discard_useless(self, key: bytes) -> None:
        """The groups with full attention have lost this block: a window's own of the same key can never match."""
        block = self.index.get(key)
        if block is not None and not block.refs:
            self.discard(block, RemovalCause.PARENT_LOST)

    def resize(self, total: int, written: Iterable[int] | None = None) -> None:
        """Changes how many device slots may be used; at most the free ones go, empty before cached.

        Where pools share memory, slots that go are overwritten: of those in `written`, None for all.
        """
        self._owe(total)
        device = self.device
        self._withhold(min(device.num_empty, device.owed), written)
        while device.may_pay:
            self.pay()

    def resize_in_steps(self, total: int) -> Steps[None]:
        """As `resize`: no more slots than `total` can be taken from now on, and those that go are withheld in steps."""
        self._owe(total)
        while self.device.may_pay:
            self.pay()
            yield

    def _owe(self, total: int) -> None:
        device = self.device
        if device.total < total:
            device.give_back(total - device.total)
        device.owed += device.total - total
        self.share_number += 1

    def pay(self) -> None:
        """Withholds a part of the slots that are owed, as far as they are not in use: empty before cached ones."""
        device = self.device
        most = steps.CHANGES if self.spec.share_blocks else steps.LOOKS
        self._withhold(min(device.num_empty, device.owed, most))
        for _ in range(steps.CHANGES):
            if device.num_empty or not device.may_pay:
                break
            victim = device.victim(None)
            assert victim is not None, TAKEABLE
            self.discard_subtree(victim, RemovalCause.POOL_SHRUNK)
            self._withhold(min(device.num_empty, device.owed))

    def _withhold(self, count: int, written: Iterable[int] | None = None) -> None:
        device = self.device
        before = len(device.withheld)
        device.owed -= count
        device.withhold(count)
        if self.spec.share_blocks:
            gone = device.withheld[before:]
            for place in gone if written is None else sorted({*written}.intersection(gone)):
                self._clear(place)

    def _clear(self, place: int) -> None:
        assert self.on_withheld is not None
        self.device.clearing.add(place)
        self.on_withheld(Block(place))

    def cleared(self, place: int, *, done: bool) -> None:
        """The executor has overwritten a withheld slot, or has failed to."""
        self.device.clearing.discard(place)
        if not done:
            self._clear(place)

    def take_over(self, block: Block, writer: Sequence) -> None:
        """An unreferenced leaf on the device leaves the index and is the writer's, with what it holds."""
        self.retain(block)
        self._unlink(block, RemovalCause.TAKEN_OVER, writer)
        self.own(block, writer)

    def own(self, block: Block, writer: Sequence) -> None:
        """A used block of the device that is not in the index is the writer's to fill, whoever stored it before."""
        self.device.count(account_of(block), blocks=-1, used=-1)
        block.writer, block.domain = writer, writer.domain
        self.device.count(account_of(block), blocks=1, used=1)
