"""Packs a step's work into tensors: ids, positions, slot mappings, and one PagedBatch per layer group."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor.kv_pool import KvPools
from executor.running import Running
from kernels.paged_attention.launch import PagedBatch, paged_attention
from kernels.store_kv.launch import store_kv


@dataclass(frozen=True)
class Batch:
    """One step's packed tokens, in the order of its sequences.

    token_ids, positions: [T] int64, on the device. slot_mappings: per group [T] int64. paged: per group.
    sampling: sequences whose last known token is computed now, with the packed index of that token in `rows` [R].
    written: per group each token's slot, [T].
    """

    token_ids: Tensor
    positions: Tensor
    slot_mappings: tuple[Tensor, ...]
    paged: tuple[PagedBatch, ...]
    sampling: tuple[Running, ...]
    rows: Tensor
    written: tuple[np.ndarray[tuple[int], np.dtype[np.int64]], ...]

    @property
    def num_tokens(self) -> int:
        """Packed tokens."""
        return self.token_ids.shape[0]


def pack(
    sequences: Sequence[Running], counts: Sequence[int], last_tokens: Tensor, block_size: int, num_groups: int
) -> Batch:
    """The batch that computes counts[i] >= 1 tokens of sequences[i]. last_tokens: [rows] int64, on the device."""
    device = last_tokens.device
    query_lens = np.asarray(counts, dtype=np.int64)
    query_start = np.zeros(len(counts) + 1, dtype=np.int64)
    query_lens.cumsum(out=query_start[1:])
    first = np.asarray([sequence.computed for sequence in sequences], dtype=np.int64)
    seq_lens = first + query_lens
    total = int(query_start[-1])
    owner = np.arange(len(sequences)).repeat(query_lens)
    positions = first[owner] + np.arange(total) - query_start[owner]

    ids = np.zeros(total, dtype=np.int64)
    from_device: list[int] = []
    for index, sequence in enumerate(sequences):
        start, end = int(first[index]), int(seq_lens[index])
        if start < len(sequence.tokens):
            ids[query_start[index] : query_start[index + 1]] = sequence.tokens[start:end]
        else:
            from_device.append(index)
    token_ids = _to(device, ids)
    if from_device:
        places = _to(device, query_start[from_device])
        token_ids[places] = last_tokens[_to(device, np.asarray([sequences[i].row for i in from_device]))]

    starts, lengths = _to(device, query_start.astype(np.int32)), _to(device, seq_lens.astype(np.int32))
    mappings, paged, written = [], [], []
    for group in range(num_groups):
        tables = _tables([sequence.tables[group] for sequence in sequences], seq_lens, block_size)
        slots = tables[owner, positions // block_size].astype(np.int64)
        written.append(slots)
        mappings.append(_to(device, slots * block_size + positions % block_size))
        paged.append(
            PagedBatch(
                query_start=starts,
                seq_lens=lengths,
                block_tables=_to(device, tables),
                max_query_len=int(query_lens.max(initial=0)),
                max_seq_len=int(seq_lens.max(initial=0)),
                query_lens=tuple(query_lens.tolist()),
                host_seq_lens=tuple(seq_lens.tolist()),
            )
        )
    samples = [i for i, sequence in enumerate(sequences) if seq_lens[i] == sequence.known]
    return Batch(
        token_ids=token_ids,
        positions=_to(device, positions),
        slot_mappings=tuple(mappings),
        paged=tuple(paged),
        sampling=tuple(sequences[i] for i in samples),
        rows=_to(device, query_start[1:][samples] - 1),
        written=tuple(written),
    )


def _tables(
    tables: Sequence[np.ndarray[tuple[int], np.dtype[np.int32]]], seq_lens: np.ndarray, block_size: int
) -> np.ndarray:
    """[S, M] int32, as wide as the longest sequence needs."""
    blocks = -(-seq_lens // block_size)
    result = np.zeros((len(tables), int(blocks.max(initial=0))), dtype=np.int32)
    for into, table, count in zip(result, tables, blocks.tolist(), strict=True):
        into[:count] = table[:count]
    return result


def _to(device: torch.device, array: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    # Pinned, so that the copy need not wait for the device.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class PagedLayers:
    """Attention of one batch over the pools; what a model call gets as `kvkeep_layers`."""

    def __init__(self, pools: KvPools, batch: Batch) -> None:
        self._pools = pools
        self._batch = batch

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
        return paged_attention(
            query, k, v, self._batch.paged[group], scale=scale, window=window, softcap=softcap, sinks=sinks
        )
