"""Why the first missing block of an admitted prompt was not used from the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachemgr.sequences.sequence import Sequence, first_needed
from cachemgr.types import Miss, MissCause, RemovalCause, TierKind

if TYPE_CHECKING:
    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.types import Removal

_CAUSES = {
    RemovalCause.PURGED: MissCause.PURGED,
    RemovalCause.FORGOTTEN: MissCause.PURGED,
    RemovalCause.EXECUTOR_LOST: MissCause.LOST,
    RemovalCause.COPY_FAILED: MissCause.LOST,
}


def first_miss(sequence: Sequence, cached_tokens: int, lowest: TierKind | None, now: float) -> Miss | None:
    """Explains the first full block after a match, before anything is allocated; None if no full block is missing.

    lowest: the lowest tier whose blocks the sequence may use; None if it may use no cached block.
    """
    size = sequence.block_size
    index = cached_tokens // size
    # The last token is always computed.
    if index >= (len(sequence.tokens) - 1) // size:
        return None
    if lowest is None:
        return Miss(MissCause.NOT_READ)
    for table in sequence.tables:
        pool = table.pool
        # With a window, the missing block may be an earlier block.
        start = index if pool.window is None else first_needed((index + 1) * size, pool.window, size)
        for block_index in range(start, index + 1):
            miss = _miss_of(sequence, pool, sequence.key(block_index), lowest, now)
            if miss is not None:
                return miss
    # The blocks are cached, but the eviction policy reuses no more of them.
    return Miss(MissCause.NOT_READ)


def _miss_of(sequence: Sequence, pool: BlockPool, key: bytes, lowest: TierKind, now: float) -> Miss | None:
    block = pool.tree.by_key.get(key)
    if block is not None:
        tier = pool.tier_of(block).kind
        if block in pool.offloader.offloading or tier > lowest:
            return Miss(MissCause.SLOWER_TIER, tier=tier)
        return None
    if key in pool.pending:
        return Miss(MissCause.BEING_COMPUTED)
    lost = pool.removals.get(key)
    return Miss(MissCause.NEVER_STORED) if lost is None else _removed(sequence, lost, now)


def _removed(sequence: Sequence, lost: Removal, now: float) -> Miss:
    cause = _CAUSES.get(lost.cause, MissCause.LEASE_ENDED if lost.lease_ended else MissCause.EVICTED)
    is_own = bool(lost.for_sequence_id) and _same_owner(sequence.scope.owner, lost.for_owner)
    for_id = lost.for_sequence_id if is_own else ""
    return Miss(cause, max(0.0, now - lost.time), lost.priority, is_own, for_id)


def _same_owner(mine: tuple[str | None, str | None], other: tuple[str | None, str | None]) -> bool:
    """Whether two owners are one tenant; without tenants, the salt identifies the owner."""
    return mine[0] == other[0] and (mine[0] is not None or mine[1] == other[1])
