"""Asynchronous copies between host and device: through pinned memory, in the order of the device's work."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# Alignment of each array in a buffer, bytes.
ALIGNMENT = 16
_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


def to_device(values: Sequence[float] | np.ndarray, device: torch.device) -> Tensor:
    """Returns a tensor on the device; on a CPU, it shares the memory of a contiguous array."""
    return sent(torch.from_numpy(np.ascontiguousarray(values)), device)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on the device, the tensor itself if it is there; the host does not wait for the copy."""
    if tensor.device.type == device.type:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Returns a copy on the host, readable once the device has come this far; on a CPU, the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def send(arrays: Sequence[np.ndarray], device: torch.device, into: Tensor | None = None) -> list[Tensor]:
    """Sends arrays of int32 or int64 in one copy; on a CPU the tensors share the memory of that copy.

    into: [bytes] uint8 on the device, written at offsets that depend only on the sizes; None for new memory.
    """
    starts = np.cumsum([0] + [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    image = host.numpy()
    for start, array in zip(starts, arrays, strict=False):
        image[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    buffer = host.to(device, non_blocking=True) if into is None else into[: len(host)].copy_(host, non_blocking=True)
    return [
        buffer[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]
