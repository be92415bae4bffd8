"""Runs one step at a time: checks and schedules it, runs the model, samples. Owns the sequences and the pools."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import structlog
import torch
from torch import Tensor

from executor.batch import HostBatch, SequenceState, build_batch
from executor.cache.pool import KvPools
from executor.cache.tiers.hazards import SlotRef
from executor.cache.tiers.tiers import Tiers
from executor.core.sampler import SampleResult, SamplingRow, TokenCounts, sample
from executor.core.state import SequenceTable, tokens_due
from executor.core.timing import Clock, Span
from executor.core.validation import Limits, check_copies, check_step
from executor.errors import InvalidStepError
from executor.eviction.engine import TokenEviction
from executor.models.forward import ForwardOutput, Model
from executor.step import Copy, Evicted, Logprobs, SampledToken, Step, StepOutput, Tier
from executor.transfer import to_device
from kernels.copy_blocks.launch import copy_blocks
from protos.kvcommon.eviction import Layout

log = structlog.get_logger()


class StepEvents(Protocol):
    """What a runner reports beside the outputs of its steps."""

    def on_idle(self) -> None:
        """The runner's thread is about to wait for copies or for the model."""
        ...

    def copy_ended(self, copy: Copy, good: bool) -> None:
        """A copy has ended: called once per copy that a step does not run within the device, in any thread."""
        ...


class NoEvents:
    """Reports nothing."""

    def on_idle(self) -> None:
        """Does nothing."""

    def copy_ended(self, copy: Copy, good: bool) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class ScheduledStep:
    """A step that was applied: counts[i] tokens of sequences[i] are computed. waited: seconds, for copies."""

    step: Step
    sequences: tuple[SequenceState, ...]
    counts: tuple[int, ...]
    batch: HostBatch
    evicted: tuple[Evicted, ...]
    span: Span
    waited: float


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device computes. sampled: the tokens of the batch's sampling sequences; None without any."""

    scheduled: ScheduledStep
    sampled: SampleResult | None

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.scheduled.batch.num_tokens

    def result(self) -> StepOutput:
        """Waits for the device; call it once, in the order of the steps. Marks sequences that sampled a stop id."""
        scheduled, batch = self.scheduled, self.scheduled.batch
        compute, idle = scheduled.span.seconds()
        return StepOutput(
            number=scheduled.step.number,
            sampled=() if self.sampled is None else tuple(_collect(batch.sampling, self.sampled)),
            num_tokens=batch.num_tokens,
            compute_time=max(0.0, compute - scheduled.waited),
            idle_time=idle + scheduled.waited,
            tickets=scheduled.step.tickets_within_device,
            evicted=scheduled.evicted,
        )


class Runner:
    """Not thread-safe: one thread launches and collects."""

    def __init__(
        self, model: Model, pools: KvPools, tiers: Tiers | None = None, events: StepEvents | None = None
    ) -> None:
        """tiers: below the device, None for none. events: where to report, None for nowhere."""
        self.model = model
        self.pools = pools
        self.tiers = tiers or Tiers(pools)
        self.last_step = 0
        self._events = events or NoEvents()
        self._sequences = SequenceTable()
        self._counts: dict[int, TokenCounts] = {}
        self._eviction = TokenEviction(pools, model.rotary, model.device)
        # More rows than most batches need: a new tensor invalidates captured CUDA graphs.
        self._last_tokens = torch.zeros(1024, dtype=torch.int64, device=model.device)
        self._clock = Clock(model.device)
        self._limits = Limits(
            vocab_size=model.vocab_size,
            max_positions=model.max_positions,
            num_blocks=tuple(pool.num_blocks for pool in pools.pools),
            block_size=pools.block_size,
            windows=tuple(group.shape.window for group in model.groups),
            lower_slots=self.tiers.slots,
        )

    @property
    def layout(self) -> Layout:
        """Block size, windows and rotary embedding, which decide what policies are possible."""
        return Layout(self.pools.block_size, self._limits.windows, self.model.rotary is not None)

    @property
    def overlaps(self) -> bool:
        """Whether a step can be launched while the step before still runs."""
        return self.model.device.type == "cuda"

    @property
    def num_sequences(self) -> int:
        """Sequences in the running batch."""
        return len(self._sequences)

    def warmup(self) -> None:
        """Does what the first steps would otherwise wait for."""
        self.model.forward.warmup(self.pools, self._last_tokens)

    def clear(self) -> None:
        """Removes all sequences; the pools keep their contents."""
        self._sequences.clear()
        self._eviction.clear()
        self._counts.clear()
        self._clock.clear()

    @torch.inference_mode()
    def launch(self, step: Step) -> LaunchedStep:
        """Applies a step and starts its work. Raises ExecutorError, with nothing changed, when it is not valid.

        Where another error is raised, each copy that is not within the device has been reported or will be.
        """
        self._check(step)
        scheduled = self._schedule(step)
        output = self._forward(scheduled.batch)
        return self._sample(scheduled, output)

    def _check(self, step: Step) -> None:
        check_step(step, self.last_step, self._sequences, self._limits)

    def _schedule(self, step: Step) -> ScheduledStep:
        """Begins the step's copies, applies its diff, evicts tokens, and packs what each sequence computes."""
        span = self._clock.start()
        waited = self._begin(step.copies, step.number)
        self._apply(step)
        sequences, counts = [], []
        for sequence in self._sequences:
            count = tokens_due(
                step,
                sequence.handle,
                computed=sequence.computed,
                known=sequence.known,
                stopped=sequence.stopped,
            )
            if count:
                sequences.append(sequence)
                counts.append(count)
        if self.tiers.busy:
            reads = _joining_reads(step, self.pools.block_size)
            waited += self._wait(reads, _evicting_writes(step, sequences))
        evicted = [
            self._eviction.evict(sequence, step.evicting.get(sequence.handle), step.number)
            for sequence in sequences
            if sequence.policy is not None
        ]
        scored = self._eviction.scored(sequences, counts)
        groups = len(self._limits.windows)
        batch = build_batch(sequences, counts, self._last_tokens, self.pools.block_size, groups, scored)
        if self.tiers.busy:
            waited += self._wait((), _written(batch))
        for group, slots in enumerate(batch.written_slots):
            self.pools.mark_written(group, slots, step.number)
        return ScheduledStep(step, tuple(sequences), tuple(counts), batch, tuple(filter(None, evicted)), span, waited)

    def _forward(self, batch: HostBatch) -> ForwardOutput | None:
        if not batch.num_sequences:
            return None
        run = self.model.forward.prepare(batch, self.pools)
        self._events.on_idle()
        return run()

    def _sample(self, scheduled: ScheduledStep, output: ForwardOutput | None) -> LaunchedStep:
        """Samples the next tokens; they can be read when the step is over."""
        sequences, counts, sampling = scheduled.sequences, scheduled.counts, scheduled.batch.sampling
        sampled = None
        if output is not None:
            self._eviction.observe(sequences, counts, output.scores)
            if sampling:
                sampled = self._sample_rows(sampling, output)
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.computed += count
            sequence.kept += count
            sequence.reuse_position = None
        for sequence in sampling:
            sequence.known += 1
        scheduled.span.end()
        return LaunchedStep(scheduled, sampled)

    def _sample_rows(self, sequences: Sequence[SequenceState], output: ForwardOutput) -> SampleResult:
        rows = [
            SamplingRow(sequence.sampling, sequence.known - sequence.num_prompt, self._counts.get(sequence.handle))
            for sequence in sequences
        ]
        sampled = sample(output.logits, rows, output.best)
        self._last_tokens.index_copy_(0, output.output_token_rows, sampled.ids)
        for index, row in enumerate(rows):
            if row.counts is not None:
                row.counts.add(sampled.ids[index : index + 1])
        # Asked for here: after the next step is launched, it would wait for that step too.
        return sampled.on_host()

    @torch.inference_mode()
    def transfer(self, copies: Sequence[Copy]) -> None:
        """Begins copies, and overwrites slots, that no step asks for, behind all steps launched before.

        Each is reported once as ended; copies within the device have run by then.
        """
        possible = []
        for copy in copies:
            try:
                check_copies((copy,), self._limits, zeros=True)
                possible.append(copy)
            except InvalidStepError as error:
                log.warning("a copy is not possible here", cause=str(error))
                self._events.copy_ended(copy, False)
        within = [copy for copy in possible if copy.within_device]
        good = False
        try:
            # Marked as written after the last step: no earlier step wrote what is there now.
            self._begin(possible, self.last_step + 1)
            good = True
        finally:
            for copy in within:
                self._events.copy_ended(copy, good)

    def _apply(self, step: Step) -> None:
        self.last_step = step.number
        for handle in step.removed:
            self._sequences.remove(handle)
            self._counts.pop(handle, None)
            self._eviction.remove(handle)
        for new in step.new_sequences:
            sequence = self._sequences.add(new)
            self._eviction.add(sequence)
            if new.sampling.penalises:
                self._counts[new.sequence] = self._count(sequence)
        for update in step.table_updates:
            self._sequences.grow(update.sequence, update.group, update.slots)
        # More than once when very many join together.
        while self._sequences.rows > len(self._last_tokens):
            self._last_tokens = torch.cat([self._last_tokens, torch.zeros_like(self._last_tokens)])

    def _count(self, sequence: SequenceState) -> TokenCounts:
        tokens = to_device(sequence.tokens, self.model.device)
        return TokenCounts.of(tokens[: sequence.num_prompt], tokens[sequence.num_prompt :], self.model.vocab_size)

    def _begin(self, copies: Sequence[Copy], step: int) -> float:
        """Begins copies in their order, and waits for copies within the device; returns the seconds that it waited."""
        waited, begun = 0.0, 0
        try:
            for within, members in groupby(copies, key=lambda copy: copy.within_device):
                run = list(members)
                if within:
                    if self.tiers.busy:
                        waited += self._wait(*_slots_of(run))
                    self._copy(run, step)
                else:
                    for copy in run:
                        if copy.target_tier is Tier.DEVICE:
                            self.pools.mark_written(copy.group, [copy.target], step)
                    self.tiers.begin(run, self._events.copy_ended)
                begun += len(run)
        except Exception:
            for copy in copies[begun:]:
                if not copy.within_device:
                    self._events.copy_ended(copy, False)
            raise
        return waited

    def _wait(self, reads: Iterable[SlotRef], writes: Iterable[SlotRef]) -> float:
        self._events.on_idle()
        return self.tiers.wait(reads, writes)

    def _copy(self, copies: Sequence[Copy], step: int) -> None:
        for run in disjoint_runs(copies):
            zeros = [copy for copy in run if not copy.source]
            for copy in zeros:
                self.pools.zero(copy.group, copy.target, step)
            moves = sorted((copy for copy in run if copy.source), key=lambda copy: copy.group)
            for group, members in groupby(moves, key=lambda copy: copy.group):
                chosen = list(members)
                pool, device = self.pools.pools[group], self.model.device
                sources = to_device([copy.source for copy in chosen], device)
                targets = to_device([copy.target for copy in chosen], device)
                copy_blocks(pool.k, pool.v, sources, targets)
                self.pools.mark_written(group, [copy.target for copy in chosen], step)


def disjoint_runs(copies: Sequence[Copy]) -> list[list[Copy]]:
    """Splits copies, in order, so that within a run no target is a source or a target of another one."""
    runs: list[list[Copy]] = []
    sources: set[tuple[int, int]] = set()
    targets: set[tuple[int, int]] = set()
    for copy in copies:
        source, target = (copy.group, copy.source), (copy.group, copy.target)
        if not runs or source in targets or target in targets or target in sources:
            runs.append([])
            sources, targets = set(), set()
        runs[-1].append(copy)
        sources.add(source)
        targets.add(target)
    return runs


def _slots_of(copies: Sequence[Copy]) -> tuple[list[SlotRef], list[SlotRef]]:
    """The slots that copies within the device read and write."""
    reads = [(Tier.DEVICE, copy.group, copy.source) for copy in copies if copy.source]
    return reads, [(Tier.DEVICE, copy.group, copy.target) for copy in copies]


def _joining_reads(step: Step, block_size: int) -> list[SlotRef]:
    """Blocks that sequences have computed when they join."""
    return [
        (Tier.DEVICE, group, slot)
        for new in step.new_sequences
        for group, table in enumerate(new.tables)
        for slot in table[: -(-new.num_computed_tokens // block_size)]
    ]


def _evicting_writes(step: Step, sequences: Sequence[SequenceState]) -> list[SlotRef]:
    """Blocks that sequences may move kept tokens to; models with policies have one layer group."""
    return [
        (Tier.DEVICE, 0, slot)
        for sequence in sequences
        if sequence.policy is not None and (sequence.evicts or sequence.handle in step.evicting)
        for slot in (*sequence.tables[0].tolist(), *step.evicting.get(sequence.handle, ()))
    ]


def _written(batch: HostBatch) -> list[SlotRef]:
    """Blocks that get new tokens."""
    groups = enumerate(np.unique(slots).tolist() for slots in batch.written_slots)
    return [(Tier.DEVICE, group, slot) for group, slots in groups for slot in slots]


def _collect(sequences: Sequence[SequenceState], result: SampleResult) -> list[SampledToken]:
    logprobs = _logprobs(sequences, result)
    sampled = []
    for index, (sequence, token) in enumerate(zip(sequences, result.ids.tolist(), strict=True)):
        # On a device that runs ahead, a sequence computes one more token before its stop is known here.
        if sequence.stopped:
            continue
        sequence.stopped = token in sequence.sampling.stop_token_ids
        sampled.append(SampledToken(sequence.handle, token, sequence.stopped, logprobs.get(index)))
    return sampled


def _logprobs(sequences: Sequence[SequenceState], result: SampleResult) -> dict[int, Logprobs]:
    if result.logprobs is None or result.top_ids is None or result.top_logprobs is None:
        return {}
    columns: tuple[Tensor, ...] = (result.logprobs, result.top_ids, result.top_logprobs)
    logprobs = {}
    for row, chosen, ids, values in zip(result.logprob_rows, *(column.tolist() for column in columns), strict=True):
        count = sequences[row].sampling.num_logprobs or 0
        logprobs[row] = Logprobs(chosen, tuple(ids[:count]), tuple(values[:count]))
    return logprobs
