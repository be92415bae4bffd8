"""A decoder of the Llama family on a CPU: packs its weights once and computes whole steps in compiled code."""

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from ctypes import c_double
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.checks import check_caches, check_contiguous, check_dtype, check_shape
from kernels.cpu_decoder import abi
from kernels.quantization import check_scales
from kernels.scores import SequenceScores
from kernels.stored import Matrix, StoredMatrix
from kernels.weights import LayerAdapter, LayerWeights, LowRank, Weights

DTYPES = (torch.float32, torch.bfloat16)
# What a step spends its time on, in the order of the compiled code's Phase.
PHASES = ("rest", "qkv", "rotary and store", "attention", "attention output", "gate and up", "down", "logits")
# The phase that multiplies with each matrix of LayerWeights, and with the head.
MATRICES = {"qkv": "qkv", "out": "attention output", "gate_up": "gate and up", "down": "down", "head": "logits"}


@dataclass(frozen=True)
class TokenGroup:
    """Slots and tables of one group of layers. slots: [T] int64, -1 to store nothing; tables: [S, M] int32.

    window: tokens that a query sees, its own included; None for no limit.
    """

    slots: Tensor
    tables: Tensor
    window: int | None = None


@dataclass(frozen=True, eq=False)
class CompiledAdapter:
    """An adapter prepared for one decoder; its weights are freed when neither this object nor a step refers to them."""

    handle: int


@dataclass(frozen=True)
class AdapterSpan:
    """The packed tokens from `begin` to `end` of a step that use one adapter."""

    adapter: CompiledAdapter
    begin: int
    end: int


def obstacle(library: ctypes.CDLL, weights: Weights[Matrix], dtype: torch.dtype) -> str:
    """Returns why this decoder cannot compute a model; empty if it can."""
    abi.declare(library)
    tile, width = library.decoder_tile(), library.decoder_width()
    hidden = weights.final_norm.shape[0]
    if dtype not in DTYPES:
        return f"{dtype} is neither float32 nor bfloat16"
    if weights.head_dim % tile or weights.head_dim // 2 % width:
        return f"the head size {weights.head_dim} is no multiple of {max(tile, 2 * width)}"
    if weights.q_heads % weights.kv_heads:
        return "the number of query heads is no multiple of the number of KV heads"
    if hidden % tile or any(layer.gate_up.shape[0] % tile for layer in weights.layers):
        return f"its widths are no multiples of {tile}"
    return ""


def _ways(weight: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yields ways to store a matrix, the smallest first, each with the matrix in the form that this way takes."""
    if weight.dtype == torch.float32:
        yield from ((weight, stored) for stored in (abi.CODES_4, abi.CODES_8))
        # Most models are published in bfloat16 or float16, and need little more memory if they are loaded as floats: if
        # bfloat16 can hold a float, its lower half is 0; if float16 can hold it, its lowest byte is 0.
        bits = weight.view(torch.int32)
        if (bits & 0xFFFF).any():
            yield weight, abi.SQUEEZED_4 if (bits & 0xFF).any() else abi.SQUEEZED_3
            yield weight, abi.FLOATS
            return
        weight = weight.bfloat16()
    yield from ((weight, stored) for stored in (abi.ROUNDED_4, abi.ROUNDED_8, abi.SQUEEZED_2, abi.BF16))


class Decoder:
    """Owns packed copies of the weights and the threads that compute with them. One step at a time.

    vocabulary: V, the length of a row of logits. cache_dtypes: dtypes that caches may have. weight_bytes: of the packed
    matrices. plain: which of MATRICES are kept in floats or bfloat16, unless they are a file's codes. products: whether
    bfloat16 is multiplied by instructions for it, whose rounding differs; otherwise it is widened first. invariant:
    whether a row's logits depend neither on the rest of its batch nor on the number of threads; False until a caller
    sets it. Rows of scored sequences are excepted.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: Weights[Matrix],
        dtype: torch.dtype,
        threads: int,
        *,
        products: bool | None = None,
        plain: Collection[str] = (),
    ) -> None:
        """products: whether to multiply bfloat16 by instructions for it, if they exist; None chooses what is faster.

        plain: all other matrices take as few bytes as possible.
        Raises ValueError if there is an `obstacle`, or if a file's scale or offset is not finite. Raises MemoryError if
        the packed weights do not fit.
        """
        reason = obstacle(library, weights, dtype)
        if reason:
            raise ValueError(f"weights: {reason}")
        self.invariant = False
        self.cache_dtypes = tuple(abi.CACHED)
        self._library = library
        self._dtype = dtype
        self.plain = frozenset(plain)
        prefers = library.decoder_prefers_products
        self.products = dtype == torch.bfloat16 and bool(prefers() if products is None else products)
        assert library.decoder_phases() == len(PHASES)
        self._seconds = (c_double * len(PHASES))()
        self.vocabulary, self._hidden = weights.head.shape
        self._cache_shape = [weights.kv_heads, weights.head_dim]
        intermediate, dim = weights.layers[0].gate_up.shape[0] // 2, weights.head_dim
        # Rows of the projections that each matrix joins, in the order of the compiled code's Matrix.
        self._heights = {
            "qkv": [weights.q_heads * dim, *[weights.kv_heads * dim] * 2],
            "out": [self._hidden],
            "gate_up": [intermediate] * 2,
            "down": [self._hidden],
        }
        # Tensors that the structures below point into; packed weights are one allocation, for large pages.
        self._kept: list[Tensor] = []
        matrices = [
            weights.head,
            *(m for one in weights.layers for m in (one.qkv, one.out, one.gate_up, one.down)),
        ]
        # An embedding stored in codes keeps its codes; any other embedding is copied in the model's dtype, unpacked.
        embedding = weights.embedding
        coded = embedding if isinstance(embedding, StoredMatrix) and embedding.codes else None
        if coded is not None:
            matrices.append(coded)
        # Enough for any way of storing; the rest is never touched, and so takes no memory.
        most = sum(map(self._most_bytes, matrices))
        self._packed, self.weight_bytes = library.decoder_allocate(most), 0
        if not self._packed:
            raise MemoryError(f"no {most} bytes for packed weights")
        self._at_end(library.decoder_free, self._packed)
        self._layers = (abi.Layer * len(weights.layers))(*map(self._layer, weights.layers))
        head = self._linear("head", weights.head)
        self._model = abi.Model(
            layers=len(weights.layers),
            hidden=self._hidden,
            intermediate=intermediate,
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
            embedding=None if embedding is coded or embedding is None else self._keep(self._in_floats(embedding)),
            embedding_stored=abi.BF16 if dtype == torch.bfloat16 else abi.FLOATS,
            table=head if coded is None else self._linear("embedding", coded),
            head=head,
            layer=self._layers,
        )
        self._team = library.decoder_team(ctypes.byref(self._model), threads)
        self._at_end(library.decoder_disband, self._team)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of all steps so far in each phase, as the calling thread saw them; "rest": norms and embedding."""
        return dict(zip(PHASES, self._seconds, strict=True))

    def bind(
        self, caches: Sequence[tuple[Tensor, Tensor]], scales: Sequence[tuple[Tensor | None, Tensor | None]] = ()
    ) -> None:
        """Sets each layer's keys and values, [N, B, Hkv, D] each, which later steps read and write.

        caches: all of one dtype of CACHED and one block size; the caller must keep them alive. scales: for int8 and
        float8_e4m3fn, each layer's scales of keys and values, [Hkv, D] float32, which are copied; for other dtypes, no
        scales. Raises ValueError naming the argument that is wrong.
        """
        nothing = [(None, None)] * len(caches)
        for layer, (k_cache, v_cache), (k_scale, v_scale) in zip(self._layers, caches, scales or nothing, strict=True):
            check_caches(k_cache, v_cache, "[N, B, Hkv, D]")
            check_shape("k_cache", k_cache, [None, None, *self._cache_shape], "[N, B, Hkv, D]")
            check_dtype("k_cache", k_cache, caches[0][0].dtype)
            check_dtype("k_cache", k_cache, *abi.CACHED)
            check_scales(k_cache, k_scale, v_scale)
            layer.k_cache, layer.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
            layer.k_scale, layer.v_scale = (
                None if scale is None else self._keep(scale) for scale in (k_scale, v_scale)
            )
            self._model.block_size, self._model.cached = k_cache.shape[1], abi.CACHED[k_cache.dtype]

    def step(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cache_positions: Tensor,
        query_start: Tensor,
        groups: Sequence[TokenGroup],
        rows: Tensor,
        scores: Sequence[SequenceScores] = (),
        adapters: Sequence[AdapterSpan] = (),
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Computes packed tokens, stores their keys and values, and returns the logits of `rows`: [R, V] float32.

        token_ids: [T] int64. positions: [T] int64, by which queries and keys are rotated.
        cache_positions: [T] int64, positions along the block tables, consecutive in a sequence; a token attends to all
        positions up to its own. query_start: [S + 1] int32; sequence s has the tokens query_start[s] to
        query_start[s + 1], at least one. groups: one per group of layers. rows: [R] int64, packed tokens.
        scores: sequences whose attention scores are computed, at most once each, and where the scores go; only for
        models without a window.
        adapters: spans that do not overlap; tokens outside them have no adapter.
        out: [R, V] float32 contiguous, which takes the logits; None for a new tensor.
        Raises ValueError naming the argument whose shape or dtype is wrong, and if no caches are bound. Ids, slots and
        tables are not checked.
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
            check_contiguous("slots", group.slots)
            check_shape("tables", group.tables, [num_sequences, None], "[S, M]")
            check_dtype("tables", group.tables, torch.int32)
            check_contiguous("tables", group.tables)
        for span in adapters:
            if not 0 <= span.begin < span.end <= num_tokens:
                raise ValueError(f"adapters: {span.begin} to {span.end} is no span of {num_tokens} tokens")
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
            spans = [abi.AdapterSpan(span.adapter.handle, span.begin, span.end) for span in adapters]
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
                len(adapters),
                (abi.AdapterSpan * len(adapters))(*spans),
            )
            inputs = ctypes.byref(self._model), ctypes.byref(batch)
            self._library.decoder_step(*inputs, logits.data_ptr(), self._team, self._seconds, self.products)
        return logits

    def adapter(self, layers: Sequence[LayerAdapter]) -> CompiledAdapter:
        """Packs an adapter. Raises ValueError naming the projection whose matrices do not fit, and MemoryError.

        Its weights are stored in bfloat16 if the model's dtype is bfloat16, or if rounding changes none of them. Else
        they are stored in float32.
        """
        matrices: list[abi.AdapterMatrix] = []
        kept: list[Tensor] = []
        exact = True
        for number, (layer, own) in enumerate(zip(self._layers, layers, strict=True)):
            for name, linear in (
                ("qkv", layer.qkv),
                ("out", layer.out),
                ("gate_up", layer.gate_up),
                ("down", layer.down),
            ):
                parts: tuple[LowRank | None, ...] = getattr(own, name)
                heights = self._heights[name]
                for part, height in zip(parts, heights, strict=True):
                    if part is not None and (part.a.shape[1], part.b.shape[0]) != (linear.k, height):
                        raise ValueError(
                            f"layer {number}, {name}: expected A [R, {linear.k}] and B [{height}, R], "
                            f"got {list(part.a.shape)} and {list(part.b.shape)}"
                        )
                rank = max((len(part.a) for part in parts if part is not None), default=0)
                matrix = abi.AdapterMatrix(rank=rank, parts=len(parts), n=linear.n, k=linear.k)
                if rank:
                    a, b = torch.zeros(len(parts), rank, linear.k), torch.zeros(linear.n, rank)
                    for at, (part, into) in enumerate(zip(parts, torch.split(b, heights), strict=True)):
                        if part is not None:
                            a[at, : len(part.a)], into[:, : len(part.a)] = part.a, part.b
                            matrix.scale[at] = part.scale
                    if name == "gate_up":
                        b = self._paired(b)
                    exact = exact and all(torch.equal(one, one.bfloat16().float()) for one in (a, b))
                    kept += (a, b)
                    matrix.a, matrix.b = a.data_ptr(), b.data_ptr()
                matrices.append(matrix)
        halves = self._dtype == torch.bfloat16 or exact
        array = (abi.AdapterMatrix * len(matrices))(*matrices)
        handle = self._library.decoder_adapter(array, len(matrices), halves)
        if not handle:
            raise MemoryError("no memory for an adapter")
        adapter = CompiledAdapter(handle)
        weakref.finalize(adapter, self._library.decoder_drop_adapter, handle).atexit = False
        return adapter

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

    def _layer(self, weights: LayerWeights[Matrix]) -> abi.Layer:
        return abi.Layer(
            input_norm=self._floats(weights.input_norm),
            post_norm=self._floats(weights.post_norm),
            q_norm=None if weights.q_norm is None else self._floats(weights.q_norm),
            k_norm=None if weights.k_norm is None else self._floats(weights.k_norm),
            qkv=self._linear("qkv", weights.qkv, weights.qkv_bias),
            out=self._linear("out", weights.out),
            gate_up=self._linear("gate_up", weights.gate_up, order=self._paired),
            down=self._linear("down", weights.down),
            group=weights.group,
        )

    def _paired(self, rows: Tensor) -> Tensor:
        """Reorders rows so that matching columns of the gate and up projections are in one tile."""
        half, width = self._library.decoder_tile() // 2, rows.shape[1]
        return rows.view(2, -1, half, width).transpose(0, 1).reshape(-1, width)

    def _linear(
        self,
        name: str,
        matrix: Matrix,
        bias: Tensor | None = None,
        order: Callable[[Tensor], Tensor] = Tensor.contiguous,
    ) -> abi.Linear:
        """order: moves rows to where the decoder expects them, contiguously."""
        if isinstance(matrix, StoredMatrix) and matrix.codes:
            packed, stored = self._pack_blocks(order(matrix.blocks()), matrix.codes, matrix.shape)
        else:
            packed, stored = self._pack(order(self._in_floats(matrix)), plain=name in self.plain)
        return abi.Linear(packed, None if bias is None else self._floats(bias), *matrix.shape, stored)

    def _in_floats(self, matrix: Matrix) -> Tensor:
        if isinstance(matrix, StoredMatrix):
            return matrix.floats(self._dtype)
        return matrix.detach().to(self._dtype)

    def _pack_blocks(self, blocks: Tensor, kind: str, shape: tuple[int, int]) -> tuple[int, int]:
        """Packs a file's blocks; returns where they lie, and how. Raises ValueError if a scale is not finite."""
        at = self._packed + self.weight_bytes
        number, stored = abi.BLOCK_KINDS[kind][0], self._coded(kind)
        size = self._library.decoder_pack_blocks(at, blocks.data_ptr(), *shape, number, stored)
        if not size:
            raise ValueError(f"a scale of a matrix in {kind} is no number, or too large")
        self.weight_bytes += size
        return at, stored

    def _coded(self, kind: str) -> int:
        """Returns how a file's blocks are stored."""
        four = abi.BLOCK_KINDS[kind][1] == 4
        if self._dtype == torch.float32:
            return abi.CODES_4 if four else abi.CODES_8
        return abi.ROUNDED_4 if four else abi.ROUNDED_8

    def _most_bytes(self, matrix: Matrix) -> int:
        if isinstance(matrix, StoredMatrix) and matrix.codes:
            return self._packed_bytes(matrix, self._coded(matrix.codes))
        return self._packed_bytes(matrix, abi.SQUEEZED_4 if self._dtype == torch.float32 else abi.SQUEEZED_2)

    def _pack(self, weight: Tensor, *, plain: bool) -> tuple[int, int]:
        """Packs a matrix; returns where it lies, and how.

        A plain matrix is stored in the last of `_ways`, any other in the first that is possible. A squeezed matrix must
        also be smaller than in floats or bfloat16.
        """
        at = self._packed + self.weight_bytes
        ways = _ways(weight)
        for same, stored in deque(ways, maxlen=1) if plain else ways:
            if stored in abi.SQUEEZED and not self._library.decoder_can_squeeze():
                continue
            size = self._library.decoder_pack(at, same.data_ptr(), *same.shape, stored)
            in_floats = self._packed_bytes(same, abi.FLOATS if same.dtype == torch.float32 else abi.BF16)
            if size and (stored not in abi.SQUEEZED or size < in_floats):
                break
        self.weight_bytes += size
        return at, stored

    def _packed_bytes(self, weight: Matrix, stored: int) -> int:
        return int(self._library.decoder_packed_bytes(*weight.shape, stored))

    def _at_end(self, release: Callable[..., None], *arguments: int) -> None:
        # Not at the interpreter's exit: a thread may still be computing, and the system reclaims all memory.
        weakref.finalize(self, release, *arguments).atexit = False

    def _floats(self, tensor: Tensor) -> int:
        return self._keep(tensor.float())

    def _keep(self, tensor: Tensor) -> int:
        # A copy, because the original may be freed.
        self._kept.append(tensor.detach().clone().contiguous())
        return self._kept[-1].data_ptr()
