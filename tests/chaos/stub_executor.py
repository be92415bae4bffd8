"""An executor that computes tokens from the contents of its blocks: `python -m tests.chaos.stub_executor`.

It needs no model: a token is a hash of all earlier tokens. The tokens that a sequence attends to are compared with the
contents of its blocks, so that a wrong block is noticed. A contradiction ends the session and is a FAULT in its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Collection
from functools import partial

import structlog

from bench.stub_executor import StubSettings
from executor.cache.tiers.hazards import SlotRef
from executor.rpc.manager_client import ManagerClient, TransferLog
from executor.rpc.sessions import SchedulerLeases
from executor.step import Copy, Tier
from protos.execution.v1 import execution_pb2_grpc as rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.rpc import logs
from protos.rpc.channel import open_channel
from protos.rpc.server import Server, StopSignals
from protos.rpc.settings import load
from scheduler import sequence
from scheduler.request import Tier as SchedulerTier
from tests.support.scheduler.fake_executor import MODEL, FakeExecutor

SERVICE = "execution.v1.ExecutorService"
FAULT = "FAULT"
# Time of a prompt token, so that routers prefer a cached prefix.
TOKEN_SECONDS = 1e-4
MAX_POSITIONS = 4096
# Marks a slot whose contents are about to change.
_NEVER = (1 << 64) - 1

log = structlog.get_logger()


class Announcement:
    """The executor's registration, of one pool. Lower tiers are memory of the process, and end with the process."""

    def __init__(self, settings: StubSettings, executor: FakeExecutor) -> None:
        self._settings = settings
        self._executor = executor
        self.executor_id = executor.executor_id
        self.epoch = executor.epoch

    def request(self, *, again: bool, awaited: Collection[SlotRef]) -> kv.RegisterExecutorRequest:
        """again: with the last write of every slot. awaited: target slots of copies that have not begun."""
        settings, executor = self._settings, self._executor
        blocks, host, disk = map(settings.slots, (Tier.DEVICE, Tier.HOST, Tier.DISK))
        changing = {slot for tier, _, slot in awaited if tier == Tier.DEVICE} | executor.arriving
        written = {slot: step for (_, slot), step in executor.written.items()} | dict.fromkeys(changing, _NEVER)
        busy = {(tier, slot) for tier, _, slot in awaited}

        def generations(tier: Tier, count: int) -> list[int]:
            held = executor.generations
            slots = range(1, count + 1)
            return [0 if (tier, slot) in busy else held.get((0, int(tier), slot), 0) for slot in slots]

        pool = kv.PoolSpec(
            group=0,
            num_blocks=blocks,
            num_layers=1,
            num_kv_heads=1,
            head_dim=16,
            dtype="float32",
            block_bytes=settings.block_bytes,
            last_write_steps=[written.get(slot, 0) for slot in range(1, blocks + 1)] if again else [],
            host_blocks=host,
            disk_blocks=disk,
            host_generations=generations(Tier.HOST, host),
            disk_generations=generations(Tier.DISK, disk),
        )
        return kv.RegisterExecutorRequest(
            executor_id=self.executor_id,
            executor_epoch=self.epoch,
            model=MODEL,
            model_fingerprint=bytes(32),
            block_size=settings.block_size,
            pools=[pool],
        )


class Worker:
    """Runs the copies of the cache manager itself."""

    def __init__(self, executor: FakeExecutor) -> None:
        self._executor = executor

    @property
    def last_step(self) -> int:
        return self._executor.last_step

    def transfer(self, copies: tuple[Copy, ...]) -> None:
        for copy in copies:
            tiers = (SchedulerTier(int(tier)) for tier in (copy.source_tier, copy.target_tier))
            self._executor.transfer(sequence.Copy(copy.ticket, copy.group, copy.source, copy.target, *tiers))


async def serve(settings: StubSettings) -> None:
    """Serves until SIGTERM."""
    executor = FakeExecutor(
        block_size=settings.block_size,
        max_tokens=settings.max_tokens,
        max_positions=MAX_POSITIONS,
        epoch=time.time_ns(),
    )
    executor.executor_id = settings.executor_id
    executor.step_seconds, executor.token_seconds = settings.stub_step_seconds, TOKEN_SECONDS
    executor.host_block_seconds = settings.copy_seconds
    executor.complain = lambda fault: log.error(FAULT, cause=fault)
    transfers = TransferLog(asyncio.get_running_loop())
    executor.confirm = lambda ticket: transfers.confirm((ticket,), ())
    executor.refuse = lambda ticket: transfers.confirm((), (ticket,))
    server = Server("executor", drain_seconds=0)
    add = partial(rpc.add_ExecutorServiceServicer_to_server, executor)
    server.listen(settings.executor_address, {SERVICE: add})
    signals = StopSignals()
    await server.start()
    async with open_channel(settings.cachemgr_address) as channel:
        announcement = Announcement(settings, executor)
        leases = SchedulerLeases()
        client = ManagerClient(channel, announcement, Worker(executor), transfers, server.set_serving, leases, executor)
        executor.times_left = leases.times_left
        registration = asyncio.create_task(client.run())

        async def drain() -> None:
            executor.break_session()

        await server.run_until_stopped(signals, drain)
        registration.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await registration


def main() -> None:
    """Serves until SIGTERM."""
    settings = load(StubSettings, os.environ)
    logs.configure("executor", settings.log_level)
    asyncio.run(serve(settings))


if __name__ == "__main__":
    main()
