"""What rotary_store means, row by row, in the words of transformers' llama."""

import torch
from torch import Tensor

from kernels.rms_norm.reference import rms_norm
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
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate query [T, Hq, D] in place; store the rotated key and the value [T, Hkv, D] at slot_mapping [T].

    q_norm, k_norm: [D], weights of the norm of each head before the rotation, None for no norm. Positions only say how
    far to rotate. Rows whose slot is -1 are left unchanged.
    """
    for row, (position, slot) in enumerate(zip(positions, slot_mapping, strict=True)):
        if slot >= 0:
            queries = query[row] if q_norm is None else rms_norm(query[row], q_norm, eps)
            keys = key[row] if k_norm is None else rms_norm(key[row], k_norm, eps)
            query[row] = rotate(queries, cos[position], sin[position])
            rotated = rotate(keys, cos[position], sin[position])
            store_kv.store_kv(rotated[None], value[row : row + 1], k_cache, v_cache, slot[None], k_scale, v_scale)
