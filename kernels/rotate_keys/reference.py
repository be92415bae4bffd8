"""What rotate_keys means, slot by slot."""

import torch
from torch import Tensor

from kernels.quantization import LARGEST, quantize


def turn_back(keys: Tensor, angles: Tensor) -> Tensor:
    """keys [..., H, D] turned back by angles [..., 1, D / 2] in float32, rounded once to the dtype of keys.

    Element j and element j + D / 2 are a pair (Su et al. 2021, "RoFormer", section 3.4.2, with the halves split).
    Quantized keys are rotated without their scales, so both elements of a pair must have the same scale.
    """
    first, second = keys.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    turned = torch.cat([first * cos + second * sin, second * cos - first * sin], -1)
    return quantize(turned, torch.ones(1), keys.dtype) if keys.dtype in LARGEST else turned.to(keys.dtype)


def rotate_keys(k_cache: Tensor, slots: Tensor, deltas: Tensor, frequencies: Tensor) -> None:
    """Turn the key at slot slots[l, h, i] back by deltas[l, h, i] positions in k_cache [L, N, B, Hkv, D]."""
    layers, _, block_size, kv_heads, _ = k_cache.shape
    shape = (layers, kv_heads, slots.shape[2])
    slots, deltas = slots.expand(shape), deltas.expand(shape)
    for layer in range(layers):
        for head in range(kv_heads):
            for slot, delta in zip(slots[layer, head].tolist(), deltas[layer, head].tolist(), strict=True):
                if delta:
                    key = k_cache[layer, slot // block_size, slot % block_size, head, None]
                    key.copy_(turn_back(key, delta * frequencies))
