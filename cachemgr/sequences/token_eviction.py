"""Token eviction of a sequence: its policy, its private blocks, and the blocks that stay cached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from cachemgr.errors import RulePolicyError, SequenceEvictsError
from cachemgr.sequences.token_eviction_state import blocks_for
from protos.errors import InvalidField
from protos.kvcommon.block_keys import child_key
from protos.kvcommon.eviction import Layout, Policy

if TYPE_CHECKING:
    from cachemgr.blocks.block import Block
    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.retention.rule_book import Rule
    from cachemgr.sequences.clients import Executor
    from cachemgr.sequences.sequence import Sequence
    from cachemgr.types import AdmitRequest, SyncRequest


def resolve(request: AdmitRequest, rules: Iterable[Rule], executor: Executor) -> Policy | None:
    """The policy of a new sequence: from the request, else from the first rule that has a policy.

    Raises InvalidField for a bad policy in the request, and RulePolicyError for a rule's policy that the model does
    not support.
    """
    windows = [pool.window for pool in executor.pools]
    layout = Layout(executor.block_size, windows, executor.spec.plain_rotary)
    if request.eviction_policy is not None:
        return request.eviction_policy.policy(layout, "eviction_policy")
    for rule in rules:
        requested = rule.spec.action.eviction_policy
        if requested is None:
            continue
        try:
            return requested.policy(layout, "eviction_policy")
        except InvalidField as error:
            name, where = rule.spec.name, executor.executor_id
            text = f"executor {where} cannot evict as rule {name} says: {error.message}"
            raise RulePolicyError(text, metadata={"rule": name}) from error
    return None


def check_columns(request: SyncRequest, sequences: Mapping[int, Sequence]) -> None:
    """Raises InvalidField for eviction columns that do not fit the known state."""
    for row, handle in enumerate(request.evicting_handles):
        sequence = sequences.get(handle)
        if sequence is None or sequence.void:
            continue
        if sequence.eviction is None or sequence.eviction.first is None:
            raise InvalidField(f"evicting_handles[{row}]", "must name a sequence that evicts tokens")
    reported = dict(zip(request.handles, request.computed_tokens, strict=True))
    for row, (handle, clean) in enumerate(
        zip(request.evicted_handles, request.computed_tokens_before_eviction, strict=True)
    ):
        sequence = sequences.get(handle)
        if sequence is None or sequence.void:
            continue
        if sequence.eviction is None or not sequence.eviction.granted or sequence.eviction.has_begun:
            raise InvalidField(
                f"evicted_handles[{row}]",
                "must name a sequence with granted blocks that has not evicted",
            )
        most = min(reported.get(handle, len(sequence.tokens)), sequence.most_computed)
        if not sequence.computed <= clean <= most:
            raise InvalidField(f"computed_tokens_before_eviction[{row}]", f"must be from {sequence.computed} to {most}")
        if handle in request.trimmed_handles:
            raise InvalidField(f"trimmed_handles[{list(request.trimmed_handles).index(handle)}]", "must not also evict")


def check_windows(request: SyncRequest, sequences: Mapping[int, Sequence]) -> None:
    """Raises InvalidField for adaptive windows that do not fit the known state."""
    named = zip(request.evicting_handles, request.evicting_window_tokens, strict=False)
    for row, (handle, tokens) in enumerate(named):
        sequence = sequences.get(handle)
        is_adaptive = sequence is not None and sequence.eviction is not None and sequence.eviction.window is not None
        if sequence is not None and not sequence.void and (tokens or is_adaptive):
            _check_window(sequence, tokens, f"evicting_window_tokens[{row}]")
    for row, (handle, tokens) in enumerate(zip(request.window_handles, request.window_tokens, strict=True)):
        sequence = sequences.get(handle)
        if sequence is None or sequence.void:
            continue
        if not sequence.has_evicted_tokens and handle not in request.evicted_handles:
            raise InvalidField(f"window_handles[{row}]", "must name a sequence that has evicted tokens")
        _check_window(sequence, tokens, f"window_tokens[{row}]")


def _check_window(sequence: Sequence, tokens: int, field: str) -> None:
    if sequence.eviction is None or not sequence.eviction.policy.allows_window(tokens):
        raise InvalidField(field, "must be an adaptive window, a multiple of its period within its bounds")


def check_in_place(sequence: Sequence, field: str) -> None:
    """Raises SequenceEvictsError if the slots do not hold the leading tokens, or may soon stop holding them."""
    eviction = sequence.eviction
    if eviction is not None and (eviction.has_begun or (eviction.granted and not eviction.private)):
        text = f"sequence {sequence.sequence_id} has evicted tokens or is about to: it cannot be forked or truncated"
        raise SequenceEvictsError(text, fields={field: "names a sequence that has evicted tokens or is about to"})


def may_evict(sequence: Sequence) -> bool:
    """Whether all its blocks are known to be right, since a failed copy could not be repeated after an eviction."""
    (table,) = sequence.tables
    return not sequence.tickets and all(
        block is None or block.writer is None or block.writer is sequence for block in table.blocks
    )


def grant(sequence: Sequence, window: int, spare: int) -> int:
    """Allocates the blocks to evict into. If blocks are missing, returns how many and changes nothing.

    window: the adaptive window that the sequence asks for; it gets as much as `spare` blocks allow.
    """
    eviction, (table,) = sequence.eviction, sequence.tables
    assert eviction is not None
    if eviction.granted:
        return 0
    if eviction.policy.most_kept is None or not _all_its_own(sequence):
        count = blocks_for(eviction.slots, sequence.block_size)
        # A running sequence may exceed its account's ceiling; the account's cached blocks are evicted first.
        missing = count - table.pool.device.free_for(sequence.scope.account, within_ceiling=False)
        if missing > 0:
            return missing
        _widen(sequence, window, spare - count)
        count = blocks_for(eviction.slots, sequence.block_size)
        eviction.private = [table.pool.allocate(sequence) for _ in range(count)]
    else:
        # The sequence keeps blocks that it would otherwise free, unless other sequences need them.
        count = blocks_for(eviction.slots, sequence.block_size)
        if _widen(sequence, window, spare + len(table.blocks) - count if spare else 0):
            _complete(sequence)
    eviction.granted = True
    return 0


def _widen(sequence: Sequence, window: int, spare: int) -> bool:
    """Lengthens the adaptive window as far as `spare` blocks allow; returns whether it became longer."""
    eviction = sequence.eviction
    assert eviction is not None
    policy = eviction.policy
    more = max(0, spare) * sequence.block_size // policy.period * policy.period
    if policy.bounds is None or not more or window <= policy.window:
        return False
    eviction.set_window(min(window, policy.window + more))
    return True


def _complete(sequence: Sequence) -> None:
    """Allocates the blocks that the table lacks for all slots of the policy; enough blocks must be free."""
    eviction, (table,) = sequence.eviction, sequence.tables
    assert eviction is not None
    count = blocks_for(eviction.slots, sequence.block_size) - len(table.blocks)
    table.blocks += [table.pool.allocate(sequence) for _ in range(count)]


def change_window(sequence: Sequence, window: int, spare: int) -> None:
    """Allocates or frees blocks of a longer or shorter adaptive window, which grows by at most `spare` blocks."""
    eviction, (table,) = sequence.eviction, sequence.tables
    assert eviction is not None
    if window < eviction.policy.window:
        eviction.set_window(window)
        if sequence.forgotten:
            zero_on_free_of(sequence)
        table.cut(blocks_for(eviction.slots, sequence.block_size))
    elif _widen(sequence, window, spare):
        _complete(sequence)


def _all_its_own(sequence: Sequence) -> bool:
    """Whether no other sequence can find or read any of its blocks, now or later."""
    (table,) = sequence.tables
    return (
        sequence.no_store
        and not table.duplicate_refs
        and all(block is not None and block.refs == 1 and block.parent is None for block in table.blocks)
    )


def move(sequence: Sequence) -> None:
    """Moves a sequence to its private table after its first eviction. Its earlier, committed blocks stay cached.

    Later blocks are not cached, since they hold only a part of the tokens of their keys.
    """
    eviction, (table,) = sequence.eviction, sequence.tables
    assert eviction is not None
    if sequence.forgotten:
        zero_on_free_of(sequence)
    if eviction.private:
        table.cut(0)
        table.blocks, eviction.private = [*eviction.private], []
    else:
        table.cut(blocks_for(eviction.slots, sequence.block_size))
        table.committed = 0
        for block in table.blocks:
            assert block is not None
            block.writer = sequence
    eviction.committed = sequence.computed
    eviction.evicted = eviction.dropped(sequence.computed)
    eviction.has_begun = True


def zero_on_free_of(sequence: Sequence) -> None:
    """Marks unindexed blocks of a sequence, unless another sequence fills them: they are overwritten when freed."""
    for table in sequence.tables:
        # Blocks that another sequence has yet to fill are left to that sequence.
        table.pool.zero_on_free.update(
            block
            for block in table.references()
            if block.parent is None and (block.writer is None or block.writer is sequence)
        )
        table.pool.zero_on_free.update(sequence.private)


def cached_before_eviction(sequence: Sequence) -> Iterator[tuple[BlockPool, Block]]:
    """Yields the earlier blocks of a sequence that has evicted tokens, as far as still cached, from the root on."""
    eviction, (table,) = sequence.eviction, sequence.tables
    assert eviction is not None
    size = sequence.block_size
    full, rest = divmod(eviction.committed, size)
    keys = [sequence.key(block_index) for block_index in range(full)]
    if rest:
        start, end = full * size, eviction.committed
        tokens, extra = sequence.packed(start, end), sequence.extra_of(start, end)
        keys.append(child_key(sequence.key(full - 1), tokens, extra))
    for key in keys if not sequence.no_store else ():
        block = table.pool.tree.by_key.get(key)
        if block is None or block in table.pool.offloader.offloading:
            return
        yield table.pool, block
