"""Move kept keys and values together after an eviction: Triton on CUDA, indexed copies of rows on a CPU."""

import torch
from torch import Tensor

from kernels.checks import check_caches
from kernels.slots import as_rows, check_slots, row_numbers


def compact_kv(k_cache: Tensor, v_cache: Tensor, sources: Tensor, targets: Tensor, *, overlap: bool = True) -> None:
    """Copy each source slot's key and value to its target slot, separately per layer and head.

    k_cache, v_cache: [L, N, B, Hkv, D] contiguous, the whole pool. Slots that are no targets do not change.
    sources, targets: [1 or L, 1 or Hkv, n] int64, block * B + offset in the block; 1 if all layers or heads have the
        same slots. All sources are read before any target is written, so that both may overlap in any way. No target
        occurs twice in one layer and head.
    overlap: whether a target may be the source of another copy. If not, CUDA copies in one launch, without memory.
    Raises ValueError naming the argument whose shape, dtype or device is wrong. Slots are not checked.
    """
    check_caches(k_cache, v_cache, "[L, N, B, Hkv, D]")
    check_slots("sources", sources, k_cache)
    check_slots("targets", targets, k_cache)
    if sources.shape[2] != targets.shape[2]:
        raise ValueError(f"targets: expected as many slots as sources, {sources.shape[2]}, got {targets.shape[2]}")
    if sources.shape[2] and k_cache.is_cuda:
        compact_with_triton(k_cache, v_cache, sources, targets, overlap=overlap)
    elif sources.shape[2]:
        compact_with_torch(k_cache, v_cache, sources, targets)


def compact_with_torch(k_cache: Tensor, v_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy slots on a CPU; all sources are read before any target of the same cache is written.

    k_cache, v_cache: [L, N, B, Hkv, D] contiguous, of any dtype. sources, targets: [1 or L, 1 or Hkv, n] int64 slots.
    """
    # If all heads have the same slots, a row holds all heads of a slot.
    heads = max(sources.shape[1], targets.shape[1])
    read, written = (row_numbers(k_cache, slots, heads) for slots in (sources, targets))
    for cache in (k_cache, v_cache):
        rows = as_rows(cache, heads)
        # As fast as anything in torch, and up to three times as fast as rows[written] = rows[read].
        rows.index_copy_(0, written, rows.index_select(0, read))


# Elements of K, and of V, that one program copies at a time.
ELEMENTS = 2048


def compact_with_triton(
    k_cache: Tensor, v_cache: Tensor, sources: Tensor, targets: Tensor, *, overlap: bool = True
) -> None:
    """As compact_with_torch, with the same shapes and dtypes, on CUDA or in Triton's interpreter.

    overlap: whether a target may be the source of another copy. Then there are copies of n slots of every layer and
    head, of K and of V, until the second of two launches ends.
    """
    if k_cache.element_size() == 1:
        # As bytes: Triton does not handle float8 on every device.
        k_cache, v_cache = k_cache.view(torch.int8), v_cache.view(torch.int8)
    if not overlap:
        copy_slots_with_triton((k_cache, v_cache), (k_cache, v_cache), sources, targets)
        return
    layers, _, _, kv_heads, head_dim = k_cache.shape
    count = sources.shape[2]
    # Programs do not wait for each other: only a second launch knows that all sources were read.
    k_between, v_between = (k_cache.new_empty(layers, 1, count, kv_heads, head_dim) for _ in range(2))
    between = torch.arange(count, device=k_cache.device)[None, None]
    copy_slots_with_triton((k_cache, v_cache), (k_between, v_between), sources, between)
    copy_slots_with_triton((k_between, v_between), (k_cache, v_cache), between, targets)


def copy_slots_with_triton(
    source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor], from_slots: Tensor, to_slots: Tensor
) -> None:
    """Copy slots of one pair of tensors (K, V) to slots of another, in one launch.

    source, target: [L, N, B, Hkv, D] contiguous, of one dtype; N and B may differ.
    from_slots, to_slots: [1 or L, 1 or Hkv, n] int64 slots in source and target.
    """
    # Imported here because a CPU machine may have no triton.
    import triton

    from kernels.compact_kv.kernel import copy_slots_kernel

    layers, _, _, kv_heads, head_dim = source[0].shape
    count = from_slots.shape[2]
    padded = triton.next_power_of_2(head_dim)
    slots = max(1, ELEMENTS // padded)
    from_slots, to_slots = (one.contiguous().expand(layers, kv_heads, count) for one in (from_slots, to_slots))
    copy_slots_kernel[(triton.cdiv(count, slots), kv_heads, layers)](
        *source,
        *target,
        from_slots,
        to_slots,
        count,
        source[0].stride(0),
        target[0].stride(0),
        *from_slots.stride()[:2],
        *to_slots.stride()[:2],
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=padded,
        SLOTS=slots,
        enable_fp_fusion=True,
    )
