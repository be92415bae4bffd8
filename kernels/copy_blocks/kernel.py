"""One program per copied block, layer and piece of a block."""

# Triton reads the signature by its own rules.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def copy_blocks_kernel(
    k_cache_ptr,
    v_cache_ptr,
    source_ptr,
    target_ptr,
    layer_stride,  # elements
    BLOCK_ELEMENTS: tl.constexpr,
    PIECE: tl.constexpr,
):
    copy = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    at = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    inside = at < BLOCK_ELEMENTS
    source = layer * layer_stride + tl.load(source_ptr + copy) * BLOCK_ELEMENTS + at
    target = layer * layer_stride + tl.load(target_ptr + copy) * BLOCK_ELEMENTS + at
    tl.store(k_cache_ptr + target, tl.load(k_cache_ptr + source, mask=inside), mask=inside)
    tl.store(v_cache_ptr + target, tl.load(v_cache_ptr + source, mask=inside), mask=inside)
