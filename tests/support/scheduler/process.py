"""`python -m scheduler` for tests."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.server import Server
from tests.support.patience import patience
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.http import ask
from tests.support.scheduler.real_manager import RealManager
from tests.support.scheduler.stack import listening

SERVING = health_pb2.HealthCheckResponse.SERVING
ADDRESSES = ("scheduler", "cachemgr", "executor")


@dataclass
class Running:
    """`python -m scheduler` between two fakes that do not listen yet."""

    process: asyncio.subprocess.Process
    stub: "rpc.GenerationServiceAsyncStub"
    health: "health_pb2_grpc.HealthStub"
    admin: "rpc.SchedulerAdminServiceAsyncStub"
    neighbours: Server
    executor: FakeExecutor
    manager: RealManager
    http_address: str
    # Front ends in separate processes; 0 if the test leaves their number to the scheduler.
    frontends: int

    async def begin(self) -> None:
        """Lets the neighbours listen; returns when the scheduler and its front ends serve."""
        await self.neighbours.start()
        self.neighbours.set_serving(True)
        async for answer in self.health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
            if answer.status == SERVING:
                break
        # Front ends learn the state later. A call may reach any front end, so many calls in a row reach all of them.
        well = 0
        async with asyncio.timeout(patience(60)):
            while well < 8 * self.frontends:
                answered = await ask(self.http_address, "GET", "/health")
                well = well + 1 if answered.status == 200 else 0

    async def end(self, seconds: float = 10) -> int:
        """Waits for the end of the process, which usually takes `seconds`; its status."""
        async with asyncio.timeout(patience(seconds)):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def scheduler(
    folder: Path, *, http_address: str = "", frontends: int | None = None, **settings: object
) -> AsyncIterator[Running]:
    """The process with its sockets in a folder."""
    executor = FakeExecutor()
    manager = RealManager(executor)
    neighbours = listening(executor, manager, folder)
    variables = {f"KVKEEP_{name.upper()}_ADDRESS": f"unix:{folder}/{name}" for name in ADDRESSES}
    variables["KVKEEP_SCHEDULER_HTTP_ADDRESS"] = http_address
    if frontends is not None:
        settings["frontends"] = frontends
    variables |= {f"KVKEEP_SCHEDULER_{name.upper()}": str(value) for name, value in settings.items()}
    # A killed process leaves files there that it would otherwise remove.
    variables["TMPDIR"] = str(folder)
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "scheduler", env=os.environ | variables)
    options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)]
    try:
        async with grpc.aio.insecure_channel(f"unix:{folder}/scheduler", options=options) as channel:
            stub, health = rpc.GenerationServiceStub(channel), health_pb2_grpc.HealthStub(channel)
            admin = rpc.SchedulerAdminServiceStub(channel)
            yield Running(process, stub, health, admin, neighbours, executor, manager, http_address, frontends or 0)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await neighbours.stop()
