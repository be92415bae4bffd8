"""Forgetting on demand: blocks leave the index and Redis, and no byte outlives its last use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING

from cachemgr.blocks.block import Block
from cachemgr.blocks.prefix_tree import children_of
from cachemgr.operators.removal_plan import RemovalPlan, with_descendants
from cachemgr.sequences.prefix_match import keys_of, partial_blocks
from cachemgr.slices import Slices, read_batches, write_batches
from cachemgr.types import ForgetTarget, Forgotten, RemovalCause, Scope, Slot
from protos.kvcommon.tokens import pack, packed_bytes

if TYPE_CHECKING:
    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.blocks.block_record import BlockRecord
    from cachemgr.blocks.events import EventLog
    from cachemgr.sequences.clients import Executor
    from cachemgr.sequences.holds import Hold
    from cachemgr.sequences.sequence import Sequence
    from cachemgr.types import ExecutorSpec, Prefix

    IsMeant = Callable[[BlockRecord], bool]


class Forgetting:
    """A call of ForgetBlocks while it runs.

    It removes blocks that are in the index when it begins. A matching sequence that is admitted meanwhile is treated
    like earlier sequences: nothing that it computes stays. If a session is forgotten, a block stays if another session
    begins to use the block before its removal.
    """

    def __init__(
        self, executors: list[Executor], target: ForgetTarget, events: EventLog, registered: Mapping[str, Executor]
    ) -> None:
        """`registered` has all executors by name, including later ones: a restarted executor may keep its pools."""
        self._executors = executors
        self._registered = registered
        self.target = target
        self._events = events
        self._receipt = Forgotten({})
        # By executor: keys of blocks to remove and, for a prefix, of blocks that were lost earlier.
        self._gone: dict[str, set[bytes]] = {}
        # Blocks that other sessions use.
        self._used: set[Block] = set()
        self._came: set[Sequence] = set()

    def sequence_admitted(self, sequence: Sequence) -> None:
        """Notes a sequence that is admitted meanwhile."""
        executor, prefix = sequence.executor, self.target.prefix
        if executor.executor_id not in self._gone:
            if prefix is not None and prefix.executor_id not in ("", executor.executor_id):
                return
            # The executor has registered meanwhile.
            self._begin(executor)
        self._came.add(sequence)
        if self.target.session_id not in (None, sequence.scope.session_id):
            for table in sequence.tables:
                self._used.update(table.references())
        elif self._matches_sequence(sequence):
            _leave_nothing(sequence)

    def slices(self, *, validate_only: bool) -> Slices[Forgotten]:
        """Removes blocks from the index. Free blocks are overwritten now, used blocks when they are released.

        With `validate_only`, only counts the blocks.
        """
        receipt = self._receipt
        there = [(one, [(pool, list(pool.tree.by_key)) for pool in one.pools]) for one in self._executors]
        for executor in self._executors:
            self._begin(executor)
            # From now on, no matching block enters the index.
            for sequence in () if validate_only else executor.sequences.values():
                self._mark(sequence)
        plans: list[tuple[Executor, RemovalPlan]] = []
        for executor, indexed in there:
            plans.append((executor, (yield from self._plan(executor, indexed))))
        for executor, plan in plans:
            # Holds of these blocks end, since a pin does not delay forgetting.
            holds = yield from _holds_of(executor, plan)
            held = Counter(block for hold in holds for _, block in hold.blocks)
            if validate_only:
                for part in read_batches(plan.blocks()):
                    for pool, block in part:
                        _count(receipt, pool, block, held)
                    yield
            else:
                yield from self._run_in_slices(executor, plan, holds, held)
        if not validate_only:
            yield from self._scrub()
        return receipt

    def _begin(self, executor: Executor) -> None:
        # All keys of the prompt, even without a block: the log may have events about blocks that were lost earlier.
        prefix = self.target.prefix
        gone = self._gone[executor.executor_id] = set()
        if prefix is not None:
            for version in executor.scopes.weight_versions:
                gone.update(keys_of(executor.spec, prefix, version))

    def _plan(self, executor: Executor, indexed: list[tuple[BlockPool, list[bytes]]]) -> Slices[RemovalPlan]:
        plan, gone = RemovalPlan(), self._gone[executor.executor_id]
        # Keys that a full-attention group loses: a window's block with such a key can never match again.
        lost: set[bytes] = set()
        for pool, keys in sorted(indexed, key=lambda one: one[0].window is not None):
            found = yield from self._find(executor, pool, keys, lost)
            for part in write_batches(found.items()):
                for block, key in part:
                    # The slot may have been reused meanwhile for content that nobody asked to forget.
                    if block.parent is not None and block.key == key:
                        plan.add(pool, block)
                        gone.add(key)
                        if pool.window is None:
                            lost.add(key)
                yield
        return plan

    def _run_in_slices(
        self, executor: Executor, plan: RemovalPlan, holds: list[Hold], held: Counter[Block]
    ) -> Slices[None]:
        if self.target.salt is None:
            live = self._registered.get(executor.executor_id, executor)
            for sequence in list(live.sequences.values()):
                if sequence not in self._came or self.target.session_id is None:
                    self._mark(sequence)
                yield
        for keyed in write_batches(plan.deepest_first()):
            for key, pools in keyed:
                self._take_out(key, pools, held)
            yield
        # Last, since an indexed block may be replaced by a longer block when its reference is released.
        for hold in holds:
            if executor.holds.get(hold.name) is hold:
                executor.holds.release(hold)
            yield

    def _find(
        self, executor: Executor, pool: BlockPool, keys: list[bytes], lost: set[bytes]
    ) -> Slices[dict[Block, bytes]]:
        """The blocks of a pool that the target matches, with their keys.

        lost: keys that full-attention groups lose.
        """
        target = self.target
        if target.prefix is not None:
            blocks = _of_prefix(executor, pool, target)
            if pool.window is not None:
                # These blocks have no ancestor block if they follow a tombstone.
                blocks += [block for key in lost if (block := pool.tree.by_key.get(key)) is not None]
            return (yield from with_descendants([(block, block.key) for block in blocks]))
        mine: dict[Block, bytes] = {}
        for part in read_batches(keys):
            for key in part:
                block = pool.tree.by_key.get(key)
                if block is not None and _stored(block.scope, target):
                    mine[block] = key
            yield
        if target.salt is not None:
            return mine
        theirs = yield from self._of_other_sessions(executor, pool, mine, lost)
        found: dict[Block, bytes] = {}
        for some in read_batches(mine):
            found.update((block, mine[block]) for block in some if block not in theirs)
            yield
        self._receipt.shared_blocks += len(mine) - len(found)
        # A session's block in a window does not need its ancestors: another session may keep using the block alone.
        return found if pool.window is not None else (yield from with_descendants(found.items()))

    def _of_other_sessions(
        self, executor: Executor, pool: BlockPool, mine: dict[Block, bytes], lost: set[bytes]
    ) -> Slices[set[Block]]:
        """The session's blocks that other sessions use, or with descendants that other sessions have stored.

        A block whose key a full-attention group loses can never match again, and needs no ancestors.
        """
        found: set[Block] = set()
        by_depth: dict[int, list[Block]] = {}
        for some in read_batches(mine):
            for block in some:
                by_depth.setdefault(block.depth, []).append(block)
            yield
        for depth in sorted(by_depth, reverse=True):
            for part in read_batches(by_depth[depth]):
                for block in part:
                    children = children_of(block) if block.key not in lost else ()
                    if any(child in found or (child not in mine and child.key not in lost) for child in children):
                        found.add(block)
                yield
        yield from self._note_other_sessions(executor, pool)
        for some in read_batches(mine):
            found.update(block for block in some if block in self._used)
            yield
        return found

    def _note_other_sessions(self, executor: Executor, pool: BlockPool) -> Slices[None]:
        """Notes the blocks that other sessions use."""
        session_id = self.target.session_id
        for hold in executor.holds:
            if not hold.pin and hold.session_id != session_id:
                self._used.update(block for holder, block in hold.blocks if holder is pool)
                yield
        group = executor.pools.index(pool)
        for sequence in list(executor.sequences.values()):
            if sequence.scope.session_id != session_id:
                self._used.update(sequence.tables[group].references())
                yield

    def _mark(self, sequence: Sequence) -> None:
        if self._matches_sequence(sequence):
            _leave_nothing(sequence)

    def _matches_sequence(self, sequence: Sequence) -> bool:
        """Whether blocks that a live sequence has, or will compute, come from forgotten blocks."""
        target = self.target
        if target.salt is not None:
            return sequence.scope.salt == target.salt
        if target.session_id is not None and sequence.scope.session_id == target.session_id:
            return True
        gone = self._gone[sequence.executor.executor_id]
        return any(key in gone for key in sequence.keys)

    def _take_out(self, key: bytes, pools: tuple[BlockPool, ...], held: Counter[Block]) -> None:
        """Removes the blocks with a key from the index, with their present descendants."""
        found: list[tuple[BlockPool, Block]] = []
        for pool in pools:
            block = pool.tree.by_key.get(key)
            if block is None:
                continue
            all_goes = block.children is not None and (pool.window is None or self.target.prefix is not None)
            standing = list(pool.tree.descendants(block)) if all_goes else []
            if self._is_shared(block, standing):
                self._receipt.shared_blocks += 1
                continue
            found += [(pool, one) for one in (*standing, block)]
        for pool, block in found:
            pool.zero_on_free.add(block)
            _count(self._receipt, pool, block, held)
        for pool, block in found:
            # A window's block may already be gone with its full-attention block.
            if block.parent is not None:
                pool.discard(block, RemovalCause.FORGOTTEN)

    def _is_shared(self, block: Block, standing: list[Block]) -> bool:
        """Whether another session has begun to need a block."""
        if self.target.session_id is None:
            return False
        return block in self._used or any(not _stored(other.scope, self.target) for other in standing)

    def _scrub(self) -> Slices[None]:
        indexes = [pool.tree.by_key for executor in self._executors for pool in executor.pools]

        def stays(key: bytes) -> bool:
            return any(key in index for index in indexes)

        lost: set[bytes] = set()
        done: set[str] = set()
        # A new executor may register between two slices.
        while left := [executor_id for executor_id in self._gone if executor_id not in done]:
            for executor_id in left:
                for part in read_batches(self._gone[executor_id]):
                    lost.update(key for key in part if not stays(key))
                    yield
            done.update(left)
        target = self.target
        yield from self._events.scrub(lost, lambda block: _stored(block.scope, target) and not stays(block.key))


def _count(receipt: Forgotten, pool: BlockPool, block: Block, held: Counter[Block]) -> None:
    kind = pool.tier_of(block).kind
    used = block.refs > held[block]
    receipt.removed[kind] = receipt.removed.get(kind, 0) + 1
    receipt.used_blocks += used
    receipt.zeroing_blocks += not used


def _stored(scope: Scope | None, target: ForgetTarget) -> bool:
    """Whether the target's salt or session stored the blocks of a scope."""
    if scope is None:
        return False
    if target.salt is not None:
        return scope.salt == target.salt
    return target.session_id is not None and scope.session_id == target.session_id


def _holds_of(executor: Executor, plan: RemovalPlan) -> Slices[list[Hold]]:
    """Holds that have some of these blocks. A hold may also keep blocks with equal keys in a group where they stay."""
    holds = []
    for hold in executor.holds:
        if any(block.parent is not None and plan.means(pool, block) for pool, block in hold.blocks):
            holds.append(hold)
        yield
    return holds


def _of_prefix(executor: Executor, pool: BlockPool, target: ForgetTarget) -> list[Block]:
    """The blocks of a prompt, blocks that partly match its last tokens, and the children of its lost blocks."""
    assert target.prefix is not None
    found: list[Block] = []
    for version in executor.scopes.weight_versions:
        found += partial_blocks(executor, pool, target.prefix, version)
        for key in keys_of(executor.spec, target.prefix, version):
            node = pool.tree.node(key)
            if isinstance(node, Block):
                found.append(node)
            elif node is not None:
                found.extend(children_of(node))
    return found


def _leave_nothing(sequence: Sequence) -> None:
    sequence.no_store = sequence.forgotten = True
    for table in sequence.tables:
        for index in range(table.committed, min(len(sequence.keys), len(table.blocks))):
            if table.pool.pending.get(sequence.keys[index]) is table.blocks[index]:
                del table.pool.pending[sequence.keys[index]]


# The limit on kept targets plus the tokens of their prefixes.
MOST_KEPT = 1 << 16
# The limit on lost executors whose last call is known. To all other executors, all kept targets apply again.
MOST_REACHED = 1 << 14
# The limit on kept slots of all lost executors together, and on lost executors whose purges are kept.
MOST_SLOTS = 1 << 16
MOST_PURGED = 1 << 10


class ForgetHistory:
    """Targets of ForgetBlocks, for blocks that are restored later and slots that were not yet overwritten.

    A target applies to all blocks of an executor that the store had before the call ended, and to slots that a lost
    executor had not overwritten. Calls are numbered. Beyond `MOST_KEPT`, the oldest targets are dropped; all stored
    blocks of executors that have been away for longer are then forgotten.
    """

    def __init__(self) -> None:
        # Each target with the number of its last call, in the order of these numbers.
        self._targets: dict[ForgetTarget, int] = {}
        self._size = 0
        self._number = 0
        # Unfinished calls by number.
        self._running: dict[int, Forgetting] = {}
        # The last call whose target was dropped.
        self._dropped = 0
        # By executor: the last call that has reached all of its stored blocks.
        self._reached: dict[str, int] = {}
        self._slots: dict[str, list[Slot]] = {}
        self._num_slots = 0
        self._purged: dict[str, list[IsMeant]] = {}

    def begin(self, forgetting: Forgetting) -> int:
        """Notes a call that begins, with its target; returns the number of the call."""
        target = forgetting.target
        if target.prefix is not None:
            # Token ids may be a list, which cannot be hashed.
            target = ForgetTarget(prefix=replace(target.prefix, token_ids=tuple(target.prefix.token_ids)))
        self._number += 1
        if self._targets.pop(target, None) is None:
            self._size += _size(target)
        self._targets[target] = self._number
        self._running[self._number] = forgetting
        while self._size > MOST_KEPT:
            oldest = next(iter(self._targets))
            self._dropped = self._targets.pop(oldest)
            self._size -= _size(oldest)
        return self._number

    def end(self, number: int) -> None:
        """Notes that a call has removed its blocks from the index of every registered executor."""
        del self._running[number]

    def sequence_admitted(self, sequence: Sequence) -> None:
        """Tells the running calls about a sequence that is admitted meanwhile."""
        for forgetting in self._running.values():
            forgetting.sequence_admitted(sequence)

    def lost(self, executor_id: str) -> None:
        """Notes the loss of an executor whose blocks were all in the index: ended calls need not reach them again."""
        self._reached.pop(executor_id, None)
        self._reached[executor_id] = min(self._running, default=self._number + 1) - 1
        if len(self._reached) > MOST_REACHED:
            del self._reached[next(iter(self._reached))]

    def not_zeroed(self, executor_id: str, slots: Iterable[Slot]) -> None:
        """Notes slots that a lost executor has not overwritten. Beyond `MOST_SLOTS`, the oldest are dropped."""
        known = self._slots.pop(executor_id, [])
        # The executor may be lost again during its recovery.
        found = list(dict.fromkeys(chain(islice(slots, MOST_SLOTS), known)))[:MOST_SLOTS]
        self._num_slots += len(found) - len(known)
        if found:
            self._slots[executor_id] = found
        while self._num_slots > MOST_SLOTS:
            self._num_slots -= len(self._slots.pop(next(iter(self._slots))))

    def lost_in_recovery(self, executor_id: str, purged: list[IsMeant]) -> None:
        """Notes the purges of an executor that was lost before all purged blocks were read."""
        if purged:
            self._purged[executor_id] = purged
        if len(self._purged) > MOST_PURGED:
            del self._purged[next(iter(self._purged))]

    def purged(self, executor_id: str) -> list[IsMeant]:
        """Takes out the purges of an executor that registers again."""
        return self._purged.pop(executor_id, [])

    def to_zero(self, executor_id: str) -> list[Slot]:
        """Takes out the slots of an executor that registers again."""
        found = self._slots.pop(executor_id, [])
        self._num_slots -= len(found)
        return found

    def of(self, spec: ExecutorSpec) -> ForgottenRecords:
        """Makes the filter of stored blocks for an executor that registers."""
        reached = self._reached.get(spec.executor_id, 0)
        found = ForgottenRecords(spec, everything=reached < self._dropped)
        for target, number in self._targets.items():
            if number > reached:
                found.add(target)
        return found


class ForgottenRecords:
    """Stored blocks of an executor that are to be forgotten, without their descendants.

    A session's blocks are forgotten even if another session has descendants, since those records are yet to be read.
    """

    def __init__(self, spec: ExecutorSpec, *, everything: bool = False) -> None:
        self._spec = spec
        self._everything = everything
        self._salts: set[str] = set()
        self._sessions: set[str] = set()
        self._prefixes: list[Prefix] = []
        # Keys of the prefixes' blocks by the version of the weights.
        self._keys: dict[str, set[bytes]] = {}
        # Prompts shorter than a block, by salt and adapter.
        self._beginnings: dict[tuple[str | None, int | None], list[bytes]] = {}

    def add(self, target: ForgetTarget) -> None:
        """Adds a target, which may be about a different executor."""
        prefix = target.prefix
        if target.salt is not None:
            self._salts.add(target.salt)
        elif target.session_id is not None:
            self._sessions.add(target.session_id)
        elif prefix is not None and prefix.executor_id in ("", self._spec.executor_id):
            if len(prefix.token_ids) >= self._spec.block_size:
                self._prefixes.append(prefix)
                self._keys.clear()
            else:
                tokens = packed_bytes(pack(prefix.token_ids))
                self._beginnings.setdefault((prefix.salt, prefix.adapter_id), []).append(tokens)

    def means(self, record: BlockRecord) -> bool:
        """Whether a stored block is to be forgotten."""
        keys = self._keys_of(record.weight_version)
        return (
            self._everything
            or record.salt in self._salts
            or record.session_id in self._sessions
            or record.key in keys
            or record.parent_key in keys
            or (record.parent_key is None and self._begins(record))
        )

    def _keys_of(self, weight_version: str) -> set[bytes]:
        found = self._keys.get(weight_version)
        if found is None:
            keys = (key for prefix in self._prefixes for key in keys_of(self._spec, prefix, weight_version))
            found = self._keys[weight_version] = set(keys)
        return found

    def _begins(self, record: BlockRecord) -> bool:
        """Whether a prompt shorter than a block and this first block begin with the same tokens."""
        prompts = self._beginnings.get((record.salt, record.adapter_id), ())
        return any(record.tokens.startswith(prompt) or prompt.startswith(record.tokens) for prompt in prompts)


def _size(target: ForgetTarget) -> int:
    return 1 if target.prefix is None else 1 + len(target.prefix.token_ids)
