"""One pool: its slots, its prefix index, and which block goes next."""

from collections import deque
from collections.abc import Iterator
from operator import attrgetter

from cachemgr import siblings
from cachemgr.api import BlockView, EventKind, IndexJournal, LeaseView, PoolSpec, PoolView, RemovalCause
from cachemgr.block import Block, EvictionOrder, Node
from cachemgr.events import EventLog
from cachemgr.keys import TOKEN_BYTES, Domain, unpack
from cachemgr.leases import LeaseBook, effective_priority, leases_of
from cachemgr.records import BlockRecord, LeaseRecord
from cachemgr.retention import Wish
from cachemgr.sequence import Sequence

_DEPTH = attrgetter("depth")
TAKEABLE = "every block without references may be taken: what a referenced block stands on is referenced too"


class Pool:
    """Owns the blocks of one layer group of one executor.

    A block is empty (no object, its slot in a queue), used (references) or cached (indexed, no references). With full
    attention only leaves are in the eviction order. Callers keep every indexed ancestor of a referenced block
    referenced, so that all cached blocks can be taken, leaf by leaf.
    """

    def __init__(
        self,
        executor_id: str,
        spec: PoolSpec,
        block_size: int,
        events: EventLog,
        leases: LeaseBook,
        journal: IndexJournal,
    ) -> None:
        self.pool_id = f"{executor_id}/{spec.group}"
        self.executor_id = executor_id
        self.spec = spec
        self.window = spec.attention_window
        self.block_size = block_size
        self.blocks: list[Block | None] = [None] * (spec.num_blocks + 1)
        self.empty = deque(range(1, spec.num_blocks + 1))
        self.order = EvictionOrder()
        # Indexed blocks by key, and nodes without a block that indexed blocks stand on.
        self.index: dict[bytes, Block] = {}
        self.bare: dict[bytes, Node] = {}
        # Blocks that a sequence has promised to fill, by the key that they will have.
        self.pending: dict[bytes, Block] = {}
        self.used = 0
        self.cached = 0
        self.evicted = 0
        self.queried_tokens = 0
        self.hit_tokens = 0
        self._uses = 0
        self._events = events
        self._leases = leases
        self._journal = journal
        events.add(EventKind.CREATED, BlockView.of_pool(self.pool_id))

    @property
    def free(self) -> int:
        """Blocks that may be taken."""
        return self.spec.num_blocks - self.used

    # Slots and references

    def take(self, writer: Sequence | None) -> Block:
        """A block with one reference and no content; evicts when none is empty. Only call it when one is free."""
        if self.empty:
            slot = self.empty.popleft()
        else:
            victim = self.order.first()
            assert victim is not None, TAKEABLE
            self.order.remove(victim)
            self.cached -= 1
            self.evicted += 1
            self._unlink(victim, RemovalCause.EVICTED)
            slot = victim.slot
        block = Block(slot, writer)
        block.refs = 1
        self.blocks[slot] = block
        self.used += 1
        return block

    def retain(self, block: Block) -> None:
        """Adds a reference."""
        if not block.refs:
            self.used += 1
            self.cached -= 1
            if block.older is not None:
                self.order.remove(block)
        block.refs += 1

    def drop(self, block: Block) -> None:
        """Takes a reference back. The last one makes an indexed block cached and any other empty."""
        block.refs -= 1
        if block.refs:
            return
        self.used -= 1
        if block.parent is None:
            if block.lease is not None:
                self._leases.forget(block)
            self.blocks[block.slot] = None
            self.empty.append(block.slot)
            return
        self.cached += 1
        longer = self._longer(block)
        if longer is not None:
            # It was the longest when it entered the index, and in use when it no longer was.
            self._pass_on(block, longer)
            return
        self._uses += 1
        block.recency = self._uses
        if self._is_evictable(block):
            self.order.append(block)
        if block.lease is not None and self._leases.start(block):
            self._journal.stored(self.executor_id, self.record(block))

    # The index

    def node(self, key: bytes) -> Node | None:
        """The place with this key, when something stands there or on it."""
        return self.index.get(key) or self.bare.get(key)

    def store(
        self, block: Block, key: bytes, parent_key: bytes, tokens: bytes, depth: int, domain: Domain, step: int
    ) -> None:
        """Enters a used block into the index; its wish is set before. No other block may have the key."""
        self._enter(block, key, parent_key, tokens, depth, domain, step)
        self._journal.stored(self.executor_id, self.record(block))

    def adopt(
        self, block: Block, key: bytes, parent_key: bytes, tokens: bytes, depth: int, domain: Domain, step: int
    ) -> None:
        """Enters a block that the journal knows as cached, used less recently than all others; its slot is unused."""
        self._uses += 1
        block.recency = -self._uses
        self.blocks[block.slot] = block
        self.cached += 1
        self._enter(block, key, parent_key, tokens, depth, domain, step)
        self.order.insert(block)

    def _enter(
        self, block: Block, key: bytes, parent_key: bytes, tokens: bytes, depth: int, domain: Domain, step: int
    ) -> None:
        parent = self.node(parent_key)
        if parent is None:
            parent = self.bare[parent_key] = Node(parent_key)
        block.key = key
        block.tokens = tokens
        block.depth = depth
        block.domain = domain
        block.stored_step = step
        block.parent = parent
        for shorter in siblings.covered(parent, tokens):
            if not shorter.refs:
                self._leases.move(shorter, block)
                self.discard(shorter, RemovalCause.COVERED)
                block.priority = effective_priority(block)
        if not isinstance(parent, Block):
            # Discarding its last child has taken it away.
            self.bare[parent_key] = parent
        elif parent.older is not None and self.window is None:
            self.order.remove(parent)
        siblings.add(parent, block)
        gap = self.bare.pop(key, None)
        if gap is not None:
            block.children = gap.children
            for child in siblings.each(gap):
                child.parent = block
        self.index[key] = block
        self._events.add(EventKind.STORED, self.view(block))
        if block.lease is not None:
            self._leases.announce(self, block)

    def discard(self, block: Block, cause: RemovalCause) -> None:
        """Takes a block out of the index; an unreferenced one becomes empty. With full attention it has no child."""
        if block.older is not None:
            self.order.remove(block)
        self._unlink(block, cause)
        if not block.refs:
            self.cached -= 1
            self.blocks[block.slot] = None
            self.empty.append(block.slot)

    def grant(self, block: Block, wish: Wish | None) -> None:
        """Adds a wish to a block that is in the index or about to enter it."""
        if wish is not None:
            self._leases.grant(self, block, wish)

    def reprioritise(self, block: Block) -> None:
        """Gives an indexed block whose leases have changed the priority that these have now. Recency stays."""
        priority = effective_priority(block)
        if priority != block.priority:
            listed = block.older is not None
            if listed:
                self.order.remove(block)
            block.priority = priority
            if listed:
                self.order.insert(block)
            self._events.add(EventKind.UPDATED, self.view(block))
        self._journal.stored(self.executor_id, self.record(block))

    def descendants(self, block: Block) -> Iterator[Block]:
        """Blocks that stand on this one, children before parents."""
        found, at = list(siblings.each(block)), 0
        while at < len(found):
            found.extend(siblings.each(found[at]))
            at += 1
        return reversed(found)

    def forget_all(self) -> None:
        """The device memory is gone: every slot is empty. The journal keeps what may come back with the same epoch."""
        for block in self.index.values():
            view = self.view(block)
            if block.lease is not None:
                self._leases.break_all(block, view, RemovalCause.EXECUTOR_LOST)
            self._events.add(EventKind.REMOVED, view, RemovalCause.EXECUTOR_LOST)
        for table in (self.index, self.bare, self.pending):
            table.clear()
        self.order = EvictionOrder()
        self.blocks = [None] * len(self.blocks)
        self.empty = deque(range(1, len(self.blocks)))
        self.used = self.cached = 0

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
            self.reprioritise(longer)
            self._leases.announce(self, longer)

    def _is_evictable(self, block: Block) -> bool:
        return self.window is not None or block.children is None

    def _unlink(self, block: Block, cause: RemovalCause) -> None:
        view = self.view(block)
        if block.lease is not None:
            self._leases.break_all(block, view, cause)
        parent = block.parent
        assert parent is not None
        siblings.remove(parent, block)
        if parent.children is None:
            if not isinstance(parent, Block):
                del self.bare[parent.key]
            elif self.window is None and not parent.refs:
                self.order.insert(parent)
        del self.index[block.key]
        if block.children is not None:
            assert self.window is not None
            gap = self.bare[block.key] = Node(block.key)
            gap.children = block.children
            for child in siblings.each(gap):
                child.parent = gap
            block.children = None
        block.parent = None
        self._events.add(EventKind.REMOVED, view, cause)
        self._journal.removed(self.executor_id, self.spec.group, block.slot)

    # Views

    def view(self, block: Block) -> BlockView:
        """The block as seen from outside."""
        parent_key = b"" if block.parent is None or not block.depth else block.parent.key
        key = b"" if block.parent is None else block.key
        tokens = len(block.tokens) // 4
        return BlockView(self.pool_id, block.slot, key, parent_key, tokens, block.refs, block.priority, block.depth)

    def record(self, block: Block) -> BlockRecord:
        """An indexed block as the store keeps it."""
        assert block.parent is not None
        assert block.domain is not None
        return BlockRecord(
            group=self.spec.group,
            slot=block.slot,
            key=block.key,
            parent_key=block.parent.key if block.depth else None,
            depth=block.depth,
            token_ids=unpack(block.tokens),
            salt=block.domain.salt,
            adapter_id=block.domain.adapter_id,
            stored_step=block.stored_step,
            leases=tuple(
                LeaseRecord(*lease.wish, None if lease.deadline is None else lease.remaining(self._leases.now))
                for lease in leases_of(block)
            ),
        )

    def records(self) -> Iterator[BlockRecord]:
        """Every indexed block, parents before children."""
        for block in sorted(self.index.values(), key=_DEPTH):
            yield self.record(block)

    def state(self) -> Iterator[tuple[EventKind, BlockView, LeaseView | None]]:
        """What has to happen to a new pool to become this one; parents before children."""
        yield EventKind.CREATED, BlockView.of_pool(self.pool_id), None
        for block in sorted(self.index.values(), key=_DEPTH):
            view = self.view(block)
            yield EventKind.STORED, view, None
            for lease in leases_of(block):
                yield EventKind.LEASE_GRANTED, view, self._leases.view(lease)

    def pool_view(self) -> PoolView:
        """The pool with its counters."""
        return PoolView(
            pool_id=self.pool_id,
            executor_id=self.executor_id,
            spec=self.spec,
            block_size=self.block_size,
            total_blocks=self.spec.num_blocks,
            free_blocks=self.free,
            used_blocks=self.used,
            cached_blocks=self.cached,
            evicted_blocks=self.evicted,
            queried_tokens=self.queried_tokens,
            hit_tokens=self.hit_tokens,
        )
