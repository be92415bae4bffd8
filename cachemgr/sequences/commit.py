"""From computed tokens to findable blocks, and what happens when the tokens will not come."""

from cachemgr.blocks.block import Block
from cachemgr.blocks.block_keys import child_key
from cachemgr.blocks.radix_tree import covering_child
from cachemgr.sequences.sequence import GroupTable, Sequence, first_needed


def promise(sequence: Sequence) -> None:
    """Makes the full blocks of the known tokens findable before they are computed."""
    if sequence.no_store:
        return
    known = len(sequence.tokens)
    if sequence.eviction is not None:
        known = sequence.eviction.policy.clean_tokens(known, sequence.eviction.prompt)
    full = known // sequence.block_size
    for table in sequence.tables:
        pending, index = table.pool.pending, table.pool.tree.by_key
        end = min(full, len(table.blocks))
        # Makes the keys before it too.
        sequence.key(end - 1)
        for place in range(table.settled, end):
            block = table.blocks[place]
            if block is not None and block.writer is sequence:
                key = sequence.keys[place]
                if key not in index:
                    pending.setdefault(key, block)


def settle(sequence: Sequence, *, leaves: bool = False) -> None:
    """Enters what is computed into the index and gives back what left the window.

    Nothing is settled while a copy into the sequence is open: until the executor has confirmed it, neither the
    copied tokens nor what was computed behind them are known to be right. What lies before all of them is when the
    sequence leaves. Nor once tokens were evicted: what comes behind them is not what its key would say.
    """
    if sequence.void or sequence.has_moved or (sequence.tickets and not leaves):
        return
    full = min([sequence.computed // sequence.block_size, *(ticket.index for ticket in sequence.tickets)])
    full = _filled(sequence, full)
    for table in sequence.tables:
        while table.settled < full:
            _settle_block(sequence, table, table.settled)
            table.settled += 1
        for place, equal in [item for item in table.anchors.items() if item[0] < table.settled]:
            own = table.blocks[place]
            assert own is not None
            if equal.parent is None:
                # It has left the index, and nothing stands on it any more.
                table.pool.release(table.anchors.pop(place))
            elif equal.refs == 1:
                # Who else used it is gone.
                table.pool.supersede(own, table.anchors.pop(place), sequence.step)
                table.pool.release(equal)
        window = table.pool.window
        if window is not None:
            needed = min(table.settled, first_needed(sequence.computed, window, sequence.block_size))
            while table.first < needed:
                block = table.blocks[table.first]
                if block is not None:
                    table.blocks[table.first] = None
                    table.pool.release(block)
                table.first += 1


def _filled(sequence: Sequence, full: int) -> int:
    """How many of so many leading blocks no other sequence has yet to fill in any group.

    What is computed behind such a block depends on it in every group: each layer sees what all layers before it have.
    """
    for table in sequence.tables:
        for place in range(table.settled, full):
            block = table.blocks[place]
            if block is not None and block.writer is not None and block.writer is not sequence:
                full = place
                break
    return full


def _settle_block(sequence: Sequence, table: GroupTable, place: int) -> None:
    """Enters a block that is computed into the index, unless that has an equal one."""
    block = table.blocks[place]
    if block is None:
        return
    pool, key = table.pool, sequence.key(place)
    if block.writer is sequence:
        block.writer = None
        if pool.pending.get(key) is block:
            del pool.pending[key]
    if sequence.no_store or block.parent is not None:
        return
    request = sequence.retention.at(place * sequence.block_size)
    equal = pool.tree.by_key.get(key)
    if equal is not None and not (equal.refs and pool.is_on_device(equal)):
        # Two of a kind would be one too many in a pool that is just large enough.
        pool.supersede(block, equal, sequence.step)
        pool.grant(block, request)
        return
    if equal is not None:
        # Whoever of those that share it puts it into the index may not have come to a step by then.
        block.stored_step = max(block.stored_step, sequence.step)
        pool.grant(equal, request)
        anchor(table, place, equal)
        for dependent in sequence.dependents:
            # What they share behind it stands on the equal one, too.
            theirs = dependent.tables[pool.spec.group]
            if place < len(theirs.blocks) and theirs.blocks[place] is block:
                anchor(theirs, place, equal)
        return
    pool.grant(block, request)
    size = sequence.block_size
    start, end = place * size, (place + 1) * size
    scope = sequence.block_scope(start, end)
    pool.store(block, key, sequence.key(place - 1), sequence.packed(start, end), place, scope, sequence.step)


def anchor(table: GroupTable, place: int, equal: Block) -> None:
    """Keeps a block that equals the table's own one: what the table has behind it may stand on that."""
    before = table.anchors.get(place)
    if table.pool.window is not None or before is equal:
        return
    table.pool.acquire(equal)
    table.anchors[place] = equal
    if before is not None:
        table.pool.release(before)


def settle_last(sequence: Sequence) -> None:
    """Enters the partly filled last block of a sequence that ends, unless a sibling covers it or none could be found.

    Its promises must be withdrawn before.
    """
    if not sequence.executor.stores_partial:
        return
    size = sequence.block_size
    place, count = divmod(sequence.computed, size)
    if sequence.void or sequence.no_store or sequence.tickets or sequence.has_moved or not count:
        return
    if any(table.settled < place for table in sequence.tables):
        return
    tokens = sequence.packed(place * size, sequence.computed)
    parent_key = sequence.key(place - 1)
    scope = sequence.block_scope(place * size, sequence.computed)
    for table in sequence.tables:
        block = table.blocks[place] if place < len(table.blocks) else None
        if block is None or block.writer is not sequence:
            continue
        parent, request = table.pool.tree.node(parent_key), sequence.retention.at(place * size)
        longer = None if parent is None else covering_child(parent, tokens, scope.extra)
        if longer is not None:
            table.pool.grant(longer, request)
            continue
        block.writer = None
        table.pool.grant(block, request)
        key = child_key(parent_key, tokens, scope.extra)
        table.pool.store(block, key, parent_key, tokens, place, scope, sequence.step)


def withdraw(sequence: Sequence, start: int = 0) -> None:
    """Takes back all promises from a place on; whoever relied on them is void."""
    for table in sequence.tables:
        for place in range(max(start, table.settled), len(table.blocks)):
            if place >= len(sequence.keys):
                break
            if table.pool.pending.get(sequence.keys[place]) is table.blocks[place]:
                del table.pool.pending[sequence.keys[place]]
    for dependent in list(sequence.dependents):
        if _relies_on(dependent, sequence, start):
            void(dependent)


def void(sequence: Sequence) -> None:
    """The sequence's content will not come. It keeps its blocks until it is released, and nothing of them is stored."""
    if sequence.void:
        return
    sequence.void = True
    sequence.scheduler.void.add(sequence.handle)
    withdraw(sequence)


def _relies_on(dependent: Sequence, writer: Sequence, start: int) -> bool:
    return any(
        block is not None and block.writer is writer for table in dependent.tables for block in table.blocks[start:]
    )
