"""Runs Llama-like decoders on a CPU in compiled code instead of transformers' modules."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from executor.batch import HostBatch, ScoredSequence
from executor.cache.pool import KvPools, LayerGroup
from executor.errors import UnsuitableError
from executor.models.forward import Forward, ForwardOutput
from executor.models.llama import layer_adapters
from kernels.cpu_decoder import build
from kernels.cpu_decoder.forms import faster_plain
from kernels.cpu_decoder.launch import AdapterSpan, CompiledAdapter, Decoder, TokenGroup, obstacle
from kernels.scores import SequenceScores
from kernels.stored import Matrix
from kernels.weights import LowRank, Weights


class CpuModel:
    """A model's forward pass in compiled code."""

    def __init__(self, decoder: Decoder, groups: Sequence[LayerGroup]) -> None:
        self.decoder = decoder
        self._windows = [group.shape.window for group in groups]
        # Layers and KV heads of models that compute attention scores.
        self._shape = sum(len(group.layers) for group in groups), groups[0].shape.kv_heads
        self._pools: KvPools | None = None
        # One buffer for all steps: the allocator keeps more memory of changing sizes.
        self._logits = torch.empty(0, decoder.vocabulary, dtype=torch.float32)

    def warmup(self, pools: KvPools, last_tokens: Tensor) -> None:
        """Does nothing."""

    def prepare(self, batch: HostBatch, pools: KvPools) -> Callable[[], ForwardOutput]:
        if pools is not self._pools:
            layers = pools.layers
            self.decoder.bind([(one.k, one.v) for one in layers], [(one.k_scale, one.v_scale) for one in layers])
            self._pools = pools
        # The host's arrays themselves: a copy to the device would be a copy within the same memory.
        here = torch.from_numpy
        token_rows = batch.input_token_rows
        ids = np.where(token_rows < 0, batch.token_ids, batch.last_tokens.numpy()[np.maximum(token_rows, 0)])
        groups = [
            TokenGroup(here(slots), here(table), window)
            for slots, table, window in zip(batch.slot_mappings, batch.tables, self._windows, strict=True)
        ]
        positions = here(batch.positions), here(batch.cache_positions)
        scores = tuple(self._scores(entry, int(batch.seq_lens[entry.sequence])) for entry in batch.scored)
        rows = here(batch.rows)
        if len(rows) > len(self._logits):
            # Rows that no step writes take no memory. Typed: transformers changes torch's default while it loads.
            self._logits = torch.empty(1 << (len(rows) - 1).bit_length(), self.decoder.vocabulary, dtype=torch.float32)
        output = ForwardOutput(self._logits[: len(rows)], None, here(batch.output_token_rows), scores)

        query_start = here(batch.query_start)
        adapters = [AdapterSpan(span.adapter, span.begin, span.end) for span in batch.adapters]

        def run() -> ForwardOutput:
            self.decoder.step(here(ids), *positions, query_start, groups, rows, scores, adapters, out=output.logits)
            return output

        return run

    def adapter(self, modules: Mapping[str, LowRank]) -> CompiledAdapter:
        return self.decoder.adapter(layer_adapters(modules, self._shape[0]))

    def _scores(self, entry: ScoredSequence, slots: int) -> SequenceScores:
        shape = (*self._shape, slots)
        sums = torch.empty(shape, dtype=torch.float32)
        squares = torch.empty_like(sums) if entry.squares else None
        return SequenceScores(sums, squares, entry.rows, entry.sequence, entry.accumulator)


def build_cpu_model(
    weights: Weights[Matrix], groups: Sequence[LayerGroup], dtype: torch.dtype, folder: Path
) -> Forward:
    """Builds a forward pass in compiled code, kept in `folder`. Raises UnsuitableError if that is impossible."""
    try:
        library = build.load(folder)
    except build.BuildError as error:
        raise UnsuitableError(str(error)) from error
    if reason := obstacle(library, weights, dtype):
        raise UnsuitableError(reason)
    threads = torch.get_num_threads()
    plain = faster_plain(library, weights, dtype, threads)
    return CpuModel(Decoder(library, weights, dtype, threads, plain=plain), groups)
