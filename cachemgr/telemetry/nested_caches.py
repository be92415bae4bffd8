"""Simulated caches of several sizes, nested in each other: the blocks that each cache would still have.

With an eviction order that does not depend on the size, a larger cache has all blocks of a smaller cache. So one pass
over the uses simulates all sizes (Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for storage
hierarchies", IBM Systems Journal 9(2), 1970). A block that a cache has evicted stays only in larger caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from cachemgr.blocks.block import Block, Node
from cachemgr.blocks.events import EventLog
from cachemgr.blocks.eviction_order import EvictionQueue
from cachemgr.blocks.prefix_tree import add_child, closest_child, covered_children, covering_child, remove_child
from cachemgr.retention.leases import LeaseBook, effective_priority
from cachemgr.retention.priority import RetentionRequest
from cachemgr.types import BlockView

if TYPE_CHECKING:
    from cachemgr.blocks.block import CacheScope


class Content(NamedTuple):
    """The content that a beginning matches: the key of the parent, the packed tokens and the scope."""

    parent: bytes
    tokens: bytes
    scope: CacheScope


class Ghost(Block):
    """A block without bytes. `zone` is the number of the smallest cache that has it.

    `stored` is false until a sequence that has computed the block releases it. A beginning matches only blocks with a
    parent node.
    """

    __slots__ = ("node", "stored", "zone")

    def __init__(self, key: bytes) -> None:
        super().__init__(0)
        self.key = key
        self.node: Node | None = None
        self.zone = 0
        self.stored = False


class NestedCaches:
    """The caches of one eviction order. `limits` are the sizes in blocks, ascending. Leases count as in a pool.

    No child is evicted after its parent, since callers use all ancestors of a block, and request at least as much
    retention for a block as for its descendants.
    """

    def __init__(self, limits: tuple[float, ...]) -> None:
        self.limits = limits
        self.blocks: dict[bytes, Ghost] = {}
        # Blocks that a beginning may match, by the key of their parent.
        self._parents: dict[bytes, Node] = {}
        # The lease book needs these attributes; nothing reads the counters.
        self.honoured_leases = self.broken_leases = 0
        self.is_lost = False
        self._orders = [EvictionQueue() for _ in limits]
        # Blocks of each zone; used blocks count in the first zone.
        self._counts = [0] * len(limits)
        self._used = 0
        self._uses = 0
        self._leases = LeaseBook(EventLog(1))

    def advance(self, now: float) -> None:
        self._leases.advance(now)

    def use(self, key: bytes, content: Content | None = None) -> tuple[Ghost, int]:
        """Adds a reference; returns the block and the smallest cache that had it, or the number of caches if none."""
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
        """Releases a reference. A block that is not stored disappears with its last reference.

        Callers release descendants before their ancestors.
        """
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
        """Yields the caches that have a child with a common beginning, largest cache first.

        Each cache comes with its best child, and the length of the common beginning in tokens.
        """
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
        """Makes an unused block the newest block in the caches that have the block."""
        if not block.refs:
            order = self._orders[block.zone]
            order.remove(block)
            self._uses += 1
            block.recency = self._uses
            order.append(block)

    def has_children(self, parent: bytes) -> bool:
        """Whether blocks that a beginning may match have this parent."""
        return parent in self._parents

    def covering(self, content: Content) -> Ghost | None:
        """Returns a block that begins with this content; None if there is none."""
        node = self._parents.get(content.parent)
        found = None if node is None else covering_child(node, content.tokens, content.scope.extra)
        assert found is None or isinstance(found, Ghost)
        return found

    def cover(self, content: Content) -> None:
        """Forgets unused blocks whose tokens are only the beginning of this content."""
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
        """Returns an empty view, since no event is read."""
        return BlockView.of_pool("")

    def fit(self, in_use: float) -> None:
        """Evicts the excess from each cache. A cache whose blocks are all in use may exceed its size.

        `in_use`: the used blocks of the real pool, including blocks that have no key yet, times the sampling rate.
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
