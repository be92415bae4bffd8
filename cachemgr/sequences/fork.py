"""Forks: a second sequence that shares the blocks of a first."""

from collections.abc import Callable

from cachemgr.blocks.extra_keys import cut_extra_keys
from cachemgr.errors import SequenceEvictsError, SequenceUnsettledError, WindowPassedError
from cachemgr.sequences.admission import admitted, copy_sources, grow, refusal
from cachemgr.sequences.sequence import Sequence, first_needed
from cachemgr.sequences.token_eviction import check_in_place
from cachemgr.sequences.token_eviction_state import TokenEvictionState, blocks_for
from cachemgr.types import Admission, ManagerConfig
from protos.errors import InvalidField


def fork(
    parent: Sequence, sequence_id: str, num_tokens: int | None, config: ManagerConfig, next_number: Callable[[], int]
) -> Sequence | Admission:
    """Returns a sequence that shares the parent's computed blocks, or how many blocks are missing.

    The fork has the first `num_tokens` tokens of the parent, or all. Raises InvalidField, SequenceUnsettledError,
    SequenceEvictsError, WindowPassedError.
    """
    _check_eviction(parent)
    size = parent.block_size
    full = parent.computed // size
    if parent.tickets or any(table.committed < full for table in parent.tables):
        raise SequenceUnsettledError(
            f"sequence {parent.sequence_id} waits for a copy or a shared prefix",
            fields={"parent_sequence_id": "names a sequence that waits"},
        )
    tokens = parent.tokens[:num_tokens]
    if num_tokens is not None and (num_tokens < 1 or num_tokens != len(tokens)):
        raise InvalidField("num_tokens", f"must be from 1 to the first sequence's {len(parent.tokens)} tokens")
    # The fork recomputes its last token, to get the next token.
    computed = min(parent.computed, len(tokens) - 1)
    if any(table.window_start > first_needed(computed, table.pool.window, size) for table in parent.tables):
        raise WindowPassedError("the attention window before that length has been released")
    full, copied = divmod(computed, size)
    eviction = None
    if parent.eviction is not None:
        eviction = TokenEvictionState(parent.eviction.policy, len(tokens), ahead=config.capacity_ahead_tokens)
    needed = blocks_for(len(tokens) if eviction is None else eviction.slots_for(len(tokens)), size)
    account = parent.scope.account

    def missing(*, within_ceiling: bool = True) -> int:
        free = (table.pool.device.free_for(account, within_ceiling=within_ceiling) for table in parent.tables)
        return sum(max(0, needed - full - spare) for spare in free)

    if missing_blocks := missing():
        return refusal(missing_blocks, missing(within_ceiling=False), account)
    child = Sequence(
        sequence_id,
        next_number(),
        parent.scheduler,
        parent.executor,
        tokens,
        parent.scope,
        parent.retention,
        parent.no_store,
        cut_extra_keys(parent.extra_keys, len(tokens)),
        parent.store_limit,
    )
    child.eviction = eviction
    child.forgotten = parent.forgotten
    child.content = ("fork", parent.sequence_id, num_tokens)
    child.step = parent.step
    child.keys = parent.keys[:full]
    sources = []
    for mine, theirs in zip(child.tables, parent.tables, strict=True):
        mine.blocks = theirs.blocks[:full]
        mine.duplicate_refs = {
            block_index: block for block_index, block in theirs.duplicate_refs.items() if block_index < full
        }
        mine.committed, mine.window_start = full, min(theirs.window_start, full)
        for block in mine.references():
            mine.pool.acquire(block)
        if copied:
            source = theirs.blocks[full]
            assert source is not None
            mine.pool.acquire(source)
            sources.append(source)
    copy_sources(child, sources, copied)
    grow(child, needed)
    child.computed = child.cached_tokens = computed
    child.admission = admitted(child, 0)
    return child


def _check_eviction(parent: Sequence) -> None:
    """Raises SequenceEvictsError if a fork would lack tokens or attention scores of its parent."""
    check_in_place(parent, "parent_sequence_id")
    if parent.eviction is not None and parent.eviction.policy.uses_scores:
        text = f"sequence {parent.sequence_id} evicts by scores, which a fork would not have"
        raise SequenceEvictsError(text, fields={"parent_sequence_id": "names a sequence that evicts by scores"})
