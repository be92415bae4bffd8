"""Every Triton kernel compiles for sm_80 and sm_90 with no GPU, as its launch module calls it."""

import importlib
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import pytest
import torch

from kernels.copy_blocks.launch import copy_with_triton
from kernels.paged_attention.launch import PagedBatch, attend_with_triton
from kernels.rms_norm.launch import norm_with_triton
from kernels.rotary_store.launch import rotate_with_triton
from kernels.store_kv.launch import map_with_triton, store_with_triton

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
# The shared memory one program may have, bytes.
SHARED = {80: 163 << 10, 90: 227 << 10}
PLAIN: dict[str, Any] = {"window": None, "softcap": None, "sinks": None}
# name: query heads, KV heads, head size, queries of the longest sequence, options
ATTENTION: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "decode": (9, 3, 64, 1, PLAIN),
    "prefill": (9, 3, 64, 512, PLAIN),
    "prefill, all options": (8, 8, 128, 512, {"window": 128, "softcap": 30.0, "sinks": True}),
    "decode, head size 80, window": (8, 1, 80, 1, {**PLAIN, "window": 100}),
    "prefill, head size 256": (8, 4, 256, 512, {**PLAIN, "softcap": 50.0}),
}


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


def attend_on_nothing(name: str, dtype: torch.dtype) -> None:
    """A launch on meta tensors: neither memory nor a device, but the arguments that CUDA tensors would give."""
    query_heads, kv_heads, head_dim, queries, options = ATTENTION[name]
    with torch.device("meta"):
        query = torch.empty(query_heads, queries, head_dim, dtype=dtype).transpose(0, 1)
        cache = torch.empty(100, 16, kv_heads, head_dim, dtype=dtype)
        sinks = torch.empty(query_heads, dtype=dtype) if options["sinks"] else None
        ints = [torch.empty(shape, dtype=torch.int32) for shape in ((2,), (1,), (1, 64))]
        batch = PagedBatch(*ints, max_query_len=queries, max_seq_len=1024)
        out = torch.empty(query.shape, dtype=dtype)
    attend_with_triton(query, cache, cache, batch, out, scale=0.125, **{**options, "sinks": sinks})


def store_nothing(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    with torch.device("meta"):
        key = torch.empty(7, 3, 80, dtype=dtype)
        cache = torch.empty(100, 16, 3, 80, dtype=cache_dtype)
        scale = torch.empty(3) if cache_dtype != dtype else None
        store_with_triton(key, key, cache, cache, torch.empty(7, dtype=torch.int64), scale, scale)


def map_nothing() -> None:
    with torch.device("meta"):
        ints = [torch.empty(shape, dtype=torch.int32) for shape in ((3,), (2,), (2, 64))]
        positions = torch.empty(7, dtype=torch.int64)
        map_with_triton(positions, PagedBatch(*ints, max_query_len=1, max_seq_len=1024), positions, 16)


def rotate_nothing(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    with torch.device("meta"):
        product = torch.empty(7, 48, 128, dtype=dtype)
        query, key, value = product.split([32, 8, 8], 1)
        cache = torch.empty(100, 16, 8, 128, dtype=cache_dtype)
        scale = torch.empty(8) if cache_dtype != dtype else None
        ints = [torch.empty(shape, dtype=torch.int32) for shape in ((3,), (2,), (2, 64))]
        batch = PagedBatch(*ints, max_query_len=1, max_seq_len=1024)
        table = torch.empty(1000, 128)
        positions = torch.empty(7, dtype=torch.int64)
        rotate_with_triton(query, key, value, table, table, positions, cache, cache, batch, scale, scale)


def norm_nothing(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.empty(shape, dtype=dtype, device="meta")
    norm_with_triton(x, x[0, 0], 1e-5, x, x)


def copy_nothing(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        # More than 2**31 elements in a layer: the stride needs 64 bits.
        cache = torch.empty(2, 1 << 20, 16, 3, 64, dtype=dtype)
        blocks = torch.empty(5, dtype=torch.int64)
        copy_with_triton(cache, cache, blocks, blocks)


Compile = Callable[..., list[Resources]]
FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize("capability", SHARED, ids="sm_{}".format)
class TestCompiles:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("name", ATTENTION)
    def test_paged_attention(self, compiler: Compile, name: str, dtype: torch.dtype, capability: int) -> None:
        (used,) = compiler(
            compile_launch,
            "paged_attention",
            ("paged_attention_kernel",),
            capability,
            attend_on_nothing,
            name,
            dtype,
        )
        assert 0 <= used.shared <= SHARED[capability]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("quantized", [None, torch.int8, FLOAT8], ids=str)
    @pytest.mark.parametrize(("op", "launch"), [("store_kv", store_nothing), ("rotary_store", rotate_nothing)])
    def test_stores(
        self,
        compiler: Compile,
        op: str,
        launch: Callable[..., None],
        quantized: torch.dtype | None,
        dtype: torch.dtype,
        capability: int,
    ) -> None:
        arguments = (compile_launch, op, (f"{op}_kernel",), capability, launch, dtype, quantized or dtype)
        if quantized == FLOAT8 and capability < 89:
            # What check_quantization refuses before a launch.
            from triton.compiler import CompilationError

            with pytest.raises(CompilationError, match="fp8e4nv not supported"):
                compiler(*arguments)
            return
        (used,) = compiler(*arguments)
        assert used.spilled == 0

    def test_slot_mapping(self, compiler: Compile, capability: int) -> None:
        (used,) = compiler(compile_launch, "store_kv", ("slot_mapping_kernel",), capability, map_nothing)
        assert used.spilled == 0

    @pytest.mark.parametrize("shape", [(1, 7, 576), (1, 64, 4096), (64, 32, 128)], ids=str)
    def test_rms_norm(self, compiler: Compile, shape: tuple[int, ...], capability: int) -> None:
        launch = (norm_nothing, shape, torch.bfloat16)
        (used,) = compiler(compile_launch, "rms_norm", ("rms_norm_kernel",), capability, *launch)
        assert used.spilled == 0
        assert "ld.global.v4" in used.ptx

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_copy_blocks(self, compiler: Compile, dtype: torch.dtype, capability: int) -> None:
        (used,) = compiler(compile_launch, "copy_blocks", ("copy_blocks_kernel",), capability, copy_nothing, dtype)
        assert used.spilled == 0
