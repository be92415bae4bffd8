"""Kernels on a CUDA device: correctness, then the speed of attention relative to bandwidth and to torch."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu.parts import Bench, CannotRunError, Figure, WrongError, note
from executor.core.sampler import SamplingRow, sample
from executor.step import Sampling
from kernels.attention_scores import reference as scores_reference
from kernels.attention_scores.launch import attention_scores
from kernels.compact_kv import reference as compact_reference
from kernels.compact_kv.launch import compact_kv
from kernels.copy_blocks import reference as copy_reference
from kernels.copy_blocks.launch import copy_blocks
from kernels.draw_tokens import reference as draw_reference
from kernels.draw_tokens.launch import draw_tokens
from kernels.paged_attention.launch import AttentionArgs, PagedBatch, paged_attention
from kernels.paged_attention.tiling import TileSizes
from kernels.rms_norm import reference as norm_reference
from kernels.rms_norm.launch import rms_norm
from kernels.rotary_store import reference as rotary_reference
from kernels.rotary_store.launch import HeadNorms, rotary_store
from kernels.rotate_keys import reference as turn_reference
from kernels.rotate_keys.launch import rotate_keys
from kernels.silu_mul import reference as silu_reference
from kernels.silu_mul.launch import silu_mul
from kernels.store_kv import reference as store_reference
from kernels.store_kv.launch import store_kv
from tests.kernels.attention_cases import Case, build, error_ratio, exact

# Limits of the relative error: root mean square of the error over that of the reference.
BARS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
EPS = 1e-5
# Limit of the difference between two correct computations in bfloat16.
BETWEEN = 2e-2
QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
HEADS = Case(query_heads=QUERY_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK)
CASES = {
    "decode": replace(HEADS, queries=(1, 1, 0, 1), lengths=(3, 150, 9, 64)),
    "prefill beside decode": replace(HEADS, queries=(1, 20, 33), lengths=(40, 20, 50)),
    "decode, few sequences, long": replace(HEADS, queries=(1,), lengths=(700,)),
    "head size 64, 9 heads over 3": replace(Case(), query_heads=9, kv_heads=3, head_dim=64, block_size=BLOCK),
    "window, soft cap and sinks": replace(Case(), head_dim=64, window=11, softcap=1.5, sinks=True),
}
SWEEP_SECONDS = 35.0


def check(_: Bench) -> Sequence[Figure]:
    """Raises WrongError unless every kernel is as close to its reference as its data type allows."""
    check_on("cuda")
    return []


def check_on(device: str) -> None:
    """Checks the kernels on a GPU, or on a CPU the torch functions that replace them there."""
    wrong = []
    backend = "cuda" if device == "cuda" else "torch"
    for dtype, bar in BARS.items():
        errors = {
            f"attention, {name}": error_ratio(backend, replace(case, dtype=dtype)) for name, case in CASES.items()
        }
        for name, op in (
            ("norm", _norm),
            ("norm of a sum", _norm_of_sum),
            ("activation", _activated),
            ("rotary", _rotary),
            ("rotary, normed", partial(_rotary, normed=True)),
            ("keys turned back", _turned),
            ("scores", _scores),
        ):
            errors[name] = ratio(*op(dtype, device))
        for name, op in (("store", _store), ("copy", _copy), ("compaction", _compacted), ("draws", _drawn)):
            # These kernels only move or choose values, so they must be exact.
            errors[name] = 0.0 if torch.equal(*op(dtype, device)) else torch.inf
        for name, error in errors.items():
            note(f"  {name}, {dtype}: error {error:.1e}")
            if not error < bar:
                wrong.append(f"{name} in {dtype} is off by {error:.1e}")
    if wrong:
        raise WrongError("; ".join(wrong))


def ratio(got: Tensor, truth: Tensor) -> float:
    """The relative error; NaN when any value is NaN."""
    got, truth = got.double().cpu(), truth.double().cpu()
    return float((got - truth).norm() / truth.norm())


def _random(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _norm(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    x, weight = _random(dtype, 7, 4096), _random(dtype, 4096, seed=1)
    return rms_norm(x.to(device), weight.to(device), EPS), norm_reference.rms_norm(x.double(), weight.double(), EPS)


def _norm_of_sum(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    x, weight, total = _random(dtype, 5, 3, 128), _random(dtype, 128, seed=1), _random(dtype, 5, 3, 128, seed=2)
    on_device, truth = total.to(device, copy=True), total.double()
    got = rms_norm(x.to(device), weight.to(device), EPS, residual=on_device)
    normed = norm_reference.rms_norm(x.double(), weight.double(), EPS, residual=truth)
    return torch.cat([got.flatten(), on_device.flatten()]), torch.cat([normed.flatten(), truth.flatten()])


def _activated(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    x = _random(dtype, 5, 2 * 1536)
    return silu_mul(x.to(device)), silu_reference.silu_mul(x.double())


def _drawn(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Rows with and without filters, of a vocabulary of several tiles."""
    logits, rows = 3 * _random(dtype, 12, 9001), torch.randperm(12, generator=torch.Generator().manual_seed(1))
    parameters = torch.rand(12, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for row, columns in enumerate(((1.0, 0, 1.0, 0.0), (0.8, 20, 0.9, 0.0), (1.2, 0, 0.95, 0.02))):
        parameters[row::3, :4] = torch.tensor(columns, dtype=torch.float64)
    got = draw_tokens(logits.to(device), rows.to(device), parameters.to(device))
    return got.cpu(), draw_reference.draw_tokens(logits[rows], parameters)


def _rotary(dtype: torch.dtype, device: str, *, normed: bool = False) -> tuple[Tensor, Tensor]:
    """Query and caches after the kernel, which norms heads if `normed`; the last row belongs to no sequence."""
    angles = torch.arange(64)[:, None] * torch.rand(HEAD_DIM // 2, generator=torch.Generator().manual_seed(3))
    cos, sin = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))
    qkv = _random(dtype, 5, QUERY_HEADS + 2 * KV_HEADS, HEAD_DIM)
    positions, slots = [30, 31, 32, 7, 0], torch.tensor([94, 95, 16, 55, -1])

    def result(where: str, wide: torch.dtype) -> Tensor:
        parts = torch.split(qkv.to(where, wide, copy=True), [QUERY_HEADS, KV_HEADS, KV_HEADS], 1)
        caches = torch.zeros(2, 6, BLOCK, KV_HEADS, HEAD_DIM, dtype=wide, device=where)
        # The device multiplies with rounded cosines and sines.
        angles = [one.to(where, dtype).to(wide) for one in (cos, sin)]
        weight = torch.linspace(0.5, 1.5, HEAD_DIM).to(where, dtype).to(wide) if normed else None
        if wide == dtype:
            places = torch.tensor(positions, device=where)
            norms = HeadNorms(weight, weight, EPS)
            rotary_store(*parts, *angles, places, slots.to(where), *caches, norms=norms)
        else:
            norm = {"q_norm": weight, "k_norm": weight, "eps": EPS}
            rotary_reference.rotary_store(*parts, *angles, positions, slots, *caches, **norm)
        return torch.cat([parts[0][:4].flatten(), caches.flatten()])

    return result(device, dtype), result("cpu", torch.float64)


def _store(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    key, value = _random(dtype, 5, KV_HEADS, HEAD_DIM), _random(dtype, 5, KV_HEADS, HEAD_DIM, seed=1)
    slots = torch.tensor([17, 3, -1, 40, 95])
    got, truth = (torch.zeros(2, 6, BLOCK, KV_HEADS, HEAD_DIM, dtype=dtype, device=one) for one in (device, "cpu"))
    store_kv(key.to(device), value.to(device), got[0], got[1], slots.to(device))
    store_reference.store_kv(key, value, truth[0], truth[1], slots)
    return got.cpu(), truth


def _copy(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    truth = _random(dtype, 2, 3, 9, BLOCK, KV_HEADS, HEAD_DIM)
    got, sources, targets = truth.to(device), torch.tensor([1, 4, 8]), torch.tensor([2, 3, 0])
    copy_blocks(got[0], got[1], sources.to(device), targets.to(device))
    copy_reference.copy_blocks(truth[0], truth[1], sources, targets)
    return got.cpu(), truth


def _compacted(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Each layer and head moves its own slots; some targets are sources of other moves."""
    truth = _random(dtype, 2, 3, 9, BLOCK, KV_HEADS, HEAD_DIM)
    sources, targets = _slots(1), _slots(2)
    got = truth.to(device, copy=True)
    compact_kv(got[0], got[1], sources.to(device), targets.to(device))
    compact_reference.compact_kv(truth[0], truth[1], sources, targets)
    return got.cpu(), truth


def _turned(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    truth, slots = _random(dtype, 3, 9, BLOCK, KV_HEADS, HEAD_DIM), _slots(3)
    deltas = torch.randint(0, 900, slots.shape, generator=torch.Generator().manual_seed(4))
    frequencies = torch.rand(HEAD_DIM // 2, generator=torch.Generator().manual_seed(5))
    got = truth.to(device, copy=True)
    rotate_keys(got, *(one.to(device) for one in (slots, deltas, frequencies)))
    turn_reference.rotate_keys(truth, slots, deltas, frequencies)
    return got, truth


def _slots(seed: int) -> Tensor:
    """For each head of 3 layers, 40 slots of nine blocks in any order: [3, Hkv, 40]."""
    order = torch.rand(3, KV_HEADS, 9 * BLOCK, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return order[..., :40]


def _scores(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Attention scores of the last queries of each sequence."""
    case, counts = replace(CASES["prefill beside decode"], dtype=dtype), [1, 8, 0]
    problem = build(case)
    lse = torch.zeros(problem.query.shape[:2], dtype=torch.float64)
    exact(case, problem, lse)
    got = attention_scores(
        problem.query.to(device),
        problem.k_cache.to(device),
        problem.batch(case, device),
        lse.float().to(device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        problem.args(case, device),
    )
    truth, _ = scores_reference.attention_scores(
        problem.query.double(),
        problem.k_cache,
        list(case.queries),
        list(case.lengths),
        problem.tables,
        counts,
        got.shape[2],
        problem.args(case),
    )
    return got, truth


def seconds_of(call: Callable[[], object], rounds: int = 30) -> float:
    """Median device time of a call, which is launched as a CUDA graph so that the launch does not count."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds + 3)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    # The first calls warm up.
    return statistics.median(begin.elapsed_time(end) for begin, end in events[3:]) / 1e3


def bandwidth(_: Bench) -> Sequence[Figure]:
    """Bandwidth of a copy on the device, many times larger than its caches, counting bytes read and written.

    Returns the faster of the driver's own copy and a kernel's copy: neither is always the faster.
    """
    free = torch.cuda.mem_get_info()[0]
    source = torch.empty(min(1 << 30, free // 16), dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    seconds = min(
        seconds_of(lambda: target.copy_(source), 10), seconds_of(lambda: torch.bitwise_not(source, out=target), 10)
    )
    return [Figure("copy bandwidth", 2 * source.nbytes / seconds / 1e9, "GB/s")]


@dataclass(frozen=True)
class Problem:
    """Attention of the last tokens of several sequences: paged, and contiguous if they are equally long."""

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: PagedBatch
    sequences: int
    length: int

    @classmethod
    def uneven(cls, lengths: Sequence[int], device: str = "cuda") -> Problem:
        """Makes a problem of sequences with different lengths, each with one new token."""
        problem = cls.make(1, sum(lengths), 1, device)
        widest, begin = max(lengths), 0
        tables = torch.zeros(len(lengths), widest // BLOCK, dtype=torch.int32)
        for row, length in enumerate(lengths):
            blocks = length // BLOCK
            tables[row, :blocks] = problem.batch.block_tables[0, begin : begin + blocks].cpu()
            begin += blocks
        batch = PagedBatch(
            query_start=torch.arange(len(lengths) + 1, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            max_query_len=1,
            max_seq_len=widest,
        )
        query = torch.randn(len(lengths), QUERY_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
        return replace(problem, query=query, batch=batch)

    @classmethod
    def make(cls, sequences: int, length: int, queries: int, device: str = "cuda") -> Problem:
        """Makes a problem of random bfloat16 numbers, with blocks in random order."""
        blocks = length // BLOCK
        if device == "cuda":
            free, needed = torch.cuda.mem_get_info()[0], 6 * sequences * length * KV_HEADS * HEAD_DIM * 2
            if needed > free:
                raise CannotRunError(f"it takes {needed / 1e9:.1f} GB of device memory, {free / 1e9:.1f} are free")
        with torch.device(device):
            k_cache, v_cache = (
                torch.randn(sequences * blocks + 1, BLOCK, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2)
            )
            query = torch.randn(sequences * queries, QUERY_HEADS, HEAD_DIM, dtype=torch.bfloat16)
            batch = PagedBatch(
                query_start=torch.arange(sequences + 1, dtype=torch.int32) * queries,
                seq_lens=torch.full((sequences,), length, dtype=torch.int32),
                block_tables=(torch.randperm(sequences * blocks) + 1).view(sequences, blocks).to(torch.int32),
                max_query_len=queries,
                max_seq_len=length,
            )
        return cls(query, k_cache, v_cache, batch, sequences, length)

    def paged(self, **options: Any) -> Tensor:
        """Paged attention, [T, Hq, D]. options: of paged_attention."""
        return paged_attention(
            self.query, self.k_cache, self.v_cache, self.batch, AttentionArgs(HEAD_DIM**-0.5), **options
        )

    def in_one_piece(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query [S, Hq, Q, D], keys and values [S, Hkv, L, D], as torch's attention takes them."""
        query = self.query.view(self.sequences, -1, QUERY_HEADS, HEAD_DIM).transpose(1, 2).contiguous()
        tables = self.batch.block_tables.long()
        keys, values = (
            cache[tables].view(self.sequences, self.length, KV_HEADS, HEAD_DIM).transpose(1, 2).contiguous()
            for cache in (self.k_cache, self.v_cache)
        )
        return query, keys, values

    def hold_to(self, theirs: Tensor) -> None:
        """Raises WrongError if our output differs from torch's, [S, Hq, Q, D]."""
        ours = self.paged().view(self.sequences, -1, QUERY_HEADS, HEAD_DIM).transpose(1, 2)
        error = ratio(ours, theirs)
        note(f"  relative difference from torch: {error:.1e}")
        if not error < BETWEEN:
            raise WrongError(f"attention is off by {error:.1e} from torch's")

    def sweep(self, candidates: Iterator[TileSizes]) -> tuple[float, TileSizes]:
        """The shortest time, and the sizes that reach it."""
        begin, best = time.monotonic(), (torch.inf, TileSizes(0, 0, 0, 0, 0))
        for sizes in candidates:
            if time.monotonic() - begin > SWEEP_SECONDS:
                note("  no time for more sizes")
                break
            try:
                seconds = seconds_of(lambda sizes=sizes: self.paged(sizes=sizes), 10)
            except Exception as error:  # Sizes that do not fit this device; Triton's errors have no common base.
                note(f"  {sizes}: {type(error).__name__}")
                continue
            if seconds < best[0]:
                best = seconds, sizes
        note(f"  best sizes: {best[1]}")
        return best


def decode_attention(bench: Bench) -> Sequence[Figure]:
    """Measures one new token for each of 64 sequences of 4,096 tokens."""
    problem = Problem.make(64, 4096, 1)
    query, keys, values = problem.in_one_piece()
    theirs = {"SDPA": lambda: F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)}
    problem.hold_to(theirs["SDPA"]())
    seconds = seconds_of(problem.paged)
    cache_bytes = 2 * problem.sequences * problem.length * KV_HEADS * HEAD_DIM * 2
    rate = cache_bytes / seconds / 1e9
    figures = [
        Figure("decode attention, K and V read", rate, "GB/s"),
        Figure("decode attention, of copy bandwidth", 100 * rate / bench.value("copy bandwidth"), "%", at_least=85),
    ]
    times = {"SDPA": seconds_of(theirs["SDPA"])}
    try:
        from torch.nn.attention.flex_attention import flex_attention

        flex = torch.compile(flex_attention, dynamic=False)
        times["FlexAttention"] = seconds_of(lambda: flex(query, keys, values, enable_gqa=True))
    except Exception as error:  # FlexAttention needs a compiler, which is not under test.
        note(f"  FlexAttention does not run here: {type(error).__name__}: {error}"[:300])
    for name, other in times.items():
        figures.append(Figure(f"decode attention, speed by {name}'s", other / seconds, at_least=1))
    best, sizes = problem.sweep(
        TileSizes(16, 4, keys, warps, stages, splits)
        for keys, warps, stages, splits in itertools.product((64, 128), (4, 8), (2, 3, 4), (1, 2, 4))
    )
    label = f"keys {sizes.keys}, warps {sizes.num_warps}, stages {sizes.num_stages}, splits {sizes.splits}"
    figures.append(Figure(f"decode attention, chosen by best sizes ({label})", best / seconds))
    return figures


def uneven_attention(bench: Bench) -> Sequence[Figure]:
    """Measures one new token for a long sequence among short sequences, for one sequence, and for many."""
    figures = []
    for name, lengths in {
        "one of 65,536 among 63 of 1,024": [65536] + [1024] * 63,
        "1 of 4,096": [4096],
        "256 of 1,024": [1024] * 256,
    }.items():
        problem = Problem.uneven(lengths)
        seconds = seconds_of(problem.paged)
        rate = 2 * sum(lengths) * KV_HEADS * HEAD_DIM * 2 / seconds / 1e9
        share = 100 * rate / bench.value("copy bandwidth")
        target = 85 if max(lengths) > 4096 else None
        figures += [
            Figure(f"decode attention, {name}", seconds * 1e6, "us"),
            Figure(f"decode attention, {name}, of copy bandwidth", share, "%", at_least=target),
        ]
    return figures


def sampling(bench: Bench) -> Sequence[Figure]:
    """Sampling of 256 rows of 128,256 tokens: time of the device, and of the host until all is launched."""
    figures = []
    logits = torch.randn(256, 128256, device="cuda", dtype=torch.bfloat16) * 3
    places = torch.arange(256, device="cuda")
    for name, parameters in {
        "temperature": {"temperature": 1.0},
        "top-p": {"temperature": 1.0, "top_p": 0.9},
        "top-k, top-p": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    }.items():
        columns = (1.0, parameters.get("top_k", 0), parameters.get("top_p", 1.0), 0.0)
        given = torch.rand(256, 5, dtype=torch.float64, device="cuda")
        given[:, :4] = torch.tensor(columns, dtype=torch.float64)
        draw = partial(draw_tokens, logits, places, given)
        rows = [SamplingRow(Sampling(seed=seed, **parameters), 3) for seed in range(256)]  # type: ignore[arg-type]
        host = []
        for _ in range(9):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            sample(logits, rows)
            host.append(time.perf_counter() - begin)
        figures += [
            Figure(f"sampling, {name}", seconds_of(draw) * 1e3, "ms", at_most=0.3),
            Figure(f"sampling, {name}: host", statistics.median(host) * 1e3, "ms"),
        ]
    return figures


def prefill_attention(_: Bench) -> Sequence[Figure]:
    """Measures whole prompts: one of 4,096 tokens, and four of 2,048."""
    figures = []
    for sequences, length in ((1, 4096), (4, 2048)):
        problem = Problem.make(sequences, length, length)

        def flash(pieces: tuple[Tensor, Tensor, Tensor] = problem.in_one_piece()) -> Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(*pieces, is_causal=True, enable_gqa=True)

        problem.hold_to(flash())
        seconds, theirs = seconds_of(problem.paged), seconds_of(flash)
        # Two matrix products, of which only the causal half counts.
        work = 4 * sequences * QUERY_HEADS * HEAD_DIM * length * length / 2
        name = f"prefill attention {sequences} x {length:,}"
        figures += [
            Figure(name, work / seconds / 1e12, "TFLOP/s"),
            Figure(f"{name}, speed by flash SDPA's", 100 * theirs / seconds, "%", at_least=70),
        ]
        if sequences == 1:
            best, sizes = problem.sweep(
                TileSizes(rows, rows // (QUERY_HEADS // KV_HEADS), keys, warps, stages)
                for rows, keys, warps, stages in itertools.product((128, 64), (64, 128), (4, 8), (2, 3))
            )
            label = f"rows {sizes.rows}, keys {sizes.keys}, warps {sizes.num_warps}, stages {sizes.num_stages}"
            figures.append(Figure(f"{name}, chosen by best sizes ({label})", best / seconds))
    return figures
