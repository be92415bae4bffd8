"""Outputs of attention in every layer, with all keys and values and with only those that a policy keeps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.research.eviction.cache import Cache
from executor.batch import SequenceState
from executor.models import attention
from executor.models.attention import PagedLayers
from executor.models.files import ModelFiles
from kernels.paged_attention.batch import AttentionArgs


class Recording:
    """PagedLayers that record their calls and outputs. calls: layer, query, key, value and arguments."""

    def __init__(self, layers: PagedLayers) -> None:
        self._layers = layers
        self.calls: list[tuple[int, Tensor, Tensor, Tensor, AttentionArgs]] = []
        self.outputs: list[Tensor] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        """Records a call like PagedLayers' attend."""
        self.calls.append((layer, query, key, value, args))
        self.outputs.append(self._layers.attend(layer, query, key, value, args))
        return self.outputs[-1]


class Outputs:
    """A model's unchanged modules over the same pools; the compiled code does not show intermediate results."""

    def __init__(self, files: ModelFiles, dtype: torch.dtype) -> None:
        self._module = AutoModelForCausalLM.from_pretrained(
            files.source, dtype=dtype, attn_implementation=attention.NAME
        ).eval()

    def of(self, cache: Cache, sequence: SequenceState, tokens: Sequence[int]) -> Recording:
        """Records the attention of the next tokens; the sequence does not change."""
        batch = cache.work(sequence, tokens).to_device()
        recording = Recording(PagedLayers(cache.pools, batch))
        self._module.model(
            input_ids=batch.ids()[None], position_ids=batch.positions[None], use_cache=False, kvkeep_layers=recording
        )
        return recording


def relative_error(recording: Recording, cache: Cache, sequence: SequenceState, tokens: Sequence[int]) -> float:
    """Relative L2 error of this sequence's outputs of attention against the recorded outputs, as the mean over layers.

    tokens: the recorded tokens. Every layer gets its recorded input, not the output of the previous layer.
    """
    layers = PagedLayers(cache.pools, cache.work(sequence, tokens).to_device())
    errors = []
    for arguments, expected in zip(recording.calls, recording.outputs, strict=True):
        output = layers.attend(*arguments)
        errors.append(float((output.float() - expected.float()).norm() / expected.float().norm()))
    return statistics.mean(errors)
