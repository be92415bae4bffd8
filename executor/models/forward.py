"""One forward pass over packed tokens: the interface, and transformers' unchanged modules behind it."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from executor.batch import PagedLayers, Work
from executor.cache.pool import KvPools
from executor.eviction.policy import Attention


@dataclass(frozen=True)
class Scores:
    """What a pass computed. logits: [R, V] of any float dtype, one row per sampling sequence, good until the next pass.

    best: [R] int64, the ids of the largest logits, or None when nobody looked for them. targets: as in Batch.
    attention: of the sequences that the work counts, in its order.
    """

    logits: Tensor
    best: Tensor | None
    targets: Tensor
    attention: tuple[Attention, ...] = ()


class Forward(Protocol):
    """Computes a model's logits over the pools."""

    def prepare(self, pools: KvPools, last_tokens: Tensor) -> None:
        """Does beforehand what else the first steps over these pools would wait for."""
        ...

    def scores(self, work: Work, pools: KvPools, placed: Callable[[], None] = lambda: None) -> Scores:
        """Stores the keys and values of a step's tokens; returns the logits of its rows.

        placed: called when all is where the device looks for it, and from there on only the device is busy.
        """
        ...


class TorchForward:
    """A transformers decoder whose attention is ours."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._slices_logits = "logits_to_keep" in inspect.signature(module.forward).parameters

    def prepare(self, pools: KvPools, last_tokens: Tensor) -> None:
        """Nothing."""

    @torch.inference_mode()
    def scores(self, work: Work, pools: KvPools, placed: Callable[[], None] = lambda: None) -> Scores:
        """As in Forward."""
        batch = work.place()
        placed()
        layers = PagedLayers(pools, batch)
        output = self._module(
            input_ids=batch.ids()[None],
            position_ids=batch.positions[None],
            use_cache=False,
            kvkeep_layers=layers,
            **({"logits_to_keep": batch.rows} if self._slices_logits else {}),
        ).logits[0]
        logits = output if self._slices_logits else output[batch.rows]
        return Scores(logits, None, batch.targets, layers.counted())
