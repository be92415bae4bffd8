"""How sequences evict tokens: by which policy, into which blocks, and what they leave behind for others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from cachemgr.blocks.block_keys import child_key
from cachemgr.errors import RulePolicyError, SequenceEvictsError
from cachemgr.sequences.commit import commit_last_block, retract_pending
from cachemgr.sequences.sequence import blocks_for
from protos.errors import InvalidField
from protos.kvcommon.eviction import Layout, Policy

if TYPE_CHECKING:
    from cachemgr.blocks.block import Block
    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.retention.rules import Rule
    from cachemgr.sequences.clients import Executor
    from cachemgr.sequences.sequence import Sequence
    from cachemgr.types import AdmitRequest, SyncRequest


# A sync gives room for the next two steps.
_STEPS_AHEAD = 2


def resolve(request: AdmitRequest, rules: Iterable[Rule], executor: Executor) -> Policy | None:
    """How a new sequence evicts: as it says itself, else as the first of its rules that says anything.

    Raises InvalidField for the request's own policy, and RulePolicyError for a rule's that the model cannot carry.
    """
    windows = [pool.window for pool in executor.pools]
    layout = Layout(executor.block_size, windows, executor.spec.plain_rotary)
    if request.eviction_policy is not None:
        return request.eviction_policy.policy(layout, "eviction_policy")
    for rule in rules:
        wish = rule.spec.action.eviction_policy
        if wish is None:
            continue
        try:
            return wish.policy(layout, "eviction_policy")
        except InvalidField as error:
            name, where = rule.spec.name, executor.executor_id
            text = f"executor {where} cannot evict as rule {name} says: {error.message}"
            raise RulePolicyError(text, metadata={"rule": name}) from error
    return None


class TokenEvictionState:
    """How one sequence evicts, and how far it has come. Lengths in tokens.

    It fills the table that it was admitted with until its `first` eviction. For that it is granted another one,
    `private`, or none when it may stay in its own. Once it has moved, later evictions change no table.
    """

    __slots__ = ("committed", "evicted", "first", "granted", "has_begun", "policy", "private", "prompt", "slots")

    def __init__(self, policy: Policy, prompt: int, *, ahead: int) -> None:
        """`prompt`: tokens of the request's prompt. `ahead`: capacity ahead of need where a policy sets no bound."""
        self.policy = policy
        self.prompt = prompt
        self.first = policy.first_eviction(prompt)
        # Of the table that it moves to.
        self.slots = policy.most_kept or min(prompt, policy.maximum) + max(_STEPS_AHEAD, ahead)
        self.granted = False
        self.private: list[Block] = []
        self.has_begun = False
        # Tokens computed before it moved, and how many of them it dropped then.
        self.committed = 0
        self.evicted = 0

    def usable(self, slots: int) -> int:
        """Of so many slots, those that it may come to use before it moves, or behind that."""
        most = self.first
        if self.has_begun:
            most = None if self.policy.most_kept is None else self.slots
        return slots if most is None else min(slots, most)

    def slots_for(self, tokens: int) -> int:
        """Slots that it uses at most in its present table with so many known tokens."""
        return self.usable(tokens - self.evicted)

    def peak_blocks(self, tokens: int, block_size: int, *, no_store: bool) -> int:
        """Blocks that it has at once, at most, until it has so many tokens."""
        present = blocks_for(self.slots_for(tokens), block_size)
        if self.has_begun or self.first is None or tokens <= self.first:
            return present
        bounded = self.policy.most_kept is not None
        if no_store and bounded:
            return max(present, blocks_for(self.slots, block_size))
        later = 0 if bounded else tokens - self.dropped(self.first)
        # Both tables are there for a moment.
        return max(present + blocks_for(self.slots, block_size), blocks_for(later, block_size))

    def past_first(self, tokens: int) -> int:
        """So many tokens, or as many as lead it beyond its first eviction."""
        return tokens if self.first is None else max(tokens, self.first + 1)

    def dropped(self, computed: int) -> int:
        """Tokens that go at the first eviction, with so many computed."""
        return computed - self.policy.kept_after(computed, computed, self.prompt)


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
        if sequence.eviction is None or not sequence.eviction.granted or sequence.eviction.has_begun:
            raise InvalidField(f"moved_handles[{row}]", "must name a sequence that was told to move and has not")
        most = min(reported.get(handle, len(sequence.tokens)), sequence.most_computed)
        if not sequence.computed <= clean <= most:
            raise InvalidField(f"moved_computed_tokens[{row}]", f"must be from {sequence.computed} to {most}")
        if handle in request.trimmed_handles:
            raise InvalidField(f"trimmed_handles[{list(request.trimmed_handles).index(handle)}]", "must not also move")


def check_in_place(sequence: Sequence, field: str) -> None:
    """Raises SequenceEvictsError when its slots are not those of its leading tokens, or may be so any moment."""
    eviction = sequence.eviction
    if eviction is not None and (eviction.has_begun or (eviction.granted and not eviction.private)):
        text = f"sequence {sequence.sequence_id} has evicted tokens: it cannot be forked or cut"
        raise SequenceEvictsError(text, fields={field: "names one that has evicted tokens"})


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
        short = count - table.pool.device.free_for(sequence.scope.account, within_ceiling=False)
        if short > 0:
            return short
        eviction.private = [table.pool.allocate(sequence) for _ in range(count)]
    eviction.granted = True
    return 0


def _all_its_own(sequence: Sequence) -> bool:
    """Whether nobody else can find or read any of its blocks, now or later."""
    (table,) = sequence.tables
    return (
        sequence.no_store
        and not table.duplicate_refs
        and all(block is not None and block.refs == 1 and block.parent is None for block in table.blocks)
    )


def move(sequence: Sequence) -> None:
    """It has moved, and has computed what it had without evicting: that is settled, and stays for others.

    Nothing that it computes from now on is: it sees a part of what its key would say.
    """
    eviction, (table,) = sequence.eviction, sequence.tables
    assert eviction is not None
    # Before the last block is stored: who was promised all of it gets less.
    retract_pending(sequence)
    commit_last_block(sequence)
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
    """No byte of what it alone has may outlive its use."""
    for table in sequence.tables:
        # What another has yet to fill is that one's.
        table.pool.zero_on_free.update(
            block
            for block in table.references()
            if block.parent is None and (block.writer is None or block.writer is sequence)
        )
        table.pool.zero_on_free.update(sequence.private)


def cached_before_eviction(sequence: Sequence) -> Iterator[tuple[BlockPool, Block]]:
    """Of a sequence that has moved: what it computed before and is still cached, from the root on."""
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
