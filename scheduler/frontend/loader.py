"""How adapters and weights are loaded at run time: by the executor, at an operator's request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

import grpc
import structlog

from protos.execution.v1 import execution_pb2
from protos.execution.v1 import execution_pb2_grpc as execution_rpc
from protos.rpc.errors import PassedOnError, RemoteError, from_rpc_error
from scheduler.errors import AdapterLeavesError, LoadedElsewhereError
from scheduler.frontend.adapters import AdapterTable
from scheduler.request import Adapter, WantedWeights

# Longest time to read the files of an adapter, and those of a model.
LOAD_SECONDS, WEIGHTS_SECONDS = 60.0, 1800.0
CALL_SECONDS = 10.0
RETRY_SECONDS = 1.0

T = TypeVar("T")

log = structlog.get_logger()


class ModelLoader(Protocol):
    """Loads and unloads adapters, and loads other weights, at run time."""

    async def load(self, name: str, path: str) -> Adapter:
        """Loads an adapter. Raises ServiceError if this is not possible or not allowed."""

    async def unload(self, name: str) -> int:
        """Refuses new requests for an adapter, and unloads it when no sample uses it. Raises like `load`.

        Returns the number of samples that still use the adapter.
        """

    async def update_weights(self, version: str, path: str) -> int:
        """Switches to a folder's weights; returns how many cached blocks are of other weights. Raises like `load`."""


class ExecutorLoader:
    """Has the executor load and unload adapters, and load weights."""

    def __init__(
        self, table: AdapterTable, stub: execution_rpc.ExecutorServiceAsyncStub, weights: WantedWeights
    ) -> None:
        """weights: the weights that the executor computes with."""
        self._table = table
        self._stub = stub
        # The weights that the executor must compute with. Read by the step loop's thread, too.
        self.weights = weights
        self._updating = asyncio.Lock()
        # Unloads that wait for running samples, and updates of weights, which go on even if the operator leaves.
        self._tasks: set[asyncio.Task[Any]] = set()

    async def load(self, name: str, path: str) -> Adapter:
        if any(adapter.name == name and self._table.is_leaving(adapter) for adapter in self._table.all):
            raise AdapterLeavesError(
                f"requests still use the adapter {name!r} that is being unloaded",
                fields={"name": "is that of an adapter that is being unloaded"},
                retry_after=RETRY_SECONDS,
            )
        message = execution_pb2.LoadAdapterRequest(name=name, path=path)
        try:
            answer = await self._stub.LoadAdapter(message, timeout=LOAD_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise PassedOnError(from_rpc_error(error)) from error
        adapter = Adapter.of(answer.adapter)
        self._table.add(adapter)
        return adapter

    async def unload(self, name: str) -> int:
        adapter = self._table.leave(name)
        running = self._table.uses(adapter)
        try:
            # An adapter in use is unloaded later; an executor that does not allow this must refuse now.
            await self._unload(adapter, validate_only=bool(running))
        except RemoteError as error:
            self._table.stay(adapter)
            raise PassedOnError(error) from error
        if running:
            self._run(self._unload_later(adapter))
        return running

    async def update_weights(self, version: str, path: str) -> int:
        # The executor goes on even if the caller leaves, and this side must know how the update ends.
        return await asyncio.shield(self._run(self._update_weights(version, path)))

    async def _update_weights(self, version: str, path: str) -> int:
        message = execution_pb2.UpdateWeightsRequest(weight_version=version, path=path)
        async with self._updating:
            before = self.weights
            self.weights = before._replace(pending=version)
            try:
                answer = await self._stub.UpdateWeights(message, timeout=WEIGHTS_SECONDS)
            except grpc.aio.AioRpcError as error:
                self.weights = before
                raise PassedOnError(from_rpc_error(error)) from error
            self.weights = WantedWeights(version, path)
            return answer.other_blocks

    def _run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs work to its end, even if nobody waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("weights were not loaded, or an adapter was not unloaded", cause=str(error))

    async def _unload_later(self, adapter: Adapter) -> None:
        await self._table.unused(adapter)
        while True:
            try:
                return await self._unload(adapter)
            except RemoteError as error:
                log.warning("an adapter is not unloaded", name=adapter.name, cause=str(error))
                if error.code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    self._table.remove(adapter)
                    return None
            await asyncio.sleep(RETRY_SECONDS)

    async def _unload(self, adapter: Adapter, *, validate_only: bool = False) -> None:
        """Unloads an adapter at the executor and removes it here, or only checks. Raises RemoteError."""
        message = execution_pb2.UnloadAdapterRequest(name=adapter.name, validate_only=validate_only)
        try:
            await self._stub.UnloadAdapter(message, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if not validate_only:
            self._table.remove(adapter)


class LoaderElsewhere:
    """A loader for a process without its own executor."""

    def __init__(self, cause: str) -> None:
        """cause: why nothing can be loaded, and what to do instead."""
        self._cause = cause

    async def load(self, name: str, path: str) -> Adapter:  # noqa: ARG002
        raise LoadedElsewhereError(self._cause)

    async def unload(self, name: str) -> int:  # noqa: ARG002
        raise LoadedElsewhereError(self._cause)

    async def update_weights(self, version: str, path: str) -> int:  # noqa: ARG002
        raise LoadedElsewhereError(self._cause)
