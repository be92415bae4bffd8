"""Decides whether a step can be applied, before anything changes."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

from executor.batch import SequenceState
from executor.core.state import SequenceTable
from executor.errors import CapacityExceededError, InvalidStepError, StepOutOfOrderError, UnknownSequenceError
from executor.step import MAX_SEQUENCES, Copy, NewSequence, Step, Tier
from protos.kvcommon.eviction import Policy


@dataclass(frozen=True)
class Limits:
    """Bounds of the model and the pools. num_blocks: slots per layer group on the device. windows: attention window per
    layer group in tokens, None for full attention. lower_slots: slots per layer group of each existing lower tier.
    adapters: ids of the adapters that are loaded at the moment.
    """

    vocab_size: int
    max_positions: int
    num_blocks: tuple[int, ...]
    block_size: int
    windows: tuple[int | None, ...]
    lower_slots: Mapping[Tier, int] = field(default_factory=dict)
    adapters: Container[int] = ()


@dataclass
class _Changed:
    """A running sequence as it will be after a step's diff. blocks: length of its block table per layer group.

    The other fields are those of SequenceState.
    """

    computed: int
    known: int
    blocks: list[int]
    kept: int
    num_prompt: int
    policy: Policy | None = None
    evicts: bool = False
    stopped: bool = False

    @property
    def table_blocks(self) -> int:
        return min(self.blocks)

    @classmethod
    def of(cls, sequence: SequenceState) -> "_Changed":
        """Returns a copy that may change."""
        return cls(
            computed=sequence.computed,
            known=sequence.known,
            blocks=[len(table) for table in sequence.tables],
            kept=sequence.kept,
            num_prompt=sequence.num_prompt,
            policy=sequence.policy,
            evicts=sequence.evicts,
            stopped=sequence.stopped,
        )


# All sequences after a step's diff. Most are as they were: copies of hundreds would take as long as the step's checks.
_Future = dict[int, SequenceState | _Changed]


def _changing(future: _Future, handle: int) -> _Changed:
    found = future[handle]
    if isinstance(found, SequenceState):
        found = future[handle] = _Changed.of(found)
    return found


def _slots(sequence: SequenceState | _Changed) -> int:
    """Returns the slots in use when a sequence computes more."""
    if sequence.policy is None or not sequence.evicts:
        return sequence.kept
    return sequence.policy.kept_after(sequence.kept, sequence.computed, sequence.num_prompt)


def check_step(step: Step, last_step: int, sequences: SequenceTable, limits: Limits) -> dict[int, int]:
    """Checks a step; returns how many known tokens of each sequence it computes: a chunk, or the last token left.

    Raises an ExecutorError that names the field and the sequence at fault; changes nothing.
    """
    if step.number != last_step + 1:
        raise StepOutOfOrderError(
            f"step {step.number} after step {last_step}", fields={"step": f"must be {last_step + 1}"}
        )
    future: _Future = {sequence.handle: sequence for sequence in sequences}
    for handle in step.removed:
        if future.pop(handle, None) is None:
            raise _unknown("removed_sequences", handle)
    for new in step.new_sequences:
        if new.sequence in future:
            raise invalid("new_sequences.sequence", new.sequence, "is already in the running set")
        if len(future) == MAX_SEQUENCES:
            said = f"would be one sequence too many: {MAX_SEQUENCES} are in the running set"
            raise invalid("new_sequences.sequence", new.sequence, said)
        _check_new(new, limits)
        future[new.sequence] = _Changed(
            computed=new.num_computed_tokens,
            known=len(new.token_ids),
            blocks=[len(table) for table in new.tables],
            kept=new.num_computed_tokens,
            num_prompt=new.num_prompt_tokens,
            policy=new.policy,
        )
    _check_tables(step, future, limits)
    _check_windows(step, future)
    _check_evicting(step, future, limits)
    check_copies(step.copies, limits)
    return _check_work(step, future, limits)


def _check_new(new: NewSequence, limits: Limits) -> None:
    handle, known = new.sequence, len(new.token_ids)
    if not known:
        raise invalid("new_sequences.token_ids", handle, "must not be empty")
    compacted = new.policy is not None and new.policy.compacted
    if known > limits.max_positions and not compacted:
        raise invalid("new_sequences.token_ids", handle, f"are {known}, the model takes {limits.max_positions}")
    if max(new.token_ids) >= limits.vocab_size:
        raise invalid("new_sequences.token_ids", handle, f"must be below {limits.vocab_size}")
    if max(new.continuation, default=0) >= limits.vocab_size:
        raise invalid("new_sequences.continuation_token_ids", handle, f"must be below {limits.vocab_size}")
    if new.num_computed_tokens >= known:
        raise invalid("new_sequences.num_computed_tokens", handle, f"must be below the {known} tokens known")
    if not 1 <= new.num_prompt_tokens <= known:
        raise invalid("new_sequences.num_prompt_tokens", handle, f"must be from 1 to the {known} tokens known")
    if new.adapter_id is not None and new.adapter_id not in limits.adapters:
        raise invalid("new_sequences.adapter_id", handle, "names no loaded adapter")
    if len(new.tables) != len(limits.windows):
        raise invalid("new_sequences.block_tables", handle, f"must be {len(limits.windows)}, one per layer group")
    _check_sampling(new, limits)
    for slots, window, num_blocks in zip(new.tables, limits.windows, limits.num_blocks, strict=True):
        # No token that is yet to be computed attends to blocks before `needed`.
        needed = 0 if window is None else max(0, new.num_computed_tokens - window + 1) // limits.block_size
        _check_slots("new_sequences.block_tables.slots", handle, slots, num_blocks, null_until=needed)
        if len(slots) * limits.block_size < new.num_computed_tokens:
            raise invalid("new_sequences.block_tables.slots", handle, "do not cover the computed tokens")


def _check_sampling(new: NewSequence, limits: Limits) -> None:
    handle = new.sequence
    sampling = new.sampling
    named = chain(sampling.logit_bias, sampling.allowed_token_ids, *sampling.bad_token_ids)
    if max(named, default=0) >= limits.vocab_size:
        raise invalid("new_sequences.sampling", handle, f"must name ids below {limits.vocab_size}")
    if sampling.num_prompt_logprobs is not None and new.num_computed_tokens:
        raise invalid("new_sequences.num_computed_tokens", handle, "must be 0 with num_prompt_logprobs")


def _check_tables(step: Step, future: _Future, limits: Limits) -> None:
    for update in step.table_updates:
        if update.sequence not in future:
            raise _unknown("table_sequences", update.sequence)
        if update.group >= len(limits.windows):
            raise invalid("table_groups", update.sequence, f"must be below {len(limits.windows)}")
        _check_slots("table_slots", update.sequence, update.slots, limits.num_blocks[update.group])
        _changing(future, update.sequence).blocks[update.group] += len(update.slots)


def _check_windows(step: Step, future: _Future) -> None:
    for handle, tokens in step.windows.items():
        sequence = future.get(handle)
        if sequence is None:
            raise _unknown("window_sequences", handle)
        if sequence.policy is None or sequence.policy.bounds is None:
            raise invalid("window_sequences", handle, "must have an adaptive window")
        if not sequence.evicts and handle not in step.evicting:
            raise invalid("window_sequences", handle, "must have begun to evict")
        if not sequence.policy.allows_window(tokens):
            raise invalid("window_tokens", handle, "must be a multiple of period_tokens within the policy's bounds")
        _changing(future, handle).policy = sequence.policy.with_window(tokens)
    for handle in step.looking:
        if handle not in future:
            raise _unknown("looking_sequences", handle)
        policy = future[handle].policy
        if policy is None or policy.bounds is None:
            raise invalid("looking_sequences", handle, "must have an adaptive window")


def _check_evicting(step: Step, future: _Future, limits: Limits) -> None:
    for handle, table in step.evicting.items():
        sequence = future.get(handle)
        if sequence is None:
            raise _unknown("evicting_sequences", handle)
        if sequence.policy is None or sequence.evicts:
            raise invalid("evicting_sequences", handle, "must have a policy and not evict by it yet")
        # Models with policies have one layer group.
        _check_slots("evicting_slots", handle, table, limits.num_blocks[0])
        changed = _changing(future, handle)
        changed.evicts = True
        if table:
            changed.blocks = [len(table)]
            if (slots := _slots(changed)) > len(table) * limits.block_size:
                raise invalid("evicting_slots", handle, f"do not hold the {slots} tokens that stay")


def _check_slots(field: str, handle: int, slots: tuple[int, ...], num_blocks: int, null_until: int = 0) -> None:
    for index, slot in enumerate(slots):
        if slot > num_blocks or (slot == 0 and index >= null_until):
            raise invalid(field, handle, f"must be from 1 to {num_blocks}, entry {index} is {slot}")


def check_copies(copies: Iterable[Copy], limits: Limits, *, zeros: bool = False) -> None:
    """Raises InvalidStepError if a source or target does not exist. zeros: whether source 0 is allowed."""
    for copy in copies:
        if copy.group >= len(limits.windows):
            raise _invalid_copy(copy, "copy_groups", f"must be below {len(limits.windows)}")
        for end, tier, slot in (
            ("source", copy.source_tier, copy.source),
            ("target", copy.target_tier, copy.target),
        ):
            slots = limits.num_blocks[copy.group] if tier is Tier.DEVICE else limits.lower_slots.get(tier)
            if slots is None:
                raise _invalid_copy(copy, f"copy_{end}_tiers", f"names {tier.name}, which is not here")
            if not 1 <= slot <= slots and not (zeros and end == "source" and not slot):
                raise _invalid_copy(copy, f"copy_{end}_slots", f"must be from 1 to {slots}, is {slot}")
        if not copy.within_device and (copy.source_tier, copy.source) == (copy.target_tier, copy.target):
            raise _invalid_copy(copy, "copy_target_slots", "must not be the source")


def _invalid_copy(copy: Copy, field: str, description: str) -> InvalidStepError:
    return InvalidStepError(f"copy {copy.ticket}: {field} {description}", fields={field: description})


def _check_work(step: Step, future: _Future, limits: Limits) -> dict[int, int]:
    for handle in step.idle:
        if handle not in future:
            raise _unknown("idle_sequences", handle)
    for handle, count in step.chunks.items():
        if handle not in future:
            raise _unknown("chunk_sequences", handle)
        if handle in step.idle:
            raise invalid("idle_sequences", handle, "names a sequence with a chunk")
        left = future[handle].known - future[handle].computed
        if not 1 <= count <= left:
            raise invalid("chunk_tokens", handle, f"must be from 1 to the {left} tokens not computed, is {count}")
    _check_drafts(step, future)
    due = {}
    for handle, sequence in future.items():
        if sequence.stopped:
            continue
        count = step.chunks.get(handle, 1 if sequence.known - sequence.computed == 1 else 0)
        if count and handle not in step.idle:
            due[handle] = count
            _check_capacity(handle, sequence, count, step.drafts.get(handle, 0), limits)
        else:
            _check_named(step, handle)
    return due


def _check_capacity(handle: int, sequence: SequenceState | _Changed, count: int, drafts: int, limits: Limits) -> None:
    """Raises CapacityExceededError if a sequence has no room for `count` tokens and the drafted tokens."""
    end, room = _slots(sequence) + count + drafts, sequence.table_blocks * limits.block_size
    if end > room:
        raise CapacityExceededError(
            f"sequence {handle} would use {end} slots, its tables hold {room}",
            fields={"table_slots": "have no slots for the step's tokens"},
            metadata={"sequence": str(handle)},
        )
    if sequence.policy is None or not sequence.policy.compacted:
        end = sequence.computed + count + drafts
    if end > limits.max_positions:
        possible = limits.max_positions - end + drafts
        if possible < 0:
            fields = {"idle_sequences": "must name a sequence that has reached the model's greatest length"}
        else:
            fields = {"draft_tokens": f"must be at most {possible}: the model takes no more tokens"}
        raise CapacityExceededError(
            f"sequence {handle} would compute {end} tokens, the model takes {limits.max_positions}",
            fields=fields,
            metadata={"sequence": str(handle)},
        )


def _check_drafts(step: Step, future: _Future) -> None:
    for handle, count in step.drafts.items():
        sequence = future.get(handle)
        if sequence is None:
            raise _unknown("draft_sequences", handle)
        decodes = sequence.known - sequence.computed == 1 and handle not in step.idle and handle not in step.chunks
        if not decodes or sequence.policy is not None:
            raise invalid("draft_sequences", handle, "must decode in this step and have no eviction policy")
        if not count:
            raise invalid("draft_tokens", handle, "must be at least 1")


def _check_named(step: Step, handle: int) -> None:
    """Raises if the step names a sequence that does not compute in this step."""
    for column, named in (
        ("evicting_sequences", step.evicting),
        ("window_sequences", step.windows),
        ("looking_sequences", step.looking),
    ):
        if handle in named:
            raise invalid(column, handle, "must compute in this step")


def invalid(field: str, handle: int, description: str) -> InvalidStepError:
    """Returns an error that names the field and the sequence at fault."""
    return InvalidStepError(
        f"sequence {handle}: {field} {description}", fields={field: description}, metadata={"sequence": str(handle)}
    )


def _unknown(field: str, handle: int) -> UnknownSequenceError:
    return UnknownSequenceError(
        f"sequence {handle} in {field} is not in the running set",
        fields={field: "names a sequence that is not in the running set"},
        metadata={"sequence": str(handle)},
    )
