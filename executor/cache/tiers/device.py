"""The device's side of copies to and from lower tiers. A block there: K, then V, each layer after layer.

That is [2, layers, block_size, kv_heads, head_dim] of the pool's dtype, as bytes, followed by those of a draft model.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import numpy as np
import structlog
import torch
from torch import Tensor

from executor.cache.pool import KvPools
from executor.cache.tiers.cuda_driver import CudaDriver, Rows, first_rows
from executor.cache.tiers.layout import Bytes

log = structlog.get_logger()

_Cache: TypeAlias = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]
_Part: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint8]]


class DeviceBlocks(Protocol):
    """Moves whole blocks. `begin_read`, `begin_write` and `finish` are called from several threads, on different slots.

    threads: number of threads that copy fastest. together: copies that a thread begins, at most, before it waits.
    """

    threads: int
    together: int

    def mark(self) -> Any:
        """Returns a mark after the work submitted to the device so far; called by the thread that submits it."""
        ...

    def begin_read(self, group: int, slot: int, into: Bytes, after: Any) -> None:
        """Begins to copy a block out, once the device is past the mark `after`. Raises RuntimeError."""
        ...

    def begin_write(self, group: int, slot: int, data: Bytes, after: Any) -> None:
        """Begins to copy a block in, once the device is past the mark `after`. Raises RuntimeError."""
        ...

    def finish(self) -> None:
        """Waits until all copies that the thread has begun are done. Raises RuntimeError."""
        ...

    def staging(self, size: int) -> Bytes:
        """Returns `size` bytes of memory on the host, pinned if that helps the device."""
        ...

    def register(self, memory: Bytes) -> None:
        """Pins memory of the host if possible."""
        ...

    def unregister(self, memory: Bytes) -> None:
        """Undoes `register`, before the memory is unmapped."""
        ...


def blocks_of(pools: KvPools) -> DeviceBlocks:
    """Returns the blocks of the device that the pools are on."""
    device = pools.pools[0].k.device
    return CudaBlocks(pools, device) if device.type == "cuda" else CpuBlocks(pools)


class CpuBlocks:
    """Pools in host memory. numpy copies in one thread and without the GIL."""

    threads, together = 2, 1

    def __init__(self, pools: KvPools) -> None:
        # Per group, its caches, [layers, slots, bytes] each, and where the parts of a block end.
        self._caches = [[_as_bytes(cache) for cache in pool.caches] for pool in pools.pools]
        sizes = [[cache.shape[0] * cache.shape[2] for cache in caches] for caches in self._caches]
        self._ends = [list(accumulate(of_group)) for of_group in sizes]

    def mark(self) -> None:
        """Returns None: a CPU has no pending work."""

    def begin_read(self, group: int, slot: int, into: Bytes, after: Any) -> None:  # noqa: ARG002
        for cache, part in self._parts(group, into):
            np.copyto(part, cache[:, slot])

    def begin_write(self, group: int, slot: int, data: Bytes, after: Any) -> None:  # noqa: ARG002
        for cache, part in self._parts(group, data):
            np.copyto(cache[:, slot], part)

    def finish(self) -> None:
        """Nothing to do: each copy has ended."""

    def _parts(self, group: int, block: Bytes) -> Iterator[tuple[_Cache, _Part]]:
        """Yields each cache of a group with its part of a block's bytes, [layers, bytes]."""
        begin = 0
        for cache, end in zip(self._caches[group], self._ends[group], strict=True):
            yield cache, block[begin:end].reshape(len(cache), -1)
            begin = end

    def staging(self, size: int) -> Bytes:
        return np.empty(size, dtype=np.uint8)

    def register(self, memory: Bytes) -> None:
        """Nothing to do."""

    def unregister(self, memory: Bytes) -> None:
        """Nothing to do."""


def _as_bytes(cache: Tensor) -> _Cache:
    return cache.view(torch.uint8).reshape(*cache.shape[:2], -1).numpy()


class CudaBlocks:
    """Pools on a GPU: each thread copies on a separate stream, beside the device's work."""

    # A copy of 2 MB takes as long as some calls in Python: a wait for each copy would keep the bus idle.
    together = 16

    def __init__(self, pools: KvPools, device: torch.device) -> None:
        # Per group, the rows of slot 0 in each cache.
        self._rows = [[rows for cache in pool.caches for rows in first_rows(cache)] for pool in pools.pools]
        self._device = device
        self._driver = CudaDriver()
        self._local = threading.local()
        # Addresses of pinned memory.
        self._registered: set[int] = set()
        # A single thread computes checksums at a tenth of the bus's speed.
        self.threads = max(2, min(8, (os.cpu_count() or 2) // 2))

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def begin_read(self, group: int, slot: int, into: Bytes, after: torch.cuda.Event) -> None:
        self._copy(self._driver.to_host, group, slot, into, after)

    def begin_write(self, group: int, slot: int, data: Bytes, after: torch.cuda.Event) -> None:
        self._copy(self._driver.to_device, group, slot, data, after)

    def finish(self) -> None:
        self._stream().synchronize()

    def _copy(
        self, copy: Callable[[Rows, int, int], None], group: int, slot: int, host: Bytes, after: torch.cuda.Event
    ) -> None:
        stream, address = self._stream(), host.ctypes.data
        stream.wait_event(after)
        for first in self._rows[group]:
            copy(first.of_slot(slot), address, stream.cuda_stream)
            address += first.bytes

    def staging(self, size: int) -> Bytes:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()

    def register(self, memory: Bytes) -> None:
        error = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)  # type: ignore[no-untyped-call]
        if int(error):
            log.warning("host memory is not pinned: copies from and to it are slower", cuda_error=int(error))
            self._forget_error()
        else:
            self._registered.add(memory.ctypes.data)

    def unregister(self, memory: Bytes) -> None:
        if memory.ctypes.data in self._registered:
            self._registered.remove(memory.ctypes.data)
            torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)  # type: ignore[no-untyped-call]

    def _forget_error(self) -> None:
        """Clears the error that the runtime keeps for the next call that checks, which would fail a launch."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._local, "stream"):
            torch.cuda.set_device(self._device)
            self._local.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._local.stream  # type: ignore[no-any-return]
