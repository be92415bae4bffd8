"""Forgetting on demand: out of the index and of Redis, and no byte outlives its last use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from cachemgr.admin_api import ForgetTarget, Forgotten
from cachemgr.api import RemovalCause
from cachemgr.block import Block
from cachemgr.chains import keys_of, last_parts
from cachemgr.keys import pack, packed_bytes

if TYPE_CHECKING:
    from cachemgr.events import EventLog
    from cachemgr.keys import Domain
    from cachemgr.pool import Pool
    from cachemgr.records import BlockRecord
    from cachemgr.registry import Executor
    from cachemgr.sequence import Sequence


def forget(executors: list[Executor], target: ForgetTarget, events: EventLog, *, validate_only: bool) -> Forgotten:
    """Takes blocks out of the index; free ones are overwritten now, used ones when they are given back."""
    receipt = Forgotten({})
    gone: set[bytes] = set()
    for executor in executors:
        found = [(pool, *_doomed(executor, pool, target)) for pool in executor.pools]
        everything = {block for _, doomed, _ in found for block in doomed}
        # What keeps blocks in place ends with them: forgetting is not put off by a pin.
        holds = [hold for hold in executor.holds if any(block in everything for _, block in hold.blocks)]
        held = Counter(block for hold in holds for _, block in hold.blocks)
        for pool, doomed, shared in found:
            receipt.shared_blocks += shared
            _count(receipt, pool, doomed, held)
        if not validate_only:
            gone.update(block.key for block in everything)
            _take_out([(pool, doomed) for pool, doomed, _ in found])
            # Behind it: what is in the index may give way to a longer block when it is let go.
            for hold in holds:
                executor.holds.release(hold)
        if target.prefix is not None:
            # Of blocks that were lost before there may be events.
            gone.update(keys_of(executor, target.prefix))
        if not validate_only:
            for sequence in executor.sequences.values():
                if _is_meant(sequence, target, gone):
                    _leave_nothing(sequence)
    if not validate_only:
        indexes = [pool.index for executor in executors for pool in executor.pools]

        def stays(key: bytes) -> bool:
            return any(key in index for index in indexes)

        lost = {key for key in gone if not stays(key)}
        events.scrub(lost, lambda block: _stored(block.domain, target) and not stays(block.key))
    return receipt


def is_remembered_of(executor: Executor, target: ForgetTarget) -> Callable[[BlockRecord], bool]:
    """Whether a block that the store remembers of an executor is to be forgotten, those behind it aside.

    It goes also where another session stands on it: nothing is known of the blocks that are yet to be read.
    """
    if target.salt is not None:
        return lambda record: record.salt == target.salt
    if target.session_id is not None:
        return lambda record: record.session_id == target.session_id
    prefix = target.prefix
    assert prefix is not None
    keys = keys_of(executor, prefix)
    known, rest = set(keys), packed_bytes(pack(prefix.token_ids[len(keys) * executor.block_size :]))

    def is_of_prefix(record: BlockRecord) -> bool:
        if record.key in known or record.parent_key in known:
            return True
        # A prompt of less than a block is the beginning of a first block, or goes on behind it.
        begins = record.tokens.startswith(rest) or rest.startswith(record.tokens)
        same = (record.parent_key, record.salt, record.adapter_id) == (None, prefix.salt, prefix.adapter_id)
        return not known and same and begins

    return is_of_prefix


def _count(receipt: Forgotten, pool: Pool, doomed: list[Block], held: Counter[Block]) -> None:
    for block in doomed:
        kind = pool.tier_of(block).kind
        used = block.refs > held[block]
        receipt.removed[kind] = receipt.removed.get(kind, 0) + 1
        receipt.used_blocks += used
        receipt.zeroing_blocks += not used


def _stored(domain: Domain | None, target: ForgetTarget) -> bool:
    """Whether the salt or session that is meant stored what lies under a domain."""
    if domain is None:
        return False
    if target.salt is not None:
        return domain.salt == target.salt
    return target.session_id is not None and domain.session_id == target.session_id


def _doomed(executor: Executor, pool: Pool, target: ForgetTarget) -> tuple[list[Block], int]:
    """The blocks to take out, deepest first, and how many stay for others' sake."""
    shared = 0
    if target.salt is not None:
        found = {block for block in pool.index.values() if _stored(block.domain, target)}
    elif target.prefix is not None:
        found = set(last_parts(executor, pool, target.prefix))
        for key in keys_of(executor, target.prefix):
            # Where it is lost, what stood on it may be left.
            node = pool.node(key)
            if isinstance(node, Block):
                found.add(node)
            elif node is not None:
                found.update(pool.descendants(node))
    else:
        mine = [block for block in pool.index.values() if _stored(block.domain, target)]
        theirs = _of_other_sessions(executor, pool, target)
        found = {block for block in mine if block not in theirs}
        shared = len(mine) - len(found)
    # A session's block in a window does not need its ancestors: another session may go on using it without them.
    stays = target.session_id is not None and pool.window is not None
    doomed = found if stays else pool.with_descendants(found)
    return sorted(doomed, key=lambda block: (-block.depth, block.slot)), shared


def _of_other_sessions(executor: Executor, pool: Pool, target: ForgetTarget) -> set[Block]:
    """Blocks that other sessions use, and blocks with a descendant that another session has stored."""
    found: set[Block] = set()
    for block in pool.index.values():
        if block.domain is None or block.domain.session_id != target.session_id:
            node = block.parent
            # Each block is met once: its ancestors are in the set as soon as it is.
            while isinstance(node, Block) and node not in found:
                found.add(node)
                node = node.parent
    for hold in executor.holds:
        if not hold.pin and hold.session_id != target.session_id:
            found.update(block for holder, block in hold.blocks if holder is pool)
    group = executor.pools.index(pool)
    for sequence in executor.sequences.values():
        if sequence.domain.session_id != target.session_id:
            found.update(sequence.tables[group].references())
    return found


def _take_out(found: list[tuple[Pool, list[Block]]]) -> None:
    for pool, doomed in found:
        pool.doomed.update(doomed)
    for pool, doomed in found:
        for block in doomed:
            # With a block of full attention those of windows may have gone already.
            if block.parent is not None:
                pool.discard(block, RemovalCause.FORGOTTEN)


def _is_meant(sequence: Sequence, target: ForgetTarget, gone: set[bytes]) -> bool:
    """Whether what a live sequence holds, or will compute, comes from what is forgotten."""
    if target.salt is not None:
        return sequence.domain.salt == target.salt
    if target.session_id is not None and sequence.domain.session_id == target.session_id:
        return True
    return any(key in gone for key in sequence.keys)


def _leave_nothing(sequence: Sequence) -> None:
    sequence.no_store = sequence.forgotten = True
    for table in sequence.tables:
        for place in range(table.settled, min(len(sequence.keys), len(table.blocks))):
            if table.pool.pending.get(sequence.keys[place]) is table.blocks[place]:
                del table.pool.pending[sequence.keys[place]]
