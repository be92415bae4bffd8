"""Runs Llama-like decoders with merged products and fused kernels, whole steps as CUDA graphs.

A graph repeats what was launched once, on the same addresses. So a step's inputs lie in permanent buffers, and its
batch is padded to one of a few sizes, each with a separate graph. A size is a number of tokens and, if some sequence
computes several tokens, also of sequences. Everything else is launched piece by piece: larger steps, steps with
adapters or scored prompts, and, with the same padding, steps that score attention.
Without a CUDA device, the same functions run over the same buffers, and nothing is captured.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor

from executor.batch import AdapterSpan, DeviceBatch, HostBatch, build_batch, sent_bytes
from executor.cache.pool import KvPools, LayerCache, LayerGroup
from executor.models.attention import ScoringAttention
from executor.models.forward import ForwardOutput
from executor.models.llama import layer_adapters
from executor.models.torch import add_low_rank, on_device
from kernels.paged_attention.batch import AttentionArgs
from kernels.rms_norm.launch import rms_norm
from kernels.rotary_store.launch import NO_NORMS, HeadNorms, rotary_store
from kernels.scores import SequenceScores
from kernels.silu_mul.launch import silu_mul
from kernels.weights import LayerAdapter, LowRank, Weights

log = structlog.get_logger()


@dataclass(frozen=True)
class GraphSize:
    """What a graph's batch is padded to. decode: whether each sequence has one token."""

    tokens: int
    sequences: int
    decode: bool = False


# A batch of more decoding sequences takes longer to compute than to launch, and needs no graph.
DECODES = tuple(GraphSize(size, size, True) for size in (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16)))
# By tokens, then by sequences. The sizes are close where padding costs the device more than launches cost the host.
PREFILLS = tuple(
    GraphSize(tokens, sequences)
    for tokens in (*range(32, 256, 32), *range(256, 512, 64), *range(512, 2049, 128))
    for sequences in sorted({min(tokens, 64), min(tokens, 256)})
)
MOST_TOKENS, MOST_SEQUENCES = PREFILLS[-1].tokens, PREFILLS[-1].sequences


def size_of(batch: HostBatch) -> GraphSize | None:
    """Returns what a batch is padded to; None for a batch that is launched without padding."""
    tokens, sequences = batch.num_tokens, batch.num_sequences
    if batch.adapters or len(batch.rows) > sequences or not tokens:
        return None
    sizes = DECODES if tokens == sequences else PREFILLS
    return next((size for size in sizes if size.tokens >= tokens and size.sequences >= sequences), None)


@dataclass(frozen=True, eq=False)
class FusedAdapter:
    """What an adapter adds, layer by layer, on the model's device and in its type."""

    layers: Sequence[LayerAdapter]


class LlamaForward:
    """A model's layers over the caches of its pools, with tensors as arguments and no state between calls.

    positions: longest sequence, in tokens.
    """

    def __init__(self, weights: Weights, groups: Sequence[LayerGroup], positions: int) -> None:
        self._weights = weights
        self._windows = [group.shape.window for group in groups]
        self._embedding = weights.head if weights.embedding is None else weights.embedding
        self._heads = [weights.q_heads, weights.kv_heads, weights.kv_heads]
        self.count = len(weights.layers)
        angles = torch.arange(positions, device=weights.head.device).float()[:, None] * weights.frequencies.float()
        angles = torch.cat([angles, angles], -1)
        self._cos, self._sin = (
            (f(angles) * weights.rotary_scale).to(weights.head.dtype) for f in (torch.cos, torch.sin)
        )

    def logits(
        self,
        batch: DeviceBatch,
        caches: Sequence[LayerCache],
        rows: Tensor | None,
        attention: ScoringAttention,
        out: Tensor | None = None,
    ) -> Tensor:
        """Stores keys and values in each layer's cache; returns logits of the batch's rows, [R] int64, or all: [R, V].

        attention: attends, and keeps the scores that the batch asks for.

        The residual sum through the layers is rounded where transformers rounds it.
        """
        layers, epsilon = self._weights.layers, self._weights.epsilon
        next_norms = [*(layer.input_norm for layer in layers[1:]), self._weights.final_norm]
        total = F.embedding(batch.ids(), self._embedding)
        normal = rms_norm(total, layers[0].input_norm, epsilon)
        for number, (layer, cache, next_norm) in enumerate(zip(layers, caches, next_norms, strict=True)):
            attended, spans = self._attend(number, normal, batch, cache, attention), batch.adapters
            if rows is not None and layer is layers[-1]:
                # The rest of the last layer computes only the rows whose logits are wanted.
                attended, total = attended[rows], total[rows]
                spans = batch.row_adapters
            output = _added(attended @ layer.out.t(), attended, number, "out", spans)
            normal = rms_norm(output, layer.post_norm, epsilon, residual=total)
            activated = silu_mul(_added(normal @ layer.gate_up.t(), normal, number, "gate_up", spans))
            output = _added(activated @ layer.down.t(), activated, number, "down", spans)
            normal = rms_norm(output, next_norm, epsilon, residual=total)
        return torch.mm(normal, self._weights.head.t(), out=out)

    def _attend(
        self, number: int, normal: Tensor, batch: DeviceBatch, cache: LayerCache, attention: ScoringAttention
    ) -> Tensor:
        """[T, Hq D]."""
        weights, layer = self._weights, self._weights.layers[number]
        paged = batch.paged[layer.group]
        qkv = normal @ layer.qkv.t() if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, normal, layer.qkv.t())
        qkv = _added(qkv, normal, number, "qkv", batch.adapters, [heads * weights.head_dim for heads in self._heads])
        query, key, value = torch.split(qkv.view(len(normal), -1, weights.head_dim), self._heads, 1)
        norms = HeadNorms(layer.q_norm, layer.k_norm, weights.epsilon)
        slots, k_scale, v_scale = batch.slot_mappings[layer.group], cache.k_scale, cache.v_scale
        if k_scale is None and cache.k.dtype != query.dtype:
            # Attention computes in the type of the caches.
            query, key, value = (one.to(cache.k.dtype) for one in (*norms.apply(query, key), value))
            norms = NO_NORMS
        rotated = query, key, value, self._cos, self._sin, batch.positions
        rotary_store(*rotated, slots, cache.k, cache.v, k_scale=k_scale, v_scale=v_scale, norms=norms)
        window = self._windows[layer.group]
        args = AttentionArgs(weights.attention_scale, window, k_scale=k_scale, v_scale=v_scale)
        return attention.attend(number, query, cache.k, cache.v, paged, args).flatten(1).to(normal.dtype)


def _added(
    sums: Tensor,
    x: Tensor,
    number: int,
    matrix: str,
    spans: Sequence[AdapterSpan],
    widths: Sequence[int] | None = None,
) -> Tensor:
    """Adds the adapters of its rows, in place, to the products of x with a layer's matrix.

    widths: of the projections that the matrix joins, None for equal widths.
    """
    for span in spans:
        parts: Sequence[LowRank | None] = getattr(span.adapter.layers[number], matrix)
        columns = sums.chunk(len(parts), -1) if widths is None else torch.split(sums, list(widths), -1)
        for part, into in zip(parts, columns, strict=True):
            if part is not None:
                add_low_rank(into, x, part, span.begin, span.end)
    return sums


class GraphBuffers:
    """Buffers where steps over some pools find their inputs and leave their results.

    caches: per layer. logits: [S, V], S the largest size. best: [S] int64. positions: of the longest sequence.
    """

    def __init__(self, pools: KvPools, last_tokens: Tensor, positions: int, logits: Tensor) -> None:
        self.pools = pools
        self.last_tokens = last_tokens
        self.caches = pools.layers
        self.logits = logits
        sequences, device, groups = len(logits), logits.device, len(pools.pools)
        blocks = -(-positions // pools.block_size)
        self.best = torch.zeros(sequences, dtype=torch.int64, device=device)
        # [S, M] int32 per layer group, as wide as the longest possible sequence needs.
        self._tables = [torch.zeros(sequences, blocks, dtype=torch.int32, device=device) for _ in range(groups)]
        self._sent = torch.zeros(sent_bytes(MOST_TOKENS, sequences, blocks, groups), dtype=torch.uint8, device=device)

    def to_device(self, host: HostBatch, size: GraphSize) -> DeviceBatch:
        """Sends a batch, padded to a size; equal sizes have equal addresses and bounds."""
        batch, paged = host.to_device(tokens=size.tokens, sequences=size.sequences, into=self._sent), []
        most_queries = 1 if size.decode else size.tokens
        for fixed, one in zip(self._tables, batch.paged, strict=True):
            # Sent no wider than necessary, and widened here.
            tables = fixed[: size.sequences]
            tables[:, : one.block_tables.shape[1]].copy_(one.block_tables)
            longest = fixed.shape[1] * self.pools.block_size
            paged.append(replace(one, block_tables=tables, max_query_len=most_queries, max_seq_len=longest))
        return replace(batch, paged=tuple(paged))


class CudaGraphRunner:
    """A model's forward pass over the pools. positions: of the longest sequence."""

    def __init__(self, weights: Weights, groups: Sequence[LayerGroup], positions: int) -> None:
        self._layers = LlamaForward(weights, groups, positions)
        self._positions = positions
        self._head = weights.head
        self._buffers: GraphBuffers | None = None
        self._graphs: dict[GraphSize, torch.cuda.CUDAGraph] = {}

    @torch.inference_mode()
    def warmup(self, pools: KvPools, last_tokens: Tensor) -> None:
        """Captures a step of every size."""
        begin = time.perf_counter()
        buffers = self._bound(pools, last_tokens)
        nothing = build_batch([], [], last_tokens, pools.block_size, len(pools.pools))
        # The largest first: the others use parts of the memory that it allocated.
        for size in (*reversed(PREFILLS), *reversed(DECODES)):
            self._run(buffers, buffers.to_device(nothing, size), size)
        log.info("graphs are captured", graphs=len(self._graphs), seconds=round(time.perf_counter() - begin, 1))

    @torch.inference_mode()
    def prepare(self, batch: HostBatch, pools: KvPools) -> Callable[[], ForwardOutput]:
        buffers, size = self._bound(pools, batch.last_tokens), size_of(batch)
        if size is None:
            return partial(self._run_layers, buffers, batch.to_device())
        return partial(self._run_graph, buffers, batch, buffers.to_device(batch, size), size)

    def adapter(self, modules: Mapping[str, LowRank]) -> FusedAdapter:
        def sent(parts: Sequence[LowRank | None]) -> Any:
            return tuple(None if part is None else on_device(part, self._head) for part in parts)

        layers = layer_adapters(modules, self._layers.count)
        return FusedAdapter(
            [LayerAdapter(sent(one.qkv), sent(one.out), sent(one.gate_up), sent(one.down)) for one in layers]
        )

    @torch.inference_mode()
    def _run_layers(self, buffers: GraphBuffers, sent: DeviceBatch) -> ForwardOutput:
        attention = ScoringAttention(sent.scored, len(buffers.caches))
        logits = self._layers.logits(sent, buffers.caches, sent.rows, attention)
        return ForwardOutput(logits, logits.argmax(-1), sent.output_token_rows, attention.result())

    @torch.inference_mode()
    def _run_graph(self, buffers: GraphBuffers, batch: HostBatch, sent: DeviceBatch, size: GraphSize) -> ForwardOutput:
        count = len(batch.rows)
        scores: tuple[SequenceScores, ...] = ()
        if batch.scored:
            # The scored rows change from step to step: no graph repeats them, but the results equal those of a graph.
            scores = self._launch(buffers, sent, size)
        else:
            self._run(buffers, sent, size)
        if not size.decode or count == batch.num_sequences:
            return ForwardOutput(buffers.logits[:count], buffers.best[:count], sent.output_token_rows, scores)
        # Some sequences compute a single token that is not their last known token, and want no logits.
        rows = sent.rows[:count]
        return ForwardOutput(buffers.logits[rows], buffers.best[rows], sent.output_token_rows, scores)

    def _bound(self, pools: KvPools, last_tokens: Tensor) -> GraphBuffers:
        """Returns the buffers over these tensors; drops graphs captured over other tensors."""
        if self._buffers is None or self._buffers.pools is not pools or self._buffers.last_tokens is not last_tokens:
            self._graphs.clear()
            logits = self._head.new_empty(MOST_SEQUENCES, len(self._head))
            self._buffers = GraphBuffers(pools, last_tokens, self._positions, logits)
            self._memory = torch.cuda.graph_pool_handle() if logits.is_cuda else None
        return self._buffers

    def _run(self, buffers: GraphBuffers, batch: DeviceBatch, size: GraphSize) -> None:
        """Computes a batch that `GraphBuffers.to_device` returned."""
        if not buffers.logits.is_cuda:
            self._launch(buffers, batch, size)
            return
        if size not in self._graphs:
            begin = time.perf_counter()
            self._graphs[size] = self._captured(buffers, batch, size)
            seconds = round(time.perf_counter() - begin, 3)
            log.debug("captured a step", tokens=size.tokens, sequences=size.sequences, seconds=seconds)
        self._graphs[size].replay()

    def _captured(self, buffers: GraphBuffers, batch: DeviceBatch, size: GraphSize) -> torch.cuda.CUDAGraph:
        # Once without capture: kernels are compiled and libraries allocate memory, which a capture must not see.
        self._launch(buffers, batch, size)
        # `replace` drops what this launch derived from the batch, so that the graph derives the same when repeated.
        batch = replace(batch, paged=tuple(replace(one) for one in batch.paged))
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA during the capture.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            self._launch(buffers, batch, size)
        return graph

    def _launch(self, buffers: GraphBuffers, batch: DeviceBatch, size: GraphSize) -> tuple[SequenceScores, ...]:
        attention = ScoringAttention(batch.scored, len(buffers.caches))
        rows = None if size.decode else batch.rows
        logits = self._layers.logits(batch, buffers.caches, rows, attention, out=buffers.logits[: size.sequences])
        torch.argmax(logits, -1, out=buffers.best[: size.sequences])
        return attention.result()
