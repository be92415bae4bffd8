"""Every Triton kernel compiles for sm_80, sm_90 and sm_100 with no GPU, as its launch module calls it."""

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import pytest
import torch

from kernels.attention_scores.launch import score_with_triton
from kernels.compact_kv.launch import compact_with_triton
from kernels.copy_blocks.launch import copy_with_triton
from kernels.draw_tokens.launch import draw_with_triton
from kernels.paged_attention.launch import AttentionArgs, PagedBatch, attend_with_triton
from kernels.paged_attention.tiling import TileSizes, choose_sizes
from kernels.rms_norm.launch import norm_with_triton
from kernels.rotary_store.launch import NO_NORMS, HeadNorms, rotate_with_triton
from kernels.rotate_keys.launch import rotate_with_triton as turn_with_triton
from kernels.silu_mul.launch import silu_mul_with_triton
from kernels.store_kv.launch import store_with_triton

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
# The shared memory one program may have, bytes.
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Attention:
    """A launch: heads, queries of the longest sequence, bounds and options. full: whether registers have to suffice."""

    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    sequences: int = 64
    queries: int = 1
    max_seq_len: int = 4096
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    lse: bool = False
    cache: torch.dtype | None = None
    full: bool = True


PROMPT = Attention(sequences=2, queries=512)
ATTENTION = {
    "decode": Attention(),
    "decode, splits, all options": Attention(sequences=4, window=2000, softcap=30.0, sinks=True, lse=True),
    "decode, 9 heads over 3 of 64": Attention(query_heads=9, kv_heads=3, head_dim=64),
    "decode, head size 80": Attention(query_heads=8, kv_heads=8, head_dim=80),
    "decode, head size 256, window": Attention(query_heads=8, kv_heads=4, head_dim=256, window=100),
    "decode, int8": Attention(cache=torch.int8),
    "decode, float8": Attention(cache=FLOAT8),
    "prompt": PROMPT,
    "prompt, all options": replace(PROMPT, window=128, softcap=30.0, sinks=True, lse=True),
    "prompt, head size 64": replace(PROMPT, query_heads=9, kv_heads=3, head_dim=64),
    "prompt, head size 256, soft cap": replace(
        PROMPT, query_heads=8, kv_heads=4, head_dim=256, softcap=50.0, full=False
    ),
    "prompt, int8": replace(PROMPT, cache=torch.int8),
    "prompt, float8": replace(PROMPT, cache=FLOAT8),
}
# The instruction that multiplies the matrices of a tile with many query rows.
MULTIPLIES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
# Registers of a multiprocessor, and the programs that decode on one at the same time: fewer would load too few keys.
REGISTERS = 1 << 16
TOGETHER = {80: 2, 90: 3, 100: 3}
# Bytes that a program may put aside so that one more fits a multiprocessor: three values, stored before a loop and
# loaded after the loop.
FEW_BYTES = 24


@dataclass(frozen=True)
class Resources:
    """Of one compiled program: shared memory in bytes, registers per thread, bytes that registers spill."""

    shared: int
    registers: int
    spilled: int
    ptx: str


class CompileInsteadOfLaunch:
    """Stands where the kernel stands in its module: takes a launch's arguments, compiles for them, runs nothing."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self._kernel = kernel
        self._capability = capability
        self.resources: list[Resources] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._compile

    def _compile(self, *args: Any, **keywords: Any) -> None:
        import triton
        from triton import knobs
        from triton.backends.compiler import GPUTarget

        names = self._kernel.arg_names
        given = dict(zip(names, args, strict=False))
        fixed = {parameter.name for parameter in self._kernel.params if parameter.do_not_specialize}
        # As a launch does: a 1 becomes part of the code, and what is known to be divisible by 16 is marked.
        ones = {name for name, arg in given.items() if isinstance(arg, int) and arg == 1 and name not in fixed}
        constants = {name: value for name, value in keywords.items() if name in names} | dict.fromkeys(ones, 1)
        options = {name: value for name, value in keywords.items() if name not in names}
        signature = {name: "constexpr" if name in constants else _triton_type(given[name]) for name in names}
        sixteens = {
            (names.index(name),): [["tt.divisibility", 16]]
            for name, arg in given.items()
            if name not in fixed | ones and (isinstance(arg, torch.Tensor) or (isinstance(arg, int) and arg % 16 == 0))
        }
        source = triton.compiler.ASTSource(fn=self._kernel, signature=signature, constexprs=constants, attrs=sixteens)
        with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(StringIO()) as log:
            knobs.nvidia.dump_ptxas_log = True
            knobs.compilation.always_compile = True
            compiled = triton.compile(source, target=GPUTarget("cuda", self._capability, 32), options=options)
        assert compiled.asm["cubin"]
        assert f".target sm_{self._capability}" in compiled.asm["ptx"]
        said = log.getvalue()
        spilled = sum(int(number) for number in re.findall(r"(\d+) bytes spill", said))
        (registers,) = re.findall(r"Used (\d+) registers", said)
        self.resources.append(Resources(compiled.metadata.shared, int(registers), spilled, compiled.asm["ptx"]))


def _triton_type(arg: Any) -> str:
    if isinstance(arg, torch.Tensor):
        return "*" + TYPES[arg.dtype]
    return "fp32" if isinstance(arg, float) else "i32" if abs(arg) < 2**31 else "i64"


def compile_launch(
    op: str, kernels: tuple[str, ...], capability: int, launch: Callable[..., None], *args: Any
) -> list[Resources]:
    """Call `launch` with kernels of the op replaced; what each compiled program takes, in the order of `kernels`."""
    module = importlib.import_module(f"kernels.{op}.kernel")
    stand_ins = [CompileInsteadOfLaunch(getattr(module, name), capability) for name in kernels]
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in zip(kernels, stand_ins, strict=True):
            patch.setattr(module, name, stand_in)
        launch(*args)
    return [resources for stand_in in stand_ins for resources in stand_in.resources]


def sizes_of(case: Attention, dtype: torch.dtype, capability: int) -> TileSizes:
    """The tile sizes of a launch."""
    return choose_sizes(
        (capability // 10, capability % 10),
        {80: 108, 90: 132, 100: 148}[capability],
        rows=case.sequences * case.queries,
        sequences=case.sequences,
        kv_heads=case.kv_heads,
        group=case.query_heads // case.kv_heads,
        head_dim=case.head_dim,
        element_size=dtype.itemsize,
        cache_element_size=(case.cache or dtype).itemsize,
        max_query_len=case.queries,
        max_seq_len=case.max_seq_len,
        window=case.window,
    )


def attend_on_nothing(case: Attention, dtype: torch.dtype, capability: int) -> None:
    """A launch on meta tensors: neither memory nor a device, but the arguments that CUDA tensors would give."""
    rows = case.sequences * case.queries
    with torch.device("meta"):
        query = torch.empty(rows, case.query_heads, case.head_dim, dtype=dtype)
        cache = torch.empty(100, 16, case.kv_heads, case.head_dim, dtype=case.cache or dtype)
        scale = torch.empty(case.kv_heads, case.head_dim) if case.cache else None
        shapes = ((case.sequences + 1,), (case.sequences,), (case.sequences, case.max_seq_len // 16))
        ints = [torch.empty(shape, dtype=torch.int32) for shape in shapes]
        batch = PagedBatch(*ints, max_query_len=case.queries, max_seq_len=case.max_seq_len)
        sinks = torch.empty(case.query_heads, dtype=dtype) if case.sinks else None
        lse = torch.empty(query.shape[:2]) if case.lse else None
    sizes = sizes_of(case, dtype, capability)
    args = AttentionArgs(0.125, case.window, case.softcap, sinks, scale, scale)
    attend_with_triton(query, cache, cache, batch, args, torch.empty_like(query), lse, sizes)


def score_on_nothing(dtype: torch.dtype, queries: int, cache_dtype: torch.dtype, with_squares: bool) -> None:
    with torch.device("meta"):
        query = torch.empty(2 * queries, 32, 128, dtype=dtype)
        cache = torch.empty(100, 16, 8, 128, dtype=cache_dtype)
        ints = [torch.empty(shape, dtype=torch.int32) for shape in ((3,), (2,), (2, 64), (2,))]
        batch = PagedBatch(*ints[:3], max_query_len=queries, max_seq_len=1024)
        scale = torch.empty(8, 128) if cache_dtype != dtype else None
        lse, out = torch.empty(query.shape[:2]), torch.empty(2, 8, 1024)
    args = AttentionArgs(0.1, window=99, softcap=30.0, k_scale=scale)
    score_with_triton(query, cache, batch, lse, ints[3], args, out, out if with_squares else None)


def store_nothing(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    with torch.device("meta"):
        key = torch.empty(7, 3, 80, dtype=dtype)
        cache = torch.empty(100, 16, 3, 80, dtype=cache_dtype)
        scale = torch.empty(3, 80) if cache_dtype != dtype else None
        store_with_triton(key, key, cache, cache, torch.empty(7, dtype=torch.int64), scale, scale)


def rotate_nothing(dtype: torch.dtype, cache_dtype: torch.dtype, normed: bool) -> None:
    with torch.device("meta"):
        product = torch.empty(7, 48, 128, dtype=dtype)
        query, key, value = product.split([32, 8, 8], 1)
        cache = torch.empty(100, 16, 8, 128, dtype=cache_dtype)
        scale = torch.empty(8, 128) if cache_dtype != dtype else None
        table = torch.empty(1000, 128)
        positions = torch.empty(7, dtype=torch.int64)
        norms = HeadNorms(table[0].to(dtype), table[0].to(dtype), 1e-5) if normed else NO_NORMS
        rotate_with_triton(query, key, value, table, table, positions, positions, cache, cache, scale, scale, norms)


def norm_nothing(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.empty(shape, dtype=dtype, device="meta")
    norm_with_triton(x, x[0, 0], 1e-5, x, x)


def activate_nothing(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        silu_mul_with_triton(torch.empty(7, 2 * 14336, dtype=dtype), torch.empty(7, 14336, dtype=dtype))


def draw_nothing(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        rows, parameters = torch.empty(5, dtype=torch.int64), torch.empty(5, 5, dtype=torch.float64)
        draw_with_triton(torch.empty(9, 128256, dtype=dtype), rows, parameters)


def copy_nothing(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        # More than 2**31 elements in a layer: the stride needs 64 bits.
        cache = torch.empty(2, 1 << 20, 16, 3, 64, dtype=dtype)
        blocks = torch.empty(5, dtype=torch.int64)
        copy_with_triton(cache, cache, blocks, blocks)


def compact_nothing(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        cache = torch.empty(2, 1 << 20, 16, 3, 64, dtype=dtype)
        compact_with_triton(cache, cache, *torch.empty(2, 2, 3, 5, dtype=torch.int64))


def turn_nothing(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        cache = torch.empty(2, 1 << 20, 16, 3, 64, dtype=dtype)
        slots, offsets = torch.empty(2, 2, 3, 5, dtype=torch.int64)
        turn_with_triton(cache, slots, offsets, torch.empty(32))


Compile = Callable[..., list[Resources]]
ATTENTION_KERNELS = ("paged_attention_kernel", "share_out_kernel", "merge_shares_kernel", "merge_splits_kernel")


@contextmanager
def refused_without_float8(cache: torch.dtype | None, capability: int) -> Iterator[None]:
    """Expects what check_quantization refuses before a launch."""
    if cache != FLOAT8 or capability >= 89:
        yield
        return
    from triton.compiler import CompilationError

    with pytest.raises(CompilationError, match="fp8e4nv not supported"):
        yield


@dataclass(frozen=True)
class Launch:
    """Of an operation's one kernel. cache: of a quantized one. spilled: bytes that registers may spill."""

    kernel: str
    launch: Callable[..., None]
    arguments: tuple[Any, ...]
    cache: torch.dtype | None = None
    spilled: int = 0

    @property
    def op(self) -> str:
        return "compact_kv" if self.kernel == "copy_slots_kernel" else self.kernel.removesuffix("_kernel")


BF16, F32, INT8 = torch.bfloat16, torch.float32, torch.int8
LAUNCHES = [
    *(
        Launch("attention_scores_kernel", score_on_nothing, (BF16, queries, cache, squares), cache, FEW_BYTES)
        for queries, cache in ((1, BF16), (512, BF16), (512, INT8), (512, FLOAT8))
        for squares in (False, True)
    ),
    *(
        Launch(kernel, launch, (dtype, cache or dtype, *normed), cache)
        for kernel, launch, *normed in (
            ("store_kv_kernel", store_nothing),
            ("rotary_store_kernel", rotate_nothing, False),
            ("rotary_store_kernel", rotate_nothing, True),
        )
        for dtype, cache in ((F32, None), (BF16, None), (BF16, INT8), (BF16, FLOAT8))
    ),
    *(Launch("rms_norm_kernel", norm_nothing, (shape, BF16)) for shape in ((1, 7, 576), (1, 64, 4096), (64, 32, 128))),
    *(Launch("silu_mul_kernel", activate_nothing, (dtype,)) for dtype in (F32, BF16)),
    *(Launch("draw_tokens_kernel", draw_nothing, (dtype,)) for dtype in (F32, BF16)),
    *(Launch("copy_blocks_kernel", copy_nothing, (dtype,)) for dtype in (F32, BF16)),
    *(Launch("copy_slots_kernel", compact_nothing, (dtype,)) for dtype in (F32, BF16, INT8, FLOAT8)),
    *(Launch("rotate_keys_kernel", turn_nothing, (dtype,), dtype, FEW_BYTES) for dtype in (F32, BF16, INT8, FLOAT8)),
]
CAPABILITIES = pytest.mark.parametrize("capability", SHARED, ids="sm_{}".format)


@CAPABILITIES
@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda one: f"{one.kernel} {one.arguments}")
def test_kernels_compile(compiler: Compile, launch: Launch, capability: int) -> None:
    arguments = (launch.op, (launch.kernel,), capability, launch.launch, *launch.arguments)
    with refused_without_float8(launch.cache, capability):
        compiled = compiler(compile_launch, *arguments)
        assert compiled
        for used in compiled:
            assert used.spilled <= launch.spilled
            assert used.shared <= SHARED[capability]
            assert launch.op not in ("rms_norm", "silu_mul", "draw_tokens") or "ld.global.v4" in used.ptx


@CAPABILITIES
@pytest.mark.parametrize("case", ATTENTION.values(), ids=ATTENTION.keys())
def test_paged_attention_compiles(compiler: Compile, case: Attention, capability: int) -> None:
    arguments = (attend_on_nothing, case, BF16, capability)
    with refused_without_float8(case.cache, capability):
        used, *merging = compiler(compile_launch, "paged_attention", ATTENTION_KERNELS, capability, *arguments)
        assert used.shared <= SHARED[capability]
        assert all(one.spilled == 0 for one in merging)
        assert used.spilled <= FEW_BYTES or not case.full
        sizes = sizes_of(case, BF16, capability)
        together = min(REGISTERS // (used.registers * 32 * sizes.num_warps), SHARED[capability] // used.shared)
        assert together >= (TOGETHER[capability] if case.queries == 1 else 1)
        # The copies that a tile does not wait for are those of later tiles.
        ahead = max(int(number) for number in re.findall(r"cp\.async\.wait_group\s+(\d+)", used.ptx))
        assert ahead >= 2 * (sizes.num_stages - 2) * (case.head_dim <= 128)
        # The instructions of later devices need at least 64 rows: decoding multiplies as on sm_80.
        assert MULTIPLIES[capability if case.queries > 1 else 80] in used.ptx


@CAPABILITIES
@pytest.mark.parametrize("name", ["decode", "prompt, all options"])
def test_paged_attention_compiles_in_float32(compiler: Compile, name: str, capability: int) -> None:
    arguments = (attend_on_nothing, ATTENTION[name], F32, capability)
    used, *_ = compiler(compile_launch, "paged_attention", ATTENTION_KERNELS, capability, *arguments)
    assert used.shared <= SHARED[capability]
