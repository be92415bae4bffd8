"""Token eviction in the step loop: what is planned is what an executor finds when it follows the same policy."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from protos.execution.v1 import execution_pb2 as pb
from protos.kvcommon.eviction import Layout, Policy, parse
from protos.kvcommon.eviction_message import message_of
from protos.kvcommon.v1 import kvcommon_pb2 as common
from scheduler.bridge import SyncAnswer
from scheduler.core.prefill_budget import PrefillBudget
from scheduler.core.step_message import InFlightStep, build_step
from scheduler.sequence import Eviction, Sequence
from tests.support.scheduler.sequences import BLOCK, Pipeline, batch_of, depths, updates
from tests.support.scheduler.sequences import sequence as make_sequence

LAYOUT = Layout(BLOCK, (None,), plain_rotary=True)
HANDLE = 7

POLICIES: list[dict[str, Any]] = [
    {"kind": "EVICTION_KIND_SLIDING_WINDOW", "start_tokens": 2, "recent_tokens": 9},
    {"kind": "EVICTION_KIND_SLIDING_WINDOW", "recent_tokens": 9, "period_tokens": 5, "during_prefill": True},
    {"kind": "EVICTION_KIND_SUM", "start_tokens": 4, "recent_tokens": 4, "max_cache_tokens": 16},
    {"kind": "EVICTION_KIND_AVERAGE", "max_cache_tokens": 16, "period_tokens": 6, "during_prefill": True},
    {"kind": "EVICTION_KIND_KEYDIFF", "start_tokens": 1, "recent_tokens": 2, "max_cache_tokens": 9, "period_tokens": 3},
    {"kind": "EVICTION_KIND_SNAPKV", "max_cache_tokens": 12, "score_window_tokens": 4},
    {"kind": "EVICTION_KIND_LAST", "max_cache_tokens": 9},
]


def policy(fields: dict[str, Any]) -> Policy:
    parsed = parse(common.EvictionPolicy(**fields), LAYOUT)
    assert parsed is not None
    return parsed


def evicting(chosen: Policy, prompt: int, output: int, **fields: Any) -> Sequence:
    """A sequence with a policy."""
    return make_sequence(
        HANDLE, prompt, max_tokens=output, eviction=Eviction(chosen, message_of(chosen), prompt), **fields
    )


@dataclass
class Executor:
    """One sequence as an executor keeps it: by the messages and the policy, and nothing else."""

    policy: Policy
    prompt: int
    table: list[int] = field(default_factory=list)
    computed: int = 0
    kept: int = 0
    evicts: bool = False
    most: int = 0
    evictions: list[int] = field(default_factory=list)

    def run(self, message: pb.Step, count: int) -> pb.StepResult:
        for joining in message.new_sequences:
            self.table = list(joining.block_tables[0].slots)
        self.table += message.table_slots
        if message.evicting_sequences:
            assert not self.evicts
            self.evicts = True
            if message.evicting_slots:
                self.table = list(message.evicting_slots)
            elif self.policy.most_kept is not None:
                del self.table[-(-self.policy.most_kept // BLOCK) :]
        result = pb.StepResult(step=message.step)
        if count and self.evicts:
            left = self.policy.kept_after(self.kept, self.computed, self.prompt)
            if left < self.kept:
                self.evictions.append(self.kept - left)
                result.evicted_sequences.append(HANDLE)
                result.evicted_tokens.append(self.kept - left)
                result.kept_masses.append(0.5)
            self.kept = left
        elif count:
            assert self.policy.kept_after(self.kept, self.computed, self.prompt) == self.kept
        self.kept += count
        self.computed += count
        self.most = max(self.most, self.kept)
        assert self.kept <= len(self.table) * BLOCK
        return result


@given(
    fields=st.sampled_from(POLICIES),
    prompt=st.integers(1, 60),
    output=st.integers(1, 60),
    budget=st.integers(1, 30),
    delay=st.integers(0, 5),
    stays=st.booleans(),
    ahead=st.integers(0, 12),
    before=st.integers(0, 40),
    depth=depths,
)
def test_an_executor_that_follows_the_policy_has_slots_for_every_planned_token(
    fields: dict[str, Any],
    prompt: int,
    output: int,
    budget: int,
    delay: int,
    stays: bool,
    ahead: int,
    before: int,
    depth: int,
) -> None:
    chosen = policy(fields)
    # What an earlier attempt generated is computed again, and evicts as it did.
    known = prompt + min(before, output - 1)
    most = chosen.first_eviction(prompt) or prompt + output
    first = -(-min(most, known) // BLOCK)
    sequence = evicting(chosen, prompt, output, blocks=first, generated=known - prompt)
    batch, executor = batch_of(sequence), Executor(chosen, prompt)
    flights: list[tuple[InFlightStep, pb.StepResult]] = []
    asked_at = reported_at = moved = None
    given_own, moves, number, evicted, most_kept = False, 0, 0, 0, 0
    for turn in range(1000):
        plan = batch.plan(budget)
        if plan.compute:
            number += 1
            message, flight = build_step(number, plan, batch.removed)
            batch.removed = []
            count = sum(tokens for _, tokens in plan.compute)
            result = executor.run(message, count)
            assert executor.kept == sequence.planned - sequence.evicted
            moves += len(message.evicting_sequences)
            flights.append((flight, result))
        if len(flights) == depth or (flights and not plan.compute):
            flight, result = flights.pop(0)
            samples = [item.handle for item, _, sampled in flight.compute if sampled and not item.stopped]
            result.sequences.extend(samples)
            result.token_ids.extend([1] * len(samples))
            result.stopped.extend([False] * len(samples))
            batch.apply_result(flight, result)
        tokens, update = updates(batch)
        evicted += sum(tokens for _, tokens, _ in tokens.evicted)
        most_kept = tokens.most_kept.get(HANDLE, most_kept)
        if update.evicting and asked_at is None:
            assert update.evicting == {HANDLE: True}
            asked_at = turn
        if update.relocated:
            assert moved is None
            moved, reported_at = update.relocated[HANDLE], turn
        own = []
        if asked_at is not None and turn >= asked_at + delay and not given_own:
            given_own = True
            room = chosen.most_kept or chosen.maximum + 1 + ahead
            own = [(HANDLE, [] if stays else list(range(501, 501 + -(-room // BLOCK))), 0)]
        # As much as the manager gives, and before it has heard of the move, to the table that it knows.
        needed = executor.kept + 2 + ahead
        if reported_at is None:
            needed = min(needed, most)
        elif chosen.most_kept is not None:
            needed = min(needed, chosen.most_kept)
        have = len(sequence.tables[0])
        more = list(range(900 + have, 900 + max(have, -(-needed // BLOCK))))
        extensions = [(HANDLE, 0, more)] if more and not (sequence.eviction.has_evicted and reported_at is None) else []
        batch.apply(SyncAnswer(extensions, (), 0, (), (), (HANDLE,) if reported_at == turn else (), own))
        if not len(batch):
            break
    assert not len(batch)
    assert len(sequence.token_ids) == prompt + output
    assert executor.computed == prompt + output - 1
    assert moves == (1 if executor.evictions else 0)
    assert evicted == sum(executor.evictions)
    assert most_kept == executor.most
    if executor.evictions:
        assert moved is not None
        assert moved <= executor.computed
    if chosen.during_prefill:
        assert chosen.most_kept is not None
        assert executor.most <= chosen.most_kept


def test_the_score_window_is_computed_in_one_step() -> None:
    chosen = policy({"kind": "EVICTION_KIND_SNAPKV", "max_cache_tokens": 12, "score_window_tokens": 4})
    batch = batch_of(evicting(chosen, 20, 5, blocks=7), make_sequence(HANDLE + 1, 20, blocks=7))
    counts = []
    for step in range(1, 4):
        plan = batch.plan(18)
        counts.append([(sequence.handle - HANDLE, count) for sequence, count in plan.compute])
        build_step(step, plan, [])
    # Of 18 tokens the first takes the 16 before the window, the second what is left; then the window at once.
    assert counts == [[(0, 16), (1, 2)], [(0, 4), (1, 14)], [(1, 4)]]


def test_a_slow_prefill_does_not_split_the_score_window() -> None:
    budget = PrefillBudget(target_seconds=1e-9)
    budget.observe(1, 0, 0.01)
    budget.observe(1, 10, 0.1)
    chosen = policy({"kind": "EVICTION_KIND_SNAPKV", "max_cache_tokens": 16, "score_window_tokens": 8})
    decoding = make_sequence(HANDLE + 1, 4, max_tokens=100, blocks=30)
    batch = batch_of(decoding)
    _, flight = build_step(1, batch.plan(64, budget), [])
    batch.apply_result(
        flight, pb.StepResult(step=1, sequences=[HANDLE + 1], token_ids=[1], stopped=[False], num_tokens=4), 0.0
    )
    batch.admit(evicting(chosen, 20, 5, blocks=7))
    counts = []
    for step in range(2, 12):
        plan = batch.plan(64, budget)
        counts += [count for sequence, count in plan.prefills if sequence.handle == HANDLE]
        build_step(step, plan, [])
    # As few tokens as possible at a time, and then all 8 of the window.
    assert counts[:5] == [3, 3, 3, 3, 8]


def test_a_sequence_that_waits_for_private_blocks_skips_steps() -> None:
    sequence = evicting(policy(POLICIES[0]), 20, 5, blocks=7)
    batch = batch_of(sequence)
    plan = batch.plan(100)
    _, flight = build_step(1, plan, [])
    assert updates(batch)[1].evicting == {}
    batch.apply_result(flight, pb.StepResult(step=1, sequences=[HANDLE], token_ids=[1], stopped=[False]))
    assert batch.plan(100).compute == []
    assert updates(batch)[1].evicting == {HANDLE: True}
    assert batch.plan(100).out_of_blocks == [sequence]
    assert updates(batch)[1].evicting == {HANDLE: False}
    batch.apply(SyncAnswer((), (), 0, (), (), (), [(HANDLE, [11, 12, 13], 0)]))
    message, flight = build_step(2, batch.plan(100), [])
    assert list(message.evicting_sequences) == [HANDLE]
    assert list(message.evicting_slots) == [11, 12, 13]
    result = pb.StepResult(step=2, sequences=[HANDLE], token_ids=[1], stopped=[False])
    result.evicted_sequences.append(HANDLE)
    result.evicted_tokens.append(9)
    result.kept_masses.append(-1)
    batch.apply_result(flight, result)
    tokens, update = updates(batch)
    assert update.relocated == {HANDLE: 20}
    assert tokens.evicted == [(HANDLE, 9, -1)]


@given(st.sampled_from(POLICIES), st.integers(1, 20), depths)
def test_a_sequence_that_stops_before_its_first_eviction_has_not_moved(
    fields: dict[str, Any], stop_at: int, depth: int
) -> None:
    sequence = evicting(policy(fields), 5, 40, blocks=19)
    batch = batch_of(sequence)
    pipeline, sampled = Pipeline(batch, depth), 0
    while len(batch):
        if flight := pipeline.turn(batch.plan(100)):
            result = pb.StepResult(step=flight.number)
            if not sequence.stopped:
                sampled += 1
                result.sequences.append(HANDLE)
                result.token_ids.append(1)
                result.stopped.append(sampled == stop_at)
            batch.apply_result(flight, result)
        update = updates(batch)[1]
        assert update.relocated.get(HANDLE, 0) <= sequence.computed
        own = [(HANDLE, list(range(501, 520)), 0)] if update.evicting else []
        batch.apply(SyncAnswer((), (), 0, (), (), list(update.relocated), own))
    assert sampled == stop_at
