"""Batches of paged sequences whose every unwritten slot is NaN, and their attention by any backend."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.paged_attention import reference
from kernels.paged_attention.launch import AttentionArgs, PagedBatch, attend_with_triton, paged_attention
from kernels.paged_attention.tiling import TileSizes
from kernels.quantization import quantize

NAN = float("nan")
PADDED_ROWS = 3


@dataclass(frozen=True)
class Case:
    """`queries` and `lengths` per sequence; `query_heads` over `kv_heads`; `shared` leading blocks are the same.

    cache: of a quantized one. sizes: of the Triton kernel, its own choice if None.
    """

    queries: tuple[int, ...] = (1, 9, 0, 21, 1)
    lengths: tuple[int, ...] = (1, 9, 5, 40, 35)
    query_heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4
    shared: int = 0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    sizes: TileSizes | None = None


@dataclass(frozen=True)
class Problem:
    """A case's tensors. `tables`: the block numbers; where no query sees a block it is 0, a block full of NaN.

    int8 has no NaN; its unwritten slots hold what would be seen to be wrong.
    """

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: list[list[int]]
    sinks: Tensor | None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    scale: float = 0.3

    def batch(self, case: Case, device: str) -> PagedBatch:
        starts = [0, *torch.tensor(case.queries).cumsum(0).tolist()]
        width = max(len(table) for table in self.tables) + 2
        table = torch.zeros(len(self.tables), width, dtype=torch.int32)
        for row, blocks in zip(table, self.tables, strict=True):
            row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        return PagedBatch(
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(case.lengths, dtype=torch.int32, device=device),
            block_tables=table.to(device),
            max_query_len=max(case.queries),
            max_seq_len=max(case.lengths),
            query_lens=case.queries,
            host_seq_lens=case.lengths,
        )

    def args(self, case: Case, device: str = "cpu") -> AttentionArgs:
        tensors = [None if x is None else x.to(device) for x in (self.sinks, self.k_scale, self.v_scale)]
        return AttentionArgs(self.scale, case.window, case.softcap, *tensors)


def build(case: Case, seed: int = 0) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    counts = [math.ceil(length / case.block_size) for length in case.lengths]
    order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    shape = (sum(counts) + 1, case.block_size, case.kv_heads, case.head_dim)
    caches = torch.full((2, *shape), NAN, dtype=case.dtype)
    tables = []
    for queries, length, count in zip(case.queries, case.lengths, counts, strict=True):
        common = tables[0][: case.shared] if tables else []
        table, order = (common + order)[:count], order[max(0, count - len(common)) :]
        first_seen = 0 if case.window is None else max(0, length - queries - case.window + 1)
        for position in range(first_seen, length):
            place = table[position // case.block_size], position % case.block_size
            caches[0][place] = random(case.kv_heads, case.head_dim)
            caches[1][place] = random(case.kv_heads, case.head_dim)
        gone = first_seen // case.block_size
        tables.append([0] * gone + table[gone:])
    # Heads before tokens in memory, as a model's projections leave them.
    query = random(case.query_heads, sum(case.queries) + PADDED_ROWS, case.head_dim).transpose(0, 1)
    sinks = random(case.query_heads) if case.sinks else None
    if case.cache is None:
        return Problem(query, caches[0], caches[1], tables, sinks)
    scales = torch.tensor([0.03, 0.011, 0.02, 0.025, 0.014]).repeat(2 * case.kv_heads * case.head_dim)
    scales = scales[: 2 * case.kv_heads * case.head_dim].view(2, case.kv_heads, case.head_dim)
    stored = [quantize(cache, scale, case.cache) for cache, scale in zip(caches, scales, strict=True)]
    if case.cache == torch.int8:
        stored = [x.masked_fill(cache.isnan(), 127) for x, cache in zip(stored, caches, strict=True)]
    return Problem(query, stored[0], stored[1], tables, sinks, scales[0], scales[1])


def attend(backend: str, case: Case, problem: Problem) -> Tensor:
    """[T + PADDED_ROWS, Hq, D] on the host, NaN where nothing was written."""
    return attend_and_keep(backend, case, problem)[0]


def attend_and_keep(backend: str, case: Case, problem: Problem, lse: bool = False) -> tuple[Tensor, Tensor]:
    """As attend, and [T + PADDED_ROWS, Hq], which gets the logarithm of the rows' sums when asked for."""
    device = "cuda" if backend == "cuda" else "cpu"
    query, k_cache, v_cache = (one.to(device) for one in (problem.query, problem.k_cache, problem.v_cache))
    out = torch.full(query.shape, NAN, dtype=case.dtype, device=device)
    kept = torch.full(query.shape[:2], NAN, device=device)
    options: dict[str, Any] = {"sizes": case.sizes, "lse": kept if lse else None}
    batch, args = problem.batch(case, device), problem.args(case, device)
    if backend == "interpreter":
        attend_with_triton(query, k_cache, v_cache, batch, args, out, **options)
    else:
        paged_attention(query, k_cache, v_cache, batch, args, out=out, **options)
    return out.cpu(), kept.cpu()


def exact(case: Case, problem: Problem, lse: Tensor | None = None) -> Tensor:
    """The reference in float64, [T, Hq, D]."""
    return reference.paged_attention(
        problem.query.double(),
        problem.k_cache,
        problem.v_cache,
        list(case.queries),
        list(case.lengths),
        problem.tables,
        problem.args(case),
        lse,
    )[: sum(case.queries)]


def error_ratio(backend: str, case: Case) -> float:
    """rms of the error over rms of the truth; NaN when anything unwritten leaked, or a padded row was touched."""
    problem = build(case)
    out = attend(backend, case, problem)
    rows = sum(case.queries)
    if not out[rows:].isnan().all():
        return NAN
    truth = exact(case, problem)
    return float((out[:rows].double() - truth).norm() / truth.norm())


def spread(shape: tuple[int, ...], seed: int) -> Tensor:
    """float32 numbers of many magnitudes, up to some hundreds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(2).exp()
