"""Adds pooled attention to sums: compiled on a CPU where the decoder is, else torch."""

import ctypes
from ctypes import c_int64, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.arguments import check_dtype, check_shape
from kernels.decoder import build


def pooled_add(weights: Tensor, sums: Tensor, first: int, width: int) -> None:
    """sums [L, S] += the largest of each `width` neighbours, this one first, of weights [L, H, T] summed over heads.

    Both float32, S >= T. Entries before `first` are neither looked at nor added to. Raises ValueError naming what is
    wrong.
    """
    check_shape("weights", weights, [None, None, None], "[L, H, T]")
    check_shape("sums", sums, [weights.shape[0], None], "[L, S]")
    check_dtype("weights", weights, torch.float32)
    check_dtype("sums", sums, torch.float32)
    if sums.shape[1] < weights.shape[2]:
        raise ValueError(f"sums: expected at least {weights.shape[2]} slots, got {sums.shape[1]}")
    if first < 0 or width < 1:
        raise ValueError(f"first and width: expected at least 0 and 1, got {first} and {width}")
    if first >= weights.shape[2]:
        return
    library = build.loaded()
    # Every row by itself: slots of a row are next to each other in both.
    together = weights.stride(2) == sums.stride(1) == 1
    if library is None or weights.is_cuda or not together:
        add_with_torch(weights, sums, first, width)
    else:
        add_compiled(library, weights, sums, first, width)


def add_with_torch(weights: Tensor, sums: Tensor, first: int, width: int) -> None:
    """As pooled_add, checked, on any device."""
    tracked = weights[..., first:].sum(1)
    pooled = F.max_pool1d(F.pad(tracked[:, None], (0, width - 1), value=-torch.inf), width, stride=1)
    sums[:, first : weights.shape[2]].add_(pooled[:, 0])


def add_compiled(library: ctypes.CDLL, weights: Tensor, sums: Tensor, first: int, width: int) -> None:
    """As pooled_add, checked, on a CPU: torch takes longer to begin than this takes."""
    library.decoder_pooled_add.argtypes = [c_void_p, *[c_int64] * 5, c_void_p, *[c_int64] * 3]
    library.decoder_pooled_add.restype = None
    layers, heads, slots = weights.shape
    library.decoder_pooled_add(
        weights.data_ptr(),
        *(layers, heads, slots),
        *(weights.stride(0), weights.stride(1)),
        sums.data_ptr(),
        *(sums.stride(0), first, width),
    )
