"""Runs decoders of the Llama kind on a CPU in compiled code, in place of transformers' modules."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.batch import Work
from executor.cache.pool import KvPools
from executor.eviction.policy import Attention
from executor.models.attention_counts import Counted
from executor.models.forward import Forward, Scores
from executor.models.layers import LayerGroup
from executor.models.llama import UnsuitableError, faster
from kernels.cpu_decoder import build
from kernels.cpu_decoder.launch import Decoder, Sums, TokenGroup, Weights, obstacle


class CpuDecoder:
    """A model's forward pass over the pools, in compiled code."""

    def __init__(self, decoder: Decoder, groups: Sequence[LayerGroup]) -> None:
        self._decoder = decoder
        self._windows = [group.shape.window for group in groups]
        # Layers and KV heads of models whose attention is counted.
        self._shape = sum(len(group.layers) for group in groups), groups[0].shape.kv_heads
        self._pools: KvPools | None = None
        # One for all steps: of sizes that come and go the allocator keeps more.
        self._logits = torch.empty(0, decoder.vocabulary)

    def seconds(self) -> dict[str, float]:
        """What the time of all steps so far went to, by kind."""
        return self._decoder.seconds

    @property
    def products(self) -> bool:
        """Whether bfloat16 is multiplied by instructions for it; results differ by what that rounds."""
        return self._decoder.products

    @property
    def weight_bytes(self) -> int:
        """What the packed matrices take."""
        return self._decoder.weight_bytes

    def prepare(self, pools: KvPools, last_tokens: Tensor) -> None:
        """Nothing."""

    def scores(self, work: Work, pools: KvPools, placed: Callable[[], None] = lambda: None) -> Scores:
        """As in Forward."""
        if pools is not self._pools:
            self._decoder.bind([pools.layer(layer)[1:] for layer in range(len(pools.places))])
            self._pools = pools
        # As it is on the host: a copy to the device would be one to the same memory.
        here = torch.from_numpy
        ids = np.where(work.sources < 0, work.token_ids, work.last_tokens.numpy()[np.maximum(work.sources, 0)])
        groups = [
            TokenGroup(here(slots), here(table), window)
            for slots, table, window in zip(work.slot_mappings, work.tables, self._windows, strict=True)
        ]
        places = here(work.positions), here(work.slot_numbers)
        sums = [self._sums(one, int(work.seq_lens[one.sequence])) for one in work.counted]
        placed()
        rows = here(work.rows)
        if len(rows) > len(self._logits):
            # Rows that nobody writes take no memory.
            self._logits = torch.empty(1 << (len(rows) - 1).bit_length(), self._decoder.vocabulary)
        logits = self._logits[: len(rows)]
        self._decoder.step(here(ids), *places, here(work.query_start), groups, rows, sums, out=logits)
        attention = tuple(Attention(one.weights, one.squares, one.rows, one.totals is not None) for one in sums)
        return Scores(logits, None, here(work.targets), attention)

    def be_invariant(self) -> None:
        """From now on a row's logits depend on nothing that it is computed beside, nor on the number of threads.

        Rows of sequences whose attention is counted are left out.
        """
        self._decoder.invariant = True

    def _sums(self, counted: Counted, slots: int) -> Sums:
        shape = (*self._shape, slots)
        squares = torch.empty(shape) if counted.squares else None
        return Sums(counted.sequence, counted.rows, torch.empty(shape), squares, counted.totals)


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
