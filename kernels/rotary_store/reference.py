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
    k_cache: Tensor,
    v_cache: Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    tables: list[list[int]],
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Rotate query [T, Hq, D] in place; store the rotated key and the value [T, Hkv, D]. Padding rows are left.

    A sequence's rows have the last slots along its table; positions only say how far to rotate.
    """
    places = [at for count, end in zip(query_lens, seq_lens, strict=True) for at in range(end - count, end)]
    places += [0] * (len(positions) - len(places))
    slots = store_kv.slot_mapping(places, query_lens, tables, k_cache.shape[1])
    for row, (position, slot) in enumerate(zip(positions, slots, strict=True)):
        if slot >= 0:
            query[row] = rotate(query[row], cos[position], sin[position])
            rotated = rotate(key[row], cos[position], sin[position])
            one = torch.tensor([slot])
            store_kv.store_kv(rotated[None], value[row : row + 1], k_cache, v_cache, one, k_scale, v_scale)
