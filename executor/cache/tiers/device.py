"""The device's side of copies to and from lower tiers. A block there: K, then V, each layer after layer.

That is [2, layers, block_size, kv_heads, head_dim] of the pool's dtype, as bytes.
"""

import threading
from typing import Any, Protocol

import numpy as np
import structlog
import torch
from torch import Tensor

from executor.cache.pool import KvPools, Pool
from executor.cache.tiers.layout import Bytes

log = structlog.get_logger()


class DeviceBlocks(Protocol):
    """Moves whole blocks. `read` and `write` are called from several threads, on different slots, and block."""

    def mark(self) -> Any:
        """A mark behind the work submitted to the device so far; called by the thread that submits it."""
        ...

    def read(self, group: int, slot: int, into: Bytes, after: Any) -> None:
        """Copies a block out once the device is past the mark `after`."""
        ...

    def write(self, group: int, slot: int, data: Bytes, after: Any) -> None:
        """Copies a block in once the device is past the mark `after`."""
        ...

    def staging(self, size: int) -> Bytes:
        """Pinned memory on the host, where the device has use for it."""
        ...

    def register(self, memory: Bytes) -> None:
        """Pins memory of the host, where that is possible."""
        ...


def blocks_of(pools: KvPools) -> DeviceBlocks:
    """Of the device that the pools are on."""
    device = pools.pools[0].k.device
    return CudaBlocks(pools, device) if device.type == "cuda" else CpuBlocks(pools)


class CpuBlocks:
    """Pools in the host's memory. numpy copies in one thread and without the interpreter's lock."""

    def __init__(self, pools: KvPools) -> None:
        # Per group K and V, [layers, slots, bytes].
        self._caches = [tuple(_as_bytes(cache) for cache in (pool.k, pool.v)) for pool in pools.pools]

    def mark(self) -> None:
        """A CPU has no pending work."""

    def read(self, group: int, slot: int, into: Bytes, after: Any) -> None:  # noqa: ARG002
        for cache, part in zip(self._caches[group], into.reshape(2, len(self._caches[group][0]), -1), strict=True):
            np.copyto(part, cache[:, slot])

    def write(self, group: int, slot: int, data: Bytes, after: Any) -> None:  # noqa: ARG002
        for cache, part in zip(self._caches[group], data.reshape(2, len(self._caches[group][0]), -1), strict=True):
            np.copyto(cache[:, slot], part)

    def staging(self, size: int) -> Bytes:
        return np.empty(size, dtype=np.uint8)

    def register(self, memory: Bytes) -> None:
        """Nothing to do."""


def _as_bytes(cache: Tensor) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
    return cache.view(torch.uint8).reshape(*cache.shape[:2], -1).numpy()


class CudaBlocks:
    """Pools on a GPU: each thread copies on a stream of its own, beside the device's work."""

    def __init__(self, pools: KvPools, device: torch.device) -> None:
        self._pools = pools.pools
        self._device = device
        self._local = threading.local()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def read(self, group: int, slot: int, into: Bytes, after: torch.cuda.Event) -> None:
        pool, stream = self._pools[group], self._stream()
        with torch.cuda.stream(stream), torch.inference_mode():
            stream.wait_event(after)
            shaped(into, pool).copy_(gathered(pool, slot), non_blocking=True)
            stream.synchronize()

    def write(self, group: int, slot: int, data: Bytes, after: torch.cuda.Event) -> None:
        pool, stream = self._pools[group], self._stream()
        with torch.cuda.stream(stream), torch.inference_mode():
            stream.wait_event(after)
            scatter(pool, slot, shaped(data, pool).to(self._device, non_blocking=True))
            stream.synchronize()

    def staging(self, size: int) -> Bytes:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()

    def register(self, memory: Bytes) -> None:
        error = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)  # type: ignore[no-untyped-call]
        if int(error):
            log.warning("host memory is not pinned: copies from and to it are slower", cuda_error=int(error))

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._local, "stream"):
            torch.cuda.set_device(self._device)
            self._local.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._local.stream  # type: ignore[no-any-return]


def shaped(data: Bytes, pool: Pool) -> Tensor:
    """A block's bytes as [2, layers, block_size, kv_heads, head_dim] of the pool's dtype; the same memory."""
    return torch.from_numpy(data).view(pool.k.dtype).view(2, *pool.k[:, 0].shape)


def gathered(pool: Pool, slot: int) -> Tensor:
    """A copy of a slot, [2, layers, block_size, kv_heads, head_dim], on the device."""
    return torch.stack((pool.k[:, slot], pool.v[:, slot]))


def scatter(pool: Pool, slot: int, block: Tensor) -> None:
    """Writes a slot; block as `gathered` makes it."""
    pool.k[:, slot].copy_(block[0])
    pool.v[:, slot].copy_(block[1])
