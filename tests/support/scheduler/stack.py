"""A whole scheduler for tests, and the requests that they send it."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from protos.execution.v1 import execution_pb2_grpc
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc
from protos.kvcache.v1 import kvcache_pb2_grpc
from protos.rpc.errors import RemoteError, from_rpc_error
from protos.rpc.server import Server
from scheduler.app import Scheduler
from tests.support.generation import Output, generate
from tests.support.patience import patience
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.real_manager import RealManager


@dataclass
class Stack:
    """The scheduler and its neighbours, for a test."""

    executor: FakeExecutor
    manager: RealManager
    scheduler: Scheduler
    stub: "generation_pb2_grpc.GenerationServiceAsyncStub"
    address: str
    registry: CollectorRegistry

    def metric(self, name: str, **labels: str) -> float:
        """Value of a metric of the scheduler."""
        value = self.registry.get_sample_value(f"kvkeep_scheduler_{name}", labels)
        assert value is not None
        return value


def listening(executor: FakeExecutor, manager: RealManager, folder: Path) -> Server:
    """A server of both on sockets in a folder, after it has started and serves."""
    server = Server("neighbours", drain_seconds=0)
    add_manager = partial(kvcache_pb2_grpc.add_CacheManagerServiceServicer_to_server, manager)
    add_executor = partial(execution_pb2_grpc.add_ExecutorServiceServicer_to_server, executor)
    server.listen(f"unix:{folder}/cachemgr", {"kvcache.v1.CacheManagerService": add_manager})
    server.listen(f"unix:{folder}/executor", {"execution.v1.ExecutorService": add_executor})
    return server


StackFactory = Callable[..., AbstractAsyncContextManager[Stack]]


def prompt_of(length: int, seed: int = 1) -> list[int]:
    """Random ids."""
    rng = random.Random(seed)
    return [rng.randrange(1, 300) for _ in range(length)]


async def run(stack: Stack, *messages: pb.StreamGenerateRequest) -> list[Output]:
    """Runs requests at once."""
    return await asyncio.gather(*[generate(stack.stub, message, patience(30)) for message in messages])


async def refusal(call: Awaitable[object]) -> RemoteError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def waiting(stack: Stack, count: int) -> None:
    """Waits until `count` requests wait for blocks."""
    async with asyncio.timeout(patience(20)):
        while (await stack.stub.GetLoads(pb.GetLoadsRequest())).waiting_requests != count:
            pass
