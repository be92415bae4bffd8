"""One step in, one outcome out. Owns the running set, the pools and the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from executor.batch import Work, pack
from executor.eviction.engine import TokenEviction
from executor.kv_pool import KvPools
from executor.model import Model
from executor.running import Running, RunningSet, tokens_due
from executor.sampler import Choice, Row, TokenCounts, sample
from executor.step import Copy, Evicted, Logprobs, Outcome, Sampled, Step
from executor.timing import Clock, Span
from executor.transfer import to_device
from executor.validation import Limits, check_step
from kernels.copy_blocks.launch import copy_blocks
from protos.kvcache.eviction import Layout


@dataclass(frozen=True)
class Pending:
    """A launched step. `result` waits for the device; call it once, in the order of the steps."""

    number: int
    num_tokens: int
    tickets: tuple[int, ...]
    sequences: tuple[Running, ...]
    choice: Choice | None
    evicted: tuple[Evicted, ...]
    span: Span

    def result(self) -> Outcome:
        """The outcome; marks sequences that sampled a stop id."""
        compute, idle = self.span.seconds()
        sampled = () if self.choice is None else tuple(_collect(self.sequences, self.choice))
        return Outcome(self.number, sampled, self.num_tokens, compute, idle, self.tickets, self.evicted)


class Runner:
    """Not thread-safe: one thread launches and collects."""

    def __init__(self, model: Model, pools: KvPools) -> None:
        self.model = model
        self.pools = pools
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
            num_blocks=pools.num_blocks,
            block_size=pools.block_size,
            windows=tuple(group.shape.window for group in model.groups),
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

    def kept_positions(self, handle: int) -> Tensor:
        """[L, Hkv, T] int64: which tokens of a sequence with a policy its slots hold, by their place in all of it."""
        sequence = self._running.get(handle)
        assert sequence is not None
        return self._eviction.positions(sequence)

    @torch.inference_mode()
    def launch(self, step: Step, prepared: Callable[[], None] = lambda: None) -> Pending:
        """Applies a step and starts its work. Raises ExecutorError, with nothing changed, when it is not valid.

        prepared: called when only the device has something to do, if the step computes anything.
        """
        check_step(step, self.last_step, self._running, self._limits)
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
        span = self._clock.start()
        self._copy(step.copies, step.number)
        evicted = [self._eviction.evict(one, step.evicting.get(one.handle), step.number) for one in sequences]
        counted = self._eviction.counted(sequences, counts)
        work = pack(sequences, counts, self._last_tokens, self.pools.block_size, len(self._limits.windows), counted)
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
            tickets=step.tickets,
            sequences=work.sampling,
            choice=choice,
            evicted=tuple(filter(None, evicted)),
            span=span,
        )

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

    def _copy(self, copies: Sequence[Copy], step: int) -> None:
        for run in disjoint_runs(copies):
            for group, members in groupby(sorted(run, key=lambda copy: copy.group), key=lambda copy: copy.group):
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
