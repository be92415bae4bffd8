"""One program per row and KV head: norms and rotates its key and the query heads that share the key, and stores."""

# Triton reads the signature by its own rules.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl

from kernels.device_functions import quantized


@triton.jit
def _rotated(first, second, cos, sin):
    """first * cos + second * sin, each product rounded to the dtype of `first`, as torch rounds it."""
    dtype = first.dtype
    straight = (first.to(tl.float32) * cos).to(dtype)
    across = (second.to(tl.float32) * sin).to(dtype)
    return (straight.to(tl.float32) + across.to(tl.float32)).to(dtype)


@triton.jit
def _normed(first, second, weight_ptr, eps, HALF: tl.constexpr, HALF_PADDED: tl.constexpr):
    """Both halves of heads, [.., HALF_PADDED], over their root mean square, times the weights, rounded as rms_norm."""
    dtype = first.dtype
    dim = tl.arange(0, HALF_PADDED)
    first_weight = tl.load(weight_ptr + dim, mask=dim < HALF, other=0.0).to(tl.float32)
    second_weight = tl.load(weight_ptr + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)
    first, second = first.to(tl.float32), second.to(tl.float32)
    mean = tl.sum(first * first + second * second, -1, keep_dims=True) / (2 * HALF)
    factor = tl.rsqrt(mean + eps)
    first = (first * factor).to(dtype).to(tl.float32) * first_weight
    second = (second * factor).to(dtype).to(tl.float32) * second_weight
    return first.to(dtype), second.to(dtype)


@triton.jit
def rotary_store_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slot_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    cos_stride,
    sin_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    GROUP_PADDED: tl.constexpr,
    HALF: tl.constexpr,  # of the head size
    HALF_PADDED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
):
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    slot = tl.load(slot_ptr + row)
    if slot < 0:
        return
    position = tl.load(positions_ptr + row)
    row = row.to(tl.int64)
    dim = tl.arange(0, HALF_PADDED)
    inside = dim < HALF
    # Both halves of a table row are the same.
    dtype = query_ptr.dtype.element_ty
    cos = tl.load(cos_ptr + position * cos_stride + dim, mask=inside, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(sin_ptr + position * sin_stride + dim, mask=inside, other=0.0).to(dtype).to(tl.float32)

    in_group = tl.arange(0, GROUP_PADDED)
    query = query_ptr + row * query_token_stride + (kv_head * GROUP + in_group)[:, None] * query_head_stride
    query += dim[None, :]
    used = (in_group < GROUP)[:, None] & inside[None, :]
    first = tl.load(query, mask=used, other=0.0)
    second = tl.load(query + HALF, mask=used, other=0.0)
    if Q_NORM:
        first, second = _normed(first, second, q_norm_ptr, eps, HALF, HALF_PADDED)
    tl.store(query, _rotated(first, second, cos[None, :], -sin[None, :]), mask=used)
    tl.store(query + HALF, _rotated(second, first, cos[None, :], sin[None, :]), mask=used)

    key = key_ptr + row * key_token_stride + kv_head * key_head_stride + dim
    first = tl.load(key, mask=inside, other=0.0)
    second = tl.load(key + HALF, mask=inside, other=0.0)
    if K_NORM:
        first, second = _normed(first, second, k_norm_ptr, eps, HALF, HALF_PADDED)
    first_key = _rotated(first, second, cos, -sin)
    second_key = _rotated(second, first, cos, sin)
    value = value_ptr + row * value_token_stride + kv_head * value_head_stride + dim
    first_value = tl.load(value, mask=inside, other=0.0)
    second_value = tl.load(value + HALF, mask=inside, other=0.0)
    if QUANTIZED:
        k_scale = k_scale_ptr + kv_head * (2 * HALF) + dim
        v_scale = v_scale_ptr + kv_head * (2 * HALF) + dim
        kind = k_cache_ptr.dtype.element_ty
        first_key = quantized(first_key, tl.load(k_scale, mask=inside, other=1.0), kind)
        second_key = quantized(second_key, tl.load(k_scale + HALF, mask=inside, other=1.0), kind)
        first_value = quantized(first_value, tl.load(v_scale, mask=inside, other=1.0), kind)
        second_value = quantized(second_value, tl.load(v_scale + HALF, mask=inside, other=1.0), kind)
    to = (slot * KV_HEADS + kv_head) * (2 * HALF) + dim
    tl.store(k_cache_ptr + to, first_key, mask=inside)
    tl.store(k_cache_ptr + to + HALF, second_key, mask=inside)
    tl.store(v_cache_ptr + to, first_value, mask=inside)
    tl.store(v_cache_ptr + to + HALF, second_value, mask=inside)
