"""Arguments of attention: a step's sequences, shared by the layers of a group, and the arguments of a layer."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor

from kernels.checks import check_device, check_dtype, check_shape
from kernels.quantization import check_quantization

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class AttentionArgs:
    """A layer's arguments of attention, the same in every step.

    scale: factor of the logits, more than 0. window: tokens that a query sees, its own included; None for no limit.
    softcap: logits become softcap * tanh(logits / softcap). sinks: [Hq] logits that join the softmax without a value.
    k_scale, v_scale: [Hkv, D] float32, factors of the keys and values in int8 or float8_e4m3fn caches.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def check(self, query: Tensor, k_cache: Tensor) -> None:
        """Raises ValueError naming what is out of range or does not fit query [T, Hq, D] and cache [N, B, Hkv, D]."""
        check_quantization("query", query, k_cache, self.k_scale, self.v_scale)
        if self.scale <= 0:
            raise ValueError(f"scale: expected more than 0, got {self.scale}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window: expected at least 1, got {self.window}")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap: expected more than 0, got {self.softcap}")
        if self.sinks is not None:
            check_shape("sinks", self.sinks, query.shape[1:2], "[Hq]")
            check_device("sinks", self.sinks, "query", query)


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """Which query rows belong to which sequence, and where its keys are. Built once per step and group.

    query_start: [S + 1] int32, sequence s has the rows query_start[s] to query_start[s + 1], possibly none.
    seq_lens: [S] int32, tokens in the cache, those of this step included.
    block_tables: [S, M] int32, block numbers; entries of blocks that no query sees may be any numbers.
    max_query_len, max_seq_len: at least the largest lengths (they limit the launch grid on CUDA).
    query_lens, host_seq_lens: the same lengths on the host, for the CPU path and its checks; both empty if unknown.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_seq_len: int
    query_lens: tuple[int, ...] = ()
    host_seq_lens: tuple[int, ...] = ()
    _derived: dict[Hashable, object] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, build: Callable[[], T]) -> T:
        """Returns what `build` returned at the first call with `key`: later layers of the step reuse the result."""
        if key not in self._derived:
            self._derived[key] = build()
        return cast(T, self._derived[key])

    def check(self, name: str, rows: Tensor, block_size: int) -> None:
        """Raise ValueError unless the batch fits the packed tensor `rows` [T, ...] of that name; checks once per step.

        Lengths that only the device has are not checked.
        """
        self.once(("checked", rows.shape[0], rows.device, block_size), lambda: self._check(name, rows, block_size))

    def _check(self, name: str, rows: Tensor, block_size: int) -> None:
        sequences = self.seq_lens.shape[0]
        check_shape("batch.seq_lens", self.seq_lens, [None], "[S]")
        check_shape("batch.query_start", self.query_start, [sequences + 1], "[S + 1]")
        check_shape("batch.block_tables", self.block_tables, [sequences, None], "[S, M]")
        for own in ("query_start", "seq_lens", "block_tables"):
            check_dtype(f"batch.{own}", getattr(self, own), torch.int32)
            check_device(f"batch.{own}", getattr(self, own), name, rows)
        if self.query_start.stride(0) != 1 or self.seq_lens.stride(0) != 1:
            raise ValueError("batch.query_start, batch.seq_lens: expected contiguous tensors")
        if self.block_tables.stride(1) != 1:
            raise ValueError("batch.block_tables: expected the blocks of a sequence side by side")
        if not self.query_lens and not self.host_seq_lens:
            return
        if len(self.query_lens) != sequences or len(self.host_seq_lens) != sequences:
            raise ValueError(f"batch.query_lens, batch.host_seq_lens: expected {sequences} lengths each")
        if sum(self.query_lens) > rows.shape[0]:
            raise ValueError(f"batch.query_lens: {sum(self.query_lens)} rows wanted, {name} has {rows.shape[0]}")
        for query_len, seq_len in zip(self.query_lens, self.host_seq_lens, strict=True):
            if query_len > seq_len:
                raise ValueError(f"batch.query_lens: {query_len} queries in a sequence of {seq_len} tokens")
            if query_len and seq_len > self.block_tables.shape[1] * block_size:
                raise ValueError(f"batch.block_tables: too narrow for a sequence of {seq_len} tokens")
            if query_len > self.max_query_len or seq_len > self.max_seq_len:
                raise ValueError("batch.max_query_len, batch.max_seq_len: smaller than a sequence's own length")
