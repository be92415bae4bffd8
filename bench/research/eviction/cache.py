"""A prompt computed once, and the tokens that each policy keeps of it, by the executor's own engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from executor.batch import HostBatch, ScoredSequence, SequenceState, build_batch
from executor.cache.pool import KvPools
from executor.eviction.engine import TokenEviction
from executor.models.forward import Model
from executor.step import Sampling
from kernels.scores import SequenceScores
from protos.kvcommon.eviction import Layout, Policy

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Computed:
    """Results of n tokens computed together. logits: [n, V] float32, for each next token. attention: if counted."""

    logits: Tensor
    attention: SequenceScores | None


class Cache:
    """Pools with two tables, for a whole prompt and for a policy's kept tokens; both have room for later tokens."""

    def __init__(self, model: Model, tokens: int) -> None:
        """tokens: capacity of each table."""
        self.model = model
        blocks = -(-tokens // BLOCK_SIZE)
        self.pools = KvPools(model.groups, 2 * blocks, BLOCK_SIZE, model.dtype, model.device)
        self.engine = TokenEviction(self.pools, model.rotary, model.device)
        self.whole = tuple(range(1, blocks + 1))
        self.private = tuple(range(blocks + 1, 2 * blocks + 1))
        self._last_tokens = torch.zeros(1, dtype=torch.int64, device=model.device)
        self._prompt: list[int] = []
        self._attention: dict[tuple[int, int], SequenceScores] = {}
        self._step = 0

    @property
    def layout(self) -> Layout:
        """The layout that policies are parsed for."""
        windows = tuple(group.shape.window for group in self.model.groups)
        return Layout(BLOCK_SIZE, windows, self.model.rotary is not None)

    def sequence(self, tokens: Sequence[int], policy: Policy | None = None) -> SequenceState:
        """A sequence in the table of the whole prompt, with no tokens computed."""
        tables = [np.asarray(self.whole, dtype=np.int32)]
        ids = np.asarray(tokens, dtype=np.int64)
        sequence = SequenceState(0, ids, len(ids), 0, len(ids), 0, tables, Sampling(), policy=policy)
        sequence.compacted = policy is not None and policy.compacted
        self.engine.clear()
        self.engine.add(sequence)
        return sequence

    def work(self, sequence: SequenceState, tokens: Sequence[int], counted: Sequence[ScoredSequence] = ()) -> HostBatch:
        """The batch that computes the next tokens, with all their logits."""
        sequence.tokens = np.concatenate([sequence.tokens[: sequence.computed], np.asarray(tokens, dtype=np.int64)])
        work = build_batch([sequence], [len(tokens)], self._last_tokens, BLOCK_SIZE, 1, counted)
        return replace(work, rows=np.arange(len(tokens)))

    def compute(
        self, sequence: SequenceState, tokens: Sequence[int], counted: Sequence[ScoredSequence] = ()
    ) -> Computed:
        """Computes the next tokens of a sequence."""
        output = self.model.forward.prepare(self.work(sequence, tokens, counted), self.pools)()
        sequence.computed += len(tokens)
        sequence.kept += len(tokens)
        return Computed(output.logits.float(), output.scores[0] if output.scores else None)

    def prefill(self, tokens: Sequence[int]) -> int:
        """Computes a prompt, counting the attention of all its queries; returns the likeliest next token."""
        self._prompt = list(tokens)
        self._attention.clear()
        self._attention[0, len(tokens)], logits = self._count(self.sequence(self._prompt), tokens)
        return int(logits.argmax())

    def _count(self, sequence: SequenceState, tokens: Sequence[int]) -> tuple[SequenceScores, Tensor]:
        """The attention of all these queries, and the last query's logits, [V]."""
        work = self.work(sequence, tokens, [ScoredSequence(0, len(tokens), squares=True)])
        # Logits of all tokens of a long prompt would take long.
        output = self.model.forward.prepare(replace(work, rows=work.rows[-1:]), self.pools)()
        return output.scores[0], output.logits[0]

    def whole_prompt(self) -> SequenceState:
        """The prompt with nothing evicted, ready to compute more."""
        sequence = self.sequence(self._prompt)
        sequence.computed = sequence.kept = len(self._prompt)
        return sequence

    def evicted(self, policy: Policy) -> SequenceState:
        """The prompt's tokens that a policy keeps after it has seen the whole prompt, ready to compute more."""
        prompt = len(self._prompt)
        sequence = self.sequence(self._prompt, policy)
        steps: list[tuple[int, list[ScoredSequence]]] = []
        while sequence.computed < prompt:
            count = policy.room(sequence.kept, sequence.computed, prompt) or prompt
            steps.append((count, self.engine.scored([sequence], [count])))
            sequence.computed = sequence.kept = sequence.computed + count
        ends = itertools.accumulate(count for count, _ in steps)
        attention = [
            [self._rows(end, entry) for entry in counted] for end, (_, counted) in zip(ends, steps, strict=True)
        ]
        # The computation above may have used a different sequence of the engine; this sequence starts afresh.
        self.engine.clear()
        self.engine.add(sequence)
        for (count, _), scores in zip(steps, attention, strict=True):
            self.engine.observe([sequence], [count], scores)
        if policy.bounds is not None:
            self.engine.set_window(sequence, int(self.engine.wanted_window(sequence)))
        self.evict(sequence, self.private)
        return sequence

    def set_window(self, sequence: SequenceState, tokens: int) -> None:
        """Sets the length of an adaptive window, which gets its slots at once. The sequence has evicted before."""
        self.engine.set_window(sequence, tokens)
        sequence.tables[0] = np.asarray(self.private, dtype=np.int32)

    def evict(self, sequence: SequenceState, table: tuple[int, ...]) -> None:
        """Evicts as the policy says. table: the blocks that kept tokens move to, () if they stay."""
        self._step += 1
        self.engine.evict(sequence, table, self._step)

    def _rows(self, end: int, counted: ScoredSequence) -> SequenceScores:
        """Computes the last queries before `end` again for their scores; K and V stay the same up to rounding."""
        first = end - counted.rows
        if (first, end) not in self._attention:
            sequence = self.sequence(self._prompt)
            sequence.computed = sequence.kept = first
            self._attention[first, end], _ = self._count(sequence, self._prompt[first:end])
        attention = self._attention[first, end]
        return attention if counted.squares else replace(attention, squares=None)
