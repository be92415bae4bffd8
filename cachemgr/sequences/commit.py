"""Publishes pending blocks, commits computed blocks to the index, and retracts pending blocks."""

from cachemgr.blocks.prefix_tree import covering_child
from cachemgr.retention.priority import OTHER_WEIGHTS, RetentionRequest
from cachemgr.sequences.sequence import GroupTable, Sequence, first_needed
from protos.kvcommon.block_keys import child_key


def publish_pending(sequence: Sequence) -> None:
    """Makes the full blocks of the known tokens findable before they are computed."""
    full = sequence.storable(len(sequence.tokens)) // sequence.block_size
    for table in sequence.tables:
        pending, index = table.pool.pending, table.pool.tree.by_key
        end = min(full, len(table.blocks))
        # Also makes the earlier keys.
        sequence.key(end - 1)
        for block_index in range(table.committed, end):
            block = table.blocks[block_index]
            if block is not None and block.writer is sequence:
                key = sequence.keys[block_index]
                if key not in index:
                    pending.setdefault(key, block)


def commit_computed_blocks(sequence: Sequence, *, leaves: bool = False) -> None:
    """Enters computed blocks into the index and releases blocks that left the window.

    Nothing is committed while a copy into the sequence is open: until the executor confirms the copy, neither the
    copied tokens nor later tokens are known to be right. At the release, blocks before all open copies are committed.
    Nothing is committed after tokens were evicted, since later blocks do not hold the tokens of their keys.
    """
    if sequence.void or sequence.has_evicted_tokens or (sequence.tickets and not leaves):
        return
    full = min([sequence.computed // sequence.block_size, *(ticket.index for ticket in sequence.tickets)])
    full = _filled(sequence, full)
    for table in sequence.tables:
        while table.committed < full:
            _commit_block(sequence, table, table.committed)
            table.committed += 1
        for block_index, equal in [item for item in table.duplicate_refs.items() if item[0] < table.committed]:
            own = table.blocks[block_index]
            assert own is not None
            if equal.parent is None:
                # The equal block has left the index and no longer has a child.
                table.pool.release(table.duplicate_refs.pop(block_index))
            elif equal.refs == 1:
                # No other sequence uses the equal block any more.
                table.pool.supersede(own, table.duplicate_refs.pop(block_index), sequence.step)
                table.pool.release(equal)
        window = table.pool.window
        if window is not None:
            needed = min(table.committed, first_needed(sequence.computed, window, sequence.block_size))
            while table.window_start < needed:
                block = table.blocks[table.window_start]
                if block is not None:
                    table.blocks[table.window_start] = None
                    table.pool.release(block)
                table.window_start += 1


def _filled(sequence: Sequence, full: int) -> int:
    """Counts how many of the first `full` blocks this sequence fills or other sequences have committed, in every group.

    A token depends on all earlier blocks of every group, since each layer builds on the layers before it.
    """
    for table in sequence.tables:
        for block_index in range(table.committed, full):
            block = table.blocks[block_index]
            if block is not None and block.writer is not None and block.writer is not sequence:
                full = block_index
                break
    return full


def _commit_block(sequence: Sequence, table: GroupTable, block_index: int) -> None:
    """Enters a computed block into the index, unless the index has an equal device block that is in use."""
    block = table.blocks[block_index]
    if block is None:
        return
    pool, key = table.pool, sequence.key(block_index)
    if block.writer is sequence:
        block.writer = None
        if pool.pending.get(key) is block:
            del pool.pending[key]
    if block.parent is not None or not sequence.stores_to((block_index + 1) * sequence.block_size):
        return
    request = _retention(sequence, block_index)
    equal = pool.tree.by_key.get(key)
    if equal is not None and not (equal.refs and pool.is_on_device(equal)):
        # Keeping both would be one block too many in a pool that is just large enough.
        pool.supersede(block, equal, sequence.step)
        pool.grant(block, request)
        return
    if equal is not None:
        # The sequence that commits the block later may not have run a step by then.
        block.stored_step = max(block.stored_step, sequence.step)
        pool.grant(equal, request)
        table.refer_to_duplicate(block_index, equal)
        for dependent in sequence.dependents:
            # Later blocks that dependents share are children of the equal block, too.
            theirs = dependent.tables[pool.spec.group]
            if block_index < len(theirs.blocks) and theirs.blocks[block_index] is block:
                theirs.refer_to_duplicate(block_index, equal)
        return
    pool.grant(block, request)
    size = sequence.block_size
    start, end = block_index * size, (block_index + 1) * size
    scope = sequence.block_scope(start, end)
    pool.store(
        block, key, sequence.key(block_index - 1), sequence.packed(start, end), block_index, scope, sequence.step
    )


def _retention(sequence: Sequence, block_index: int) -> RetentionRequest | None:
    """The retention request for a block. If the sequence's weights are outdated, its blocks are evicted first."""
    if sequence.scope.weight_version != sequence.executor.spec.weight_version:
        return OTHER_WEIGHTS
    return sequence.retention.at(block_index * sequence.block_size)


def commit_last_block(sequence: Sequence) -> None:
    """Enters the partly filled last block of a sequence that ends, unless a sibling begins with its tokens.

    The sequence's pending blocks must be retracted first.
    """
    if not sequence.executor.stores_partial:
        return
    size = sequence.block_size
    block_index, count = divmod(sequence.computed, size)
    if not count or not sequence.stores_to(sequence.computed):
        return
    if sequence.void or sequence.tickets or sequence.has_evicted_tokens:
        return
    if any(table.committed < block_index for table in sequence.tables):
        return
    tokens = sequence.packed(block_index * size, sequence.computed)
    parent_key = sequence.key(block_index - 1)
    scope = sequence.block_scope(block_index * size, sequence.computed)
    for table in sequence.tables:
        block = table.blocks[block_index] if block_index < len(table.blocks) else None
        if block is None or block.writer is not sequence:
            continue
        parent, request = table.pool.tree.node(parent_key), _retention(sequence, block_index)
        longer = None if parent is None else covering_child(parent, tokens, scope.extra)
        if longer is not None:
            table.pool.grant(longer, request)
            continue
        block.writer = None
        table.pool.grant(block, request)
        key = child_key(parent_key, tokens, scope.extra)
        table.pool.store(block, key, parent_key, tokens, block_index, scope, sequence.step)


def retract_pending(sequence: Sequence, start: int = 0) -> None:
    """Retracts the pending blocks from index `start` on; sequences that share them become void."""
    for table in sequence.tables:
        for block_index in range(max(start, table.committed), len(table.blocks)):
            if block_index >= len(sequence.keys):
                break
            if table.pool.pending.get(sequence.keys[block_index]) is table.blocks[block_index]:
                del table.pool.pending[sequence.keys[block_index]]
    for dependent in list(sequence.dependents):
        if _relies_on(dependent, sequence, start):
            void(dependent)


def void(sequence: Sequence) -> None:
    """Marks a sequence whose content will not be computed.

    It keeps its blocks until its release; no further block is indexed.
    """
    if sequence.void:
        return
    sequence.void = True
    sequence.scheduler.void.add(sequence.handle)
    retract_pending(sequence)


def _relies_on(dependent: Sequence, writer: Sequence, start: int) -> bool:
    return any(
        block is not None and block.writer is writer for table in dependent.tables for block in table.blocks[start:]
    )
