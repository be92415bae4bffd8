"""Copy whole blocks inside the pool, all layers at once: Triton on CUDA, indexed copies on a CPU."""

import torch
from torch import Tensor

from kernels.checks import check_caches, check_device, check_dtype, check_shape


def copy_blocks(k_cache: Tensor, v_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy block sources[c] to targets[c] in every layer; no other block is touched.

    k_cache, v_cache: [L, N, B, Hkv, D] contiguous, the whole pool.
    sources, targets: [C] int64 block numbers; no target is a source or named twice, so the order does not matter.
    Raises ValueError naming the argument whose shape, dtype or device is wrong. Block numbers are not checked on CUDA.
    """
    check_caches(k_cache, v_cache, "[L, N, B, Hkv, D]")
    check_shape("sources", sources, [None], "[C]")
    check_shape("targets", targets, sources.shape, "[C]")
    for name, blocks in (("sources", sources), ("targets", targets)):
        check_dtype(name, blocks, torch.int64)
        check_device(name, blocks, "k_cache", k_cache)
    if sources.shape[0] == 0:
        return
    if k_cache.element_size() == 1:
        # As bytes: neither torch on a CPU nor Triton on every device handles float8.
        k_cache, v_cache = k_cache.view(torch.int8), v_cache.view(torch.int8)
    if k_cache.is_cuda:
        copy_with_triton(k_cache, v_cache, sources, targets)
    else:
        k_cache[:, targets] = k_cache[:, sources]
        v_cache[:, targets] = v_cache[:, sources]


# Elements that one program copies: enough to hide a load's latency, few enough to stay in registers.
PIECE = 2048


def copy_with_triton(k_cache: Tensor, v_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy blocks on CUDA or in Triton's interpreter, in one launch.

    k_cache, v_cache: [L, N, B, Hkv, D] contiguous, of one dtype that Triton handles. sources, targets: [C] int64 block
    numbers.
    """
    # Imported here because a CPU machine may have no triton.
    import triton

    from kernels.copy_blocks.kernel import copy_blocks_kernel

    layers = k_cache.shape[0]
    elements = k_cache[0, 0].numel()
    copy_blocks_kernel[(sources.shape[0], layers, triton.cdiv(elements, PIECE))](
        k_cache,
        v_cache,
        sources.contiguous(),
        targets.contiguous(),
        k_cache.stride(0),
        BLOCK_ELEMENTS=elements,
        PIECE=PIECE,
        enable_fp_fusion=True,
    )
