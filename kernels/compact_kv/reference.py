"""What compact_kv means, slot by slot."""

from torch import Tensor


def compact_kv(k_cache: Tensor, v_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy slot sources[l, h, i] to slot targets[l, h, i] in layer l and head h of the caches [L, N, B, Hkv, D]."""
    layers, _, block_size, kv_heads, _ = k_cache.shape
    shape = (layers, kv_heads, sources.shape[2])
    sources, targets = sources.expand(shape), targets.expand(shape)
    for cache in (k_cache, v_cache):
        before = cache.clone()
        for layer in range(layers):
            for head in range(kv_heads):
                pairs = zip(sources[layer, head].tolist(), targets[layer, head].tolist(), strict=True)
                for source, target in pairs:
                    row = before[layer, source // block_size, source % block_size, head]
                    cache[layer, target // block_size, target % block_size, head] = row
