"""A decoder of the Llama family on a CPU: packs its weights once and computes whole steps in compiled code."""

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_double
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.checks import check_caches, check_contiguous, check_dtype, check_shape
from kernels.cpu_decoder import abi
from kernels.scores import SequenceScores
from kernels.weights import LayerWeights, Weights

DTYPES = (torch.float32, torch.bfloat16)
# Share of its bytes up to which a matrix stays squeezed: else unpacking gains too little.
_WORTH_SQUEEZING = 0.95
# What a step spends its time on, in the order of the compiled code's Phase.
PHASES = ("rest", "qkv", "rotary and store", "attention", "attention output", "gate and up", "down", "logits")


@dataclass(frozen=True)
class TokenGroup:
    """Slots and tables of the layers with one window. slots: [T] int64, -1 for nowhere; tables: [S, M] int32."""

    slots: Tensor
    tables: Tensor
    window: int | None = None


def obstacle(library: ctypes.CDLL, weights: Weights, dtype: torch.dtype) -> str:
    """Why this decoder cannot compute a model; empty when it can."""
    abi.declare(library)
    tile, width = library.decoder_tile(), library.decoder_width()
    hidden = weights.final_norm.shape[0]
    if dtype not in DTYPES:
        return f"{dtype} is neither float32 nor bfloat16"
    if weights.head_dim % tile or weights.head_dim // 2 % width:
        return f"the head size {weights.head_dim} is no multiple of {max(tile, 2 * width)}"
    if weights.q_heads % weights.kv_heads:
        return "query heads are not shared evenly"
    if hidden % tile or any(layer.gate_up.shape[0] % tile for layer in weights.layers):
        return f"its widths are no multiples of {tile}"
    return ""


def _ways(weight: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Ways to keep a matrix, the smallest first, each with the same matrix as that takes it."""
    if weight.dtype == torch.float32:
        yield from ((weight, stored) for stored in (abi.CODES_4, abi.CODES_8))
        # Most models are published in bfloat16 or float16: as floats, too, their weights need little more memory than
        # that. The lower half of floats that bfloat16 holds is 0, the lowest byte of those that float16 holds.
        bits = weight.view(torch.int32)
        if (bits & 0xFFFF).any():
            yield weight, abi.SQUEEZED_4 if (bits & 0xFF).any() else abi.SQUEEZED_3
            yield weight, abi.FLOATS
            return
        weight = weight.bfloat16()
    yield from ((weight, stored) for stored in (abi.ROUNDED_4, abi.ROUNDED_8, abi.SQUEEZED_2, abi.BF16))


class Decoder:
    """Owns packed copies of the weights and the threads that compute with them. One step at a time.

    vocabulary: V, the length of a row of logits. weight_bytes: of the packed matrices. products: whether bfloat16 is
    multiplied by instructions for it, whose rounding differs; else it is widened first. invariant: whether a row's
    logits depend neither on the rest of its batch nor on the number of threads; rows of scored sequences are left out.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: Weights,
        dtype: torch.dtype,
        threads: int,
        *,
        products: bool | None = None,
    ) -> None:
        """products: whether bfloat16 is multiplied by instructions for it, if there are any; None takes what is faster.

        Raises ValueError when `obstacle` finds one.
        """
        reason = obstacle(library, weights, dtype)
        if reason:
            raise ValueError(f"weights: {reason}")
        self.invariant = False
        self._library = library
        self._dtype = dtype
        prefers = library.decoder_prefers_products
        self.products = dtype == torch.bfloat16 and bool(prefers() if products is None else products)
        assert library.decoder_phases() == len(PHASES)
        self._seconds = (c_double * len(PHASES))()
        self.vocabulary, self._hidden = weights.head.shape
        self._cache_shape = [weights.kv_heads, weights.head_dim]
        # What the structures below point into; packed weights in one piece, for the large pages.
        self._kept: list[Tensor] = []
        matrices = [
            weights.head,
            *(m for one in weights.layers for m in (one.qkv, one.out, one.gate_up, one.down)),
        ]
        # Enough however they are stored; what is left is never touched, and so takes no memory.
        way = abi.SQUEEZED_4 if dtype == torch.float32 else abi.SQUEEZED_2
        most = sum(self._packed_bytes(one, way) for one in matrices)
        self._packed, self.weight_bytes = library.decoder_allocate(most), 0
        if not self._packed:
            raise MemoryError(f"no {most} bytes for packed weights")
        self._at_end(library.decoder_free, self._packed)
        self._layers = (abi.Layer * len(weights.layers))(*map(self._layer, weights.layers))
        self._model = abi.Model(
            layers=len(weights.layers),
            hidden=self._hidden,
            intermediate=weights.layers[0].gate_up.shape[0] // 2,
            vocabulary=self.vocabulary,
            q_heads=weights.q_heads,
            kv_heads=weights.kv_heads,
            head_dim=weights.head_dim,
            block_size=0,
            epsilon=weights.epsilon,
            attention_scale=weights.attention_scale,
            rotary_scale=weights.rotary_scale,
            frequencies=self._floats(weights.frequencies),
            final_norm=self._floats(weights.final_norm),
            embedding=None if weights.embedding is None else self._keep(weights.embedding.to(dtype)),
            head=self._linear(weights.head),
            layer=self._layers,
        )
        self._team = library.decoder_team(ctypes.byref(self._model), threads)
        self._at_end(library.decoder_disband, self._team)

    @property
    def seconds(self) -> dict[str, float]:
        """What the time of all steps so far went to, as one thread saw it; norms and the embedding are the rest."""
        return dict(zip(PHASES, self._seconds, strict=True))

    def bind(self, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Names each layer's keys and values, [N, B, Hkv, D] each, which later steps read and write."""
        for layer, (k_cache, v_cache) in zip(self._layers, caches, strict=True):
            check_caches(k_cache, v_cache, "[N, B, Hkv, D]")
            check_shape("k_cache", k_cache, [None, None, *self._cache_shape], "[N, B, Hkv, D]")
            check_dtype("k_cache", k_cache, self._dtype)
            layer.k_cache, layer.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
            self._model.block_size = k_cache.shape[1]

    def step(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cache_positions: Tensor,
        query_start: Tensor,
        groups: Sequence[TokenGroup],
        rows: Tensor,
        scores: Sequence[SequenceScores] = (),
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Computes packed tokens, stores their keys and values, and returns the logits of `rows`: [R, V] float32.

        token_ids: [T] int64. positions: [T] int64, by which queries and keys are rotated.
        cache_positions: [T] int64, positions along the block tables, consecutive in a sequence; a token attends to all
        positions up to its own. query_start: [S + 1] int32; sequence s has the tokens query_start[s] to
        query_start[s + 1], at least one. groups: per group of layers. rows: [R] int64.
        scores: of which sequences the attention scores are computed, at most once each, and where they go; only for
        models without a window.
        out: [R, V] float32 contiguous, which takes the logits; None for new ones.
        Raises ValueError naming the argument whose shape or dtype is wrong. Ids, slots and tables are not checked.
        """
        num_tokens, num_sequences = token_ids.shape[0], query_start.shape[0] - 1
        for name, tensor, size, dtype in (
            ("token_ids", token_ids, None, torch.int64),
            ("positions", positions, num_tokens, torch.int64),
            ("cache_positions", cache_positions, num_tokens, torch.int64),
            ("query_start", query_start, None, torch.int32),
            ("rows", rows, None, torch.int64),
        ):
            check_shape(name, tensor, [size], "one dimension")
            check_dtype(name, tensor, dtype)
            check_contiguous(name, tensor)
        for group in groups:
            check_shape("slots", group.slots, [num_tokens], "[T]")
            check_dtype("slots", group.slots, torch.int64)
            check_shape("tables", group.tables, [num_sequences, None], "[S, M]")
            check_dtype("tables", group.tables, torch.int32)
            check_contiguous("tables", group.tables)
        if not self._model.block_size:
            raise ValueError("no caches are bound")
        if scores and any(group.window for group in groups):
            raise ValueError("scores: attention is not scored where it has a window")
        scored = [self._scored(entry, cache_positions, query_start) for entry in scores]
        shape = [rows.shape[0], self.vocabulary]
        logits = torch.empty(shape) if out is None else out
        check_shape("out", logits, shape, "[R, V]")
        check_dtype("out", logits, torch.float32)
        check_contiguous("out", logits)
        if num_tokens:
            entries = [
                abi.Group(group.slots.data_ptr(), group.tables.data_ptr(), group.tables.shape[1], group.window or 0)
                for group in groups
            ]
            batch = abi.Batch(
                num_tokens,
                num_sequences,
                len(groups),
                rows.shape[0],
                token_ids.data_ptr(),
                positions.data_ptr(),
                query_start.data_ptr(),
                (abi.Group * len(groups))(*entries),
                rows.data_ptr(),
                cache_positions.data_ptr(),
                len(scored),
                (abi.Scored * len(scored))(*scored),
                self.invariant,
            )
            types = self._dtype == torch.bfloat16, self.products
            inputs = ctypes.byref(self._model), ctypes.byref(batch)
            self._library.decoder_step(*inputs, logits.data_ptr(), self._team, self._seconds, *types)
        return logits

    def _scored(self, scores: SequenceScores, cache_positions: Tensor, query_start: Tensor) -> abi.Scored:
        first, end = query_start[scores.sequence : scores.sequence + 2].tolist()
        if not 1 <= scores.rows <= end - first:
            raise ValueError(f"scores: expected 1 to {end - first} rows, got {scores.rows}")
        keys = int(cache_positions[end - 1]) + 1
        for name, tensor in (("weights", scores.weights), ("squares", scores.squares)):
            if tensor is not None:
                shape = [len(self._layers), self._cache_shape[0], keys]
                check_shape(f"scores.{name}", tensor, shape, "[L, Hkv, T]")
                check_dtype(f"scores.{name}", tensor, torch.float32)
                check_contiguous(f"scores.{name}", tensor)
        squares = None if scores.squares is None else scores.squares.data_ptr()
        scored = abi.Scored(scores.sequence, scores.rows, keys, scores.weights.data_ptr(), squares)
        if (accumulator := scores.accumulator) is not None:
            heads, sums = self._cache_shape[0], accumulator.sums
            check_shape("accumulator", sums, [len(self._layers), None, None], "[L, 1 or Hkv, S]")
            check_dtype("accumulator", sums, torch.float32)
            check_contiguous("accumulator", sums)
            if sums.shape[1] not in (1, heads) or sums.shape[2] < keys:
                raise ValueError(f"accumulator: expected [L, 1 or {heads}, at least {keys}], got {list(sums.shape)}")
            first, width = accumulator.first, accumulator.width
            if first < 0 or width < 1:
                raise ValueError(f"accumulator: first and width cannot be {first} and {width}")
            scored.totals = sums.data_ptr()
            scored.heads, scored.capacity = sums.shape[1:]
            scored.first, scored.width = first, width
        return scored

    def _layer(self, weights: LayerWeights) -> abi.Layer:
        half = self._library.decoder_tile() // 2
        hidden = weights.gate_up.shape[1]
        # Columns of the gate and of the up projection that meet stand in one tile.
        gate_up = weights.gate_up.view(2, -1, half, hidden).transpose(0, 1).reshape(-1, hidden)
        return abi.Layer(
            input_norm=self._floats(weights.input_norm),
            post_norm=self._floats(weights.post_norm),
            q_norm=None if weights.q_norm is None else self._floats(weights.q_norm),
            k_norm=None if weights.k_norm is None else self._floats(weights.k_norm),
            qkv=self._linear(weights.qkv, weights.qkv_bias),
            out=self._linear(weights.out),
            gate_up=self._linear(gate_up),
            down=self._linear(weights.down),
            group=weights.group,
        )

    def _linear(self, weight: Tensor, bias: Tensor | None = None) -> abi.Linear:
        weight = weight.detach().to(self._dtype).contiguous()
        packed, stored = self._pack(weight)
        return abi.Linear(packed, None if bias is None else self._floats(bias), *weight.shape, stored)

    def _pack(self, weight: Tensor) -> tuple[int, int]:
        """Where a matrix lies now, and how: in the first way that it can be, squeezed if that is worth it."""
        at = self._packed + self.weight_bytes
        for same, stored in _ways(weight):
            if stored in abi.SQUEEZED and not self._library.decoder_can_squeeze():
                continue
            size = self._library.decoder_pack(at, same.data_ptr(), *same.shape, stored)
            plain = self._packed_bytes(same, abi.FLOATS if same.dtype == torch.float32 else abi.BF16)
            if size and (stored not in abi.SQUEEZED or size < _WORTH_SQUEEZING * plain):
                break
        self.weight_bytes += size
        return at, stored

    def _packed_bytes(self, weight: Tensor, stored: int) -> int:
        return int(self._library.decoder_packed_bytes(*weight.shape, stored))

    def _at_end(self, release: Callable[..., None], *arguments: int) -> None:
        # Not at the interpreter's exit: a thread may still be computing, and the system takes all back.
        weakref.finalize(self, release, *arguments).atexit = False

    def _floats(self, tensor: Tensor) -> int:
        return self._keep(tensor.float())

    def _keep(self, tensor: Tensor) -> int:
        # A copy, as what it was taken from may go.
        self._kept.append(tensor.detach().clone().contiguous())
        return self._kept[-1].data_ptr()
