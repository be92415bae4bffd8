"""What copy_blocks means, block by block."""

from torch import Tensor


def copy_blocks(k_cache: Tensor, v_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy block sources[c] to targets[c] in every layer of the caches [L, N, B, Hkv, D]."""
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        k_cache[:, target] = k_cache[:, source]
        v_cache[:, target] = v_cache[:, source]
