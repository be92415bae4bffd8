"""Runs decoders of the Llama kind on a CPU in compiled code, in place of transformers' modules."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor.batch import Work
from executor.forward import Forward, Scores
from executor.kv_pool import KvPools
from executor.layers import LayerGroup
from executor.llama import UnsuitableError, faster
from kernels.decoder import build
from kernels.decoder.launch import Decoder, TokenGroup, Weights, obstacle


class CpuDecoder:
    """A model's forward pass over the pools, in compiled code."""

    def __init__(self, decoder: Decoder, groups: Sequence[LayerGroup]) -> None:
        self._decoder = decoder
        self._windows = [group.shape.window for group in groups]
        self._pools: KvPools | None = None

    def prepare(self, pools: KvPools, last_tokens: Tensor) -> None:
        """Nothing."""

    def scores(self, work: Work, pools: KvPools) -> Scores:
        """As in Forward."""
        if pools is not self._pools:
            self._decoder.bind([pools.layer(layer)[1:] for layer in range(len(pools.places))])
            self._pools = pools
        batch = work.place()
        groups = [
            TokenGroup(slots, paged.block_tables, window)
            for slots, paged, window in zip(batch.slot_mappings, batch.paged, self._windows, strict=True)
        ]
        logits = self._decoder.step(batch.ids(), batch.positions, batch.paged[0].query_start, groups, batch.rows)
        return Scores(logits, None, batch)


def compiled(forward: Forward, module: Any, groups: Sequence[LayerGroup], folder: Path) -> Forward:
    """What computes the same as `forward`, which runs `module`, in less time; `forward` itself where nothing does.

    folder: where the compiled code is kept.
    """

    def decoder(weights: Weights) -> Forward:
        try:
            library = build.load(folder)
        except build.BuildError as error:
            raise UnsuitableError(str(error)) from error
        if reason := obstacle(library, weights, module.dtype):
            raise UnsuitableError(reason)
        return CpuDecoder(Decoder(library, weights, module.dtype, torch.get_num_threads()), groups)

    return faster(forward, module, groups, decoder, "compiled decoder")
