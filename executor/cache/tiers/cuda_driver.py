"""Copies of rows between the host and a CUDA device, each by one call of the driver, without a kernel.

A block of a pool is one row in each layer, a layer apart; on the host, its rows are consecutive. Where layers are
farther apart than a call's rows may be, each layer has a call.
"""

import ctypes
from dataclasses import dataclass

from torch import Tensor

_HOST, _DEVICE = 1, 2
# CU_DEVICE_ATTRIBUTE_MAX_PITCH of every device: bytes between two rows of a copy.
MAX_PITCH = (1 << 31) - 1


@dataclass(frozen=True)
class Rows:
    """`height` rows of `width` bytes, the first at an address, each `pitch` bytes after the previous row."""

    address: int
    pitch: int
    width: int
    height: int

    @property
    def bytes(self) -> int:
        return self.width * self.height

    def of_slot(self, slot: int) -> "Rows":
        """Returns the rows of a slot; these are the rows of slot 0."""
        return Rows(self.address + slot * self.width, self.pitch, self.width, self.height)


def first_rows(cache: Tensor) -> list[Rows]:
    """Returns the rows of slot 0 in a pool's cache, [layers, slots, ...] contiguous, by the calls that copy them."""
    size, layers, address = cache.element_size(), len(cache), cache.data_ptr()
    pitch, width = cache.stride(0) * size, cache.stride(1) * size
    if pitch <= MAX_PITCH:
        return [Rows(address, pitch, width, layers)]
    return [Rows(address + layer * pitch, width, width, 1) for layer in range(layers)]


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver's interface."""

    _fields_ = [
        (f"{end}_{name}", kind)
        for end in ("src", "dst")
        for name, kind in (
            ("x", ctypes.c_size_t),
            ("y", ctypes.c_size_t),
            ("memory_type", ctypes.c_uint),
            ("host", ctypes.c_void_p),
            ("device", ctypes.c_uint64),
            ("array", ctypes.c_void_p),
            ("pitch", ctypes.c_size_t),
        )
    ] + [("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]


class CudaDriver:
    """The driver's calls that copy. A thread that calls must have a current CUDA device."""

    def __init__(self) -> None:
        # CUDA runs here, so its driver is there.
        library = ctypes.CDLL("libcuda.so.1")
        self._copy = library.cuMemcpy2DAsync_v2
        self._copy.argtypes = [ctypes.POINTER(_Copy), ctypes.c_void_p]
        self._copy.restype = ctypes.c_int

    def to_host(self, rows: Rows, host: int, stream: int) -> None:
        """Begins to copy rows of the device to an address on the host. Raises RuntimeError."""
        self._run(
            _Copy(
                src_memory_type=_DEVICE,
                src_device=rows.address,
                src_pitch=rows.pitch,
                dst_memory_type=_HOST,
                dst_host=host,
                dst_pitch=rows.width,
                width=rows.width,
                height=rows.height,
            ),
            stream,
        )

    def to_device(self, rows: Rows, host: int, stream: int) -> None:
        """Begins to copy from an address on the host to rows of the device. Raises RuntimeError."""
        self._run(
            _Copy(
                src_memory_type=_HOST,
                src_host=host,
                src_pitch=rows.width,
                dst_memory_type=_DEVICE,
                dst_device=rows.address,
                dst_pitch=rows.pitch,
                width=rows.width,
                height=rows.height,
            ),
            stream,
        )

    def _run(self, copy: _Copy, stream: int) -> None:
        if error := self._copy(ctypes.byref(copy), stream):
            raise RuntimeError(f"cuMemcpy2DAsync fails with CUresult {error}")
