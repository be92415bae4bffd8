"""One program per token: both rows are contiguous in the cache, so a store is one masked vector."""

# Triton reads the signature by its own rules.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl

from kernels.device_functions import quantized


@triton.jit
def store_kv_kernel(
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    k_scale_ptr,
    v_scale_ptr,
    key_token_stride,
    key_head_stride,
    key_dim_stride,
    value_token_stride,
    value_head_stride,
    value_dim_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # HEADS * HEAD_DIM rounded up to a power of two
    QUANTIZED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    at = tl.arange(0, WIDTH)
    inside = at < HEADS * HEAD_DIM
    head = at // HEAD_DIM
    dim = at % HEAD_DIM
    key = tl.load(key_ptr + token * key_token_stride + head * key_head_stride + dim * key_dim_stride, mask=inside)
    value = tl.load(
        value_ptr + token * value_token_stride + head * value_head_stride + dim * value_dim_stride, mask=inside
    )
    if QUANTIZED:
        key = quantized(key, tl.load(k_scale_ptr + at, mask=inside, other=1.0), k_cache_ptr.dtype.element_ty)
        value = quantized(value, tl.load(v_scale_ptr + at, mask=inside, other=1.0), v_cache_ptr.dtype.element_ty)
    to = slot * HEADS * HEAD_DIM + at
    tl.store(k_cache_ptr + to, key, mask=inside)
    tl.store(v_cache_ptr + to, value, mask=inside)
