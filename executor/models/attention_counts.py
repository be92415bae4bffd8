"""Attention of a batch that also counts: how much of it each slot of some sequences got."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.eviction.policy import Attention
from kernels.attention_scores.launch import attention_scores
from kernels.cpu_decoder.launch import Totals
from kernels.paged_attention.launch import PagedBatch, paged_attention


@dataclass(frozen=True)
class Counted:
    """A sequence of a step whose attention is wanted.

    sequence: its index in the batch. rows: how many of its query rows of this step count, the last ones; at least one.
    squares: whether the squares of the weights are wanted too. totals: where a forward may add the weights up itself.
    """

    sequence: int
    rows: int
    squares: bool = False
    totals: Totals | None = None


@dataclass(frozen=True)
class CountedRows:
    """The counted rows of a step as a batch of their own, on the device.

    entries: one per sequence in it. rows: [R] int64, their packed indices. numbers: [S] int32, rows per sequence.
    paged: of the model's only layer group.
    """

    entries: tuple[Counted, ...]
    rows: Tensor
    numbers: Tensor
    paged: PagedBatch


class CountingAttention:
    """Attention of one batch, layer by layer; keeps the weights of what is counted, if anything is."""

    def __init__(self, counted: CountedRows | None, layers: int) -> None:
        self._counted = counted
        self._layers = layers
        # [L, S, Hkv, T] each, made by the first layer.
        self._sums: Tensor | None = None
        self._squares: Tensor | None = None

    def attend(
        self,
        layer: int,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: PagedBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As paged_attention."""

        def attended(query: Tensor, batch: PagedBatch, lse: Tensor | None) -> Tensor:
            return paged_attention(
                query, k_cache, v_cache, batch, scale=scale, window=window, softcap=softcap, sinks=sinks, lse=lse
            )

        if self._counted is None:
            return attended(query, batch, None)
        rows, paged = self._counted.rows, self._counted.paged
        if query.is_cuda:
            # Costs nothing there.
            every = torch.empty(query.shape[:2], device=query.device)
            out, chosen = attended(query, batch, every), query[rows]
            lse = every[rows]
        else:
            # There it is a slower way, which rounds differently: only for the rows that need it.
            out, chosen = attended(query, batch, None), query[rows]
            lse = torch.empty(chosen.shape[:2])
            attended(chosen, paged, lse)
        sums, squares = self._places(query.device, k_cache.shape[2])
        attention_scores(
            chosen,
            k_cache,
            paged,
            lse,
            self._counted.numbers,
            scale=scale,
            window=window,
            softcap=softcap,
            out=sums[layer],
            squares=None if squares is None else squares[layer],
        )
        return out

    def result(self) -> tuple[Attention, ...]:
        """One per entry, once all layers were attended."""
        if self._counted is None or self._sums is None:
            return ()
        return tuple(
            Attention(
                weights=_of(self._sums, index, length),
                squares=_of(self._squares, index, length) if entry.squares and self._squares is not None else None,
                rows=entry.rows,
            )
            for index, (entry, length) in enumerate(
                zip(self._counted.entries, self._counted.paged.host_seq_lens, strict=True)
            )
        )

    def _places(self, device: torch.device, kv_heads: int) -> tuple[Tensor, Tensor | None]:
        assert self._counted is not None
        if self._sums is None:
            entries = self._counted.entries
            shape = (self._layers, len(entries), kv_heads, self._counted.paged.max_seq_len)
            self._sums = torch.empty(shape, device=device)
            if any(entry.squares for entry in entries):
                self._squares = torch.empty_like(self._sums)
        return self._sums, self._squares


def _of(sums: Tensor, index: int, length: int) -> Tensor:
    """[L, Hkv, T] of one sequence."""
    return sums[:, index, :, :length]


def check_counted(entries: Sequence[Counted], counts: Sequence[int], groups: int) -> None:
    """Raises ValueError when entries ask for what a step of `counts` tokens per sequence does not have."""
    if entries and groups > 1:
        raise ValueError("counted: only models with one layer group count attention")
    if len({entry.sequence for entry in entries}) < len(entries):
        raise ValueError("counted: a sequence is named twice")
    for entry in entries:
        if not 1 <= entry.rows <= counts[entry.sequence]:
            raise ValueError(f"counted: {entry.rows} rows of a sequence that computes {counts[entry.sequence]}")
