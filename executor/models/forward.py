"""The interface of a model's forward pass, over a step's packed tokens and paged caches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from executor.batch import HostBatch
from executor.cache.pool import KvPools, LayerGroup
from kernels.scores import SequenceScores
from kernels.weights import LowRank


@dataclass(frozen=True)
class ForwardOutput:
    """logits: [R, V] of any float dtype, one row for each of the batch's `rows`, valid until the next pass.

    best: [R] int64, the ids of the largest logits; None if the pass did not compute them. output_token_rows: as in
    DeviceBatch. scores: of the batch's scored sequences, in their order.
    """

    logits: Tensor
    best: Tensor | None
    output_token_rows: Tensor
    scores: tuple[SequenceScores, ...] = ()


class Forward(Protocol):
    """A model's forward pass over the pools."""

    def warmup(self, pools: KvPools, last_tokens: Tensor) -> None:
        """Does in advance what the first steps over these pools would otherwise wait for."""
        ...

    def prepare(self, batch: HostBatch, pools: KvPools) -> Callable[[], ForwardOutput]:
        """Brings the batch to the device; returns the pass over it, to be called once, before the next `prepare`.

        The pass stores the keys and values of the batch's tokens in the pools, and returns the logits of its rows.
        Unlike `prepare`, it releases the GIL for most of its time.
        """
        ...

    def adapter(self, modules: Mapping[str, LowRank]) -> Any:
        """Prepares an adapter for the spans of a batch, from what it adds to modules by their names. In any thread.

        Its memory is freed when neither the caller nor a batch has it any more. Raises AdapterError for a module to
        which this pass cannot add.
        """
        ...


@dataclass(frozen=True)
class Model:
    """A loaded decoder with what the executor has to know of it.

    rotary: radians per position, [D / 2] float32, of plain rotary embeddings; None if cached keys cannot be rotated
    again. linears: outputs and inputs of the linear modules that adapters may add to, by their names.
    """

    name: str
    forward: Forward
    config: Any
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    groups: tuple[LayerGroup, ...]
    rotary: Tensor | None
    linears: Mapping[str, tuple[int, int]]
