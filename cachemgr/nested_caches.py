"""Caches of several sizes that hold no bytes, one nested in the other: what each of them would still have.

An order of loss that does not depend on the size makes a smaller cache's blocks a part of a larger one's, so that one
pass over the uses tells of all sizes (Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for storage
hierarchies", IBM Systems Journal 9(2), 1970). What the cache of one size loses, only larger ones have from then on.
"""

from __future__ import annotations

from cachemgr.api import BlockView
from cachemgr.block import Block, EvictionOrder
from cachemgr.events import EventLog
from cachemgr.leases import LeaseBook, effective_priority
from cachemgr.retention import Wish


class Ghost(Block):
    """A block without bytes. `zone` is the number of the smallest cache that has it.

    `stored` is false as long as nobody has computed it. A partly filled one has its parent's key and its packed tokens.
    """

    __slots__ = ("stored", "tail", "zone")

    def __init__(self, key: bytes, tail: tuple[bytes, bytes] | None = None) -> None:
        super().__init__(0)
        self.key = key
        self.tail = tail
        self.zone = 0
        self.stored = False


class NestedCaches:
    """`limits` are the sizes in blocks, ascending. Leases count as they do in a pool, in which no child is lost after
    what it stands on: who uses blocks names them all, and wishes at least as much for a block as for those behind it.
    """

    def __init__(self, limits: tuple[float, ...]) -> None:
        self.limits = limits
        self.blocks: dict[bytes, Ghost] = {}
        # Partly filled blocks by the key of their parent, by their length in bytes, by their tokens.
        self._tails: dict[bytes, dict[int, dict[bytes, Ghost]]] = {}
        # Nobody asks; what ends leases counts them.
        self.honoured_leases = self.broken_leases = 0
        self.is_lost = False
        self._orders = [EvictionOrder() for _ in limits]
        # Blocks of each zone, those in use with the first.
        self._counts = [0] * len(limits)
        self._used = 0
        self._uses = 0
        self._leases = LeaseBook(EventLog(1))

    def advance(self, now: float) -> None:
        """Ends leases."""
        self._leases.advance(now)

    def use(self, key: bytes, tail: tuple[bytes, bytes] | None = None) -> tuple[Ghost, int]:
        """The block with a reference more, and the number of the smallest cache that had it, or how many there are."""
        block = self.blocks.get(key)
        if block is None:
            zone = len(self.limits)
            block = self.blocks[key] = Ghost(key, tail)
            if tail is not None:
                parent, tokens = tail
                self._tails.setdefault(parent, {}).setdefault(len(tokens), {})[tokens] = block
            self._counts[0] += 1
        else:
            zone = block.zone
            if not block.refs:
                self._orders[zone].remove(block)
            if zone:
                self._counts[zone] -= 1
                self._counts[0] += 1
                block.zone = 0
        self._used += not block.refs
        block.refs += 1
        return block, zone

    def wish(self, block: Ghost, wish: Wish) -> None:
        """Adds a lease to a block in use."""
        self._leases.grant(self, block, wish)

    def drop(self, block: Ghost) -> None:
        """Takes a reference back. Drop what stands on others before these."""
        block.refs -= 1
        if block.refs:
            return
        self._used -= 1
        if not block.stored:
            self._forget(block)
            return
        self._uses += 1
        block.recency = self._uses
        self._orders[0].append(block)
        if block.lease is not None:
            self._leases.start(block)

    def has_tails(self, parent: bytes) -> bool:
        """Whether partly filled blocks have this parent."""
        return parent in self._tails

    def cover(self, parent: bytes, tokens: bytes) -> None:
        """Forgets partly filled children of a parent that no sequence uses and that a longer one begins with."""
        by_length = self._tails.get(parent, {})
        covered = [by_length[length].get(tokens[:length]) for length in by_length if length < len(tokens)]
        for block in covered:
            if block is not None and not block.refs:
                self._orders[block.zone].remove(block)
                self._forget(block)

    def reprioritise(self, block: Block) -> BlockView:
        """A lease of a block has ended."""
        assert isinstance(block, Ghost)
        if block.refs:
            block.priority = effective_priority(block)
        else:
            order = self._orders[block.zone]
            order.remove(block)
            block.priority = effective_priority(block)
            order.insert(block)
        return self.view(block)

    @staticmethod
    def view(_: Block) -> BlockView:
        """Nothing to see."""
        return BlockView.of_pool("")

    def fit(self, in_use: float) -> None:
        """Each cache loses what is too much, after every change; one whose blocks are all in use is too large.

        So many blocks are really in use: room for those that are not known here, as they have no key yet, is left.
        """
        total = max(0.0, in_use - self._used)
        limits, orders, counts = self.limits, self._orders, self._counts
        for zone, limit in enumerate(limits):
            total += counts[zone]
            order = orders[zone]
            while total > limit and (victim := order.first()) is not None:
                assert isinstance(victim, Ghost)
                order.remove(victim)
                total -= 1
                if zone + 1 == len(limits):
                    self._forget(victim)
                    continue
                counts[zone] -= 1
                counts[zone + 1] += 1
                victim.zone = zone + 1
                orders[zone + 1].insert(victim)

    def _forget(self, block: Ghost) -> None:
        self._counts[block.zone] -= 1
        del self.blocks[block.key]
        if block.tail is not None:
            self._forget_tail(*block.tail)
        if block.lease is not None:
            self._leases.forget(block)

    def _forget_tail(self, parent: bytes, tokens: bytes) -> None:
        by_length = self._tails[parent]
        del by_length[len(tokens)][tokens]
        if not by_length[len(tokens)]:
            del by_length[len(tokens)]
        if not by_length:
            del self._tails[parent]
