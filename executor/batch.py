"""Packs a step's work and sends it to the device at once: ids, positions, slots, one PagedBatch per layer group."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor.cache.pool import KvPools
from executor.core.state import Running
from executor.core.transfer import ALIGNMENT, send
from executor.eviction.policy import Attention
from executor.models.attention_counts import Counted, CountedRows, CountingAttention, check_counted
from kernels.paged_attention.launch import PagedBatch
from kernels.store_kv.launch import store_kv

Int32s = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Batch:
    """One step's packed tokens on the device, in the order of its sequences.

    token_ids: [T] int64. sources: [T] int64, where `last_tokens` has a token's id, -1 when token_ids has it.
    positions: [T] int64, by which queries and keys are rotated. slot_mappings: per group [T] int64. paged: per group.
    rows: [R] int64, packed indices of the tokens whose logits are wanted. targets: [R] int64, where `last_tokens` takes
    what is sampled from them. last_tokens: [rows of the running set] int64. counted: None when nothing is.
    """

    token_ids: Tensor
    sources: Tensor
    positions: Tensor
    slot_mappings: tuple[Tensor, ...]
    paged: tuple[PagedBatch, ...]
    rows: Tensor
    targets: Tensor
    last_tokens: Tensor
    counted: CountedRows | None

    def ids(self) -> Tensor:
        """[T] int64, those included that only the device knows."""
        return torch.where(self.sources < 0, self.token_ids, self.last_tokens[self.sources.clamp(min=0)])


@dataclass(frozen=True)
class Work:
    """What a step computes, on the host; its arrays as in Batch.

    slot_numbers: [T] int64, of each token's slot along its sequence's block tables; not its position once tokens were
    evicted. query_start: [S + 1] int32. seq_lens: [S] int32, slots in use. tables: per group [S, M] int32.
    sampling: sequences whose last known token is computed now, in the order of `rows`.
    written: per group, the blocks that get new tokens. last_tokens: on the device. counted: whose attention is wanted.
    """

    token_ids: Int64s
    sources: Int64s
    positions: Int64s
    slot_numbers: Int64s
    query_start: Int32s
    seq_lens: Int32s
    rows: Int64s
    targets: Int64s
    slot_mappings: tuple[Int64s, ...]
    tables: tuple[Int32s, ...]
    sampling: tuple[Running, ...]
    written: tuple[Int64s, ...]
    last_tokens: Tensor
    counted: tuple[Counted, ...]

    @property
    def num_tokens(self) -> int:
        """Packed tokens."""
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """Sequences that compute something."""
        return len(self.seq_lens)

    def place(self, *, padded: int = 0, into: Tensor | None = None) -> Batch:
        """Sends all of it to the device in one copy, to the bytes `into` or to new memory.

        padded: adds tokens that belong to no sequence, and sequences without tokens, until there are so many. For work
        of one token per sequence, the places in `into` of token_ids, sources, positions, slot_mappings, query_start and
        seq_lens depend on nothing else.
        """
        extra = max(0, padded - self.num_sequences)
        query_start, seq_lens = _extended(self.query_start, extra, self.num_tokens), _extended(self.seq_lens, extra)
        token_ids, sources, positions, starts, lengths, *rest = send(
            [
                _extended(self.token_ids, extra),
                _extended(self.sources, extra, -1),
                _extended(self.positions, extra),
                query_start,
                seq_lens,
                *(_extended(slots, extra, -1) for slots in self.slot_mappings),
                self.rows,
                self.targets,
                *(_extended(table, extra) for table in self.tables),
                *self._counted_arrays(),
            ],
            self.last_tokens.device,
            into,
        )
        groups = len(self.tables)
        slot_mappings, (rows, targets, *rest) = rest[:groups], rest[groups:]
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
        return Batch(
            token_ids=token_ids,
            sources=sources,
            positions=positions,
            slot_mappings=tuple(slot_mappings),
            paged=tuple(paged),
            rows=rows,
            targets=targets,
            last_tokens=self.last_tokens,
            counted=self._counted_rows(*rest[groups:]) if self.counted else None,
        )

    def _counted_arrays(self) -> list[np.ndarray]:
        """What CountedRows has on the device: rows, numbers, query_start, seq_lens, block_tables."""
        if not self.counted:
            return []
        chosen = [entry.sequence for entry in self.counted]
        numbers = np.asarray([entry.rows for entry in self.counted], dtype=np.int32)
        starts = np.zeros(len(chosen) + 1, dtype=np.int32)
        numbers.cumsum(out=starts[1:])
        ends = self.query_start[1:][chosen].astype(np.int64)
        rows = np.arange(starts[-1]) + (ends - starts[1:]).repeat(numbers)
        return [rows, numbers, starts, self.seq_lens[chosen], self.tables[0][chosen]]

    def _counted_rows(
        self, rows: Tensor, numbers: Tensor, starts: Tensor, lengths: Tensor, tables: Tensor
    ) -> CountedRows:
        query_lens = tuple(entry.rows for entry in self.counted)
        seq_lens = tuple(int(self.seq_lens[entry.sequence]) for entry in self.counted)
        paged = PagedBatch(
            query_start=starts,
            seq_lens=lengths,
            block_tables=tables,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            query_lens=query_lens,
            host_seq_lens=seq_lens,
        )
        return CountedRows(self.counted, rows, numbers, paged)


def sent_bytes(sequences: int, blocks: int, groups: int) -> int:
    """What `Work.place` sends at most, for sequences of one token and that many blocks, all of them counted."""
    parts = 12 + 2 * groups
    numbers = 5 * sequences + 2 + (groups + 1) * sequences * blocks
    return ALIGNMENT * parts + 8 * (6 + groups) * sequences + 4 * numbers


def pack(
    sequences: Sequence[Running],
    counts: Sequence[int],
    last_tokens: Tensor,
    block_size: int,
    num_groups: int,
    counted: Sequence[Counted] = (),
) -> Work:
    """The work of computing counts[i] >= 1 tokens of sequences[i]. last_tokens: [rows] int64, on the device.

    counted: whose attention is wanted. Raises ValueError when there is not as much of it.
    """
    check_counted(counted, counts, num_groups)
    query_lens = np.asarray(counts, dtype=np.int64)
    query_start = np.zeros(len(counts) + 1, dtype=np.int64)
    query_lens.cumsum(out=query_start[1:])
    first = np.asarray([sequence.computed for sequence in sequences], dtype=np.int64)
    kept = np.asarray([sequence.kept for sequence in sequences], dtype=np.int64)
    seq_lens = kept + query_lens
    total = int(query_start[-1])
    owner = np.arange(len(sequences)).repeat(query_lens)
    steps = np.arange(total) - query_start[owner]
    slot_numbers = kept[owner] + steps
    # After an eviction one slot in the middle may be free: a sequence's only new token is stored there, and attends
    # to all its slots. So the slot of a token does not follow from the sequence's length.
    stored = slot_numbers.copy()
    for index, sequence in enumerate(sequences):
        if sequence.hole is not None:
            stored[query_start[index]] = sequence.hole
    compacted = np.asarray([sequence.compacted for sequence in sequences], dtype=bool)
    positions = np.where(compacted, kept, first)[owner] + steps

    ids, sources = np.zeros(total, dtype=np.int64), np.full(total, -1, dtype=np.int64)
    for index, sequence in enumerate(sequences):
        start, end = int(first[index]), int(first[index] + query_lens[index])
        if start < len(sequence.tokens):
            ids[query_start[index] : query_start[index + 1]] = sequence.tokens[start:end]
        else:
            sources[query_start[index]] = sequence.row

    mappings, tables, written = [], [], []
    for group in range(num_groups):
        table = _table([sequence.tables[group] for sequence in sequences], seq_lens, block_size)
        blocks = table[owner, stored // block_size].astype(np.int64)
        tables.append(table)
        written.append(blocks)
        mappings.append(blocks * block_size + stored % block_size)
    samples = [i for i, sequence in enumerate(sequences) if first[i] + query_lens[i] == sequence.known]
    return Work(
        token_ids=ids,
        sources=sources,
        positions=positions,
        slot_numbers=slot_numbers,
        query_start=query_start.astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        rows=query_start[1:][samples] - 1,
        targets=np.asarray([sequences[i].row for i in samples], dtype=np.int64),
        slot_mappings=tuple(mappings),
        tables=tuple(tables),
        sampling=tuple(sequences[i] for i in samples),
        written=tuple(written),
        last_tokens=last_tokens,
        counted=tuple(counted),
    )


def _table(tables: Sequence[Int32s], seq_lens: Int64s, block_size: int) -> Int32s:
    """[S, M] int32, as wide as the longest sequence needs."""
    blocks = -(-seq_lens // block_size)
    result = np.zeros((len(tables), int(blocks.max(initial=0))), dtype=np.int32)
    for into, table, count in zip(result, tables, blocks.tolist(), strict=True):
        into[:count] = table[:count]
    return result


def _extended(array: np.ndarray, extra: int, value: int = 0) -> np.ndarray:
    """The array with so many rows more, full of one value."""
    return np.concatenate([array, np.full((extra, *array.shape[1:]), value, array.dtype)]) if extra else array


class PagedLayers:
    """Attention of one batch over the pools; what a model call gets as `kvkeep_layers`."""

    def __init__(self, pools: KvPools, batch: Batch) -> None:
        self._pools = pools
        self._batch = batch
        self._counting = CountingAttention(batch.counted, len(pools.places))

    def counted(self) -> tuple[Attention, ...]:
        """What Scores has as `attention`, once all layers were computed."""
        return self._counting.result()

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Stores key and value [T, Hkv, D], then attends query [T, Hq, D]."""
        group, k, v = self._pools.layer(layer)
        store_kv(key, value, k, v, self._batch.slot_mappings[group])
        paged = self._batch.paged[group]
        return self._counting.attend(
            layer, query, k, v, paged, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
