"""One program per layer, head and few slots: a slot's key and value of one head are two rows."""

# Triton reads the signature by its own rules.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


# The number of slots changes from call to call; variants for 1 or multiples of 16 would gain nothing.
@triton.jit(
    do_not_specialize=[
        "count",
        "from_slot_layer_stride",
        "from_slot_head_stride",
        "to_slot_layer_stride",
        "to_slot_head_stride",
    ]
)
def copy_slots_kernel(
    k_from_ptr,
    v_from_ptr,
    k_to_ptr,
    v_to_ptr,
    from_slot_ptr,
    to_slot_ptr,
    count,  # slots of one layer and head
    from_layer_stride,
    to_layer_stride,
    from_slot_layer_stride,
    from_slot_head_stride,
    to_slot_layer_stride,
    to_slot_head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SLOTS: tl.constexpr,  # of one program
):
    at = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    head = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    used = at < count
    source = tl.load(from_slot_ptr + layer * from_slot_layer_stride + head * from_slot_head_stride + at, mask=used)
    target = tl.load(to_slot_ptr + layer * to_slot_layer_stride + head * to_slot_head_stride + at, mask=used)
    source = layer * from_layer_stride + ((source * KV_HEADS + head) * HEAD_DIM)[:, None] + dim[None, :]
    target = layer * to_layer_stride + ((target * KV_HEADS + head) * HEAD_DIM)[:, None] + dim[None, :]
    inside = used[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(k_to_ptr + target, tl.load(k_from_ptr + source, mask=inside), mask=inside)
    tl.store(v_to_ptr + target, tl.load(v_from_ptr + source, mask=inside), mask=inside)
