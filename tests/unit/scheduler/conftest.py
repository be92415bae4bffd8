"""A whole scheduler between a fake executor and a cache manager, over unix sockets."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import openai
import pytest
from prometheus_client import CollectorRegistry

from protos.generation.v1 import generation_pb2_grpc
from protos.rpc.server import Server
from scheduler.app import Scheduler
from scheduler.settings import SchedulerSettings
from tests.support.keyring import Keyring
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.http import client, serve
from tests.support.scheduler.real_manager import RealManager
from tests.support.scheduler.stack import Stack, StackFactory, listening


@pytest.fixture
def run_stack(tmp_path: Path) -> StackFactory:
    """Starts a stack; checks at its end that every block came back."""

    @contextlib.asynccontextmanager
    async def run(
        *, executor: FakeExecutor | None = None, manager: RealManager | None = None, **settings: object
    ) -> AsyncIterator[Stack]:
        executor = executor or FakeExecutor()
        manager = manager or RealManager(executor)
        addresses = {name: f"unix:{tmp_path}/{name}" for name in ("scheduler", "cachemgr", "executor")}
        async with AsyncExitStack() as exits:
            neighbours = listening(executor, manager, tmp_path)
            await neighbours.start()
            neighbours.set_serving(True)
            exits.push_async_callback(neighbours.stop)
            fields = {f"{name}_address": address for name, address in addresses.items()}
            registry = CollectorRegistry()
            server = Server("scheduler", drain_seconds=0)
            scheduler = Scheduler(SchedulerSettings(**fields, scheduler_id="test", **settings), server, registry)
            server.listen(addresses["scheduler"], scheduler.services)
            await server.start()
            exits.push_async_callback(server.stop)
            exits.push_async_callback(scheduler.stop)
            await scheduler.start()
            channel = await exits.enter_async_context(grpc.aio.insecure_channel(addresses["scheduler"]))
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            yield Stack(executor, manager, scheduler, stub, addresses["scheduler"], registry)
            await manager.settled()
            assert executor.faults == []

    return run


@pytest.fixture
async def stack(run_stack: StackFactory) -> AsyncIterator[Stack]:
    """A stack with default settings."""
    async with run_stack() as stack:
        yield stack


@pytest.fixture
async def address(stack: Stack) -> AsyncIterator[str]:
    """Where the stack serves the HTTP API."""
    async with serve(stack.scheduler.service) as address:
        yield address


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    """A tokens file without tokens."""
    return Keyring(tmp_path)


@pytest.fixture
async def caller(address: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of that API."""
    async with client(address) as caller:
        yield caller
