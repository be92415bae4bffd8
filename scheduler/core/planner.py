"""Decides what a step computes and which sequences give blocks back. No I/O, no clock; changes no sequence."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from scheduler.core.prefill_budget import PrefillBudget
from scheduler.sequence import Sequence

# Most tokens of a scored prompt in one step: each token has separate logits.
SCORED_CHUNK = 128


@dataclass(slots=True)
class StepPlan:
    """One step."""

    # Sequences that compute one token and sample the next; the step's message does not name them.
    decodes: list[Sequence] = field(default_factory=list)
    # The other computing sequences, with their token counts; sequences that join are among them.
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    # Running sequences that must not decode: the step's message names them as idle.
    skipped: list[Sequence] = field(default_factory=list)
    # Sequences without capacity for one more token.
    out_of_blocks: list[Sequence] = field(default_factory=list)
    # Whether a decoding sequence will soon be out of blocks.
    needs_blocks_soon: bool = False
    # Computing sequences that move to their private blocks.
    relocating: list[Sequence] = field(default_factory=list)
    # Decoding sequences that may compute drafted tokens, too, with the most drafted tokens of each.
    drafts: list[tuple[Sequence, int]] = field(default_factory=list)
    # Computing sequences whose adaptive window has a new length, and those whose attention is to determine the length.
    resizing: list[Sequence] = field(default_factory=list)
    looking: list[Sequence] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.prefills

    @property
    def compute(self) -> list[tuple[Sequence, int]]:
        """All sequences that compute, with their token counts except drafts."""
        return [*((sequence, 1) for sequence in self.decodes), *self.prefills]

    @property
    def num_tokens(self) -> int:
        """The largest possible number of tokens: drafts may be fewer."""
        return len(self.decodes) + sum(count for _, count in (*self.prefills, *self.drafts))


def plan_step(
    sequences: Seq[Sequence], max_tokens: int, budget: PrefillBudget | None = None, max_prefills: int | None = None
) -> StepPlan:
    """Plans one step of at most `max_tokens` tokens over sequences in order of rank; ignores those that leave.

    Decodes come first, then chunks of at most `max_prefills` prefills in the given order, within the `budget`. A step
    drafts only while no prompt is to be computed, because drafts would hide from the budget what prompts cost. A
    sequence waiting for another's blocks starts once the other's planned tokens, including this step's, cover them. A
    sequence with onloads starts once all have ended.
    """
    plan = StepPlan()
    prefilling: list[Sequence] = []
    drafting: list[Sequence] = []
    for sequence in sequences:
        if sequence.leave_reason is not None:
            continue
        if sequence.known >= sequence.limit:
            # Its last token is in flight: if the message did not name the sequence, it would sample one more token.
            plan.skipped.append(sequence)
        elif not sequence.started or sequence.known - sequence.planned > 1:
            if not sequence.pending_onloads:
                prefilling.append(sequence)
        elif len(plan.decodes) < max_tokens and sequence.planned < sequence.capacity:
            plan.decodes.append(sequence)
            plan.needs_blocks_soon |= sequence.planned + sequence.drafts > sequence.low_capacity_at
            if sequence.drafts:
                drafting.append(sequence)
        else:
            plan.skipped.append(sequence)
            if sequence.planned >= sequence.capacity:
                plan.out_of_blocks.append(sequence)
    if prefilling:
        _Prefills(plan, sequences, max_tokens, budget).add(prefilling, max_prefills or len(prefilling))
        return plan
    left = max_tokens - plan.num_tokens
    for sequence in drafting:
        if (count := min(sequence.most_drafts, left)) > 0:
            plan.drafts.append((sequence, count))
            left -= count
    return plan


class _Prefills:
    """Adds prefills to a plan that already has its decodes."""

    def __init__(self, plan: StepPlan, sequences: Seq[Sequence], max_tokens: int, budget: PrefillBudget | None) -> None:
        self._plan = plan
        self._budget = budget
        self._left = max_tokens - len(plan.decodes)
        if budget is not None:
            self._left = budget.within_longest_step(len(plan.decodes), self._left)
        # Planned tokens by handle, including this step's.
        self._planned = {s.handle: 0 if s.pending_onloads else s.planned for s in sequences}
        for sequence in plan.decodes:
            self._planned[sequence.handle] += 1

    def add(self, prefilling: list[Sequence], most: int) -> None:
        """Adds at most `most` of these sequences."""
        bounded = self._bounded(prefilling)
        bound = self._bound(bounded)
        handles = {sequence.handle for sequence in bounded}
        blocked, progress = prefilling, True
        while blocked and progress:
            progress, later = False, []
            for sequence in blocked:
                if not sequence.started and self._waits_for_writer(sequence):
                    later.append(sequence)
                    continue
                is_bounded = sequence.handle in handles
                count = self._grant(sequence, min(self._left, bound) if is_bounded else self._left, most)
                bound -= count * is_bounded
                progress |= count > 0
            blocked = later

    def _waits_for_writer(self, sequence: Sequence) -> bool:
        return self._planned.get(sequence.wait_for, sequence.cached_tokens) < sequence.cached_tokens

    def _grant(self, sequence: Sequence, tokens: int, most: int) -> int:
        """Plans a chunk of at most `tokens` tokens; returns its length."""
        free = sequence.capacity - sequence.planned
        if free < 1:
            self._plan.out_of_blocks.append(sequence)
            return 0
        count = min(sequence.remaining, free, tokens)
        if count < 1 or len(self._plan.prefills) >= most:
            return 0
        count = sequence.align_to_score_window(count, min(free, self._left))
        if sequence.request.sampling.HasField("num_prompt_logprobs"):
            count = min(count, SCORED_CHUNK)
        self._plan.prefills.append((sequence, count))
        self._planned[sequence.handle] += count
        self._left -= count
        return count

    def _bounded(self, prefilling: Seq[Sequence]) -> list[Sequence]:
        """Returns the prefills that must not delay decodes: those that arrived after a decoding sequence's first token.

        With a target latency, all prefills.
        """
        if self._budget is None or not self._plan.decodes:
            return []
        first = min(sequence.first_token_at for sequence in self._plan.decodes)
        return [s for s in prefilling if self._budget.has_target or s.request.arrived_at > first]

    def _bound(self, bounded: Seq[Sequence]) -> int:
        """Returns the tokens that the budget allows these sequences together, beside the plan's decodes."""
        if self._budget is None or not bounded:
            return self._left
        arrived = min(sequence.request.arrived_at for sequence in bounded)
        older = sum(sequence.first_token_at < arrived for sequence in self._plan.decodes)
        bound = self._budget.max_prefill_tokens(len(self._plan.decodes), older, len(bounded))
        return self._left if bound is None else bound


def trimmable(sequences: Seq[Sequence], out_of_blocks: Seq[Sequence]) -> list[Sequence]:
    """Sequences with blocks that neither they nor the executor need yet."""
    handles = {sequence.handle for sequence in out_of_blocks}
    return [
        sequence
        for sequence in sequences
        if sequence.leave_reason is None
        and sequence.handle not in handles
        and not (sequence.eviction and sequence.eviction.has_evicted)
        and min(len(table) for table in sequence.tables) > sequence.first_spare_block()
    ]


def choose_victim(sequences: Seq[Sequence]) -> Sequence | None:
    """Returns the sequence to preempt: of the live sequences in order of rank, the last not started, or else the last.

    The first live sequence is never chosen, so that it always finishes: None if there is no other.
    """
    candidates = [sequence for sequence in sequences if sequence.leave_reason is None][1:]
    waiting = [sequence for sequence in candidates if not sequence.started]
    chosen = waiting or candidates
    return chosen[-1] if chosen else None
