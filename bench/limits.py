"""Upper limits of a machine: the work of a case, and the speed of multiplying matrices and reading memory.

A case takes at least the time of its arithmetic at the speed of large matrix products, and at least the time to read
its weights and its K and V at the memory's speed; the limit is the larger of the two. Weights count once per step, and
there are as many steps as a request has output tokens. K and V that a step attends to count once per step; a reused
common prefix counts once for all requests. Norms, rotations, activations and all writes count nothing. So no engine
that reads weights in their dtype, 4 or 2 bytes each, can be faster. kvkeep's compiled code keeps weights in fewer bytes
if nothing is lost. The limits are for dense models with the matrices of Llama.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.workloads import Case

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
# Rows of the matrix products: one stream, a few, a full decoding batch, a chunk of a prompt.
ROWS = (1, 4, 32, 512)
LARGE = 2048
# Many times the largest cache of a processor.
READ_BYTES = 512 * 2**20
RUNS = 3


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that determine its work."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """Reads the sizes from a model's config.json."""
        config = json.loads((folder / "config.json").read_text())
        heads = config["num_attention_heads"]
        return cls(
            config["num_hidden_layers"],
            config["hidden_size"],
            config["intermediate_size"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            config["vocab_size"],
        )

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of a layer's matrices; matrices with the same input are merged."""
        query = self.heads * self.head_dim
        return (
            (query + 2 * self.kv_heads * self.head_dim, self.hidden),
            (self.hidden, query),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        )

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of one layer."""
        return sum(outputs * inputs for outputs, inputs in self.matrices)

    @property
    def output_weights(self) -> int:
        """Elements of the output matrix."""
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """Elements that every step reads."""
        return self.layers * self.layer_weights + self.output_weights

    @property
    def kv_elements(self) -> int:
        """Elements of K and V of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def attention_flops(self) -> int:
        """Operations of one token for each token that it attends to, in all layers."""
        return 4 * self.layers * self.heads * self.head_dim


@dataclass(frozen=True)
class Work:
    """The least arithmetic and the least reading: of a whole case, and of its mean decoding step."""

    flops: float
    bytes: float
    step_flops: float
    step_bytes: float


def work(shape: ModelShape, case: Case, dtype: str, weight_bytes: float | None = None) -> Work:
    """The least work of a case, with all weights in the dtype or in `weight_bytes` bytes."""
    size = ELEMENT_BYTES[dtype]
    weights = size * shape.weights if weight_bytes is None else weight_bytes
    shared = case.shared if case.reuse else 0
    # The last token of an output is sampled but never computed.
    fed = [prompt + case.output_tokens - 1 for prompt in case.prompt_tokens]
    tokens = shared + sum(length - shared for length in fed)
    attended = _triangle(shared) + sum(_triangle(length) - _triangle(shared) for length in fed)
    sampled = case.requests * case.output_tokens
    flops = (
        2 * shape.layers * shape.layer_weights * tokens
        + 2 * shape.output_weights * sampled
        + shape.attention_flops * attended
    )
    decoding_steps = case.output_tokens - 1
    # Step k of these attends to each prompt and the k tokens after it, and reads a common prefix once.
    context = sum(case.prompt_tokens) + case.requests * case.output_tokens / 2
    step_bytes = weights + size * shape.kv_elements * (context - shared * (case.requests - 1))
    return Work(
        flops,
        weights + decoding_steps * step_bytes,
        2 * shape.weights * case.requests + shape.attention_flops * context,
        step_bytes,
    )


def _triangle(length: int) -> int:
    """The number of pairs of tokens in the attention of the first `length` tokens."""
    return length * (length + 1) // 2


@dataclass(frozen=True)
class Limits:
    """The highest rates of the machine, in GFLOP/s and GB/s."""

    threads: int
    matrix_gflops: float
    layer_gflops: dict[int, float]
    output_gflops: float
    read_gbs: float

    def seconds(self, needed: Work) -> float:
        """Least time of a case."""
        return max(needed.flops / self.matrix_gflops, needed.bytes / self.read_gbs) / 1e9

    def step_seconds(self, needed: Work) -> float:
        """Least time of its mean decoding step."""
        return max(needed.step_flops / self.matrix_gflops, needed.step_bytes / self.read_gbs) / 1e9

    def best(self, other: Limits) -> Limits:
        """The better figures of two measurements of the same machine."""
        return replace(
            self,
            matrix_gflops=max(self.matrix_gflops, other.matrix_gflops),
            layer_gflops={rows: max(rate, other.layer_gflops[rows]) for rows, rate in self.layer_gflops.items()},
            output_gflops=max(self.output_gflops, other.output_gflops),
            read_gbs=max(self.read_gbs, other.read_gbs),
        )

    def lines(self) -> list[str]:
        """The limits as text."""
        layers = ", ".join(f"{rate:.0f} with {rows}" for rows, rate in self.layer_gflops.items())
        return [
            f"the machine, {self.threads} threads: matrix product {self.matrix_gflops:.0f} GFLOP/s, "
            f"memory read {self.read_gbs:.1f} GB/s",
            f"at the layers' shapes, GFLOP/s: {layers} rows; output matrix {self.output_gflops:.1f} with 1 row",
        ]


def measure(shape: ModelShape, dtype: str) -> Limits:
    """Measures in this process, which should have no other work: it allocates the model's weights."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    element = getattr(torch, dtype)

    def matrix(rows: int, columns: int) -> Any:
        # Numbers, not zeros: untouched pages would all be the same physical page.
        return torch.rand(rows, columns).to(element)

    # Some processors multiply bfloat16 more slowly than floats, and an engine may widen it.
    squares = [torch.rand(LARGE, LARGE).to(one) for one in {element, torch.float32}]
    seconds = min(_fastest(lambda way=way, square=square: way(square)) for square in squares for way in _ways(square))
    large = 2 * LARGE**3 / seconds / 1e9
    rates = _layer_rates(shape, matrix)
    output, row = matrix(shape.vocabulary, shape.hidden), matrix(1, shape.hidden)
    output_seconds = min(_fastest(lambda way=way: way(row)) for way in _ways(output))
    output_gflops = 2 * shape.output_weights / output_seconds / 1e9
    # The larger product is not always faster.
    return Limits(threads, max(large, *rates.values()), rates, output_gflops, _read_gbs())


def _ways(weight: Any) -> list[Callable[[Any], Any]]:
    """Ways to multiply rows by a matrix [outputs, inputs].

    The library that torch chooses uses only half of the float32 speed of some processors. The other way is oneDNN's
    product, with weights in oneDNN's preferred order.
    """
    import torch

    ways = [lambda rows: rows @ weight.t()]
    if torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        ways.append(lambda rows: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], ""))
    return ways


def _layer_rates(shape: ModelShape, matrix: Callable[[int, int], Any]) -> dict[int, float]:
    """GFLOP/s of the products of all layers: a weight has left the processor's cache before its next turn."""
    weights = [matrix(*sizes) for _ in range(shape.layers) for sizes in shape.matrices]
    products = list(zip(*(_ways(weight) for weight in weights), strict=True))
    inputs = {rows: [matrix(rows, weight.shape[1]) for weight in weights[: len(shape.matrices)]] for rows in ROWS}

    def multiply(rows: int, ways: Sequence[Callable[[Any], Any]]) -> None:
        for place, way in enumerate(ways):
            way(inputs[rows][place % len(shape.matrices)])

    return {
        rows: 2
        * rows
        * shape.layers
        * shape.layer_weights
        / min(_fastest(lambda rows=rows, ways=ways: multiply(rows, ways)) for ways in products)
        / 1e9
        for rows in ROWS
    }


def _fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls, after one call to warm up."""
    call()
    times = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def _read_gbs() -> float:
    """Sums more bytes than any cache holds, which is the fastest way to read with threads in torch and numpy.

    Uses large pages if there are some: one thread reads 40 GB/s from large pages, but 37 GB/s from small pages.
    """
    import torch

    memory = mmap.mmap(-1, READ_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    numbers = torch.frombuffer(memory, dtype=torch.float32).fill_(1)
    return READ_BYTES / _fastest(numbers.sum) / 1e9
