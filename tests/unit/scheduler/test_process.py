"""The process: becomes healthy when the stack is there, and ends in order."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.execution.v1 import execution_pb2_grpc
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.kvcache.v1 import kvcache_pb2_grpc
from protos.rpc.server import Server
from tests.support.generation import generate
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.fake_manager import FakeManager
from tests.unit.scheduler.test_generation import request

SERVING = health_pb2.HealthCheckResponse.SERVING


@contextlib.asynccontextmanager
async def scheduler_process(folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m scheduler` with its sockets in a folder."""
    names = ("scheduler", "cachemgr", "executor")
    variables = {f"KVKEEP_{name.upper()}_ADDRESS": f"unix:{folder}/{name}" for name in names}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "scheduler", env=os.environ | variables)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_process_serves_once_its_neighbours_do_and_finishes_requests_before_it_ends(tmp_path: Path) -> None:
    executor, manager = FakeExecutor(), FakeManager()
    neighbours = Server("fakes", drain_seconds=0)
    neighbours.listen(
        f"unix:{tmp_path}/cachemgr",
        {
            "kvcache.v1.CacheManagerService": lambda server: kvcache_pb2_grpc.add_CacheManagerServiceServicer_to_server(
                manager, server
            )
        },
    )
    neighbours.listen(
        f"unix:{tmp_path}/executor",
        {
            "execution.v1.ExecutorService": lambda server: execution_pb2_grpc.add_ExecutorServiceServicer_to_server(
                executor, server
            )
        },
    )
    async with (
        scheduler_process(tmp_path) as process,
        grpc.aio.insecure_channel(
            f"unix:{tmp_path}/scheduler",
            options=[("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)],
        ) as channel,
    ):
        stub = rpc.GenerationServiceStub(channel)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        assert (await watch.read()).status != SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="waits for the executor"):
            await stub.GetModel(pb.GetModelRequest())
        await neighbours.start()
        neighbours.set_serving(True)
        assert (await watch.read()).status == SERVING

        executor.gate.clear()
        running = asyncio.create_task(generate(stub, request([1, 2], 5), 30))
        await manager.admitted(1)
        process.send_signal(signal.SIGTERM)
        assert (await watch.read()).status != SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="the scheduler is stopping"):
            await generate(stub, request([3], 1), 5)
        executor.gate.set()
        assert (await running).token_ids == executor.expected([1, 2], 5)
        assert await process.wait() == 0
    await neighbours.stop()
