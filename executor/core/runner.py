"""One step in, one outcome out. Owns the running set, the pools and the device."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import structlog
import torch
from torch import Tensor

from executor.batch import Work, pack
from executor.cache.pool import KvPools
from executor.cache.tiers.copier import Ended
from executor.cache.tiers.order import Place
from executor.cache.tiers.tiers import Tiers
from executor.core.sampler import Choice, Row, TokenCounts, sample
from executor.core.state import Running, RunningSet, tokens_due
from executor.core.timing import Clock, Span
from executor.core.transfer import to_device
from executor.core.validation import Limits, check_copies, check_step
from executor.errors import InvalidStepError
from executor.eviction.engine import TokenEviction
from executor.models.load import Model
from executor.step import Copy, Evicted, Logprobs, Outcome, Sampled, Step, Tier
from kernels.copy_blocks.launch import copy_blocks
from protos.kvcommon.eviction import Layout

log = structlog.get_logger()


@dataclass(frozen=True)
class Pending:
    """A launched step. `result` waits for the device; call it once, in the order of the steps.

    tickets: of its copies within the device. waited: seconds in which its launch waited for other copies.
    """

    number: int
    num_tokens: int
    tickets: tuple[int, ...]
    sequences: tuple[Running, ...]
    choice: Choice | None
    evicted: tuple[Evicted, ...]
    span: Span
    waited: float = 0.0

    def result(self) -> Outcome:
        """The outcome; marks sequences that sampled a stop id."""
        compute, idle = self.span.seconds()
        sampled = () if self.choice is None else tuple(_collect(self.sequences, self.choice))
        compute, idle = max(0.0, compute - self.waited), idle + self.waited
        return Outcome(self.number, sampled, self.num_tokens, compute, idle, self.tickets, self.evicted)


class Runner:
    """Not thread-safe: one thread launches and collects. tiers: below the device; None for none."""

    def __init__(self, model: Model, pools: KvPools, tiers: Tiers | None = None) -> None:
        self.model = model
        self.pools = pools
        self.tiers = tiers or Tiers(pools)
        self.last_step = 0
        self._running = RunningSet()
        self._counts: dict[int, TokenCounts] = {}
        self._eviction = TokenEviction(pools, model.rotary, model.device)
        # Room for more than most ever run: a decoder that has taken notes of the place begins anew when it moves.
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
        """What the model can carry."""
        return Layout(self.pools.block_size, self._limits.windows, self.model.rotary is not None)

    @property
    def overlaps(self) -> bool:
        """Whether a step can be launched while the one before still runs."""
        return self.model.device.type == "cuda"

    @property
    def num_sequences(self) -> int:
        """Sequences in the running set."""
        return len(self._running)

    def prepare(self) -> None:
        """Does beforehand what else the first steps would wait for."""
        self.model.forward.prepare(self.pools, self._last_tokens)

    def clear(self) -> None:
        """Empties the running set; the pools keep what they hold."""
        self._running.clear()
        self._eviction.clear()
        self._counts.clear()
        self._clock.clear()

    @torch.inference_mode()
    def launch(
        self, step: Step, prepared: Callable[[], None] = lambda: None, ended: Ended = lambda _copy, _good: None
    ) -> Pending:
        """Applies a step and starts its work. Raises ExecutorError, with nothing changed, when it is not valid.

        prepared: called when this thread has nothing to do for a while, perhaps more than once, perhaps never.
        ended: told of each copy that is not within the device, once, in another thread; also when this raises another
        error than ExecutorError.
        """
        check_step(step, self.last_step, self._running, self._limits)
        span = self._clock.start()
        waited = self._begin(step.copies, step.number, ended, prepared)
        self._apply(step)
        sequences, counts = [], []
        for sequence in self._running:
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
            waited += self._wait(reads, _evicting_writes(step, sequences), prepared)
        evicted = [
            self._eviction.evict(one, step.evicting.get(one.handle), step.number)
            for one in sequences
            if one.policy is not None
        ]
        counted = self._eviction.counted(sequences, counts)
        work = pack(sequences, counts, self._last_tokens, self.pools.block_size, len(self._limits.windows), counted)
        if self.tiers.busy:
            waited += self._wait((), _written(work), prepared)
        for group, slots in enumerate(work.written):
            self.pools.mark_written(group, slots, step.number)
        choice = self._compute(sequences, counts, work, prepared) if sequences else None
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.computed += count
            sequence.kept += count
            sequence.hole = None
        for sequence in work.sampling:
            sequence.known += 1
        span.end()
        return Pending(
            number=step.number,
            num_tokens=work.num_tokens,
            tickets=tuple(copy.ticket for copy in step.copies if copy.within_device),
            sequences=work.sampling,
            choice=choice,
            evicted=tuple(filter(None, evicted)),
            span=span,
            waited=waited,
        )

    @torch.inference_mode()
    def transfer(self, copies: Sequence[Copy], ended: Ended) -> None:
        """Begins copies, and overwrites slots, that no step asks for, behind all steps launched before.

        ended: told of each, once, in whatever thread; those within the device have run by then.
        """
        possible = []
        for copy in copies:
            try:
                check_copies((copy,), self._limits, zeros=True)
                possible.append(copy)
            except InvalidStepError as error:
                log.warning("a copy is not possible here", cause=str(error))
                ended(copy, False)
        within = [copy for copy in possible if copy.within_device]
        good = False
        try:
            # As written after the last step: nobody may take what is there for what a step before left.
            self._begin(possible, self.last_step + 1, ended)
            good = True
        finally:
            for copy in within:
                ended(copy, good)

    def _apply(self, step: Step) -> None:
        self.last_step = step.number
        for handle in step.removed:
            self._running.remove(handle)
            self._counts.pop(handle, None)
            self._eviction.remove(handle)
        for joining in step.joining:
            sequence = self._running.add(joining)
            self._eviction.add(sequence)
            if joining.sampling.penalises:
                self._counts[joining.sequence] = self._count(sequence)
        for growth in step.growth:
            self._running.grow(growth.sequence, growth.group, growth.slots)
        # More than once when very many join together.
        while self._running.rows > len(self._last_tokens):
            self._last_tokens = torch.cat([self._last_tokens, torch.zeros_like(self._last_tokens)])

    def _count(self, sequence: Running) -> TokenCounts:
        tokens = to_device(sequence.tokens, self.model.device)
        return TokenCounts.of(tokens[: sequence.num_prompt], tokens[sequence.num_prompt :], self.model.vocab_size)

    def _begin(
        self, copies: Sequence[Copy], step: int, ended: Ended, prepared: Callable[[], None] = lambda: None
    ) -> float:
        """Begins copies in their order; those within the device have run when it returns the seconds that it waited."""
        waited, begun = 0.0, 0
        try:
            for within, members in groupby(copies, key=lambda copy: copy.within_device):
                run = list(members)
                if within:
                    if self.tiers.busy:
                        waited += self._wait(*_places(run), prepared)
                    self._copy(run, step)
                else:
                    for copy in run:
                        if copy.target_tier is Tier.DEVICE:
                            self.pools.mark_written(copy.group, [copy.target], step)
                    self.tiers.begin(run, ended)
                begun += len(run)
        except Exception:
            for copy in copies[begun:]:
                if not copy.within_device:
                    ended(copy, False)
            raise
        return waited

    def _wait(self, reads: Iterable[Place], writes: Iterable[Place], prepared: Callable[[], None]) -> float:
        prepared()
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

    def _compute(
        self, sequences: Sequence[Running], counts: Sequence[int], work: Work, placed: Callable[[], None]
    ) -> Choice | None:
        """Runs the model and samples; what comes back can be read when the step is over."""
        scores = self.model.forward.scores(work, self.pools, placed)
        self._eviction.observe(sequences, counts, work.counted, scores.attention)
        if not work.sampling:
            return None
        rows = [
            Row(sequence.sampling, sequence.known - sequence.num_prompt, self._counts.get(sequence.handle))
            for sequence in work.sampling
        ]
        choice = sample(scores.logits, rows, scores.best)
        self._last_tokens.index_copy_(0, scores.targets, choice.ids)
        for index, row in enumerate(rows):
            if row.counts is not None:
                row.counts.add(choice.ids[index : index + 1])
        # Asked for here: after the next step is launched, it would wait for that one too.
        return choice.on_host()


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


def _places(copies: Sequence[Copy]) -> tuple[list[Place], list[Place]]:
    """What copies within the device read and write."""
    reads = [(Tier.DEVICE, copy.group, copy.source) for copy in copies if copy.source]
    return reads, [(Tier.DEVICE, copy.group, copy.target) for copy in copies]


def _joining_reads(step: Step, block_size: int) -> list[Place]:
    """Blocks that sequences find computed when they join."""
    return [
        (Tier.DEVICE, group, slot)
        for joining in step.joining
        for group, table in enumerate(joining.tables)
        for slot in table[: -(-joining.num_computed_tokens // block_size)]
    ]


def _evicting_writes(step: Step, sequences: Sequence[Running]) -> list[Place]:
    """Blocks in which sequences may move what they keep: policies go with one layer group."""
    evicting = [one for one in sequences if one.policy is not None and (one.evicts or one.handle in step.evicting)]
    return [
        (Tier.DEVICE, 0, slot)
        for one in evicting
        for slot in (*one.tables[0].tolist(), *step.evicting.get(one.handle, ()))
    ]


def _written(work: Work) -> list[Place]:
    """Blocks that get new tokens."""
    groups = enumerate(np.unique(slots).tolist() for slots in work.written)
    return [(Tier.DEVICE, group, slot) for group, slots in groups for slot in slots]


def _collect(sequences: Sequence[Running], choice: Choice) -> list[Sampled]:
    logprobs = _logprobs(sequences, choice)
    sampled = []
    for index, (sequence, token) in enumerate(zip(sequences, choice.ids.tolist(), strict=True)):
        # On a device that runs ahead, a sequence computes one more token before its stop is known here.
        if sequence.stopped:
            continue
        sequence.stopped = token in sequence.sampling.stop_token_ids
        sampled.append(Sampled(sequence.handle, token, sequence.stopped, logprobs.get(index)))
    return sampled


def _logprobs(sequences: Sequence[Running], choice: Choice) -> dict[int, Logprobs]:
    if choice.logprobs is None or choice.top_ids is None or choice.top_logprobs is None:
        return {}
    columns: tuple[Tensor, ...] = (choice.logprobs, choice.top_ids, choice.top_logprobs)
    result = {}
    for row, chosen, ids, values in zip(choice.logprob_rows, *(column.tolist() for column in columns), strict=True):
        count = sequences[row].sampling.num_logprobs or 0
        result[row] = Logprobs(chosen, tuple(ids[:count]), tuple(values[:count]))
    return result
