"""Runs a transformers decoder, unchanged, over packed tokens and paged attention."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from executor.batch import DeviceBatch, HostBatch
from executor.cache.pool import KvPools
from executor.models.attention import PagedLayers
from executor.models.forward import ForwardOutput


class TorchForward:
    """The forward pass of any decoder that transformers has."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._slices_logits = "logits_to_keep" in inspect.signature(module.forward).parameters

    def warmup(self, pools: KvPools, last_tokens: Tensor) -> None:
        """Nothing is to be done."""

    def prepare(self, batch: HostBatch, pools: KvPools) -> Callable[[], ForwardOutput]:
        return partial(self._run, batch.to_device(), pools)

    @torch.inference_mode()
    def _run(self, sent: DeviceBatch, pools: KvPools) -> ForwardOutput:
        layers = PagedLayers(pools, sent)
        output = self._module(
            input_ids=sent.ids()[None],
            position_ids=sent.positions[None],
            use_cache=False,
            kvkeep_layers=layers,
            **({"logits_to_keep": sent.rows} if self._slices_logits else {}),
        ).logits[0]
        logits = output if self._slices_logits else output[sent.rows]
        return ForwardOutput(logits, None, sent.output_token_rows, layers.scores())
