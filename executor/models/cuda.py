"""Runs decoders of the Llama kind with merged products and fused kernels; decoding as CUDA graphs of whole steps.

A graph repeats what was launched once, on the same addresses. So a decoding step's inputs lie in buffers that stay, and
its batch is padded to one of a few sizes, each with a graph of its own. Everything else is launched piece by piece.
Without a CUDA device the same functions run over the same buffers, and nothing is captured.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor

from executor.batch import Batch, Work, pack, sent_bytes
from executor.cache.pool import KvPools
from executor.eviction.policy import Attention
from executor.models.attention_counts import CountingAttention
from executor.models.forward import Forward, Scores
from executor.models.layers import LayerGroup
from executor.models.llama import faster
from kernels.cpu_decoder.launch import Weights
from kernels.rms_norm.launch import rms_norm
from kernels.rotary_store.launch import rotary_store

log = structlog.get_logger()

# Sequences that a graph's batch is padded to. A larger batch takes longer than its launches.
SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16))


class FusedLayers:
    """A model's layers over the caches of its pools: arguments in tensors, nothing kept between two calls.

    positions: longest sequence, in tokens.
    """

    def __init__(self, weights: Weights, groups: Sequence[LayerGroup], positions: int) -> None:
        self._weights = weights
        self._windows = [group.shape.window for group in groups]
        self._embedding = weights.head if weights.embedding is None else weights.embedding
        self._heads = [weights.q_heads, weights.kv_heads, weights.kv_heads]
        angles = torch.arange(positions, device=weights.head.device).float()[:, None] * weights.frequencies.float()
        angles = torch.cat([angles, angles], -1)
        self._cos, self._sin = (
            (f(angles) * weights.rotary_scale).to(weights.head.dtype) for f in (torch.cos, torch.sin)
        )

    def logits(
        self,
        batch: Batch,
        caches: Sequence[tuple[Tensor, Tensor]],
        rows: Tensor | None,
        counting: CountingAttention,
        out: Tensor | None = None,
    ) -> Tensor:
        """Stores keys and values in each layer's K and V; the logits of some rows, [R] int64, or of all: [R, V].

        counting: attends, and keeps what the batch counts.

        The sum that runs through the layers is rounded where transformers rounds it.
        """
        layers, epsilon = self._weights.layers, self._weights.epsilon
        next_norms = [*(layer.input_norm for layer in layers[1:]), self._weights.final_norm]
        total = F.embedding(batch.ids(), self._embedding)
        normal = rms_norm(total, layers[0].input_norm, epsilon)
        for number, (layer, cache, next_norm) in enumerate(zip(layers, caches, next_norms, strict=True)):
            attended = self._attend(number, normal, batch, cache, counting)
            if rows is not None and layer is layers[-1]:
                # From here on nobody asks for the others.
                attended, total = attended[rows], total[rows]
            normal = rms_norm(attended @ layer.out.t(), layer.post_norm, epsilon, residual=total)
            gate, up = (normal @ layer.gate_up.t()).chunk(2, -1)
            normal = rms_norm(F.silu(gate).mul_(up) @ layer.down.t(), next_norm, epsilon, residual=total)
        return torch.mm(normal, self._weights.head.t(), out=out)

    def _attend(
        self, number: int, normal: Tensor, batch: Batch, cache: tuple[Tensor, Tensor], counting: CountingAttention
    ) -> Tensor:
        """[T, Hq D]."""
        weights, layer = self._weights, self._weights.layers[number]
        paged = batch.paged[layer.group]
        qkv = normal @ layer.qkv.t() if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, normal, layer.qkv.t())
        query, key, value = torch.split(qkv.view(len(normal), -1, weights.head_dim), self._heads, 1)
        for heads, norm in ((query, layer.q_norm), (key, layer.k_norm)):
            if norm is not None:
                rms_norm(heads, norm, weights.epsilon, out=heads)
        slots = batch.slot_mappings[layer.group]
        rotary_store(query, key, value, self._cos, self._sin, batch.positions, slots, *cache)
        window = self._windows[layer.group]
        out = counting.attend(number, query, *cache, paged, scale=weights.attention_scale, window=window)
        return out.flatten(1)


class Buffers:
    """Where decoding steps over some pools find their inputs and leave their results.

    caches: per layer K and V. logits: [S, V], S the largest size. best: [S] int64. positions: of the longest sequence.
    """

    def __init__(self, pools: KvPools, last_tokens: Tensor, positions: int, logits: Tensor) -> None:
        self.pools = pools
        self.last_tokens = last_tokens
        self.caches = [pools.layer(layer)[1:] for layer in range(len(pools.places))]
        self.logits = logits
        sequences, device, groups = len(logits), logits.device, len(pools.pools)
        blocks = -(-positions // pools.block_size)
        self.best = torch.zeros(sequences, dtype=torch.int64, device=device)
        # [S, M] int32 per layer group, as wide as the longest sequence that may come.
        self._tables = [torch.zeros(sequences, blocks, dtype=torch.int32, device=device) for _ in range(groups)]
        self._sent = torch.zeros(sent_bytes(sequences, blocks, groups), dtype=torch.uint8, device=device)

    def place(self, work: Work, size: int) -> Batch:
        """Sends work of one token per sequence, padded to `size` of them; the same addresses for the same size."""
        batch, paged = work.place(padded=size, into=self._sent), []
        for fixed, one in zip(self._tables, batch.paged, strict=True):
            # Sent no wider than they must be, and spread out here.
            fixed[:size, : one.block_tables.shape[1]].copy_(one.block_tables)
            longest = fixed.shape[1] * self.pools.block_size
            paged.append(replace(one, block_tables=fixed[:size], max_query_len=1, max_seq_len=longest))
        return replace(batch, paged=tuple(paged))


class CudaDecoder:
    """A model's forward pass over the pools. positions: of the longest sequence."""

    def __init__(self, weights: Weights, groups: Sequence[LayerGroup], positions: int) -> None:
        self._layers = FusedLayers(weights, groups, positions)
        self._positions = positions
        self._head = weights.head
        self._buffers: Buffers | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @torch.inference_mode()
    def prepare(self, pools: KvPools, last_tokens: Tensor) -> None:
        """Captures a decoding step of every size."""
        begin = time.perf_counter()
        buffers = self._bound(pools, last_tokens)
        nothing = pack([], [], last_tokens, pools.block_size, len(pools.pools))
        # The largest first: the others find room in the memory that it took.
        for size in reversed(SIZES):
            self._run(buffers, buffers.place(nothing, size), size)
        log.info("ready to decode", graphs=len(self._graphs), seconds=round(time.perf_counter() - begin, 1))

    @torch.inference_mode()
    def scores(self, work: Work, pools: KvPools, placed: Callable[[], None] = lambda: None) -> Scores:
        """As in Forward."""
        buffers, count = self._bound(pools, work.last_tokens), work.num_sequences
        if not work.num_tokens == count <= SIZES[-1]:
            batch = work.place()
            placed()
            counting = CountingAttention(batch.counted, len(buffers.caches))
            logits = self._layers.logits(batch, buffers.caches, batch.rows, counting)
            return Scores(logits, logits.argmax(-1), batch.targets, counting.result())
        size = next(size for size in SIZES if size >= count)
        batch = buffers.place(work, size)
        placed()
        attention: tuple[Attention, ...] = ()
        if work.counted:
            # What is counted changes from step to step: no graph repeats it, but it computes the same as a graph.
            attention = self._launch(buffers, batch, size)
        else:
            self._run(buffers, batch, size)
        if len(work.rows) == count:
            return Scores(buffers.logits[:count], buffers.best[:count], batch.targets, attention)
        # Some compute a last token of a chunk that is not their last token.
        return Scores(buffers.logits[batch.rows], buffers.best[batch.rows], batch.targets, attention)

    def _bound(self, pools: KvPools, last_tokens: Tensor) -> Buffers:
        """Buffers over these tensors; what was captured over others goes."""
        if self._buffers is None or self._buffers.pools is not pools or self._buffers.last_tokens is not last_tokens:
            self._graphs.clear()
            logits = self._head.new_empty(SIZES[-1], len(self._head))
            self._buffers = Buffers(pools, last_tokens, self._positions, logits)
            self._memory = torch.cuda.graph_pool_handle() if logits.is_cuda else None
        return self._buffers

    def _run(self, buffers: Buffers, batch: Batch, size: int) -> None:
        """Computes what Buffers.place has put in place."""
        if not buffers.logits.is_cuda:
            self._launch(buffers, batch, size)
            return
        if size not in self._graphs:
            begin = time.perf_counter()
            self._graphs[size] = self._captured(buffers, batch, size)
            log.debug("captured a decoding step", sequences=size, seconds=round(time.perf_counter() - begin, 3))
        self._graphs[size].replay()

    def _captured(self, buffers: Buffers, batch: Batch, size: int) -> torch.cuda.CUDAGraph:
        # Once without: kernels are compiled and libraries take their memory, which a capture must not see.
        self._launch(buffers, batch, size)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            self._launch(buffers, batch, size)
        return graph

    def _launch(self, buffers: Buffers, batch: Batch, size: int) -> tuple[Attention, ...]:
        counting = CountingAttention(batch.counted, len(buffers.caches))
        logits = self._layers.logits(batch, buffers.caches, None, counting, out=buffers.logits[:size])
        torch.argmax(logits, -1, out=buffers.best[:size])
        return counting.result()


def fused(forward: Forward, module: Any, groups: Sequence[LayerGroup], positions: int) -> Forward:
    """What computes the same as `forward`, which runs `module`, in less time; `forward` itself where nothing does."""
    return faster(forward, module, groups, lambda weights: CudaDecoder(weights, groups, positions), "fused decoder")
