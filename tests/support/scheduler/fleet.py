"""A router with several schedulers and fake executors, in one process, over unix sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from protos.generation.v1 import generation_pb2_grpc
from protos.kvcache.v1 import kvcache_pb2_grpc
from protos.rpc.server import Server
from scheduler.app import Scheduler
from scheduler.router.process import Router
from scheduler.router.settings import RouterSettings
from scheduler.settings import SchedulerSettings
from tests.support.patience import patience
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.real_manager import RealManager
from tests.support.scheduler.stack import Stack, listening


@dataclass
class Engine(Stack):
    """An engine of a fleet."""

    server: Server

    async def kill(self) -> None:
        """Breaks all its streams, like a killed process."""
        await self.server.stop()


@dataclass
class Fleet:
    """A router with its engines."""

    router: Router
    stub: "generation_pb2_grpc.GenerationServiceAsyncStub"
    engines: list[Engine]
    registry: CollectorRegistry
    health: Server

    def metric(self, name: str, **labels: str) -> float:
        """Value of a metric of the router; 0 for a metric without a value."""
        return self.registry.get_sample_value(f"kvkeep_router_{name}", labels) or 0.0

    async def ready(self, count: int) -> None:
        """Waits until `count` engines take requests."""
        async with asyncio.timeout(patience(20)):
            while sum(link.is_open and not link.obstacle for link in self.router.fleet.links.values()) != count:
                await asyncio.sleep(0.01)

    async def knows(self, count: int) -> None:
        """Waits until the router's view has `count` executors."""
        async with asyncio.timeout(patience(20)):
            while len(self.router.view.executors) != count:
                await asyncio.sleep(0.01)

    async def knows_weights(self, version: str) -> None:
        """Waits until the router's view has these weights of every executor."""
        async with asyncio.timeout(patience(20)):
            while any(one.space.weight_version != version for one in self.router.view.executors.values()):
                await asyncio.sleep(0.01)

    async def views(self, blocks: int) -> None:
        """Waits until the router's view has `count` blocks."""
        async with asyncio.timeout(patience(60)):
            while len(self.router.view) < blocks:
                await asyncio.sleep(0.01)


class _Events(kvcache_pb2_grpc.CacheEventServiceServicer):
    """The events of a cache manager, also after it has started again."""

    def __init__(self, manager: RealManager) -> None:
        self._manager = manager

    async def WatchEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if self._manager.hides_events:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no events")
        async for message in self._manager.events.WatchEvents(request, context):
            yield message


@contextlib.asynccontextmanager
async def run_engine(
    folder: Path, executor: FakeExecutor | None = None, manager: RealManager | None = None, **settings: object
) -> AsyncIterator[Engine]:
    """A scheduler between a fake executor and a cache manager, with sockets in a folder. Every block is released."""
    executor = executor or FakeExecutor()
    manager = manager or RealManager(executor)
    addresses = {name: f"unix:{folder}/{name}" for name in ("scheduler", "cachemgr", "cachemgr_admin", "executor")}
    async with AsyncExitStack() as exits:
        neighbours = listening(executor, manager, folder)
        add_events = partial(kvcache_pb2_grpc.add_CacheEventServiceServicer_to_server, _Events(manager))
        # Asks the present service each time: a cache manager that starts again has a new service.
        add_admin = partial(kvcache_pb2_grpc.add_CacheAdminServiceServicer_to_server, manager.admin)
        neighbours.listen(
            addresses["cachemgr_admin"],
            {"kvcache.v1.CacheEventService": add_events, "kvcache.v1.CacheAdminService": add_admin},
        )
        await neighbours.start()
        neighbours.set_serving(True)
        exits.push_async_callback(neighbours.stop)
        fields = {f"{name}_address": address for name, address in addresses.items()}
        registry = CollectorRegistry()
        server = Server("scheduler", drain_seconds=0)
        scheduler = Scheduler(SchedulerSettings(**fields | {"scheduler_id": folder.name} | settings), server, registry)
        server.listen(addresses["scheduler"], scheduler.services)
        await server.start()
        exits.push_async_callback(server.stop)
        exits.push_async_callback(scheduler.stop)
        await scheduler.start()
        channel = await exits.enter_async_context(grpc.aio.insecure_channel(addresses["scheduler"]))
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        yield Engine(executor, manager, scheduler, stub, addresses["scheduler"], registry, server)
        await manager.unused()
        assert executor.faults == []


@contextlib.asynccontextmanager
async def run_fleet(
    folder: Path,
    count: int = 2,
    executor_ids: Sequence[str] = (),
    executors: Sequence[FakeExecutor] = (),
    of_engines: Mapping[str, object] = MappingProxyType({}),
    **settings: object,
) -> AsyncIterator[Fleet]:
    """`count` engines and a router, after all engines take requests. settings: of the router. of_engines: of each."""
    async with AsyncExitStack() as exits:
        engines = []
        for number in range(count):
            (folder / f"engine-{number}").mkdir()
            executor = executors[number] if executors else FakeExecutor()
            executor.executor_id = executor_ids[number] if executor_ids else f"executor-{number}"
            engine = run_engine(folder / f"engine-{number}", executor, **of_engines)
            engines.append(await exits.enter_async_context(engine))
        yield await exits.enter_async_context(run_router(folder, engines, **settings))


@contextlib.asynccontextmanager
async def run_router(folder: Path, engines: list[Engine], /, **settings: object) -> AsyncIterator[Fleet]:
    """A router in front of engines, after all of them take requests."""
    async with AsyncExitStack() as exits:
        registry = CollectorRegistry()
        server = Server("router", drain_seconds=0)
        address = f"unix:{folder}/router"
        fields = {"engines": ",".join(engine.address for engine in engines), "address": address, "router_id": "router"}
        router = Router(RouterSettings(**(fields | settings)), server, registry)
        server.listen(address, router.services)
        await server.start()
        exits.push_async_callback(server.stop)
        exits.push_async_callback(router.stop)
        await router.start()
        channel = await exits.enter_async_context(grpc.aio.insecure_channel(address))
        fleet = Fleet(router, generation_pb2_grpc.GenerationServiceStub(channel), engines, registry, server)
        await fleet.ready(len(engines))
        yield fleet
