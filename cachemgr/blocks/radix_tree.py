"""The prefix tree of one pool: what is cached, behind what, and how it enters and leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from cachemgr.blocks import children as siblings
from cachemgr.blocks.block import Block, Node
from cachemgr.blocks.block_keys import TOKEN_BYTES, Domain
from cachemgr.blocks.events import EventLog
from cachemgr.blocks.eviction_history import LostBlocks
from cachemgr.blocks.journal import IndexJournal
from cachemgr.blocks.pool_views import PoolViews
from cachemgr.blocks.tier import Tier, account_of
from cachemgr.blocks.write_through import Backups
from cachemgr.retention.leases import effective_priority
from cachemgr.retention.priority import DEFAULT_PRIORITY, Wish
from cachemgr.sequences.sequence import Sequence
from cachemgr.types import BlockView, EventKind, RemovalCause

if TYPE_CHECKING:
    from cachemgr.sequences.transfers import Ticket

# Looked up once, not for each block that comes or goes: that takes as long as putting it into the order of loss.
_STORED, _REMOVED, _UPDATED = EventKind.STORED, EventKind.REMOVED, EventKind.UPDATED

# What is lost in these ways is there in another block.
_REPLACED = (RemovalCause.COVERED, RemovalCause.TAKEN_OVER, RemovalCause.TRUNCATED)


class PrefixIndex(PoolViews):
    """Half of a pool; the other half hands out the slots.

    With full attention a block is in the order of loss when no child lies in its own tier, and children never lie in a
    higher tier than what they stand on. `near` counts the children in a block's own tier.
    """

    window: int | None
    bare: dict[bytes, Node]
    doomed: set[Block]
    leaving: dict[Block | None, Ticket]
    backups: Backups
    on_superseded: Callable[[Block, Block], None] | None
    on_gone: Callable[[bytes], None] | None
    lost: LostBlocks
    successors: list[list[Block]]
    is_lost: bool
    uses: int
    blocks: list[Block | None]
    moving: dict[Block, Ticket]
    _events: EventLog
    _journal: IndexJournal
    _has_lower: bool

    def _empty(self, tier: Tier, block: Block) -> None:
        """Gives the slot of a block back that is neither used nor in the index."""
        raise NotImplementedError

    def node(self, key: bytes) -> Node | None:
        """The place with this key, when something stands there or on it."""
        return self.index.get(key) or self.bare.get(key)

    def store(
        self, block: Block, key: bytes, parent_key: bytes, tokens: bytes, depth: int, domain: Domain, step: int
    ) -> None:
        """Enters a used block into the index; its wish is set before. No other block may have the key."""
        self._enter(block, key, parent_key, tokens, depth, domain, step)
        self.write(block)

    def adopt(
        self, block: Block, key: bytes, parent_key: bytes, tokens: bytes, depth: int, domain: Domain, step: int
    ) -> None:
        """Enters a block that the journal knows as cached; its slot is free, and a parent on its device is there."""
        tier = self.tier_of(block)
        self.blocks[block.slot] = block
        tier.cached += 1
        tier.counters.restored += 1
        tier.count(domain.account, blocks=1)
        block.domain = domain
        self._enter(block, key, parent_key, tokens, depth, domain, step)
        if self.window is None and block.children is not None:
            # They have outlived what it puts back.
            block.near = sum(self.tier_of(child) is tier for child in siblings.each(block))
        if self._is_evictable(block):
            tier.enlist(block, domain.account, newest=False)

    def _enter(
        self, block: Block, key: bytes, parent_key: bytes, tokens: bytes, depth: int, domain: Domain, step: int
    ) -> None:
        parent = self.node(parent_key)
        if parent is None:
            parent = self.bare[parent_key] = Node(parent_key)
        self.doomed.discard(block)
        self.has_left(block)
        block.key = key
        block.tokens = tokens
        block.depth = depth
        if account_of(block) is not domain.account:
            # Quotas have come or gone since it was taken.
            self.rebook(block, domain)
        block.domain = domain
        # Who took it over from the index and ended may have had no step of its own.
        block.stored_step = max(block.stored_step, step)
        block.hits = 0
        block.parent = parent
        for shorter in siblings.covered(parent, tokens, domain.extra):
            if not shorter.refs:
                self._leases.move(shorter, block)
                self.discard(shorter, RemovalCause.COVERED)
                block.priority = effective_priority(block)
        if not isinstance(parent, Block):
            # Discarding its last child has taken it away.
            self.bare[parent_key] = parent
        elif self.window is None and (block.slot <= self.device.size or self.tier_of(parent) is self.tier_of(block)):
            # What a device block stands on is on the device, too.
            parent.near += 1
            if parent.older is not None:
                self.tier_of(parent).delist(parent, account_of(parent))
        siblings.add(parent, block)
        gap = self.bare.pop(key, None)
        if gap is not None:
            self._adopt_children(block, gap)
        self.index[key] = block
        self.tier_of(block).indexed += 1
        if self._has_lower:
            self.backups.want(block)
        self.lost.came_back(key)
        self._events.add(_STORED, self.view(block))
        if block.lease is not None:
            self._leases.announce(self, block)

    def rebook(self, block: Block, domain: Domain) -> None:
        """A block counts against the account of this domain, which is its own but for that."""
        tier, before = self.tier_of(block), account_of(block)
        is_listed, is_used = block.older is not None, int(block.refs > 0)
        if is_listed:
            tier.delist(block, before)
        tier.count(before, blocks=-1, used=-is_used)
        block.domain = domain
        tier.count(domain.account, blocks=1, used=is_used)
        if is_listed:
            tier.enlist(block, domain.account, newest=False)
        self._offer(block)

    def has_left(self, block: Block) -> None:
        """A block is computed: the bytes that lay in its slot before are copied, whether that is confirmed or not.

        From now on its slot is free as soon as nothing uses it, which decisions about room count on.
        """
        if self.leaving:
            self.leaving.pop(block, None)

    def supersede(self, block: Block, old: Block, step: int) -> None:
        """A used device block takes the place in the index of an equal one, with all it stands for."""
        parent, tier = old.parent, self.tier_of(old)
        assert parent is not None
        on_device = tier is self.device
        self.has_left(block)
        self._leave(tier, old)
        siblings.remove(parent, old)
        # Whoever took it, from now on it counts against the quota of whose it was.
        self.device.count(account_of(block), blocks=-1, used=-1)
        block.key, block.tokens, block.depth, block.domain = old.key, old.tokens, old.depth, old.domain
        block.hits = old.hits
        self.device.count(account_of(block), blocks=1, used=1)
        block.stored_step = max(block.stored_step, step)
        block.parent = parent
        siblings.add(parent, block)
        self._adopt_children(block, old)
        if self.window is None:
            block.near = sum(self.tier_of(child) is self.device for child in siblings.each(block))
            if isinstance(parent, Block) and not on_device:
                parent.near += 1
                if parent.older is not None:
                    self.device.delist(parent, account_of(parent))
        self.index[block.key] = block
        for heard in self.successors:
            heard.append(block)
        tier.indexed -= 1
        self.device.indexed += 1
        self._leases.move(old, block)
        block.priority = effective_priority(block)
        old.parent = None
        if old.refs and self.on_superseded is not None:
            self.on_superseded(old, block)
        if self._has_lower:
            self.backups.pass_on(old, block)
        if not old.refs:
            if old.older is not None:
                tier.delist(old, account_of(old))
            tier.cached -= 1
            self._empty(tier, old)
        old.priority = DEFAULT_PRIORITY
        self._events.add(_UPDATED, self.view(block))
        self.write(block)

    @staticmethod
    def _adopt_children(block: Block, old: Node) -> None:
        block.children, old.children = old.children, None
        for child in siblings.each(block):
            child.parent = block

    def discard(self, block: Block, cause: RemovalCause) -> None:
        """Takes a block out of the index; an unreferenced one becomes empty. With full attention it has no child."""
        tier = self.tier_of(block)
        if block.older is not None:
            tier.delist(block, account_of(block))
        self._unlink(block, cause, None)
        if not block.refs:
            tier.cached -= 1
            self._empty(tier, block)

    def discard_subtree(self, block: Block, cause: RemovalCause) -> None:
        """Takes a block out of the index, with full attention after all that stands on it."""
        if self.window is None and block.children is not None:
            self._lose_children(block)
        self.discard(block, cause)

    def _lose_children(self, block: Block) -> None:
        for child in self.descendants(block):
            self.discard(child, RemovalCause.PARENT_LOST)

    def grant(self, block: Block, wish: Wish | None) -> bool:
        """Adds a wish to a block that is in the index or about to enter it. False when the block has nothing of it."""
        return wish is None or self._leases.grant(self, block, wish)

    def reprioritise(self, block: Block) -> BlockView:
        """Gives an indexed block whose leases have changed the priority that these have now, and shows it.

        Recency stays.
        """
        priority = effective_priority(block)
        changed = priority != block.priority
        if changed:
            if self._has_lower and priority > block.priority:
                self.backups.want(block)
            if block.older is None:
                block.priority = priority
                self._offer(block)
            else:
                tier, account = self.tier_of(block), account_of(block)
                tier.delist(block, account)
                block.priority = priority
                tier.enlist(block, account, newest=False)
        view = self.view(block)
        if changed:
            self._events.add(_UPDATED, view)
        self.write(block)
        return view

    def descendants(self, node: Node) -> Iterator[Block]:
        """Blocks that stand on this place, children before parents."""
        found, at = list(siblings.each(node)), 0
        while at < len(found):
            found.extend(siblings.each(found[at]))
            at += 1
        return reversed(found)

    def _longer(self, block: Block) -> Block | None:
        """A sibling that holds all that a partly filled block does."""
        if len(block.tokens) == self.block_size * TOKEN_BYTES or block.parent is None:
            return None
        return siblings.longer(block.parent, block)

    def _pass_on(self, block: Block, longer: Block) -> None:
        """Discards a cached block; a longer one takes over what is wished for it."""
        had_leases = block.lease is not None
        self._leases.move(block, longer)
        self.discard(block, RemovalCause.COVERED)
        if had_leases:
            if not longer.refs:
                self._leases.start(longer)
            self.reprioritise(longer)
            self._leases.announce(self, longer)

    def _is_evictable(self, block: Block) -> bool:
        return self.window is not None or not block.near

    def _lose_near(self, parent: Block, tier: Tier) -> None:
        """A child of this block has left the block's own tier, which is this one."""
        parent.near -= 1
        if parent.near:
            return
        if parent.refs:
            self._offer(parent)
        elif parent.older is None:
            if tier.shares:
                tier.enlist(parent, account_of(parent), newest=False)
            else:
                tier.order.insert(parent)

    def _offer(self, block: Block) -> None:
        """A block in use may be evicted at another time than before, if it is moving and its copy can be recalled."""
        ticket = self.moving.get(block) if self.moving else None
        if ticket is not None and ticket.opened_by is not None:
            ticket.opened_by.offer(ticket)

    def _unlink(self, block: Block, cause: RemovalCause, writer: Sequence | None) -> None:
        view = self.view(block)
        device = self.device
        # Most pools have no other tier.
        tier = device if block.slot <= device.size else self.tier_of(block)
        if block.lease is not None:
            self._leases.break_all(block, view, cause)
        parent = block.parent
        assert parent is not None
        if parent.children is block:
            parent.children = None
        else:
            siblings.remove(parent, block)
        if not isinstance(parent, Block):
            if parent.children is None:
                del self.bare[parent.key]
        elif self.window is None and (parent.slot <= device.size if tier is device else self.tier_of(parent) is tier):
            self._lose_near(parent, tier)
        del self.index[block.key]
        tier.indexed -= 1
        if block.children is not None:
            assert self.window is not None
            gap = self.bare[block.key] = Node(block.key)
            gap.children = block.children
            for child in siblings.each(gap):
                child.parent = gap
            block.children = None
        block.parent = None
        # Its leases may have passed to another, and its slot may stay reserved for a copy.
        block.priority = DEFAULT_PRIORITY
        for_sequence_id = "" if writer is None else writer.sequence_id
        tier.counters.removed[cause] += 1
        self.lost.add(block.key, cause, self._leases.now, for_sequence_id, view.priority)
        self._events.add(_REMOVED, view, cause, None, for_sequence_id)
        self._leave(tier, block)
        if self._has_lower and tier is device:
            self.backups.drop(block)
        if self.on_gone is not None and cause not in _REPLACED:
            self.on_gone(block.key)

    def _leave(self, tier: Tier, block: Block) -> None:
        """Tells the journal that a block leaves its place."""
        self._journal.removed(self.executor_id, self.spec.group, tier.kind, block.slot - tier.offset)

    def write(self, block: Block) -> None:
        """Tells the journal that a block has come to its place, or has changed there."""
        device = self.device
        tier = device if block.slot <= device.size else self.tier_of(block)
        for tell in self._events.quiet:
            tell(self.pool_id, block.key)
        # Not the record itself: most blocks change again before it is wanted.
        current = partial(self.current_record, block)
        self._journal.stored(self.executor_id, self.spec.group, tier.kind, block.slot - tier.offset, current)
