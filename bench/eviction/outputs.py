"""What attention returns in every layer, with all keys and values and with those that a policy leaves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.eviction.cache import Cache
from executor.batch import PagedLayers
from executor.core.state import Running
from executor.models import attention
from executor.models.files import ModelFiles


class Recording:
    """PagedLayers that remember what they get and what they return. calls: layer, query, key and value, options."""

    def __init__(self, layers: PagedLayers) -> None:
        self._layers = layers
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.outputs: list[Tensor] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """As PagedLayers."""
        self.calls.append(((layer, query, key, value), options))
        self.outputs.append(self._layers.attend(layer, query, key, value, **options))
        return self.outputs[-1]


class Outputs:
    """A model's unchanged modules over the same pools; its compiled code does not show what is in between."""

    def __init__(self, files: ModelFiles, dtype: torch.dtype) -> None:
        self._module = AutoModelForCausalLM.from_pretrained(
            files.source, dtype=dtype, attn_implementation=attention.NAME
        ).eval()

    def of(self, cache: Cache, sequence: Running, tokens: Sequence[int]) -> Recording:
        """Of tokens behind those computed, which stay as they are."""
        batch = cache.work(sequence, tokens).place()
        recording = Recording(PagedLayers(cache.pools, batch))
        self._module.model(
            input_ids=batch.ids()[None], position_ids=batch.positions[None], use_cache=False, kvkeep_layers=recording
        )
        return recording


def relative_error(recording: Recording, cache: Cache, sequence: Running, tokens: Sequence[int]) -> float:
    """Length of what the same queries get otherwise from this sequence, beside that of what they got; layers' mean.

    tokens: those that were recorded. Every layer is on its own: it gets what it got, not what layers before make of it.
    """
    layers = PagedLayers(cache.pools, cache.work(sequence, tokens).place())
    errors = []
    for (arguments, options), expected in zip(recording.calls, recording.outputs, strict=True):
        output = layers.attend(*arguments, **options)
        errors.append(float((output.float() - expected.float()).norm() / expected.float().norm()))
    return statistics.mean(errors)
