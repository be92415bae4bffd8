"""A running executor over a unix socket, with a cache manager that only takes notes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from executor.cache.pool import KvPools
from executor.cache.tiers.tiers import Tiers
from executor.core.adapters import Adapters
from executor.core.outbox import Outbox
from executor.core.runner import Runner
from executor.core.watchdog import Watchdog
from executor.core.worker import Worker
from executor.errors import ModelError
from executor.models.forward import Model
from executor.models.tokenizer import TokenizerFiles
from executor.rpc.announcement import PoolAnnouncement
from executor.rpc.manager_client import ManagerClient, TransferLog
from executor.rpc.service import SERVICE, ExecutorServicer, Identity
from executor.rpc.sessions import SchedulerLeases, Sessions
from executor.rpc.weights import WeightUpdates
from protos.execution.v1 import execution_pb2 as pb
from protos.execution.v1 import execution_pb2_grpc as rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kv_rpc
from protos.rpc.channel import open_channel
from protos.rpc.errors import RemoteError, ServiceError, UnexpectedError, from_rpc_error
from protos.rpc.server import Server
from tests.support.patience import patience
from tests.unit.executor.conftest import BLOCK_SIZE

EPOCH = 1234
PROMPT = [5, 60, 7, 80, 9]
# Announced as the most tokens of a step.
MAX_BATCHED_TOKENS = 99


class UnknownExecutorError(ServiceError):
    """What a restarted manager says to a renewal."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "UNKNOWN_EXECUTOR"


class StaleExecutorError(ServiceError):
    """What a manager answers a process that is no longer the executor of this name."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STALE_EXECUTOR"


class SchedulerFirstError(ServiceError):
    """What a restarted manager says while the scheduler of the session has not registered with it."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "SCHEDULER_FIRST"


@contextmanager
def refused(reason: str = "", field: str = "", code: grpc.StatusCode | None = None) -> Iterator[None]:
    """Expects an error with this reason, which names this field alone, as far as they are given."""
    with pytest.raises(RemoteError) as caught:
        yield
    assert reason in ("", caught.value.reason)
    assert not field or list(caught.value.fields) == [field]
    assert code in (None, caught.value.code)


@dataclass
class FakeManager(kv_rpc.CacheManagerServiceServicer):
    """Takes registrations, renewals and confirmations; `restart` forgets them all."""

    epoch: int = 1
    registrations: list[kv.RegisterExecutorRequest] = field(default_factory=list)
    confirmations: list[kv.ConfirmTransfersRequest] = field(default_factory=list)
    # What renewals bring, until it is confirmed.
    transfers: list[kv.Transfer] = field(default_factory=list)
    scheduler_ids: list[str] = field(default_factory=list)
    renewals: int = 0
    known: bool = False
    replaced: bool = False
    # Whether it has blocks that it does not restore while steps for another manager may run.
    has_blocks: bool = False
    refused: list[kv.RegisterExecutorRequest] = field(default_factory=list)
    lease: timedelta = timedelta(milliseconds=60)
    refuse_confirmations: int = 0
    # As executors have told them.
    weight_versions: list[str] = field(default_factory=list)
    refuse_weights: int = 0
    # Renewals have no answer while this is not set.
    answers_renewals: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.answers_renewals.set()

    def restart(self) -> None:
        self.epoch += 1
        self.known = False

    def replace(self) -> None:
        """Another process has been given the executor's name."""
        self.known, self.replaced = False, True

    @property
    def confirmed(self) -> list[tuple[int, bool]]:
        """Tickets in the order in which they were confirmed, and whether their copies ended well."""
        done = [(ticket, True) for request in self.confirmations for ticket in request.tickets]
        return done + [(ticket, False) for request in self.confirmations for ticket in request.failed_tickets]

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(patience(10)):
            while not reached():
                self.changed.clear()
                await self.changed.wait()

    async def RegisterExecutor(self, request: Any, context: Any) -> kv.RegisterExecutorResponse:
        if self.replaced:
            raise StaleExecutorError("a newer epoch is registered")
        if self.has_blocks and request.steps_manager_epoch not in (0, self.epoch):
            self.refused.append(request)
            self.changed.set()
            raise SchedulerFirstError("waiting for the scheduler")
        self.registrations.append(request)
        self.known = True
        self.changed.set()
        return kv.RegisterExecutorResponse(manager_epoch=self.epoch, lease_duration=self.lease)

    async def RenewExecutor(self, request: Any, context: Any) -> kv.RenewExecutorResponse:
        if not self.known:
            raise UnknownExecutorError("register first")
        self.renewals += 1
        self.changed.set()
        await self.answers_renewals.wait()
        return kv.RenewExecutorResponse(
            manager_epoch=self.epoch,
            lease_duration=self.lease,
            transfers=self.transfers,
            scheduler_ids=self.scheduler_ids,
        )

    async def UpdateWeights(self, request: Any, context: Any) -> kv.UpdateWeightsResponse:
        if not self.known:
            raise UnknownExecutorError("register first")
        self.weight_versions.append(request.weight_version)
        self.changed.set()
        if self.refuse_weights:
            self.refuse_weights -= 1
            raise UnexpectedError("not now")
        return kv.UpdateWeightsResponse(other_blocks=3)

    async def ConfirmTransfers(self, request: Any, context: Any) -> kv.ConfirmTransfersResponse:
        if self.refuse_confirmations:
            self.refuse_confirmations -= 1
            raise UnknownExecutorError("not now")
        self.confirmations.append(request)
        ended = {*request.tickets, *request.failed_tickets}
        self.transfers = [transfer for transfer in self.transfers if transfer.ticket not in ended]
        self.changed.set()
        return kv.ConfirmTransfersResponse()


@dataclass
class Stack:
    """A running executor, its manager, and a stub to talk to it."""

    manager: FakeManager
    runner: Runner
    stub: Any
    servicer: ExecutorServicer
    worker: Worker
    client: ManagerClient
    leases: SchedulerLeases
    # Set when the executor says that its device never answers again.
    given_up: asyncio.Event

    @asynccontextmanager
    async def session(
        self, scheduler_epoch: int = 1, executor_epoch: int = EPOCH, scheduler_id: str = "s", manager_epoch: int = 0
    ) -> AsyncIterator["Stream"]:
        call = self.stub.StreamSteps()
        stream = Stream(call)
        opening = pb.OpenSession(
            scheduler_id=scheduler_id,
            scheduler_epoch=scheduler_epoch,
            executor_epoch=executor_epoch,
            manager_epoch=manager_epoch,
        )
        await call.write(pb.StreamStepsRequest(open=opening))
        try:
            stream.opened = (await stream.read()).opened
            stream.next_step = stream.opened.first_step
            yield stream
        finally:
            call.cancel()


@dataclass
class Stream:
    """One session as a scheduler sees it."""

    call: Any
    next_step: int = 0
    opened: pb.SessionOpened = field(default_factory=pb.SessionOpened)

    async def read(self) -> pb.StreamStepsResponse:
        try:
            async with asyncio.timeout(patience(20)):
                answer = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if answer is grpc.aio.EOF:
            raise EOFError
        return answer

    async def send(self, **changes: Any) -> None:
        step, self.next_step = self.next_step, self.next_step + 1
        await self.call.write(pb.StreamStepsRequest(step=pb.Step(step=step, **changes)))

    async def registered(self, manager_epoch: int) -> None:
        await self.call.write(pb.StreamStepsRequest(registered=pb.SchedulerRegistered(manager_epoch=manager_epoch)))

    async def run(self, **changes: Any) -> pb.StepResult:
        await self.send(**changes)
        return (await self.read()).result


def new_sequence(sequence: int, **changes: Any) -> pb.NewSequence:
    sampling = pb.SamplingParams(top_p=1, repetition_penalty=1, num_logprobs=2)
    table = pb.StepBlockTable(slots=range(1 + 20 * sequence, 11 + 20 * sequence))
    return pb.NewSequence(
        **{
            "sequence": sequence,
            "token_ids": PROMPT,
            "num_prompt_tokens": len(PROMPT),
            "block_tables": [table],
            "sampling": sampling,
        }
        | changes
    )


def join(sequence: int, **changes: Any) -> dict[str, Any]:
    return {
        "new_sequences": [new_sequence(sequence, **changes)],
        "chunk_sequences": [sequence],
        "chunk_tokens": [len(PROMPT)],
    }


def cannot_load(folder: Path | None) -> Model:
    raise ModelError(f"there are no weights in {folder}")


@asynccontextmanager
async def running(
    model: Model,
    tmp_path: Path,
    tiers: Callable[[KvPools], Tiers] = Tiers,
    load: Callable[[Path | None], Model] = cannot_load,
) -> AsyncIterator[Stack]:
    """An executor with a pool of 200 blocks. load: other weights, from a folder below `weights`."""
    manager = FakeManager()
    manager_server = Server("cachemgr", drain_seconds=0)
    manager_address, address = f"unix:{tmp_path}/m.sock", f"unix:{tmp_path}/e.sock"
    manager_server.listen(
        manager_address,
        {"kvcache.v1.CacheManagerService": lambda s: kv_rpc.add_CacheManagerServiceServicer_to_server(manager, s)},
    )
    pools = KvPools(model.groups, 200, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    loop, made = asyncio.get_running_loop(), tiers(pools)
    transfers = TransferLog(loop)
    outbox = Outbox(transfers, made.block_times)
    runner = Runner(model, pools, made, outbox.copy_ended)
    server = Server("executor", drain_seconds=0)
    worker = Worker(runner, outbox, lambda: None)
    given_up = asyncio.Event()
    watchdog = Watchdog(worker, server.set_serving, given_up.set)
    leases = SchedulerLeases()
    sessions = Sessions(EPOCH, leases, worker)
    client = ManagerClient(
        open_channel(manager_address),
        PoolAnnouncement("executor-0", EPOCH, "tiny", b"f" * 32, pools, made, plain_rotary=True),
        worker,
        transfers,
        watchdog.set_registered,
        leases,
        sessions,
    )
    adapters = Adapters(runner, folder=tmp_path / "adapters", most=2, largest_rank=16)
    servicer = ExecutorServicer(
        Identity("executor-0", EPOCH),
        runner,
        worker,
        TokenizerFiles(b"{}", "template", {"bos_token": "<s>"}),
        leases,
        adapters,
        sessions,
        WeightUpdates(worker, sessions, client, adapters, load, tmp_path / "weights"),
        hub_id="owner/tiny",
        max_batched_tokens=MAX_BATCHED_TOKENS,
    )
    server.listen(address, {SERVICE: lambda s: rpc.add_ExecutorServiceServicer_to_server(servicer, s)})
    await manager_server.start()
    await server.start()
    worker.start()
    registration, watching = asyncio.create_task(client.run()), asyncio.create_task(watchdog.run())
    async with open_channel(address) as channel:
        yield Stack(manager, runner, rpc.ExecutorServiceStub(channel), servicer, worker, client, leases, given_up)
    servicer.stop()
    await asyncio.to_thread(worker.stop)
    registration.cancel()
    watching.cancel()
    await server.stop()
    await manager_server.stop()
    runner.tiers.close()
