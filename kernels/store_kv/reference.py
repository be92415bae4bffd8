"""What store_kv means, token by token."""

from torch import Tensor

from kernels.quantization import quantize


def store_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write row t of key and value [T, Hkv, D] to slot slot_mapping[t] of the caches [N, B, Hkv, D]; -1 skips it."""
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            for x, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
                row = x[token] if scale is None else quantize(x[token], scale, cache.dtype)
                cache[slot // block_size, slot % block_size] = row
