"""Runs one step at a time: checks and schedules the step, runs the model, samples. Owns the sequences and the pools."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor

from executor.batch import HostBatch, ScoredPrompt, SequenceState, build_batch
from executor.cache.pool import KvPools
from executor.cache.tiers.hazards import SlotRef
from executor.cache.tiers.tiers import Tiers
from executor.core.drafts import Decodes, Drafter, count_accepted
from executor.core.grammars import Grammars
from executor.core.restrictions import Restrictions, RowRestrictions
from executor.core.sampler import SampleResult, SamplingRow, sample, score
from executor.core.state import SequenceTable
from executor.core.timing import Clock, Span
from executor.core.token_counts import TokenCounts
from executor.core.validation import Limits, check_copies, check_step, invalid
from executor.errors import GrammarError, InvalidStepError
from executor.eviction.engine import Eviction, TokenEviction
from executor.models.forward import Forward, ForwardOutput, Model
from executor.step import (
    MAX_SEQUENCES,
    Copy,
    Logprobs,
    NewSequence,
    PromptLogprobs,
    SampledToken,
    Step,
    StepOutput,
    Tier,
)
from executor.transfer import to_device, to_host
from kernels.copy_blocks.launch import copy_blocks
from protos.kvcommon.eviction import Layout

log = structlog.get_logger()


# A call that waits for the restrictions of rows, and returns these by handle: after the last known token, then after
# each draft.
Restricted = Callable[[], Mapping[int, Sequence[RowRestrictions | None]]]


@dataclass(frozen=True)
class ScheduledStep:
    """A step that was applied: counts[i] tokens of sequences[i] are computed.

    drafts: by handle, the drafted tokens among the computed tokens.
    """

    step: Step
    sequences: tuple[SequenceState, ...]
    counts: tuple[int, ...]
    drafts: dict[int, list[int]]
    batch: HostBatch
    evicted: tuple[Eviction, ...]
    span: Span

    @property
    def num_drafts(self) -> int:
        """Drafted tokens of all sequences."""
        return sum(map(len, self.drafts.values()))


@dataclass(frozen=True)
class PreparedStep:
    """A step that is ready for the device. run: computes the step; None if it computes no token."""

    scheduled: ScheduledStep
    restricted: Restricted
    run: Callable[[], ForwardOutput] | None


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device computes. sampled: the tokens of the batch's rows; None if no row samples.

    accepted: for each sampling sequence, how many of its rows count. wanted_drafts: as in StepOutput.
    windows: sequence -> tokens that its adaptive window is to have, [] int64, if the step asked.
    failed: sequences whose last token ends an output because its grammar could not be followed.
    """

    scheduled: ScheduledStep
    sampled: SampleResult | None
    accepted: Sequence[int] = ()
    failed: frozenset[int] = frozenset()
    wanted_drafts: Mapping[int, int] = field(default_factory=dict)
    windows: Mapping[int, Tensor] = field(default_factory=dict)
    # What `score` returned for each of the batch's prompts.
    prompts: Sequence[tuple[Tensor, ...]] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.scheduled.batch.num_tokens

    @property
    def is_over(self) -> bool:
        """Whether the device has computed the step; does not wait."""
        return self.scheduled.span.is_over

    def result(self) -> StepOutput:
        """Waits for the device; must be called once, in order of steps. Marks sequences that sampled a stop id."""
        scheduled, batch = self.scheduled, self.scheduled.batch
        compute_time, idle_time = scheduled.span.seconds()
        return StepOutput(
            number=scheduled.step.number,
            sampled=() if self.sampled is None else tuple(self._collect(batch.sampling, self.sampled)),
            num_tokens=batch.num_tokens,
            compute_time=compute_time,
            idle_time=idle_time,
            tickets=scheduled.step.tickets_within_device,
            evicted=tuple(eviction.result() for eviction in scheduled.evicted),
            num_drafts=scheduled.num_drafts,
            wanted_drafts=self.wanted_drafts,
            windows={handle: int(tokens) for handle, tokens in self.windows.items()},
            prompt_logprobs=tuple(map(_prompt_logprobs, batch.prompts, self.prompts)),
        )

    def _collect(self, sequences: Sequence[SequenceState], result: SampleResult) -> Iterator[SampledToken]:
        logprobs, ids, first = _logprobs(result), result.ids.tolist(), 0
        for sequence, accepted in zip(sequences, self.accepted, strict=True):
            # On a device that runs ahead, a sequence computes one more token before its stop is known.
            for row in range(first, first + (0 if sequence.stopped else accepted)):
                sequence.stopped = ids[row] in sequence.sampling.stop_token_ids
                chosen = logprobs[row].best(sequence.sampling.num_logprobs or 0) if row in logprobs else None
                failed = sequence.handle in self.failed and row == first + accepted - 1
                yield SampledToken(sequence.handle, ids[row], sequence.stopped, chosen, failed)
            first += 1 + len(self.scheduled.drafts.get(sequence.handle, ()))


class Runner:
    """Not thread-safe: one thread prepares, launches and collects."""

    def __init__(
        self,
        model: Model,
        pools: KvPools,
        tiers: Tiers | None = None,
        copy_ended: Callable[[Copy, bool], None] = lambda _copy, _good: None,
        drafter: Drafter | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """tiers: below the device, None for none. copy_ended: called in any thread, once for each copy except a step's
        copies within the device, with whether it succeeded.

        drafter: None for no drafts. It needs each token before the next step is launched, so a device that runs ahead
        can have no drafter. grammars: for the model's tokenizer, None for a model without a tokenizer.
        """
        self.model = model
        self.pools = pools
        self.tiers = tiers or Tiers(pools)
        self.last_step = 0
        self._copy_ended = copy_ended
        # Each loaded adapter in the model's prepared form, by its id.
        self.adapters: dict[int, Any] = {}
        self._sequences = SequenceTable()
        self._counts = TokenCounts(model.vocab_size, model.device)
        self._clock = Clock(model.device)
        self._eviction = TokenEviction(pools, model.rotary, model.device, self._clock.begin)
        assert drafter is None or not self.overlaps
        self._drafter = drafter
        self.grammars = grammars or Grammars(b"", model.vocab_size, model.eos_token_ids)
        # Computes grammar masks while the model runs.
        self._masking = ThreadPoolExecutor(1, "masks")
        self._restrictions: dict[int, Restrictions] = {}
        # Steps whose tokens have yet to be passed to their sequences' restrictions.
        self._unsettled: list[LaunchedStep] = []
        # CUDA graphs are captured over this tensor.
        self._last_tokens = torch.zeros(MAX_SEQUENCES, dtype=torch.int64, device=model.device)
        self._limits = Limits(
            vocab_size=model.vocab_size,
            max_positions=model.max_positions,
            num_blocks=tuple(pool.num_blocks for pool in pools.pools),
            block_size=pools.block_size,
            windows=tuple(group.shape.window for group in model.groups),
            lower_slots=self.tiers.slots,
            adapters=self.adapters.keys(),
        )

    @property
    def layout(self) -> Layout:
        """Block size, windows and rotary embedding, which determine the possible policies."""
        return Layout(self.pools.block_size, self._limits.windows, self.model.rotary is not None)

    @property
    def overlaps(self) -> bool:
        """Whether a step can be launched while the previous step still runs."""
        return self.model.device.type == "cuda"

    @property
    def drafts(self) -> bool:
        """Whether steps may compute drafted tokens."""
        return self._drafter is not None

    @property
    def num_sequences(self) -> int:
        """Sequences in the running batch."""
        return len(self._sequences)

    def warmup(self) -> None:
        """Does in advance what the first steps would otherwise wait for."""
        self.model.forward.warmup(self.pools, self._last_tokens)

    def use(self, forward: Forward, adapters: Mapping[int, Any]) -> None:
        """Computes with other weights of the same model from now on, and with the adapters prepared for these weights.

        There must be no sequences. If warming up fails, the previous weights stay.
        """
        before = self.model
        self.model = replace(before, forward=forward)
        try:
            self.warmup()
        except BaseException:
            self.model = before
            raise
        self.adapters.clear()
        self.adapters.update(adapters)

    def clear(self) -> None:
        """Removes all sequences; the pools keep their contents."""
        self._sequences.clear()
        self._eviction.clear()
        self._counts.clear()
        self._restrictions.clear()
        self._unsettled.clear()
        if self._drafter is not None:
            self._drafter.clear()
        self._clock.clear()

    @torch.inference_mode()
    def prepare(self, step: Step) -> PreparedStep:
        """Applies a step and packs what the device needs. Raises ExecutorError, with nothing changed, if not valid.

        If any other error is raised, each copy that is not within the device has been or will be reported.
        """
        due = check_step(step, self.last_step, self._sequences, self._limits)
        joining = {new.sequence: self._restrictions_of(new) for new in step.new_sequences if new.sampling.restricts}
        scheduled = self._schedule(step, due, joining)
        restricted, batch = self._restrict(scheduled), scheduled.batch
        run = self.model.forward.prepare(batch, self.pools) if batch.num_sequences else None
        return PreparedStep(scheduled, restricted, run)

    @torch.inference_mode()
    def launch(self, prepared: PreparedStep) -> LaunchedStep:
        """Starts the work of the last prepared step."""
        self._clock.begin()
        output = None if prepared.run is None else prepared.run()
        return self._sample(prepared.scheduled, output, prepared.restricted)

    def _restrictions_of(self, new: NewSequence) -> Restrictions:
        """Returns a sequence's restrictions. Raises InvalidStepError for a grammar that cannot be compiled."""
        sampling, grammar = new.sampling, new.sampling.grammar
        try:
            matcher = None if grammar is None else self.grammars.matcher(grammar)
        except GrammarError as error:
            field = "new_sequences.sampling.structured_output"
            raise invalid(field, new.sequence, f"cannot be compiled: {error.message}") from error
        eos = frozenset() if matcher is None else self.grammars.eos_token_ids
        return Restrictions(
            replace(sampling, stop_token_ids=sampling.stop_token_ids | eos),
            matcher,
            self.grammars.words,
            eos - sampling.stop_token_ids,
            new.token_ids[new.num_prompt_tokens :],
        )

    def _schedule(self, step: Step, due: Mapping[int, int], restrictions: Mapping[int, Restrictions]) -> ScheduledStep:
        """Begins the step's copies, applies its diff, evicts tokens, and packs what each sequence computes.

        due: known tokens to compute, by sequence. restrictions: of sequences that join.
        """
        span = self._clock.start()
        self._begin(step.copies, step.number)
        self._apply(step, restrictions)
        sequences = [sequence for sequence in self._grouped() if sequence.handle in due]
        counts = [due[sequence.handle] for sequence in sequences]
        drafts = self._propose(step, sequences, counts)
        if drafts:
            counts = [count + len(drafts.get(s.handle, ())) for s, count in zip(sequences, counts, strict=True)]
        evicting = [s for s in sequences if s.policy is not None and (s.evicts or s.handle in step.evicting)]
        if self.tiers.busy:
            reads = _joining_reads(step, self.pools.block_size)
            self._wait(reads, _evicting_writes(step, evicting))
        for sequence in sequences:
            if sequence.handle in step.windows:
                self._eviction.set_window(sequence, step.windows[sequence.handle])
        evicted = [
            self._eviction.evict(sequence, step.evicting.get(sequence.handle), step.number) for sequence in evicting
        ]
        scored = self._eviction.scored(sequences, counts)
        groups = len(self._limits.windows)
        batch = build_batch(sequences, counts, self._last_tokens, self.pools.block_size, groups, scored, drafts)
        if self.tiers.busy:
            self._wait((), _written(batch))
        for group, slots in enumerate(batch.written_slots):
            self.pools.mark_written(group, slots, step.number)
        done = tuple(filter(None, evicted))
        return ScheduledStep(step, tuple(sequences), tuple(counts), drafts, batch, done, span)

    def _propose(self, step: Step, sequences: Sequence[SequenceState], counts: Sequence[int]) -> dict[int, list[int]]:
        """Returns the drafts of a step, only where the step allows them. counts: tokens due, for each sequence."""
        if self._drafter is None:
            return {}
        decoding = [sequence for sequence, count in zip(sequences, counts, strict=True) if count == 1]
        allowed = {handle: most for handle, most in step.drafts.items() if not self._sequences.get(handle).stopped}
        return self._drafter.propose(allowed, Decodes.of(decoding), self._claim)

    def _claim(self, slots: Sequence[SlotRef]) -> None:
        """Waits until no copy uses these slots, which a draft model is about to write."""
        if self.tiers.busy:
            self._wait((), slots)

    def _grouped(self) -> Iterable[SequenceState]:
        """Returns all sequences in the order in which they joined, but grouped by adapter."""
        if all(sequence.adapter is None for sequence in self._sequences):
            return self._sequences
        order: dict[int, int] = {}
        return sorted(self._sequences, key=lambda sequence: order.setdefault(id(sequence.adapter), len(order)))

    def _restrict(self, scheduled: ScheduledStep) -> Restricted:
        """Computes the restrictions of a step's rows while the model runs; returns a call that waits for them."""
        drafts, handles = scheduled.drafts, [sequence.handle for sequence in scheduled.batch.sampling]
        found = [(handle, self._restrictions[handle]) for handle in handles if handle in self._restrictions]
        if not found:
            return dict

        def compute() -> dict[int, list[RowRestrictions | None]]:
            return {handle: restrictions.rows(drafts.get(handle, ())) for handle, restrictions in found}

        if not self.overlaps:
            return self._masking.submit(compute).result

        def settle_and_compute() -> dict[int, list[RowRestrictions | None]]:
            for launched in self._unsettled:
                self._settle(launched)
            self._unsettled.clear()
            return compute()

        return settle_and_compute

    def _sample(self, scheduled: ScheduledStep, output: ForwardOutput | None, restricted: Restricted) -> LaunchedStep:
        """Samples the next tokens, which can be read when the step is over."""
        sequences, counts, sampling = scheduled.sequences, scheduled.counts, scheduled.batch.sampling
        sampled, accepted, prompts, failed = None, [1] * len(sampling), [], frozenset[int]()
        if output is not None:
            self._eviction.observe(sequences, counts, output.scores)
            prompts = [self._score(prompt, output.logits) for prompt in scheduled.batch.prompts]
            if (rows := scheduled.batch.sample_rows) is not None:
                places = to_device(rows, self.model.device)
                best = None if output.best is None else output.best[places]
                output = replace(output, logits=output.logits[places], best=best)
            if sampling:
                restrictions = restricted()
                sampled, accepted = self._sample_rows(sampling, scheduled.drafts, output, restrictions)
                failed = _failed(sampling, accepted, restrictions)
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.computed += count
            sequence.kept += count
            sequence.reuse_position = None
        for sequence, tokens in zip(sampling, accepted, strict=True):
            sequence.known += tokens
        for handle in scheduled.drafts:
            # The keys and values of rejected drafts come after the computed tokens, where the next step writes.
            sequence = self._sequences.get(handle)
            rejected = sequence.computed + 1 - sequence.known
            sequence.computed -= rejected
            sequence.kept -= rejected
        if self._drafter is not None:
            self._drafter.keep_up(sequences, self._claim)
        looking = scheduled.step.looking
        windows = {s.handle: to_host(self._eviction.wanted_window(s)) for s in sequences if s.handle in looking}
        scheduled.span.end()
        wanted = self._note_drafts(scheduled)
        launched = LaunchedStep(scheduled, sampled, accepted, failed, wanted, windows, prompts)
        if self._restrictions and any(sequence.handle in self._restrictions for sequence in sampling):
            if self.overlaps:
                self._unsettled.append(launched)
            else:
                self._settle(launched)
        return launched

    def _score(self, prompt: ScoredPrompt, logits: Tensor) -> tuple[Tensor, ...]:
        """Returns what `score` returns, on the host once the device has come this far."""
        device, count = self.model.device, prompt.sequence.sampling.num_prompt_logprobs or 0
        scored = score(logits[to_device(prompt.rows, device)], to_device(prompt.ids, device), count)
        return tuple(map(to_host, scored))

    def _settle(self, launched: LaunchedStep) -> None:
        """Passes the tokens that a step sampled to the restrictions; waits for the device."""
        if launched.sampled is None:
            return
        launched.scheduled.span.seconds()
        ids, first = launched.sampled.ids.tolist(), 0
        for sequence, accepted in zip(launched.scheduled.batch.sampling, launched.accepted, strict=True):
            if (restrictions := self._restrictions.get(sequence.handle)) is not None:
                restrictions.take(ids[first : first + accepted])
            first += 1 + len(launched.scheduled.drafts.get(sequence.handle, ()))

    def _sample_rows(
        self,
        sequences: Sequence[SequenceState],
        drafts: Mapping[int, Sequence[int]],
        output: ForwardOutput,
        restricted: Mapping[int, Sequence[RowRestrictions | None]],
    ) -> tuple[SampleResult, list[int]]:
        """Samples all rows; returns the samples, and how many of each sequence's rows count."""
        rows = list(self._rows(sequences, drafts, restricted))
        sampled = sample(output.logits, rows, output.best, self._counts)
        token_rows, ids, accepted = output.output_token_rows, sampled.ids, [1] * len(sequences)
        if self._drafter is not None:
            accepted = self._accept(sequences, drafts, ids.tolist(), self._drafter)
        if self._counts:
            self._count(sequences, drafts, accepted, ids)
        if drafts:
            last = [first + count - 1 for first, count in zip(rows_begin(sequences, drafts), accepted, strict=True)]
            token_rows, ids = token_rows[last], ids[last]
        self._last_tokens.index_copy_(0, token_rows, ids)
        # The copy is requested here: after the next step is launched, the copy would wait for that step, too.
        return sampled.on_host(), accepted

    def _rows(
        self,
        sequences: Sequence[SequenceState],
        drafts: Mapping[int, Sequence[int]],
        restricted: Mapping[int, Sequence[RowRestrictions | None]],
    ) -> Iterator[SamplingRow]:
        """Yields how to sample after the last known token and after each draft, as if it were accepted."""
        if not (drafts or restricted or self._counts):
            # Nearly all steps: with hundreds of sequences, the rest of this function takes longer than all other work.
            yield from (SamplingRow(one.sampling, one.known - one.num_prompt) for one in sequences)
            return
        for sequence in sequences:
            position, handle = sequence.known - sequence.num_prompt, sequence.handle
            counted, own = handle if handle in self._counts else None, drafts.get(handle, ())
            for index, restrictions in enumerate(restricted.get(handle) or [None] * (1 + len(own))):
                yield SamplingRow(sequence.sampling, position + index, restrictions, counted, own[:index])

    def _accept(
        self,
        sequences: Sequence[SequenceState],
        drafts: Mapping[int, Sequence[int]],
        ids: Sequence[int],
        drafter: Drafter,
    ) -> list[int]:
        """Tells the drafter the sampled ids that count; returns how many these are for each sequence."""
        accepted = []
        for sequence, first in zip(sequences, rows_begin(sequences, drafts), strict=True):
            drafted = drafts.get(sequence.handle, ())
            own = ids[first : first + 1 + len(drafted)]
            accepted.append(count_accepted(own, drafted, sequence.sampling.stop_token_ids))
            drafter.extend(sequence, own[: accepted[-1]])
        return accepted

    def _count(
        self,
        sequences: Sequence[SequenceState],
        drafts: Mapping[int, Sequence[int]],
        accepted: Sequence[int],
        ids: Tensor,
    ) -> None:
        """Counts the accepted tokens of sequences with penalties. ids: [R] int64, of all rows."""
        rows = [
            (sequence.handle, row)
            for sequence, first, count in zip(sequences, rows_begin(sequences, drafts), accepted, strict=True)
            if sequence.handle in self._counts
            for row in range(first, first + count)
        ]
        if rows:
            handles, places = zip(*rows, strict=True)
            self._counts.add(handles, ids[to_device(places, ids.device)])

    def _note_drafts(self, scheduled: ScheduledStep) -> Mapping[int, int]:
        """Tells the drafter the time of a step that only decoded; returns how many drafts are worth computing next."""
        if self._drafter is None or not scheduled.sequences:
            return {}
        sampling = scheduled.batch.sampling
        if scheduled.batch.num_tokens == len(scheduled.sequences) + scheduled.num_drafts:
            self._drafter.observe(Decodes.of(sampling), scheduled.num_drafts, scheduled.span.seconds()[0])
        return self._drafter.wanted([sequence.handle for sequence in sampling])

    @torch.inference_mode()
    def transfer(self, copies: Sequence[Copy]) -> None:
        """Begins copies that belong to no step and overwrites slots, all after the steps launched earlier.

        Each copy is reported once as ended. A copy within the device is reported when the device has it in its queue,
        before any later step.
        """
        possible = []
        for copy in copies:
            try:
                check_copies((copy,), self._limits, zeros=True)
                possible.append(copy)
            except InvalidStepError as error:
                log.warning("a copy is not possible here", cause=str(error))
                self._copy_ended(copy, False)
        within = [copy for copy in possible if copy.within_device]
        good = False
        try:
            # Marked as written after the last step: no earlier step wrote the present contents.
            self._begin(possible, self.last_step + 1)
            good = True
        finally:
            for copy in within:
                self._copy_ended(copy, good)

    def _apply(self, step: Step, restrictions: Mapping[int, Restrictions]) -> None:
        self.last_step = step.number
        for handle in step.removed:
            self._sequences.remove(handle)
            self._counts.leave(handle)
            self._restrictions.pop(handle, None)
            self._eviction.remove(handle)
            if self._drafter is not None:
                self._drafter.remove(handle)
        self._restrictions |= restrictions
        for joining in step.new_sequences:
            found = restrictions.get(joining.sequence)
            new = joining if found is None else replace(joining, sampling=found.sampling)
            sequence = self._sequences.add(new, None if new.adapter_id is None else self.adapters[new.adapter_id])
            self._eviction.add(sequence)
            if new.sampling.penalises:
                self._counts.join(new.sequence, sequence.tokens, sequence.num_prompt)
        for update in step.table_updates:
            self._sequences.grow(update.sequence, update.group, update.slots)

    def _begin(self, copies: Sequence[Copy], step: int) -> None:
        """Begins copies in their order. Copies within the device wait for their slots first."""
        begun = 0
        try:
            for within, members in groupby(copies, key=lambda copy: copy.within_device):
                run = list(members)
                if within:
                    if self.tiers.busy:
                        self._wait(*_slots_of(run))
                    self._clock.begin()
                    self._copy(run, step)
                else:
                    for copy in run:
                        if copy.target_tier is Tier.DEVICE:
                            self.pools.mark_written(copy.group, [copy.target], step)
                    self.tiers.begin(run, self._copy_ended)
                begun += len(run)
        except Exception:
            for copy in copies[begun:]:
                if not copy.within_device:
                    self._copy_ended(copy, False)
            raise

    def _wait(self, reads: Iterable[SlotRef], writes: Iterable[SlotRef]) -> None:
        with self._clock.waiting():
            self.tiers.wait(reads, writes)

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
                for k_cache, v_cache in pool.pairs:
                    copy_blocks(k_cache, v_cache, sources, targets)
                self.pools.mark_written(group, [copy.target for copy in chosen], step)


def rows_begin(sequences: Sequence[SequenceState], drafts: Mapping[int, Sequence[int]]) -> Iterator[int]:
    """Yields where the rows of each sampling sequence begin: a sequence has a row, and a row for each of its drafts."""
    row = 0
    for sequence in sequences:
        yield row
        row += 1 + len(drafts.get(sequence.handle, ()))


def disjoint_runs(copies: Sequence[Copy]) -> list[list[Copy]]:
    """Splits copies, in order, into runs in which no target is a source or target of another copy."""
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


def _failed(
    sequences: Sequence[SequenceState],
    accepted: Sequence[int],
    restricted: Mapping[int, Sequence[RowRestrictions | None]],
) -> frozenset[int]:
    """Returns the sequences whose grammar failed at the last of their rows that count."""
    last = {
        s.handle: restricted[s.handle][n - 1]
        for s, n in zip(sequences, accepted, strict=True)
        if s.handle in restricted
    }
    return frozenset(handle for handle, row in last.items() if row is not None and row.failed)


def _slots_of(copies: Sequence[Copy]) -> tuple[list[SlotRef], list[SlotRef]]:
    """Returns the slots that copies within the device read and write."""
    reads = [(Tier.DEVICE, copy.group, copy.source) for copy in copies if copy.source]
    return reads, [(Tier.DEVICE, copy.group, copy.target) for copy in copies]


def _joining_reads(step: Step, block_size: int) -> list[SlotRef]:
    """Returns the blocks that sequences have computed when they join."""
    return [
        (Tier.DEVICE, group, slot)
        for new in step.new_sequences
        for group, table in enumerate(new.tables)
        for slot in table[: -(-new.num_computed_tokens // block_size)]
    ]


def _evicting_writes(step: Step, evicting: Sequence[SequenceState]) -> list[SlotRef]:
    """Returns the blocks to which sequences may move kept tokens; models with policies have one layer group."""
    return [
        (Tier.DEVICE, 0, slot)
        for sequence in evicting
        for slot in (*sequence.tables[0].tolist(), *step.evicting.get(sequence.handle, ()))
    ]


def _written(batch: HostBatch) -> list[SlotRef]:
    """Returns the blocks that get new tokens."""
    groups = enumerate(np.unique(slots).tolist() for slots in batch.written_slots)
    return [(Tier.DEVICE, group, slot) for group, slots in groups for slot in slots]


def _logprobs(result: SampleResult) -> dict[int, Logprobs]:
    """Returns log-probabilities by row, with the most alternatives that any row asked for."""
    if result.logprobs is None or result.top_ids is None or result.top_logprobs is None:
        return {}
    columns: tuple[Tensor, ...] = (result.logprobs, result.top_ids, result.top_logprobs)
    rows = zip(result.logprob_rows, *(column.tolist() for column in columns), strict=True)
    return {row: _possible(chosen, ids, values) for row, chosen, ids, values in rows}


def _prompt_logprobs(prompt: ScoredPrompt, scored: Sequence[Tensor]) -> PromptLogprobs:
    rows = zip(*(column.tolist() for column in scored), strict=True)
    logprobs = tuple(Logprobs(chosen, tuple(ids), tuple(values), rank) for chosen, rank, ids, values in rows)
    return PromptLogprobs(prompt.sequence.handle, prompt.position, logprobs)


def _possible(chosen: float, ids: Sequence[int], values: Sequence[float]) -> Logprobs:
    """Returns the log-probabilities without forbidden alternatives, which come last."""
    count = sum(value > -math.inf for value in values)
    return Logprobs(chosen, tuple(ids[:count]), tuple(values[:count]))
