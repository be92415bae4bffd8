"""Turns a plan into the step message for the executor."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from protos.execution.v1 import execution_pb2 as pb
from scheduler.core.planner import StepPlan
from scheduler.request import Tier
from scheduler.sequence import Copy, Eviction, Sequence

_TIERS = {Tier.DEVICE: pb.STEP_TIER_DEVICE, Tier.HOST: pb.STEP_TIER_HOST, Tier.DISK: pb.STEP_TIER_DISK}


@dataclass(slots=True)
class InFlightStep:
    """A step that was sent but is not answered yet."""

    number: int
    # Sequences that compute one token and sample the next.
    decodes: list[Sequence] = field(default_factory=list)
    # The other computing sequences with their token counts and whether they sample.
    prefills: list[tuple[Sequence, int, bool]] = field(default_factory=list)
    # Decoding sequences that may have computed drafts, too, with the number of drafts of each.
    drafts: list[tuple[Sequence, int]] = field(default_factory=list)
    # Sequences that evict for the first time, with the tokens planned before this step.
    relocated: list[tuple[Sequence, int]] = field(default_factory=list)
    # Sequences whose adaptive window became shorter, with the tokens of the new window.
    shortened: list[tuple[Sequence, int]] = field(default_factory=list)
    copies: Seq[Copy] = ()

    @property
    def compute(self) -> list[tuple[Sequence, int, bool]]:
        """All computing sequences with their token counts, except drafts, and whether they sample."""
        return [*((sequence, 1, True) for sequence in self.decodes), *self.prefills]

    @property
    def num_tokens(self) -> int:
        """The largest possible number of tokens: drafts may be fewer."""
        return len(self.decodes) + sum(count for _, count, _ in self.prefills) + sum(count for _, count in self.drafts)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of prefill chunks, except chunks of a single token, which take as long as a decode."""
        return sum(count for _, count, _ in self.prefills if count > 1)


def build_step(
    number: int, plan: StepPlan, removed: list[int], copies: Seq[Copy] = (), *, awaits_copies: bool = False
) -> tuple[pb.Step, InFlightStep]:
    """Builds the message of a step; advances the planned lengths of its sequences.

    removed: handles. awaits_copies: whether the executor answers only once an onload has ended.
    """
    message = pb.Step(step=number, removed_sequences=removed, awaits_copies=awaits_copies)
    message.idle_sequences.extend(sequence.handle for sequence in plan.skipped)
    step = InFlightStep(number, plan.decodes, drafts=plan.drafts, copies=copies)
    if copies:
        _copy(message, copies)
    for sequence in plan.relocating:
        assert sequence.eviction is not None
        _relocate(message, sequence, sequence.eviction)
        step.relocated.append((sequence, sequence.planned))
    for sequence, count in plan.drafts:
        message.draft_sequences.append(sequence.handle)
        message.draft_tokens.append(count)
        _grow(message, sequence, sequence.planned + 1 + count)
        sequence.planned += count
        sequence.known += count
    for sequence in plan.resizing:
        assert sequence.eviction is not None
        _resize(message, step, sequence, sequence.eviction)
    for sequence in plan.looking:
        assert sequence.eviction is not None
        sequence.eviction.looking = True
        message.looking_sequences.append(sequence.handle)
    for sequence in plan.decodes:
        if sequence.planned >= sequence.sent_tokens:
            _grow(message, sequence, sequence.planned + 1)
        # Like `advance`, but inlined: this runs for every sequence in every step.
        sequence.planned += 1
        sequence.known += 1
        sequence.last_step = number
    for sequence, count in plan.prefills:
        if sequence.remaining > 1:
            message.chunk_sequences.append(sequence.handle)
            message.chunk_tokens.append(count)
        if sequence.started:
            _grow(message, sequence, sequence.planned + count)
        else:
            _join(message, sequence)
        step.prefills.append((sequence, count, sequence.advance(count, number)))
    return message, step


def _copy(message: pb.Step, copies: Seq[Copy]) -> None:
    for copy in copies:
        message.copy_tickets.append(copy.ticket)
        message.copy_groups.append(copy.group)
        message.copy_source_slots.append(copy.source_slot)
        message.copy_target_slots.append(copy.target_slot)
    if not all(copy.is_within_device for copy in copies):
        message.copy_source_tiers.extend(_TIERS[copy.source_tier] for copy in copies)
        message.copy_target_tiers.extend(_TIERS[copy.target_tier] for copy in copies)


def _relocate(message: pb.Step, sequence: Sequence, eviction: Eviction) -> None:
    assert eviction.private_blocks is not None
    eviction.relocating = False
    message.evicting_sequences.append(sequence.handle)
    message.evicting_counts.append(len(eviction.private_blocks))
    message.evicting_slots.extend(eviction.private_blocks)


def _resize(message: pb.Step, step: InFlightStep, sequence: Sequence, eviction: Eviction) -> None:
    eviction.window_unsent = False
    message.window_sequences.append(sequence.handle)
    message.window_tokens.append(eviction.policy.window)
    if eviction.window_unanswered:
        step.shortened.append((sequence, eviction.policy.window))


def _join(message: pb.Step, sequence: Sequence) -> None:
    sequence.started = True
    sequence.send(min(sequence.blocks_for(len(sequence.token_ids)), len(sequence.tables[0])))
    message.new_sequences.add(
        sequence=sequence.handle,
        token_ids=sequence.token_ids,
        num_prompt_tokens=len(sequence.request.prompt_ids),
        num_computed_tokens=sequence.planned,
        block_tables=[
            pb.StepBlockTable(group=group, slots=table[: sequence.sent_blocks])
            for group, table in enumerate(sequence.tables)
        ],
        sampling=sequence.request.sampling,
        traceparent=sequence.request.traceparent,
        continuation_token_ids=sequence.continuation,
        adapter_id=sequence.request.adapter_id,
        eviction_policy=None if sequence.eviction is None else sequence.eviction.message,
    )


def _grow(message: pb.Step, sequence: Sequence, tokens: int) -> None:
    """Sends only the table entries that the step needs, so that the other blocks can still be trimmed."""
    blocks = sequence.blocks_for(tokens)
    if blocks <= sequence.sent_blocks:
        return
    for group, table in enumerate(sequence.tables):
        slots = table[sequence.sent_blocks : blocks]
        message.table_sequences.append(sequence.handle)
        message.table_groups.append(group)
        message.table_counts.append(len(slots))
        message.table_slots.extend(slots)
    sequence.send(blocks)
