"""What store_kv means, token by token."""

from torch import Tensor


def store_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write row t of key and value [T, Hkv, D] to place slot_mapping[t] of the caches [N, B, Hkv, D]; -1 skips it."""
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_cache[slot // block_size, slot % block_size] = key[token]
            v_cache[slot // block_size, slot % block_size] = value[token]
