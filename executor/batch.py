"""One step's work, packed without padding: on the host, and on the device with a PagedBatch per layer group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.step import NewSequence, Sampling
from executor.transfer import ALIGNMENT, send
from kernels.paged_attention.batch import PagedBatch
from kernels.scores import ScoreAccumulator
from protos.kvcommon.eviction import Policy
from protos.rpc import tracing
from protos.rpc.spans import Span

Int32s = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]
Slots = np.ndarray[tuple[int], np.dtype[np.int32]]

_NO_DRAFTS: Mapping[int, Sequence[int]] = {}


@dataclass(frozen=True)
class AdapterSpan:
    """The packed tokens from `begin` to `end` that use one adapter, given as `adapter` in the model's prepared form."""

    adapter: Any
    begin: int
    end: int


@dataclass(eq=False)
class SequenceState:
    """One running sequence. Three lengths in tokens: kept <= computed <= known. Its block tables hold the kept tokens.

    tokens: the ids it joined with, [joined] int64; later ids are on the device only.
    known: tokens that exist, sampled ones included. computed: leading tokens whose K and V were computed.
    kept: computed tokens that were not evicted: they use the first `kept` slots. reuse_position: a free position among
    the first kept + 1 slots, which the next token fills; None for none. row: where the device keeps its last token.
    tables: per layer group, the slots of its blocks, [M] int32. cached: tokens that were computed when it joined.
    adapter: its adapter in the model's prepared form, None for none. A sequence keeps an adapter that is unloaded.
    policy: its token eviction policy. evicts: whether it has begun to evict. compacted: whether the kept tokens get new
    positions. continuation: ids that may follow `tokens`. span: covers its time in the batch.
    """

    handle: int
    tokens: Int64s
    num_prompt: int
    computed: int
    known: int
    row: int
    tables: list[Slots]
    sampling: Sampling
    adapter: Any = None
    policy: Policy | None = None
    kept: int = 0
    evicts: bool = False
    compacted: bool = False
    reuse_position: int | None = None
    stopped: bool = False
    cached: int = 0
    continuation: tuple[int, ...] = ()
    span: Span = tracing.OFF

    @property
    def table_blocks(self) -> int:
        """Length of its shortest block table."""
        return min(map(len, self.tables))

    @classmethod
    def of(cls, new: NewSequence, row: int, adapter: Any = None) -> SequenceState:
        """Returns the state in which a sequence joins."""
        return cls(
            handle=new.sequence,
            tokens=np.asarray(new.token_ids, dtype=np.int64),
            num_prompt=new.num_prompt_tokens,
            computed=new.num_computed_tokens,
            known=len(new.token_ids),
            row=row,
            tables=[np.asarray(slots, dtype=np.int32) for slots in new.tables],
            sampling=new.sampling,
            adapter=adapter,
            policy=new.policy,
            compacted=new.policy is not None and new.policy.compacted,
            kept=new.num_computed_tokens,
            cached=new.num_computed_tokens,
            continuation=new.continuation,
        )


@dataclass(frozen=True)
class ScoredSequence:
    """A sequence of a batch whose eviction policy wants its attention scores.

    sequence: its index in the batch. rows: how many of its last queries of this step count, at least 1.
    squares: whether the squares of the weights are wanted. accumulator: where a forward pass may sum the weights.
    """

    sequence: int
    rows: int
    squares: bool = False
    accumulator: ScoreAccumulator | None = None


@dataclass(frozen=True)
class ScoredPrompt:
    """Tokens of a prompt whose log-probabilities are wanted: ids [N] int64, from a position on.

    rows: [N] int64, packed indices of the tokens before them, and later the indices of their logits.
    """

    sequence: SequenceState
    position: int
    ids: Int64s
    rows: Int64s


@dataclass(frozen=True)
class ScoredRows:
    """The scored queries of a batch as a separate batch, on the device.

    entries: its S sequences. rows: [R] int64, packed indices of the queries. counts: [S] int32, queries per sequence.
    paged: for the model's only layer group.
    """

    entries: tuple[ScoredSequence, ...]
    rows: Tensor
    counts: Tensor
    paged: PagedBatch


@dataclass(frozen=True)
class DeviceBatch:
    """One step's packed tokens on the device, in the order of its sequences.

    token_ids: [T] int64. input_token_rows: [T] int64, the row of `last_tokens` with a token's id, -1 if token_ids has
    it. positions: [T] int64, by which queries and keys are rotated. slot_mappings: per layer group, [T] int64, where
    keys and values are stored. paged: per layer group. rows: [R] int64, packed indices of the tokens whose logits are
    wanted. output_token_rows: [S_R] int64, for each row that samples: the row of `last_tokens` for the sampled token.
    last_tokens: [rows of the sequence table] int64. scored: None if no attention scores are wanted.
    adapters: spans that do not overlap, in order. row_adapters: the spans in terms of `rows` only.
    """

    token_ids: Tensor
    input_token_rows: Tensor
    positions: Tensor
    slot_mappings: tuple[Tensor, ...]
    paged: tuple[PagedBatch, ...]
    rows: Tensor
    output_token_rows: Tensor
    last_tokens: Tensor
    scored: ScoredRows | None
    adapters: tuple[AdapterSpan, ...] = ()
    row_adapters: tuple[AdapterSpan, ...] = ()

    def ids(self) -> Tensor:
        """Returns token ids, [T] int64, including those that only the device knows."""
        known = self.last_tokens[self.input_token_rows.clamp(min=0)]
        return torch.where(self.input_token_rows < 0, self.token_ids, known)


@dataclass(frozen=True)
class HostBatch:
    """What a step computes, on the host; its arrays as in DeviceBatch.

    cache_positions: [T] int64, how many kept tokens each token follows. This is the token's position along its block
    tables, unless the token reuses a slot; after an eviction, its position in the sequence is larger.
    query_start: [S + 1] int32. seq_lens: [S] int32, slots in use.
    tables: per layer group, [S, M] int32. sampling: the sequences whose last known token is computed now; each has a
    row for that token and one for each of its drafts.
    written_slots: per layer group, [T] int64, the slots of the blocks that get new tokens. prompts: in order,
    the scored prompts, each with its own indices into `rows`: these rows do not sample. sample_rows: [S_R] int64,
    indices into `rows` of the rows that sample; None for all.
    last_tokens: [rows of the sequence table] int64 on the device. scored: the sequences whose scores are wanted.
    """

    token_ids: Int64s
    input_token_rows: Int64s
    positions: Int64s
    cache_positions: Int64s
    query_start: Int32s
    seq_lens: Int32s
    rows: Int64s
    output_token_rows: Int64s
    slot_mappings: tuple[Int64s, ...]
    tables: tuple[Int32s, ...]
    sampling: tuple[SequenceState, ...]
    written_slots: tuple[Int64s, ...]
    last_tokens: Tensor
    scored: tuple[ScoredSequence, ...]
    adapters: tuple[AdapterSpan, ...] = ()
    prompts: tuple[ScoredPrompt, ...] = ()
    sample_rows: Int64s | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """Sequences that compute something."""
        return len(self.seq_lens)

    def to_device(self, *, tokens: int = 0, sequences: int = 0, into: Tensor | None = None) -> DeviceBatch:
        """Sends the batch to the device in one copy, to the bytes `into` or to new memory.

        Pads the batch to `tokens` tokens with tokens without a sequence, and to `sequences` sequences with sequences
        without tokens and rows of token 0. If the batch has no more than that, the addresses in `into` of token_ids,
        input_token_rows, positions, slot_mappings, query_start, seq_lens and rows depend only on these two numbers.
        """
        added, extra = max(0, tokens - self.num_tokens), max(0, sequences - self.num_sequences)
        query_start, seq_lens = _extended(self.query_start, extra, self.num_tokens), _extended(self.seq_lens, extra)
        token_ids, input_token_rows, positions, starts, lengths, *rest = send(
            [
                _extended(self.token_ids, added),
                _extended(self.input_token_rows, added, -1),
                _extended(self.positions, added),
                query_start,
                seq_lens,
                *(_extended(slots, added, -1) for slots in self.slot_mappings),
                _extended(self.rows, max(0, sequences - len(self.rows))),
                self.output_token_rows,
                *(_extended(table, extra) for table in self.tables),
                *self._scored_arrays(),
            ],
            self.last_tokens.device,
            into,
        )
        groups = len(self.tables)
        slot_mappings, (rows, output_token_rows, *rest) = rest[:groups], rest[groups:]
        query_lens = np.diff(query_start)
        paged = [
            PagedBatch(
                query_start=starts,
                seq_lens=lengths,
                block_tables=tables,
                max_query_len=int(query_lens.max(initial=1)),
                max_seq_len=int(seq_lens.max(initial=1)),
                query_lens=tuple(query_lens.tolist()),
                host_seq_lens=tuple(seq_lens.tolist()),
            )
            for tables in rest[:groups]
        ]
        return DeviceBatch(
            token_ids=token_ids,
            input_token_rows=input_token_rows,
            positions=positions,
            slot_mappings=tuple(slot_mappings),
            paged=tuple(paged),
            rows=rows,
            output_token_rows=output_token_rows,
            last_tokens=self.last_tokens,
            scored=self._scored_rows(*rest[groups:]) if self.scored else None,
            adapters=self.adapters,
            row_adapters=self._row_adapters(),
        )

    def _row_adapters(self) -> tuple[AdapterSpan, ...]:
        bounds = ((span.adapter, *self.rows.searchsorted((span.begin, span.end)).tolist()) for span in self.adapters)
        return tuple(AdapterSpan(adapter, begin, end) for adapter, begin, end in bounds if begin < end)

    def _scored_arrays(self) -> list[np.ndarray]:
        """Returns what ScoredRows has on the device: rows, counts, query_start, seq_lens, block_tables."""
        if not self.scored:
            return []
        chosen = [entry.sequence for entry in self.scored]
        counts = np.asarray([entry.rows for entry in self.scored], dtype=np.int32)
        starts = np.zeros(len(chosen) + 1, dtype=np.int32)
        counts.cumsum(out=starts[1:])
        ends = self.query_start[1:][chosen].astype(np.int64)
        rows = np.arange(starts[-1]) + (ends - starts[1:]).repeat(counts)
        return [rows, counts, starts, self.seq_lens[chosen], self.tables[0][chosen]]

    def _scored_rows(self, rows: Tensor, counts: Tensor, starts: Tensor, lengths: Tensor, tables: Tensor) -> ScoredRows:
        query_lens = tuple(entry.rows for entry in self.scored)
        seq_lens = tuple(int(self.seq_lens[entry.sequence]) for entry in self.scored)
        paged = PagedBatch(
            query_start=starts,
            seq_lens=lengths,
            block_tables=tables,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            query_lens=query_lens,
            host_seq_lens=seq_lens,
        )
        return ScoredRows(self.scored, rows, counts, paged)


def sent_bytes(tokens: int, sequences: int, blocks: int, groups: int) -> int:
    """Returns how many bytes `HostBatch.to_device` sends at most for these tokens and sequences.

    blocks: of each sequence. Each sequence wants one row, and the scores of all its tokens.
    """
    parts = 12 + 2 * groups
    numbers = 5 * sequences + 2 + (groups + 1) * sequences * blocks
    return ALIGNMENT * parts + 8 * ((4 + groups) * tokens + 2 * sequences) + 4 * numbers


def build_batch(
    sequences: Sequence[SequenceState],
    counts: Sequence[int],
    last_tokens: Tensor,
    block_size: int,
    num_groups: int,
    scored: Sequence[ScoredSequence] = (),
    drafts: Mapping[int, Sequence[int]] = _NO_DRAFTS,
) -> HostBatch:
    """Builds the batch that computes counts[i] >= 1 tokens of sequences[i]. last_tokens: [rows] int64, on the device.

    scored: sequences whose attention scores are wanted. drafts: by handle, the tokens after the last known one, which
    are included in the sequence's count. Raises ValueError if `scored` asks for more than the batch has.
    """
    _check_scored(scored, counts, num_groups)
    query_lens = np.asarray(counts, dtype=np.int64)
    query_start = np.zeros(len(counts) + 1, dtype=np.int64)
    query_lens.cumsum(out=query_start[1:])
    first = np.asarray([sequence.computed for sequence in sequences], dtype=np.int64)
    kept = np.asarray([sequence.kept for sequence in sequences], dtype=np.int64)
    seq_lens = kept + query_lens
    total = int(query_start[-1])
    owner = np.arange(len(sequences)).repeat(query_lens)
    steps = np.arange(total) - query_start[owner]
    cache_positions = kept[owner] + steps
    # An eviction may leave one slot in the middle free. The sequence's only new token is stored there, not at the end,
    # and attends to all slots.
    write_positions = cache_positions.copy()
    for index, sequence in enumerate(sequences):
        if sequence.reuse_position is not None:
            write_positions[query_start[index]] = sequence.reuse_position
    compacted = np.asarray([sequence.compacted for sequence in sequences], dtype=bool)
    positions = np.where(compacted, kept, first)[owner] + steps

    state_rows = np.asarray([sequence.row for sequence in sequences], dtype=np.int64)
    ids, token_rows = np.zeros(total, dtype=np.int64), np.full(total, -1, dtype=np.int64)
    given = first < [len(sequence.tokens) for sequence in sequences]
    token_rows[query_start[:-1][~given]] = state_rows[~given]
    for index in np.flatnonzero(given).tolist():
        sequence, row, start = sequences[index], int(query_start[index]), int(first[index])
        wanted = counts[index] - len(drafts.get(sequence.handle, ()))
        ids[row : row + wanted] = sequence.tokens[start : start + wanted]
    if drafts:
        for sequence, end in zip(sequences, query_start[1:].tolist(), strict=True):
            drafted = drafts.get(sequence.handle, ())
            ids[end - len(drafted) : end] = drafted

    mappings, tables, written = [], [], []
    for group in range(num_groups):
        table = _table([sequence.tables[group] for sequence in sequences], seq_lens, block_size)
        blocks = table[owner, write_positions // block_size].astype(np.int64)
        tables.append(table)
        written.append(blocks)
        mappings.append(blocks * block_size + write_positions % block_size)
    samples = np.flatnonzero(first + query_lens >= [sequence.known for sequence in sequences]).tolist()
    rows, output_rows = query_start[1:][samples] - 1, state_rows[samples]
    if drafts:
        own = np.asarray([1 + len(drafts.get(sequences[i].handle, ())) for i in samples], dtype=np.int64)
        output_rows = output_rows.repeat(own)
        rows = (rows + 1 - own.cumsum()).repeat(own) + np.arange(len(output_rows))
    prompts = _scored_prompts(sequences, query_start)
    sample_rows = None
    if prompts:
        every = np.sort(np.concatenate([rows, *(prompt.rows for prompt in prompts)]))
        sample_rows, rows = every.searchsorted(rows), every
        prompts = [replace(prompt, rows=every.searchsorted(prompt.rows)) for prompt in prompts]
    return HostBatch(
        token_ids=ids,
        input_token_rows=token_rows,
        positions=positions,
        cache_positions=cache_positions,
        query_start=query_start.astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        rows=rows,
        output_token_rows=output_rows,
        slot_mappings=tuple(mappings),
        tables=tuple(tables),
        sampling=tuple(sequences[i] for i in samples),
        written_slots=tuple(written),
        last_tokens=last_tokens,
        scored=tuple(scored),
        adapters=_adapter_spans(sequences, query_start),
        prompts=tuple(prompts),
        sample_rows=sample_rows,
    )


def _scored_prompts(sequences: Sequence[SequenceState], query_start: Int64s) -> list[ScoredPrompt]:
    """Returns the prompt tokens that follow tokens of this batch, for prompts whose log-probabilities are wanted."""
    prompts = []
    for index, sequence in enumerate(sequences):
        if sequence.sampling.num_prompt_logprobs is None:
            continue
        begin, first = int(query_start[index]), sequence.computed
        end = min(first + int(query_start[index + 1]) - begin, sequence.num_prompt - 1)
        if end > first:
            rows = np.arange(begin, begin + end - first)
            prompts.append(ScoredPrompt(sequence, first + 1, sequence.tokens[first + 1 : end + 1], rows))
    return prompts


def _adapter_spans(sequences: Sequence[SequenceState], query_start: Int64s) -> tuple[AdapterSpan, ...]:
    """Returns the tokens of each adapter; consecutive sequences of an adapter share a span."""
    spans: list[AdapterSpan] = []
    for index, sequence in enumerate(sequences):
        if sequence.adapter is None:
            continue
        begin, end = int(query_start[index]), int(query_start[index + 1])
        if spans and spans[-1].adapter is sequence.adapter and spans[-1].end == begin:
            begin = spans.pop().begin
        spans.append(AdapterSpan(sequence.adapter, begin, end))
    return tuple(spans)


def _table(tables: Sequence[Int32s], seq_lens: Int64s, block_size: int) -> Int32s:
    """[S, M] int32, as wide as the longest sequence needs."""
    blocks = -(-seq_lens // block_size)
    result = np.zeros((len(tables), int(blocks.max(initial=0))), dtype=np.int32)
    used = [table[:count] for table, count in zip(tables, blocks.tolist(), strict=True)]
    # All at once: an assignment per sequence would take three times as long.
    result[np.arange(result.shape[1]) < blocks[:, None]] = np.concatenate(used) if used else 0
    return result


def _extended(array: np.ndarray, extra: int, value: int = 0) -> np.ndarray:
    """Returns the array with `extra` more rows, filled with `value`."""
    return np.concatenate([array, np.full((extra, *array.shape[1:]), value, array.dtype)]) if extra else array


def _check_scored(entries: Sequence[ScoredSequence], counts: Sequence[int], groups: int) -> None:
    """Raises ValueError if entries ask for more than a batch of `counts` tokens per sequence has."""
    if entries and groups > 1:
        raise ValueError("scored: only models with one layer group compute attention scores")
    if len({entry.sequence for entry in entries}) < len(entries):
        raise ValueError("scored: a sequence is named twice")
    for entry in entries:
        if not 1 <= entry.rows <= counts[entry.sequence]:
            raise ValueError(f"scored: {entry.rows} rows of a sequence that computes {counts[entry.sequence]}")
