"""Ends and shrinks sequences, and ends everything of a lost executor or scheduler."""

from collections.abc import Iterable, Iterator

from cachemgr.blocks.block import Block
from cachemgr.blocks.block_pool import BlockPool, PoolListener
from cachemgr.blocks.events import NO_BLOCK, EventLog
from cachemgr.blocks.extra_keys import cut_extra_keys
from cachemgr.blocks.lost_blocks import LostBlocks
from cachemgr.blocks.recovery import restart
from cachemgr.errors import SharedBlockError, VoidSequenceError, WindowPassedError
from cachemgr.sequences.clients import Executor, Scheduler
from cachemgr.sequences.commit import commit_computed_blocks, commit_last_block, retract_pending, void
from cachemgr.sequences.copies import Outcome, Purpose, Ticket
from cachemgr.sequences.holds import with_ancestors
from cachemgr.sequences.sequence import GroupTable, Sequence, first_needed
from cachemgr.sequences.token_eviction import cached_before_eviction, check_in_place, zero_on_free_of
from cachemgr.sequences.token_eviction_state import blocks_for
from cachemgr.types import EventKind, ExecutorSpec, Freed, RemovalCause, Slot, TierKind
from protos.errors import InvalidField

# Up to this many blocks of a lost executor are reported one by one.
MOST_REPORTED = 4096
# Slots of a restarted executor that one call carries over; each takes some microseconds.
MOST_CARRIED_OVER = 8192


def free_blocks(executor: Executor) -> int:
    """Counts free blocks over all groups."""
    return sum(pool.device.free for pool in executor.pools)


def release(sequence: Sequence, now: float) -> None:
    """Commits the last blocks and releases all, or hands them to a hold."""
    executor = sequence.executor
    commit_computed_blocks(sequence, leaves=True)
    # Before the last block is committed, since sequences that share the pending block expect a full block.
    retract_pending(sequence)
    commit_last_block(sequence)
    stored = 0 if executor.ghosts is None else executor.ghosts.stored(sequence)
    for ticket in list(sequence.tickets):
        ticket.detach(sequence.tables[ticket.pool.spec.group])
    if not sequence.void:
        _hand_to_holds(sequence, now)
    if sequence.forgotten:
        zero_on_free_of(sequence)
    for block in reversed(sequence.private):
        sequence.tables[0].pool.release(block)
    for table in sequence.tables:
        table.cut(0)
    for writer in sequence.waits_on:
        writer.dependents.discard(sequence)
    del executor.sequences[sequence.handle]
    del sequence.scheduler.sequences[sequence.handle]
    sequence.scheduler.void.discard(sequence.handle)
    if executor.ghosts is not None:
        executor.ghosts.released(sequence, stored)


def tickets_of(executor: Executor, scheduler: Scheduler) -> list[Ticket]:
    """Open copies of a scheduler."""
    return [ticket for ticket in executor.tickets.values() if ticket.scheduler is scheduler]


def end_ticket(executor: Executor, ticket: Ticket) -> None:
    """Ends a copy of a lost scheduler, if it is still open.

    The executor ends the old session before it takes a step of a new session, and runs steps in order. So the next
    sequence in the slots writes after the last copy that could still run.
    """
    if executor.tickets.pop(ticket.number, None) is not None:
        end_copy(ticket, Outcome.CANCELLED)


def end_copies(executor: Executor, done: Iterable[int], failed: Iterable[int], step: int) -> int:
    """Ends copies that the executor reports, by their tickets; returns how many of the tickets were not open.

    No step after `step` has written for these copies.
    """
    unknown = 0
    for numbers, outcome in ((failed, Outcome.FAILED), (done, Outcome.DONE)):
        for number in numbers:
            ticket = executor.tickets.pop(number, None)
            if ticket is None:
                unknown += 1
                continue
            if ticket.sequence is not None:
                ticket.sequence.step = max(ticket.sequence.step, step)
            elif ticket.purpose is Purpose.PREFETCH:
                # No sequence will report later which step wrote the block.
                ticket.target.stored_step = max(ticket.target.stored_step, step)
            end_copy(ticket, outcome)
    return unknown


def end_copy(ticket: Ticket, outcome: Outcome) -> None:
    """Ends a copy whose ticket has been removed, with its effects on the sequence."""
    sequence = ticket.sequence
    ticket.end(outcome)
    if sequence is None:
        return
    if outcome is Outcome.DONE:
        commit_computed_blocks(sequence)
    else:
        void(sequence)


def _hand_to_holds(sequence: Sequence, now: float) -> None:
    """Hands the blocks to their holds, and pins the blocks that a rule pins."""
    executor = sequence.executor
    if sequence.has_evicted_tokens:
        kept = list(cached_before_eviction(sequence))
    else:
        kept = [(table.pool, block) for table in sequence.tables for block in reversed(list(table.references()))]
    if sequence.holds:
        owners = {owner: now + duration for owner, duration in sequence.holds.items()}
        executor.holds.keep(kept, owners, sequence.scope.session_id)
    found = sequence.retention.pin()
    if found is not None:
        rule, duration = found
        size = executor.block_size
        pinned = [(pool, block) for pool, block in kept if block.parent is not None and rule.covers(block.depth * size)]
        executor.holds.pin(with_ancestors(pinned), rule.holder, now, duration)


def to_zero(executor: Executor) -> Iterator[tuple[BlockPool, int]]:
    """Yields indexes whose bytes were forgotten but not yet overwritten. The executor's sequences are about to end."""
    for sequence in executor.sequences.values():
        if sequence.forgotten:
            zero_on_free_of(sequence)
    for ticket in executor.tickets.values():
        if ticket.purpose is Purpose.ZERO or ticket.source in ticket.pool.zero_on_free:
            yield ticket.pool, ticket.target.index
    for pool in executor.pools:
        for block in pool.zero_on_free:
            yield pool, block.index


def slots_to_zero(executor: Executor) -> Iterator[Slot]:
    """Yields the slots of `to_zero`, lower tiers first, since these outlive the executor's process."""
    on_device: list[Slot] = []
    for pool, block_index in to_zero(executor):
        tier = pool.tier_at(block_index)
        slot = pool.spec.group, tier.kind, block_index - tier.offset
        if tier is pool.device:
            on_device.append(slot)
        else:
            yield slot
    yield from on_device


def end_executor(executor: Executor, events: EventLog, lost_blocks: LostBlocks) -> None:
    """Ends an executor: its sequences become void, and its blocks can no longer be found or freed.

    Each block gets a separate event, unless there are too many; the last event is about the executor.
    """
    _end_epoch(executor)
    executor.holds.clear()
    count = sum(len(pool.tree.by_key) for pool in executor.pools)
    for pool in executor.pools:
        if count > MOST_REPORTED:
            pool.abandon(lost_blocks)
        else:
            pool.lose_all()
    events.add(EventKind.EXECUTOR_LOST, NO_BLOCK, executor=executor.spec)


def can_carry_over(before: Executor, spec: ExecutorSpec) -> bool:
    """Whether an executor has few enough slots, before and now, to carry its blocks over in one call."""
    slots = sum(pool.num_blocks + pool.host_blocks + pool.disk_blocks for pool in spec.pools)
    return max(slots, sum(len(pool.blocks) for pool in before.pools)) <= MOST_CARRIED_OVER


def carry_over(before: Executor, spec: ExecutorSpec, listener: PoolListener) -> None:
    """Keeps the blocks that a restarted executor's lower tiers still have, and the slots to overwrite.

    `spec` is the spec of the new epoch, which takes over the pools, scopes and holds of `before`.
    """
    zeroing = list(to_zero(before))
    _end_epoch(before)
    held = before.holds.held()
    for pool in before.pools:
        group = pool.spec.group
        filled = {tier: spec.generations(tier, group) for tier in (TierKind.HOST, TierKind.DISK)}
        indexes = [block_index for other, block_index in zeroing if other is pool]
        restart(pool, spec.pools[group], listener, filled, held, indexes)
    before.holds.keep_cached()


def _end_epoch(executor: Executor) -> None:
    """Voids the sequences of an executor, and drops its copies."""
    for sequence in executor.sequences.values():
        void(sequence)
        sequence.tickets.clear()
        sequence.opened.clear()
        for table in sequence.tables:
            table.blocks, table.duplicate_refs = [], {}
            table.committed = table.window_start = 0
        sequence.private.clear()
    executor.tickets.clear()


def truncate(sequence: Sequence, num_tokens: int) -> Freed:
    """Keeps the first `num_tokens` tokens. Blocks of dropped tokens leave the index, unless other sequences use them.

    Raises InvalidField, VoidSequenceError, SequenceEvictsError, WindowPassedError, SharedBlockError.
    """
    if num_tokens < 1:
        raise InvalidField("num_tokens", "must be at least 1")
    if num_tokens > len(sequence.tokens):
        raise InvalidField("num_tokens", f"must be at most the sequence's {len(sequence.tokens)} tokens")
    if sequence.void:
        raise VoidSequenceError(
            f"sequence {sequence.sequence_id} can only be released",
            fields={"sequence_id": "names a sequence that can only be released"},
        )
    check_in_place(sequence, "sequence_id")
    size = sequence.block_size
    # K and V of the newest token do not count: the next step writes them to the block at `cut`.
    computed = min(sequence.computed, num_tokens - 1)
    cut, keep = computed // size, blocks_for(num_tokens, size)
    rewritten = computed < sequence.computed
    discarded = [_check_truncation(sequence, table, computed, cut, rewritten) for table in sequence.tables]

    before = free_blocks(sequence.executor)
    if rewritten:
        _void_copies_from(sequence, cut, computed - cut * size)
    retract_pending(sequence, cut if rewritten else num_tokens // size)
    for ticket in list(sequence.tickets):
        if ticket.index >= keep:
            ticket.detach(sequence.tables[ticket.pool.spec.group])
    for table, blocks in zip(sequence.tables, discarded, strict=True):
        for block in blocks:
            table.pool.discard(block, RemovalCause.TRUNCATED)
        if rewritten:
            _make_writable(sequence, table, cut)
        table.cut(keep)
    del sequence.tokens[num_tokens:]
    sequence.extra_keys = cut_extra_keys(sequence.extra_keys, num_tokens)
    del sequence.keys[num_tokens // size :]
    sequence.computed = computed
    return Freed(True, free_blocks(sequence.executor) - before)


def _check_truncation(sequence: Sequence, table: GroupTable, computed: int, cut: int, rewritten: bool) -> list[Block]:
    """Returns the blocks to take out of the index, tail first; raises if the truncation is impossible."""
    if not rewritten:
        return []
    if table.window_start > first_needed(computed, table.pool.window, sequence.block_size):
        text = "the attention window before that length has been released"
        raise WindowPassedError(text, fields={"num_tokens": "is too small"})
    own_from = sequence.cached_tokens // sequence.block_size
    discarded: list[Block] = []
    for block_index in range(len(table.blocks) - 1, max(cut, own_from) - 1, -1):
        block = table.blocks[block_index]
        if block is not None and block.parent is not None and block.refs == 1 and _stands_alone(block, discarded):
            discarded.append(block)
    block = table.blocks[cut]
    assert block is not None
    if cut < own_from or (block.writer is not sequence and block.refs > 1) or (block.parent and block not in discarded):
        text = "the sequence would write into a block that others can read; release it instead"
        raise SharedBlockError(text, fields={"num_tokens": "ends in a shared block"})
    return discarded


def _stands_alone(block: Block, discarded: list[Block]) -> bool:
    children = block.children
    return children is None or (isinstance(children, Block) and bool(discarded) and children is discarded[-1])


def _make_writable(sequence: Sequence, table: GroupTable, cut: int) -> None:
    """Lets the sequence fill the block at `cut` again."""
    block = table.blocks[cut]
    assert block is not None
    table.pool.own(block, sequence)
    duplicate = table.duplicate_refs.pop(cut, None)
    if duplicate is not None:
        table.pool.release(duplicate)
    table.committed = min(table.committed, cut)


def _void_copies_from(sequence: Sequence, cut: int, kept: int) -> None:
    """Voids forks whose copy has not run yet and would read overwritten tokens of the sequence."""
    sources = {table.blocks[cut] for table in sequence.tables}
    for ticket in sequence.executor.tickets.values():
        if ticket.source in sources and ticket.num_tokens > kept and ticket.sequence is not None:
            void(ticket.sequence)
