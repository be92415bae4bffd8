"""Decides what a step computes and who makes room. Pure: no I/O, no clock, nothing is changed."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from scheduler.core.prefill_budget import Pace
from scheduler.sequence import Sequence


@dataclass(slots=True)
class Plan:
    """One step."""

    # Sequences that compute one token and sample the next, as they do by silence.
    decoding: list[Sequence] = field(default_factory=list)
    # The others that compute, with their token counts; joining ones are among them.
    prompts: list[tuple[Sequence, int]] = field(default_factory=list)
    # Running sequences that would decode by silence and must not.
    idle: list[Sequence] = field(default_factory=list)
    # Sequences that have no room for a single token more.
    stalled: list[Sequence] = field(default_factory=list)
    # Whether a decoding sequence needs more room soon.
    tight: bool = False

    @property
    def compute(self) -> list[tuple[Sequence, int]]:
        """All sequences that compute, with their token counts."""
        return [*((sequence, 1) for sequence in self.decoding), *self.prompts]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decoding) + sum(count for _, count in self.prompts)


def plan_step(sequences: Seq[Sequence], budget: int, pace: Pace | None = None, most_prompts: int | None = None) -> Plan:
    """Plans one step of at most `budget` tokens over live sequences, given in order of rank.

    Decoding sequences first, then known tokens in chunks, each in the given order; `pace` bounds these. A sequence
    that waits for another one's blocks starts once the planned tokens of that one, this step's included, reach them;
    one whose own blocks come from a lower tier, once all are there.
    """
    plan = Plan()
    computing: list[Sequence] = []
    for sequence in sequences:
        if sequence.exit is not None:
            continue
        if sequence.known >= sequence.limit:
            # Its last token is on its way; silence would make another one.
            plan.idle.append(sequence)
        elif not sequence.started or sequence.known - sequence.planned > 1:
            if not sequence.arriving:
                computing.append(sequence)
        elif len(plan.decoding) < budget and sequence.planned < sequence.capacity:
            plan.decoding.append(sequence)
            plan.tight |= sequence.planned > sequence.tight_at
        else:
            plan.idle.append(sequence)
            if sequence.planned >= sequence.capacity:
                plan.stalled.append(sequence)
    if computing:
        paced = _paced(plan, computing, pace)
        left = budget - len(plan.decoding)
        if pace is not None:
            left = pace.bounded(len(plan.decoding), left)
        bound = _bound(plan, paced, pace, budget)
        _add_prompts(plan, sequences, computing, left, paced, bound, most_prompts or len(computing))
    return plan


def _add_prompts(
    plan: Plan,
    sequences: Seq[Sequence],
    computing: list[Sequence],
    budget: int,
    paced: Seq[Sequence],
    bound: int,
    most: int,
) -> None:
    """Adds `most` prompts of at most `budget` tokens, of which `paced` ones have at most `bound`."""
    paced_handles = {sequence.handle for sequence in paced}
    planned = {sequence.handle: 0 if sequence.arriving else sequence.planned for sequence in sequences}
    for sequence in plan.decoding:
        planned[sequence.handle] += 1

    def grant(sequence: Sequence) -> bool:
        nonlocal budget, bound
        is_paced = sequence.handle in paced_handles
        room = sequence.capacity - sequence.planned
        if room < 1:
            plan.stalled.append(sequence)
            return False
        count = min(sequence.remaining, room, budget, bound if is_paced else budget)
        if count < 1 or len(plan.prompts) >= most:
            return False
        count = sequence.whole_window(count)
        plan.prompts.append((sequence, count))
        planned[sequence.handle] += count
        budget -= count
        bound -= count * is_paced
        return True

    blocked = computing
    progress = True
    while blocked and progress:
        progress, later = False, []
        for sequence in blocked:
            if not sequence.started and planned.get(sequence.wait_for, sequence.cached_tokens) < sequence.cached_tokens:
                later.append(sequence)
            else:
                progress |= grant(sequence)
        blocked = later


def _paced(plan: Plan, computing: Seq[Sequence], pace: Pace | None) -> list[Sequence]:
    """Of those with a prompt, who came to streams that were there: all others owe nobody anything."""
    if pace is None or not plan.decoding:
        return []
    first = min(sequence.streams_since for sequence in plan.decoding)
    return [sequence for sequence in computing if pace.has_target or sequence.request.arrived_at > first]


def _bound(plan: Plan, paced: Seq[Sequence], pace: Pace | None, budget: int) -> int:
    """Tokens that the pace allows those together, beside those who decode in the plan."""
    if pace is None or not paced:
        return budget
    arrived = min(sequence.request.arrived_at for sequence in paced)
    older = sum(sequence.streams_since < arrived for sequence in plan.decoding)
    bound = pace.tokens(len(plan.decoding), older, len(paced))
    return budget if bound is None else bound


def trimmable(sequences: Seq[Sequence], stalled: Seq[Sequence]) -> list[Sequence]:
    """Sequences that hold blocks which neither they nor the executor need yet."""
    handles = {sequence.handle for sequence in stalled}
    return [
        sequence
        for sequence in sequences
        if sequence.exit is None
        and sequence.handle not in handles
        and not (sequence.eviction and sequence.eviction.evicts)
        and min(len(table) for table in sequence.tables) > sequence.spare_blocks_from()
    ]


def choose_victim(sequences: Seq[Sequence]) -> Sequence | None:
    """Whom to preempt, given all live sequences in order of rank: not started ones first, then the last in rank.

    The first in rank is never chosen, so that it always comes to its end.
    """
    candidates = [sequence for sequence in sequences if sequence.exit is None][1:]
    waiting = [sequence for sequence in candidates if not sequence.started]
    chosen = waiting or candidates
    return chosen[-1] if chosen else None
