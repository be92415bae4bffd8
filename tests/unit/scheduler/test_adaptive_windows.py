"""Adaptive windows between the step loop and a real cache manager: each is as long as blocks are there for it."""

from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from random import Random

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemgr.manager import CacheManager
from cachemgr.rpc import convert
from cachemgr.types import ExecutorSpec, ManagerConfig, PoolSpec, WindowChange
from protos.execution.v1 import execution_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcommon.eviction import Layout, Policy, parse
from protos.kvcommon.v1 import kvcommon_pb2 as common
from scheduler.bridge import CacheUpdate
from scheduler.cache.client import _sequence
from scheduler.cache.sync import sync_answer, sync_request
from scheduler.core.batch import RunningBatch
from scheduler.core.step_message import InFlightStep, build_step
from scheduler.request import AdmissionAttempt, CacheOptions, Request
from scheduler.sequence import LeaveReason
from tests.support.scheduler.sequences import BLOCK, depths

CONFIG = ManagerConfig(capacity_ahead_tokens=4, free_watermark=0.0, lease_seconds=1e9)
TURN_SECONDS = 0.05


def adaptive(least: int = 8, most: int = 24, start: int = 4) -> common.EvictionPolicy:
    """A window of `least` to `most` tokens that changes by a block."""
    return common.EvictionPolicy(
        kind=common.EVICTION_KIND_ADAPTIVE_WINDOW,
        start_tokens=start,
        recent_tokens=least,
        max_cache_tokens=start + most,
        period_tokens=BLOCK,
        score_window_tokens=4,
    )


@dataclass
class Running:
    """A sequence as an executor keeps it, by the messages and the policy alone."""

    policy: Policy | None
    prompt: int
    table: list[int]
    computed: int
    kept: int
    evicts: bool = False
    windows: list[int] = field(default_factory=list)

    def compute(self, handle: int, count: int, moves_to: Seq[int] | None, result: pb.StepResult) -> set[int]:
        """Evicts and computes; returns the slots that this uses."""
        used = set(self.table[: -(-self.kept // BLOCK)])
        if self.policy is not None and (self.evicts or moves_to is not None):
            left = self.policy.kept_after(self.kept, self.computed, self.prompt)
            if moves_to is not None:
                self.evicts, self.table = True, list(moves_to) or self.table
            if left < self.kept:
                result.evicted_sequences.append(handle)
                result.evicted_tokens.append(self.kept - left)
                result.kept_masses.append(0.5)
            self.kept = left
            assert self.policy.most_kept is not None
            del self.table[-(-self.policy.most_kept // BLOCK) :]
        elif self.policy is not None:
            assert self.policy.kept_after(self.kept, self.computed, self.prompt) == self.kept
        self.kept += count
        self.computed += count
        assert self.kept <= len(self.table) * BLOCK
        return used | set(self.table[: -(-self.kept // BLOCK)])


class Stage:
    """A running batch, a cache manager of N = `blocks` blocks, and an executor that attends as the seed says."""

    def __init__(self, seed: int, blocks: int, depth: int = 2) -> None:
        self.random, self.depth, self.now = Random(seed), depth, 0.0
        self.manager = CacheManager(1, lambda: self.now, CONFIG)
        pool = PoolSpec(0, blocks, None)
        self.manager.register_executor(ExecutorSpec("e", 1, "m", b"f" * 32, BLOCK, [pool]))
        self.manager.register_scheduler("s", 1)
        self.batch, self.running = RunningBatch(), dict[int, Running]()
        self.waiting: deque[AdmissionAttempt] = deque()
        self.flights: deque[tuple[InFlightStep, pb.StepResult, dict[int, set[int]]]] = deque()
        self.update, self.syncs, self.steps = CacheUpdate(), 0, 0
        self.preempted = 0
        self.outputs: dict[int, int] = {}
        # How long each window is that attention asks for; None for one that is drawn.
        self.wanted: int | None = None
        self.requests = 0

    def ask(self, prompt: int, output: int, policy: common.EvictionPolicy | None, *, store: bool = True) -> None:
        """A request that waits for blocks."""
        self.requests += 1
        tokens = array("I", (self.requests * 1000 + i for i in range(prompt)))
        cache = CacheOptions(eviction_policy=policy, no_store=not store)
        request = Request(
            f"r{self.requests}", tokens, output, pb.SamplingParams(), self.requests, float(self.requests), cache=cache
        )
        self.waiting.append(AdmissionAttempt(request, tokens))

    def admit(self) -> None:
        """As many as have blocks."""
        while self.waiting:
            attempt = self.waiting[0]
            request = attempt.request
            message = kv.AdmitSequenceRequest(
                sequence_id=attempt.sequence_id("s"),
                scheduler_id="s",
                scheduler_epoch=1,
                executor_id="e",
                token_ids=attempt.token_ids,
                num_prompt_tokens=len(request.prompt_ids),
                no_store=request.cache.no_store,
                eviction_policy=request.cache.eviction_policy,
            )
            admission = self.manager.admit(convert.admit_request(message))
            if not admission.admitted:
                return
            self.waiting.popleft()
            self.batch.admit(_sequence(attempt, convert.admit_response(1, admission), BLOCK))

    def sync(self) -> None:
        """Reports all news, and applies the answer."""
        self.syncs += 1
        update, self.update = self.update, CacheUpdate(step=self.update.step)
        message = sync_request(update, "s", 1, 1, self.syncs)
        answer = self.manager.sync(convert.sync_request(message))
        self.batch.apply(sync_answer(update, convert.sync_response(1, answer, Duration()), 1))
        assert self.manager.queries.check_pool() == []

    def step(self, budget: int) -> bool:
        """Plans and sends a step, which is computed at once; returns whether there was anything to compute."""
        plan = self.batch.plan(budget)
        if not plan.compute and not self.batch.copies.unsent:
            return False
        self.steps += 1
        message, flight = build_step(self.steps, plan, self.batch.removed, self.batch.copies.take())
        self.batch.removed = []
        for handle in message.removed_sequences:
            self.running.pop(handle)
        for new in message.new_sequences:
            layout = Layout(BLOCK, (None,), plain_rotary=True)
            policy = parse(new.eviction_policy, layout) if new.HasField("eviction_policy") else None
            computed = new.num_computed_tokens
            slots = list(new.block_tables[0].slots)
            self.running[new.sequence] = Running(policy, new.num_prompt_tokens, slots, computed, computed)
        at = 0
        for handle, count in zip(message.table_sequences, message.table_counts, strict=True):
            self.running[handle].table += message.table_slots[at : at + count]
            at += count
        for handle, tokens in zip(message.window_sequences, message.window_tokens, strict=True):
            one = self.running[handle]
            assert one.policy is not None
            assert one.policy.allows_window(tokens)
            assert one.evicts or handle in message.evicting_sequences
            one.policy = one.policy.with_window(tokens)
            one.windows.append(tokens)
        moves, at = {}, 0
        for handle, count in zip(message.evicting_sequences, message.evicting_counts, strict=True):
            moves[handle] = message.evicting_slots[at : at + count]
            at += count
        result, used = pb.StepResult(step=self.steps), {}
        for sequence, count, samples in flight.compute:
            one = self.running[sequence.handle]
            used[sequence.handle] = one.compute(sequence.handle, count, moves.get(sequence.handle), result)
            assert one.kept == sequence.planned - sequence.evicted
            if samples:
                result.sequences.append(sequence.handle)
                result.token_ids.append(7)
                result.stopped.append(False)
        for handle in message.looking_sequences:
            policy = self.running[handle].policy
            assert policy is not None
            assert policy.bounds is not None
            wanted = self.random.randrange(policy.bounds.least, policy.bounds.most + 1, policy.period)
            if self.running[handle].evicts:
                near = self.random.choice([-policy.period, 0, policy.period])
                wanted = min(max(policy.window + near, policy.bounds.least), policy.bounds.most)
            result.window_sequences.append(handle)
            result.window_tokens.append(wanted if self.wanted is None else self.wanted)
        self.flights.append((flight, result, used))
        return True

    def answer(self) -> None:
        """The oldest step ends: until then all slots that it used are its sequences' own."""
        flight, result, used = self.flights.popleft()
        owned = {
            sequence.handle: {block.index for table in sequence.tables for block in table.blocks if block is not None}
            | {block.index for block in sequence.private}
            for sequence in self.manager.queries.sequences()
        }
        for handle, slots in used.items():
            assert slots <= owned[handle], f"{handle} computed in slots that it does not have"
        self.batch.apply_result(flight, result)
        self.manager.confirm_transfers("e", 1, [copy.ticket for copy in flight.copies], [], flight.number)

    def turn(self, budget: int = 64, *, syncs: bool = True) -> None:
        """One turn of the step loop and of the cache client."""
        self.now += TURN_SECONDS
        sent = self.step(budget)
        if len(self.flights) >= self.depth or (self.flights and not sent):
            self.answer()
        tokens, update = self.batch.take_updates()
        if tokens is not None:
            self.preempted += len(tokens.preempted)
            for arrival, _, _ in tokens.outputs:
                self.outputs[arrival] = self.outputs.get(arrival, 0) + 1
            self.waiting.extendleft(tokens.retried)
        if update is not None:
            self.update.merge(update)
        if syncs:
            self.sync()
            if not self.batch.missing_blocks:
                self.admit()

    def turn_until(self, is_done: Callable[[], bool], most: int = 2000) -> int:
        """Turns until something is so; returns how many."""
        for turns in range(most):
            if is_done():
                return turns
            self.turn()
        raise AssertionError(f"after {most} turns: {[sequence.dump() for sequence in self.batch.ranked]}")

    @property
    def used(self) -> int:
        """Blocks with a reference."""
        (pool,) = self.manager.queries.pools()
        return pool.used_blocks


@given(
    seed=st.integers(0, 1 << 20),
    blocks=st.integers(26, 60),
    requests=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 60), st.sampled_from(["adaptive", "none", "alone"])),
        min_size=1,
        max_size=6,
    ),
    budget=st.integers(3, 64),
    depth=depths,
    lazy=st.integers(1, 5),
)
@settings(max_examples=30, deadline=None)
def test_no_window_uses_a_block_that_its_sequence_does_not_have(
    seed: int, blocks: int, requests: list[tuple[int, int, str]], budget: int, depth: int, lazy: int
) -> None:
    stage = Stage(seed, blocks, depth)
    for prompt, output, kind in requests:
        stage.ask(prompt, output, None if kind == "none" else adaptive(), store=kind != "alone")
    stage.admit()
    turns = 0
    while len(stage.batch) or stage.waiting or stage.flights or stage.update != CacheUpdate():
        turns += 1
        assert turns < 5000, "no sequence goes on"
        stage.turn(budget, syncs=turns % lazy == 0)
    assert stage.outputs == {number + 1: output for number, (_, output, _) in enumerate(requests)}
    assert stage.used == 0


def one_that_reaches_far(blocks: int, output: int = 200) -> Stage:
    """A sequence that attends to all that it may keep, for some time."""
    stage = Stage(0, blocks)
    stage.wanted = 24
    stage.ask(20, output, adaptive())
    stage.admit()
    for _ in range(60):
        stage.turn()
    return stage


def changes(stage: Stage) -> dict[WindowChange, int]:
    return {change: count for change, count in stage.manager.queries.window_changes().items() if count}


def window(stage: Stage) -> int | None:
    """The first sequence's."""
    first = next(iter(stage.manager.queries.sequences()))
    assert first.eviction is not None
    return first.eviction.window


def test_a_window_grows_to_its_bound_and_gives_back_what_it_does_not_need() -> None:
    stage = one_that_reaches_far(40)
    assert window(stage) == 24
    # Its first tokens, the window, and a period more.
    assert stage.used == (4 + 24 + 4) // BLOCK
    stage.wanted = 8
    for _ in range(60):
        stage.turn()
    assert window(stage) == 8
    assert stage.used == (4 + 8 + 4) // BLOCK
    assert changes(stage)[WindowChange.RETURNED] == 1


def test_without_free_blocks_a_window_stays_and_nothing_waits_for_it() -> None:
    # Enough for the first eviction, when it has two tables; the other sequence has what is left.
    stage = Stage(0, 14)
    stage.wanted = 24
    stage.ask(20, 60, adaptive())
    stage.ask(4, 20, None)
    stage.admit()
    # A step makes a token of each.
    assert stage.turn_until(lambda: not len(stage.batch)) < 60 + 20
    assert stage.outputs == {1: 60, 2: 20}
    assert stage.preempted == 0


def test_longer_windows_are_taken_back_before_any_sequence_is_preempted() -> None:
    stage = one_that_reaches_far(14, output=400)
    assert window(stage) == 24
    stage.ask(4, 24, None)
    stage.admit()
    stage.turn_until(lambda: stage.outputs.get(2) == 24)
    assert stage.preempted == 0
    # Syncs repeat that a window is taken back until the sequence has shortened it.
    counted = changes(stage)
    assert 0 < counted[WindowChange.TAKEN_BACK] <= counted[WindowChange.RETURNED] <= counted[WindowChange.GRANTED]


def test_longer_windows_are_taken_back_for_a_request_that_waits() -> None:
    stage = one_that_reaches_far(12, output=400)
    assert window(stage) == 24
    stage.ask(20, 2, None)
    stage.admit()
    assert stage.waiting
    stage.turn_until(lambda: stage.outputs.get(2) == 2, 200)
    assert stage.preempted == 0
    assert window(stage) == 8
    for _ in range(60):
        stage.turn()
    # It may be long again, once nothing waits.
    assert window(stage) == 24


@pytest.mark.parametrize("again", ["preempted", "manager lost"])
def test_a_sequence_that_begins_again_begins_with_the_least_window(again: str) -> None:
    stage = one_that_reaches_far(40)
    sequence = stage.batch.ranked[0]
    if again == "preempted":
        stage.batch.leave(sequence, LeaveReason.PREEMPTED)
    else:
        stage.batch.restart_all(executor_lost=False)
    stage.wanted = 8
    stage.turn_until(lambda: stage.outputs[1] >= 150)
    assert window(stage) == 8
