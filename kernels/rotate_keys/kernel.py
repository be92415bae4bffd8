"""One program per layer, head and few slots: rotates the keys of these slots in place."""

# Triton reads the signature by its own rules.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl

from kernels.device_functions import quantized


# The number of slots changes from call to call; variants for 1 or multiples of 16 would gain nothing.
@triton.jit(do_not_specialize=["count", "slot_layer_stride", "slot_head_stride"])
def rotate_keys_kernel(
    k_cache_ptr,
    slot_ptr,
    delta_ptr,
    frequency_ptr,
    count,  # slots of one layer and head
    layer_stride,
    slot_layer_stride,  # of the deltas too
    slot_head_stride,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # of the head size
    HALF_PADDED: tl.constexpr,
    SLOTS: tl.constexpr,  # of one program
    QUANTIZED: tl.constexpr,
):
    at = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    head = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    dim = tl.arange(0, HALF_PADDED)
    used = at < count
    at = layer * slot_layer_stride + head * slot_head_stride + at
    slot = tl.load(slot_ptr + at, mask=used, other=0)
    delta = tl.load(delta_ptr + at, mask=used, other=0)
    frequency = tl.load(frequency_ptr + dim, mask=dim < HALF, other=0.0)
    angle = delta.to(tl.float32)[:, None] * frequency[None, :]
    cos = tl.cos(angle)
    sin = tl.sin(angle)
    key = k_cache_ptr + layer * layer_stride + ((slot * KV_HEADS + head) * (2 * HALF))[:, None] + dim[None, :]
    # A key that does not move keeps its bytes, whatever they are.
    inside = (used & (delta != 0))[:, None] & (dim < HALF)[None, :]
    first = tl.load(key, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(key + HALF, mask=inside, other=0.0).to(tl.float32)
    first_turned = first * cos + second * sin
    second_turned = second * cos - first * sin
    dtype = k_cache_ptr.dtype.element_ty
    if QUANTIZED:
        first_turned = quantized(first_turned, 1.0, dtype)
        second_turned = quantized(second_turned, 1.0, dtype)
    tl.store(key, first_turned.to(dtype), mask=inside)
    tl.store(key + HALF, second_turned.to(dtype), mask=inside)
