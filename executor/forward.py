"""One forward pass over packed tokens: the interface, and transformers' unchanged modules behind it."""

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor

from executor.batch import Batch, PagedLayers
from executor.kv_pool import KvPools


class Forward(Protocol):
    """Computes a model's logits over the pools."""

    def logits(self, batch: Batch, pools: KvPools) -> Tensor:
        """Stores the batch's keys and values; returns the logits of its rows, [R, V] float32."""
        ...


class TorchForward:
    """A transformers decoder whose attention is ours."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._slices_logits = "logits_to_keep" in inspect.signature(module.forward).parameters

    @torch.inference_mode()
    def logits(self, batch: Batch, pools: KvPools) -> Tensor:
        """As in Forward."""
        output = self._module(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            kvkeep_layers=PagedLayers(pools, batch),
            **({"logits_to_keep": batch.rows} if self._slices_logits else {}),
        ).logits[0]
        logits: Tensor = (output if self._slices_logits else output[batch.rows]).float()
        return logits
