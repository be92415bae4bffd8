"""Runs decoders of the Llama kind with merged products and fused kernels; decoding as CUDA graphs of whole steps.

A graph repeats what was launched once, on the same addresses. So a decoding step's inputs lie in buffers that stay, and
its batch is padded to one of a few sizes, each with a graph of its own. Everything else is launched piece by piece.
Without a CUDA device the same functions run over the same buffers, and nothing is captured.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor

from executor.batch import DeviceBatch, HostBatch, build_batch, sent_bytes
from executor.cache.pool import KvPools, LayerGroup
from executor.models.attention import ScoringAttention
from executor.models.forward import ForwardOutput
from kernels.paged_attention.batch import AttentionArgs
from kernels.rms_norm.launch import rms_norm
from kernels.rotary_store.launch import rotary_store
from kernels.scores import SequenceScores
from kernels.weights import Weights

log = structlog.get_logger()

# Sequences that a graph's batch is padded to. A larger batch takes longer than its launches.
SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16))


class LlamaForward:
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
        batch: DeviceBatch,
        caches: Sequence[tuple[Tensor, Tensor]],
        rows: Tensor | None,
        attention: ScoringAttention,
        out: Tensor | None = None,
    ) -> Tensor:
        """Stores keys and values in each layer's K and V; the logits of some rows, [R] int64, or of all: [R, V].

        attention: attends, and keeps the scores that the batch asks for.

        The sum that runs through the layers is rounded where transformers rounds it.
        """
        layers, epsilon = self._weights.layers, self._weights.epsilon
        next_norms = [*(layer.input_norm for layer in layers[1:]), self._weights.final_norm]
        total = F.embedding(batch.ids(), self._embedding)
        normal = rms_norm(total, layers[0].input_norm, epsilon)
        for number, (layer, cache, next_norm) in enumerate(zip(layers, caches, next_norms, strict=True)):
            attended = self._attend(number, normal, batch, cache, attention)
            if rows is not None and layer is layers[-1]:
                # The rest of the last layer computes only the rows whose logits are wanted.
                attended, total = attended[rows], total[rows]
            normal = rms_norm(attended @ layer.out.t(), layer.post_norm, epsilon, residual=total)
            gate, up = (normal @ layer.gate_up.t()).chunk(2, -1)
            normal = rms_norm(F.silu(gate).mul_(up) @ layer.down.t(), next_norm, epsilon, residual=total)
        return torch.mm(normal, self._weights.head.t(), out=out)

    def _attend(
        self, number: int, normal: Tensor, batch: DeviceBatch, cache: tuple[Tensor, Tensor], attention: ScoringAttention
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
        args = AttentionArgs(weights.attention_scale, self._windows[layer.group])
        return attention.attend(number, query, *cache, paged, args).flatten(1)


class GraphBuffers:
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

    def to_device(self, host: HostBatch, size: int) -> DeviceBatch:
        """Sends a batch of one token per sequence, padded to `size` sequences; equal sizes have equal addresses."""
        batch, paged = host.to_device(padded=size, into=self._sent), []
        for fixed, one in zip(self._tables, batch.paged, strict=True):
            # Sent no wider than they must be, and spread out here.
            fixed[:size, : one.block_tables.shape[1]].copy_(one.block_tables)
            longest = fixed.shape[1] * self.pools.block_size
            paged.append(replace(one, block_tables=fixed[:size], max_query_len=1, max_seq_len=longest))
        return replace(batch, paged=tuple(paged))


class CudaGraphRunner:
    """A model's forward pass over the pools. positions: of the longest sequence."""

    def __init__(self, weights: Weights, groups: Sequence[LayerGroup], positions: int) -> None:
        self._layers = LlamaForward(weights, groups, positions)
        self._positions = positions
        self._head = weights.head
        self._buffers: GraphBuffers | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @torch.inference_mode()
    def warmup(self, pools: KvPools, last_tokens: Tensor) -> None:
        """Captures a decoding step of every size."""
        begin = time.perf_counter()
        buffers = self._bound(pools, last_tokens)
        nothing = build_batch([], [], last_tokens, pools.block_size, len(pools.pools))
        # The largest first: the others use parts of the memory that it allocated.
        for size in reversed(SIZES):
            self._run(buffers, buffers.to_device(nothing, size), size)
        log.info("ready to decode", graphs=len(self._graphs), seconds=round(time.perf_counter() - begin, 1))

    @torch.inference_mode()
    def prepare(self, batch: HostBatch, pools: KvPools) -> Callable[[], ForwardOutput]:
        buffers, count = self._bound(pools, batch.last_tokens), batch.num_sequences
        if not batch.num_tokens == count <= SIZES[-1]:
            return partial(self._run_layers, buffers, batch.to_device())
        size = next(size for size in SIZES if size >= count)
        return partial(self._run_decode, buffers, batch, buffers.to_device(batch, size), size)

    @torch.inference_mode()
    def _run_layers(self, buffers: GraphBuffers, sent: DeviceBatch) -> ForwardOutput:
        attention = ScoringAttention(sent.scored, len(buffers.caches))
        logits = self._layers.logits(sent, buffers.caches, sent.rows, attention)
        return ForwardOutput(logits, logits.argmax(-1), sent.output_token_rows, attention.result())

    @torch.inference_mode()
    def _run_decode(self, buffers: GraphBuffers, batch: HostBatch, sent: DeviceBatch, size: int) -> ForwardOutput:
        count = batch.num_sequences
        scores: tuple[SequenceScores, ...] = ()
        if batch.scored:
            # The scored rows change from step to step: no graph repeats them, but the results are those of a graph.
            scores = self._launch(buffers, sent, size)
        else:
            self._run(buffers, sent, size)
        if len(batch.rows) == count:
            return ForwardOutput(buffers.logits[:count], buffers.best[:count], sent.output_token_rows, scores)
        # Some compute the last token of a chunk that is not their last token.
        return ForwardOutput(buffers.logits[sent.rows], buffers.best[sent.rows], sent.output_token_rows, scores)

    def _bound(self, pools: KvPools, last_tokens: Tensor) -> GraphBuffers:
        """The buffers over these tensors; graphs captured over other tensors are dropped."""
        if self._buffers is None or self._buffers.pools is not pools or self._buffers.last_tokens is not last_tokens:
            self._graphs.clear()
            logits = self._head.new_empty(SIZES[-1], len(self._head))
            self._buffers = GraphBuffers(pools, last_tokens, self._positions, logits)
            self._memory = torch.cuda.graph_pool_handle() if logits.is_cuda else None
        return self._buffers

    def _run(self, buffers: GraphBuffers, batch: DeviceBatch, size: int) -> None:
        """Computes a batch that `GraphBuffers.to_device` returned."""
        if not buffers.logits.is_cuda:
            self._launch(buffers, batch, size)
            return
        if size not in self._graphs:
            begin = time.perf_counter()
            self._graphs[size] = self._captured(buffers, batch, size)
            log.debug("captured a decoding step", sequences=size, seconds=round(time.perf_counter() - begin, 3))
        self._graphs[size].replay()

    def _captured(self, buffers: GraphBuffers, batch: DeviceBatch, size: int) -> torch.cuda.CUDAGraph:
        # Once without: kernels are compiled and libraries take their memory, which a capture must not see.
        self._launch(buffers, batch, size)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            self._launch(buffers, batch, size)
        return graph

    def _launch(self, buffers: GraphBuffers, batch: DeviceBatch, size: int) -> tuple[SequenceScores, ...]:
        attention = ScoringAttention(batch.scored, len(buffers.caches))
        logits = self._layers.logits(batch, buffers.caches, None, attention, out=buffers.logits[:size])
        torch.argmax(logits, -1, out=buffers.best[:size])
        return attention.result()
