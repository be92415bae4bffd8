"""What rotary_store means, row by row, in the words of transformers' llama."""

import torch
from torch import Tensor

from kernels.store_kv import reference as store_kv


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D] rotated by the angles whose cosines and sines [..., D] are given, all rounded to the dtype of x.

    Element j and element j + D / 2 are a pair (Su et al. 2021, "RoFormer", section 3.4.2, with the halves split).
    """
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)


def rotary_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: list[int],
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Rotate query [T, Hq, D] in place; store the rotated key and the value [T, Hkv, D] at slot_mapping [T].

    Positions only say how far to rotate. Rows whose slot is -1 are left unchanged.
    """
    for row, (position, slot) in enumerate(zip(positions, slot_mapping, strict=True)):
        if slot >= 0:
            query[row] = rotate(query[row], cos[position], sin[position])
            rotated = rotate(key[row], cos[position], sin[position])
            store_kv.store_kv(rotated[None], value[row : row + 1], k_cache, v_cache, slot[None], k_scale, v_scale)
