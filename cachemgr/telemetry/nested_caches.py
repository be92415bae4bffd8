"""Caches of several sizes that hold no bytes, one nested in the other: what each of them would still have.

An order of loss that does not depend on the size makes a smaller cache's blocks a part of a larger one's, so that one
pass over the uses tells of all sizes (Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for storage
hierarchies", IBM Systems Journal 9(2), 1970). What the cache of one size loses, only larger ones have from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from cachemgr.blocks.block import Block, Node
from cachemgr.blocks.events import EventLog
from cachemgr.blocks.eviction_queue import EvictionQueue
from cachemgr.blocks.radix_tree import add_child, closest_child, covered_children, covering_child, remove_child
from cachemgr.retention.leases import LeaseBook, effective_priority
from cachemgr.retention.priority import RetentionRequest
from cachemgr.types import BlockView

if TYPE_CHECKING:
    from cachemgr.blocks.cache_scope import CacheScope


class Content(NamedTuple):
    """What a block's beginnings are found by: its parent's key, its packed tokens and its scope."""

    parent: bytes
    tokens: bytes
    scope: CacheScope


class Ghost(Block):
    """A block without bytes. `zone` is the number of the smallest cache that has it.

    `stored` is false as long as nobody has computed it. Only one with a node, its parent's, is found by a beginning.
    """

    __slots__ = ("node", "stored", "zone")

    def __init__(self, key: bytes) -> None:
        super().__init__(0)
        self.key = key
        self.node: Node | None = None
        self.zone = 0
        self.stored = False


class NestedCaches:
    """`limits` are the sizes in blocks, ascending. Leases count as they do in a pool, in which no child is lost after
    what it stands on: who uses blocks names them all, and requests at least as much for a block as for those behind it.
    """

    def __init__(self, limits: tuple[float, ...]) -> None:
        self.limits = limits
        self.blocks: dict[bytes, Ghost] = {}
        # By key of their parent, blocks that are found by a beginning.
        self._parents: dict[bytes, Node] = {}
        # Nobody asks; what ends leases counts them.
        self.honoured_leases = self.broken_leases = 0
        self.is_lost = False
        self._orders = [EvictionQueue() for _ in limits]
        # Blocks of each zone, those in use with the first.
        self._counts = [0] * len(limits)
        self._used = 0
        self._uses = 0
        self._leases = LeaseBook(EventLog(1))

    def advance(self, now: float) -> None:
        self._leases.advance(now)

    def use(self, key: bytes, content: Content | None = None) -> tuple[Ghost, int]:
        """The block with a reference more, and the number of the smallest cache that had it, or how many there are."""
        block = self.blocks.get(key)
        if block is None:
            zone = len(self.limits)
            block = self.blocks[key] = Ghost(key)
            if content is not None:
                self._enter(block, content)
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

    def grant(self, block: Ghost, request: RetentionRequest) -> None:
        """Adds a lease to a block in use."""
        self._leases.grant(self, block, request)

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

    def beginnings(self, parent: bytes, tokens: bytes, extra: bytes, caches: range) -> Iterator[tuple[int, Ghost, int]]:
        """Of some caches those with a child that begins alike, with the best child and its tokens in common."""
        node = self._parents.get(parent)
        if node is None:
            return
        best, common = None, 0
        for number in reversed(caches):
            if best is None or best.zone > number:
                found, common = closest_child(node, tokens, extra, partial(_is_in, number))
                if found is None:
                    return
                assert isinstance(found, Ghost)
                best = found
            yield number, best, common

    def touch(self, block: Ghost) -> None:
        """It was read in the caches that have it: of what is not in use it is lost last."""
        if not block.refs:
            order = self._orders[block.zone]
            order.remove(block)
            self._uses += 1
            block.recency = self._uses
            order.append(block)

    def has_children(self, parent: bytes) -> bool:
        """Whether blocks that are found by a beginning have this parent."""
        return parent in self._parents

    def covering(self, content: Content) -> Ghost | None:
        """A block that begins with what another would hold."""
        node = self._parents.get(content.parent)
        found = None if node is None else covering_child(node, content.tokens, content.scope.extra)
        assert found is None or isinstance(found, Ghost)
        return found

    def cover(self, content: Content) -> None:
        """Forgets blocks that no sequence uses and that are the beginning of a longer one."""
        node = self._parents.get(content.parent)
        for block in [] if node is None else covered_children(node, content.tokens, content.scope.extra):
            assert isinstance(block, Ghost)
            if not block.refs:
                self._orders[block.zone].remove(block)
                self._forget(block)

    def reprioritise(self, block: Block) -> BlockView:
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
        node = block.node
        if node is not None:
            remove_child(node, block)
            if node.children is None:
                del self._parents[node.key]
        if block.lease is not None:
            self._leases.forget(block)

    def _enter(self, block: Ghost, content: Content) -> None:
        node = self._parents.get(content.parent)
        if node is None:
            node = self._parents[content.parent] = Node(content.parent)
        block.node, block.tokens, block.scope = node, content.tokens, content.scope
        add_child(node, block)


def _is_in(cache: int, block: Block) -> bool:
    assert isinstance(block, Ghost)
    return block.zone <= cache
