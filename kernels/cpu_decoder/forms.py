"""How a decoder stores its matrices: in as few bytes as they need, unless this machine is faster with plain matrices.

Fewer bytes are read sooner but have to be unpacked. What costs more depends on the processor, its memory and the
number of threads, so both are timed, with some layers of the model itself.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod, sqrt
from statistics import median

import torch
from torch import Tensor

from kernels.cpu_decoder.launch import MATRICES, Decoder, TokenGroup
from kernels.stored import Matrix, StoredMatrix
from kernels.weights import LayerWeights, Weights

# Sequences that decode together in the steps that are timed: one stream, and a batch.
_ROWS = (1, 32)
# A matrix is kept plain only if that takes at most this share of the time, because plain matrices take more memory.
_CLEARLY_FASTER = 0.95
# Weights of the layers that are timed. Two copies alternate, so that weights come from memory as in a real step.
_TIMED_WEIGHTS = 16_000_000
# The weights of smaller models stay in caches, and no difference is noticeable.
_FEW_WEIGHTS = 8_000_000
_ROUNDS = 7
_BLOCK = 16


def faster_plain(library: ctypes.CDLL, weights: Weights[Matrix], dtype: torch.dtype, threads: int) -> frozenset[str]:
    """Returns which of MATRICES the decoder multiplies with clearly faster if they are plain. Takes about a second.

    The set is empty if a file stores the matrices as codes: an operator serves such a file for its small size. The set
    is also empty for a model so small that its weights stay in caches.
    """
    part = _part(weights)
    if part is None:
        return frozenset()
    small = Decoder(library, part, dtype, threads)
    plain = Decoder(library, part, dtype, threads, plain=MATRICES)
    if plain.weight_bytes <= small.weight_bytes:
        return frozenset()
    timed = [(_Timed(small, part, rows), _Timed(plain, part, rows)) for rows in _ROWS]
    shares: dict[str, list[float]] = {name: [] for name in MATRICES}
    for _ in range(_ROUNDS):
        times = [(of_small.step(), of_plain.step()) for of_small, of_plain in timed]
        for name, phase in MATRICES.items():
            # One row and a batch count the same. A thread that took no part in a phase says nothing about it.
            shares[name].append(prod(now[phase] / before[phase] if before[phase] else inf for before, now in times))
    return frozenset(name for name, found in shares.items() if _is_clear(found))


def _is_clear(shares: Sequence[float]) -> bool:
    """Returns whether all shares are below 1 and their median is clearly below 1.

    shares: products of two time ratios each, so a root is compared. All must be below 1, so that other processes do not
    decide.
    """
    return max(shares) < 1 and sqrt(median(shares)) < _CLEARLY_FASTER


def _part(weights: Weights[Matrix]) -> Weights[Matrix] | None:
    """Returns the model with only the layers and head rows to be timed; None if nothing is to be timed."""
    head, embedding = weights.head, weights.embedding
    if any(isinstance(matrix, StoredMatrix) and matrix.codes for matrix in (head, *_matrices(weights.layers[0]))):
        return None
    of_layer = sum(_count(matrix) for matrix in _matrices(weights.layers[0]))
    if of_layer * len(weights.layers) < _FEW_WEIGHTS:
        return None
    rows = max(1, min(head.shape[0], _TIMED_WEIGHTS // head.shape[1]))
    if isinstance(head, Tensor):
        head = head[:rows]
    if isinstance(embedding, Tensor):
        embedding = embedding[:rows]
    return replace(weights, head=head, embedding=embedding, layers=weights.layers[: -(-_TIMED_WEIGHTS // of_layer)])


def _matrices(layer: LayerWeights[Matrix]) -> Sequence[Matrix]:
    return layer.qkv, layer.out, layer.gate_up, layer.down


def _count(matrix: Matrix) -> int:
    return matrix.shape[0] * matrix.shape[1]


class _Timed:
    """Steps of a decoder in which each of some sequences decodes its first token."""

    def __init__(self, decoder: Decoder, weights: Weights[Matrix], rows: int) -> None:
        self._decoder = decoder
        shape = rows, _BLOCK, weights.kv_heads, weights.head_dim
        # All layers may write to the same blocks, because their results are not used.
        self._cache = torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16)
        self._layers = len(weights.layers)
        ids, first = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        tables = torch.arange(rows, dtype=torch.int32).view(rows, 1)
        group = TokenGroup(torch.arange(rows) * _BLOCK, tables)
        groups = [group] * (1 + max(layer.group for layer in weights.layers))
        self._inputs = ids, first, first, torch.arange(rows + 1, dtype=torch.int32), groups, torch.arange(rows)

    def step(self) -> dict[str, float]:
        """Seconds of each phase."""
        self._decoder.bind([self._cache] * self._layers)
        before = self._decoder.seconds
        self._decoder.step(*self._inputs)
        return {phase: seconds - before[phase] for phase, seconds in self._decoder.seconds.items()}
