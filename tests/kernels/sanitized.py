"""Computes steps of every kind with a decoder that was compiled to report its own faults, beside the plain one.

`python -m tests.kernels.sanitized INSTRUMENTED PLAIN`, under the sanitizer's runtime. tests/kernels/test_sanitizers.py
runs it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kernels.cpu_decoder.launch import Decoder, obstacle
from kernels.scores import ScoreAccumulator
from kernels.stored import StoredMatrix
from tests.kernels.decoder_cases import (
    BARS,
    CASES,
    COMPUTED,
    COUNTED,
    EIGHT_BITS,
    Case,
    build_world,
    error_of,
    quantized,
    scores_of,
    stored,
)

# A step that begins while threads are late in the one before is the hardest to get right.
STEPS = 3
SHAPES = (*CASES.values(), *COUNTED.values())
# As weights come: as they are, as one of ggml's quantizations left them, or as a file has those.
Way = Callable[[Tensor], Tensor | StoredMatrix]
WAYS: list[Way] = [partial(form, way=kind) for form in (quantized, stored) for kind in ("Q4_0", "Q4_1", "Q8_0")]
QUANTIZED = Case((1, 30), (40, 70), hidden=192, intermediate=480, vocabulary=500)


def outputs(
    library: ctypes.CDLL,
    case: Case,
    dtype: torch.dtype,
    products: bool,
    way: Way | None,
    invariant: bool,
    cache: torch.dtype | None = None,
) -> list[Tensor]:
    """Logits of the steps, and what the attention of the last one was counted as. cache: its type, unless `dtype`."""
    world = build_world(case, cache or dtype)
    if obstacle(library, world.weights, dtype):
        return []
    if way is not None:
        matrices = ("qkv", "out", "gate_up", "down")
        layers = [replace(one, **{name: way(getattr(one, name)) for name in matrices}) for one in world.weights.layers]
        world = replace(world, weights=replace(world.weights, layers=layers))
    decoder = Decoder(library, world.weights, dtype, case.threads, products=products)
    decoder.invariant = invariant
    decoder.bind(world.caches, world.scales)
    sums = [
        replace(one, accumulator=ScoreAccumulator(torch.zeros(case.layers, 1, one.weights.shape[2] + 5), 3, 7))
        for one in scores_of(case, torch.float32)
    ]
    logits = [decoder.step(*world.arguments, sums) for _ in range(STEPS)]
    return logits + [one.weights for one in sums] + [one.accumulator.sums for one in sums if one.accumulator]


def main(instrumented: str, plain: str) -> None:
    """Raises AssertionError if the two computations differ."""
    torch.set_num_threads(1)
    libraries = [ctypes.CDLL(path) for path in (instrumented, plain)]
    ways: list[tuple[Case, Way | None]] = [(case, None) for case in SHAPES] + [(QUANTIZED, way) for way in WAYS]
    computed = 0
    for number, (case, way) in enumerate(ways):
        for dtype, products in COMPUTED.values():
            # Every second one as with batch-invariant computation.
            found, expected = (
                outputs(library, case, dtype, products, way, invariant=number % 2 == 1) for library in libraries
            )
            for one, other in zip(found, expected, strict=True):
                assert one.equal(other) or error_of(one, other.double()) < BARS[dtype], (case, way, dtype, products)
            computed += len(found)
    for number, case in enumerate(SHAPES):
        dtype, products = [*COMPUTED.values()][number % len(COMPUTED)]
        cache = EIGHT_BITS[number // len(COMPUTED) % len(EIGHT_BITS)]
        found, expected = (outputs(library, case, dtype, products, None, False, cache) for library in libraries)
        for one, other in zip(found, expected, strict=True):
            # A number rounded to a different one of the 256 changes many later values.
            assert one.equal(other) or error_of(one, other.double()) < 0.3, (case, dtype, products, cache)
        computed += len(found)
    print(computed, "results are equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
