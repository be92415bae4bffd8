"""What becomes of a pool when its executor is gone, or starts again: the device is void, lower tiers may not be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import TYPE_CHECKING

from cachemgr.blocks import children as siblings
from cachemgr.blocks.block import Block, Node
from cachemgr.blocks.eviction import MakingRoom
from cachemgr.blocks.tier import account_of
from cachemgr.types import EventKind, PoolSpec, RemovalCause, TierKind

if TYPE_CHECKING:
    from cachemgr.blocks.leftovers import Leftovers

_LOST = RemovalCause.EXECUTOR_LOST
_DEPTH, _RECENCY = attrgetter("depth"), attrgetter("recency")
# Tier, slot, and the ticket of the copy that filled it.
_Place = tuple[TierKind, int, int]


class Restarting(MakingRoom):
    """A part of a pool: how it goes on without its device."""

    pending: dict[bytes, Block]
    is_lost: bool

    def _make_tiers(self) -> None:
        raise NotImplementedError

    def zero(self, block: Block) -> None:
        """Keeps a slot until its bytes are overwritten."""
        raise NotImplementedError

    def forget_all(self) -> None:
        """The executor is gone: every slot is empty. The journal keeps what may come back when it does."""
        for block in self.index.values():
            self._lose(block)
        self._start_empty()

    def restart(
        self, spec: PoolSpec, filled: Mapping[TierKind, Seq[int]], held: Mapping[Block, int], zeroing: Iterable[int]
    ) -> None:
        """The executor has started again: the device is void, and a lower slot counts if it is filled as remembered.

        `filled` has for each lower tier the tickets that filled its slots. What stays keeps the references `held`;
        callers end all others before. Lower places in `zeroing` are overwritten.
        """
        staying = {block: place for block in self.index.values() if (place := self._outlives(block, filled))}
        for block in self.index.values():
            if block not in staying:
                self._lose(block)
        was_on_device = [block for block in staying if self.is_on_device(block)]
        for block in sorted(was_on_device, key=_DEPTH, reverse=True):
            if block.refs:
                self.uses += 1
                block.recency = self.uses
        parents = {block: block.parent.key for block in staying if block.parent is not None}
        dirty = [(self.tier_at(place).kind, place - self.tier_at(place).offset) for place in zeroing]
        counters = [tier.counters for tier in self.tiers]
        self.spec = spec
        self._start_empty()
        for tier, before in zip(self.tiers, counters, strict=True):
            tier.counters = before
        for block, place in staying.items():
            self._move_in(block, place, held.get(block, 0))
        self._stand_up(parents)
        self._zero_again(dirty)
        self.find_empty()
        for block, (kind, _, _) in staying.items():
            self.tiers[kind].counters.restored += 1
            self.write(block)
        for block in sorted(staying, key=_RECENCY):
            self.drop(block)
        for block in was_on_device:
            if block.parent is not None:
                self._events.add(EventKind.UPDATED, self.view(block))

    def find_empty(self) -> None:
        """Makes all slots empty that hold nothing."""
        held = set(self.backups.places.values())
        for tier in self.tiers:
            places = range(tier.offset + 1, tier.offset + tier.size + 1)
            tier.set_empty(place for place in places if self.blocks[place] is None and place not in held)

    def _outlives(self, block: Block, filled: Mapping[TierKind, Seq[int]]) -> _Place | None:
        """Where the bytes of a block are without the device."""
        for place in (block.slot, *self.backups.copies(block)):
            tier = self.tier_at(place)
            slot, generation = place - tier.offset, tier.generation(place)
            slots = filled.get(tier.kind, ())
            if slot <= len(slots) and slots[slot - 1] == generation != 0:
                return tier.kind, slot, generation
        return None

    def _lose(self, block: Block) -> None:
        view = self.view(block)
        if block.lease is not None:
            self._leases.break_all(block, view, _LOST)
        self.tier_of(block).counters.removed[_LOST] += 1
        self.lost.add(block.key, _LOST, self._leases.now, "", view.priority)
        self._events.add(EventKind.REMOVED, view, _LOST)
        # Else they would hold each other until the next full garbage collection.
        block.parent = block.children = block.older = block.newer = None

    def abandon(self, leftovers: Leftovers) -> None:
        """As `forget_all`, in constant time and without an event for each block."""
        self.is_lost = True
        leftovers.add(self.blocks, self.index)
        self.blocks, self.index = [], {}
        self._start_empty()

    def _start_empty(self) -> None:
        for block in self.blocks:
            # Shared before it was computed: who waits for it wished something for it already.
            if block is not None and block.parent is None and block.lease is not None:
                self._leases.forget(block)
        for table in (self.index, self.bare, self.pending, self.moving, self.leaving, self.doomed):
            table.clear()
        self._make_tiers()

    def _move_in(self, block: Block, place: _Place, held: int) -> None:
        """Puts a block where its bytes are, with one reference more than it keeps."""
        kind, slot, generation = place
        tier = self.tiers[kind]
        block.slot = tier.offset + slot
        tier.fill(block.slot, generation)
        block.refs = held + 1
        block.children = block.older = block.newer = None
        self.blocks[block.slot] = self.index[block.key] = block
        tier.used += 1
        tier.count(account_of(block), blocks=1, used=1)
        tier.indexed += 1

    def _stand_up(self, parents: Mapping[Block, bytes]) -> None:
        """Makes the tree again from the keys of what blocks stand on."""
        for block, key in parents.items():
            parent = self.node(key)
            if parent is None:
                parent = self.bare[key] = Node(key)
            block.parent = parent
            siblings.add(parent, block)
        for block in parents:
            tier = self.tier_of(block)
            block.near = sum(self.tier_of(child) is tier for child in siblings.each(block)) if not self.window else 0

    def _zero_again(self, slots: Iterable[tuple[TierKind, int]]) -> None:
        for kind, slot in slots:
            tier = self.tiers[kind]
            place = tier.offset + slot
            if tier is not self.device and slot <= tier.size and self.blocks[place] is None:
                block = self.blocks[place] = Block(place)
                self.zero(block)
