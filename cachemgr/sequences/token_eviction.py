"""How a sequence that evicts tokens comes by blocks of its own, and leaves behind what others may use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from cachemgr.blocks.block_keys import child_key
from cachemgr.errors import SequenceEvictsError
from cachemgr.sequences.commit import settle_last, withdraw
from cachemgr.sequences.sequence import blocks_for
from protos.errors import InvalidField

if TYPE_CHECKING:
    from cachemgr.blocks.block import Block
    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.sequences.sequence import Sequence
    from cachemgr.types import SyncRequest


def check_columns(request: SyncRequest, sequences: Mapping[int, Sequence]) -> None:
    """Raises InvalidField for evictions and moves that do not fit to what is known."""
    for row, handle in enumerate(request.evicting_handles):
        sequence = sequences.get(handle)
        if sequence is None or sequence.void:
            continue
        if sequence.eviction is None or sequence.eviction.first is None:
            raise InvalidField(f"evicting_handles[{row}]", "must name a sequence that evicts tokens")
    reported = dict(zip(request.handles, request.computed_tokens, strict=True))
    for row, (handle, clean) in enumerate(zip(request.moved_handles, request.moved_computed_tokens, strict=True)):
        sequence = sequences.get(handle)
        if sequence is None or sequence.void:
            continue
        if sequence.eviction is None or not sequence.eviction.granted or sequence.eviction.moved:
            raise InvalidField(f"moved_handles[{row}]", "must name a sequence that was told to move and has not")
        most = min(reported.get(handle, len(sequence.tokens)), sequence.most_computed)
        if not sequence.computed <= clean <= most:
            raise InvalidField(f"moved_computed_tokens[{row}]", f"must be from {sequence.computed} to {most}")
        if handle in request.trimmed_handles:
            raise InvalidField(f"trimmed_handles[{list(request.trimmed_handles).index(handle)}]", "must not also move")


def check_in_place(sequence: Sequence, field: str) -> None:
    """Raises SequenceEvictsError when its slots are not those of its leading tokens, or may be so any moment."""
    eviction = sequence.eviction
    if eviction is not None and (eviction.moved or (eviction.granted and not eviction.private)):
        text = f"sequence {sequence.sequence_id} has evicted tokens: it cannot be forked or cut"
        raise SequenceEvictsError(text, fields={field: "names one that has evicted tokens"})


def check_fork(parent: Sequence) -> None:
    """Raises SequenceEvictsError when a fork would not know what its parent knows."""
    check_in_place(parent, "parent_sequence_id")
    if parent.eviction is not None and parent.eviction.policy.uses_scores:
        text = f"sequence {parent.sequence_id} evicts by scores, which a fork would not have"
        raise SequenceEvictsError(text, fields={"parent_sequence_id": "names one that evicts by scores"})


def may_evict(sequence: Sequence) -> bool:
    """Whether all that it has is known to be right. What it keeps of a copy that fails nobody would find again."""
    (table,) = sequence.tables
    return not sequence.tickets and all(
        block is None or block.writer is None or block.writer is sequence for block in table.blocks
    )


def grant(sequence: Sequence) -> int:
    """Gives a sequence what it evicts into; returns how many blocks are missing for that, with nothing changed."""
    eviction, (table,) = sequence.eviction, sequence.tables
    assert eviction is not None
    if eviction.granted:
        return 0
    if eviction.policy.most_kept is None or not _all_its_own(sequence):
        count = blocks_for(eviction.slots, sequence.block_size)
        # What runs goes on beyond its ceiling, at the cost of its own cached blocks first.
        short = count - table.pool.device.free_for(sequence.domain.account, within_ceiling=False)
        if short > 0:
            return short
        eviction.private = [table.pool.take(sequence) for _ in range(count)]
    eviction.granted = True
    return 0


def _all_its_own(sequence: Sequence) -> bool:
    """Whether nobody else can find or read any of its blocks, now or later."""
    (table,) = sequence.tables
    return (
        sequence.no_store
        and not table.anchors
        and all(block is not None and block.refs == 1 and block.parent is None for block in table.blocks)
    )


def move(sequence: Sequence) -> None:
    """It has moved, and has computed what it had without evicting: that is settled, and stays for others.

    Nothing that it computes from now on is: it sees a part of what its key would say.
    """
    eviction, (table,) = sequence.eviction, sequence.tables
    assert eviction is not None
    # Before the last block is stored: who was promised all of it gets less.
    withdraw(sequence)
    settle_last(sequence)
    if sequence.forgotten:
        doom(sequence)
    if eviction.private:
        table.cut(0)
        table.blocks, eviction.private = [*eviction.private], []
    else:
        table.cut(blocks_for(eviction.slots, sequence.block_size))
        table.settled = 0
        for block in table.blocks:
            assert block is not None
            block.writer = sequence
    eviction.settled = sequence.computed
    eviction.evicted = eviction.dropped(sequence.computed)
    eviction.moved = True


def doom(sequence: Sequence) -> None:
    """No byte of what it alone has may outlive its use."""
    for table in sequence.tables:
        # What another has yet to fill is that one's.
        table.pool.doomed.update(
            block
            for block in table.references()
            if block.parent is None and (block.writer is None or block.writer is sequence)
        )
        table.pool.doomed.update(sequence.private)


def left_behind(sequence: Sequence) -> Iterator[tuple[BlockPool, Block]]:
    """Of a sequence that has moved: what it computed before and is still cached, from the root on."""
    eviction, (table,) = sequence.eviction, sequence.tables
    assert eviction is not None
    size = sequence.block_size
    full, rest = divmod(eviction.settled, size)
    keys = [sequence.key(place) for place in range(full)]
    if rest:
        start, end = full * size, eviction.settled
        tokens, extra = sequence.packed(start, end), sequence.extra_of(start, end)
        keys.append(child_key(sequence.key(full - 1), tokens, extra))
    for key in keys if not sequence.no_store else ():
        block = table.pool.tree.by_key.get(key)
        if block is None or block in table.pool.offloader.moving:
            return
        yield table.pool, block
