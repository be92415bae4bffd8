"""Every Triton kernel compiles for sm_80 and sm_90 with no GPU, as its launch module calls it."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.copy_blocks.launch import copy_with_triton
from kernels.paged_attention.launch import PagedBatch, attend_with_triton
from kernels.store_kv.launch import store_with_triton

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64"}
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


class CompileInsteadOfLaunch:
    """Stands where the kernel stands in its module: takes a launch's arguments, compiles for them, runs nothing."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self._kernel = kernel
        self._capability = capability
        self.shared = -1

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._compile

    def _compile(self, *args: Any, **keywords: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget

        names = self._kernel.arg_names
        constants = {name: value for name, value in keywords.items() if name in names}
        options = {name: value for name, value in keywords.items() if name not in names}
        signature = dict.fromkeys(constants, "constexpr")
        signature |= {name: _triton_type(arg) for name, arg in zip(names, args, strict=False)}
        source = triton.compiler.ASTSource(
            fn=self._kernel, signature={name: signature[name] for name in names}, constexprs=constants
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", self._capability, 32), options=options)
        assert compiled.asm["cubin"]
        assert f".target sm_{self._capability}" in compiled.asm["ptx"]
        self.shared = compiled.metadata.shared


def _triton_type(arg: Any) -> str:
    if isinstance(arg, torch.Tensor):
        return "*" + TYPES[arg.dtype]
    return "fp32" if isinstance(arg, float) else "i32" if abs(arg) < 2**31 else "i64"


def shared_bytes(op: str, capability: int, launch: Callable[..., None], *args: Any) -> int:
    """Call `launch` with the op's kernel replaced; the shared memory of what was compiled."""
    module = importlib.import_module(f"kernels.{op}.kernel")
    stand_in = CompileInsteadOfLaunch(getattr(module, f"{op}_kernel"), capability)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, f"{op}_kernel", stand_in)
        launch(*args)
    return stand_in.shared


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


def store_nothing(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        key = torch.empty(7, 3, 80, dtype=dtype)
        cache = torch.empty(100, 16, 3, 80, dtype=dtype)
        store_with_triton(key, key, cache, cache, torch.empty(7, dtype=torch.int64))


def copy_nothing(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        # More than 2**31 elements in a layer: the stride needs 64 bits.
        cache = torch.empty(2, 1 << 20, 16, 3, 64, dtype=dtype)
        blocks = torch.empty(5, dtype=torch.int64)
        copy_with_triton(cache, cache, blocks, blocks)


@pytest.mark.parametrize("capability", SHARED, ids="sm_{}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
class TestCompiles:
    @pytest.mark.parametrize("name", ATTENTION)
    def test_paged_attention(
        self, compiler: Callable[..., int], name: str, dtype: torch.dtype, capability: int
    ) -> None:
        used = compiler(shared_bytes, "paged_attention", capability, attend_on_nothing, name, dtype)
        assert 0 <= used <= SHARED[capability]

    def test_store_kv(self, compiler: Callable[..., int], dtype: torch.dtype, capability: int) -> None:
        assert 0 <= compiler(shared_bytes, "store_kv", capability, store_nothing, dtype) <= SHARED[capability]

    def test_copy_blocks(self, compiler: Callable[..., int], dtype: torch.dtype, capability: int) -> None:
        assert 0 <= compiler(shared_bytes, "copy_blocks", capability, copy_nothing, dtype) <= SHARED[capability]
