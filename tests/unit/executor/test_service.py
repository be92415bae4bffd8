"""The executor's service over a unix socket, with a cache manager that only takes notes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.duration_pb2 import Duration

from executor.kv_pool import KvPools
from executor.manager_client import Announcement, ManagerClient
from executor.model import Model
from executor.runner import Runner
from executor.service import SERVICE, ExecutorServicer, Identity
from executor.tokenizer import TokenizerFiles
from executor.worker import Worker
from protos.execution.v1 import execution_pb2 as pb
from protos.execution.v1 import execution_pb2_grpc as rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kv_rpc
from protos.rpc.channel import open_channel
from protos.rpc.errors import RemoteError, ServiceError, from_rpc_error
from protos.rpc.server import Server
from tests.unit.executor.conftest import BLOCK_SIZE

EPOCH = 1234
PROMPT = [5, 60, 7, 80, 9]


class UnknownExecutorError(ServiceError):
    """What a restarted manager says to a renewal."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "UNKNOWN_EXECUTOR"


@dataclass
class FakeManager(kv_rpc.CacheManagerServiceServicer):
    """Takes registrations, renewals and confirmations; `restart` forgets them all."""

    epoch: int = 1
    registrations: list[kv.RegisterExecutorRequest] = field(default_factory=list)
    confirmations: list[kv.ConfirmTransfersRequest] = field(default_factory=list)
    known: bool = False
    refuse_confirmations: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def restart(self) -> None:
        self.epoch += 1
        self.known = False

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not reached():
                self.changed.clear()
                await self.changed.wait()

    async def RegisterExecutor(self, request: Any, context: Any) -> kv.RegisterExecutorResponse:
        self.registrations.append(request)
        self.known = True
        self.changed.set()
        return kv.RegisterExecutorResponse(manager_epoch=self.epoch, lease_duration=Duration(nanos=60_000_000))

    async def RenewExecutor(self, request: Any, context: Any) -> kv.RenewExecutorResponse:
        if not self.known:
            raise UnknownExecutorError("register first")
        return kv.RenewExecutorResponse(manager_epoch=self.epoch, lease_duration=Duration(nanos=60_000_000))

    async def ConfirmTransfers(self, request: Any, context: Any) -> kv.ConfirmTransfersResponse:
        if self.refuse_confirmations:
            self.refuse_confirmations -= 1
            raise UnknownExecutorError("not now")
        self.confirmations.append(request)
        self.changed.set()
        return kv.ConfirmTransfersResponse()


@dataclass
class Stack:
    """A running executor, its manager, and a stub to talk to it."""

    manager: FakeManager
    runner: Runner
    stub: Any
    servicer: ExecutorServicer

    @asynccontextmanager
    async def session(self, scheduler_epoch: int = 1, executor_epoch: int = EPOCH) -> AsyncIterator["Stream"]:
        call = self.stub.StreamSteps()
        stream = Stream(call)
        opening = pb.OpenSession(scheduler_id="s", scheduler_epoch=scheduler_epoch, executor_epoch=executor_epoch)
        await call.write(pb.StreamStepsRequest(open=opening))
        try:
            answer = await stream.read()
            stream.next_step = answer.opened.first_step
            yield stream
        finally:
            call.cancel()


@dataclass
class Stream:
    """One session as a scheduler sees it."""

    call: Any
    next_step: int = 0

    async def read(self) -> pb.StreamStepsResponse:
        try:
            async with asyncio.timeout(20):
                answer = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if answer is grpc.aio.EOF:
            raise EOFError
        return answer

    async def send(self, **changes: Any) -> None:
        step, self.next_step = self.next_step, self.next_step + 1
        await self.call.write(pb.StreamStepsRequest(step=pb.Step(step=step, **changes)))

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


@pytest.fixture
async def stack(tiny: Model, tmp_path: Path) -> AsyncIterator[Stack]:
    manager = FakeManager()
    manager_server = Server("cachemgr", drain_seconds=0)
    manager_address, address = f"unix:{tmp_path}/m.sock", f"unix:{tmp_path}/e.sock"
    manager_server.listen(
        manager_address,
        {"kvcache.v1.CacheManagerService": lambda s: kv_rpc.add_CacheManagerServiceServicer_to_server(manager, s)},
    )
    runner = Runner(tiny, KvPools(tiny.groups, 200, BLOCK_SIZE, torch.float32, torch.device("cpu")))
    server = Server("executor", drain_seconds=0)
    client = ManagerClient(
        open_channel(manager_address),
        Announcement("executor-0", EPOCH, "tiny", b"f" * 32, plain_rotary=True),
        runner.pools,
        lambda slots: worker.zero(slots),
        lambda: server.set_serving(True),
    )
    loop = asyncio.get_running_loop()
    worker = Worker(
        runner,
        lambda done, failed: loop.call_soon_threadsafe(client.confirm, done, failed) and None,
        lambda: None,
    )
    servicer = ExecutorServicer(
        Identity("executor-0", EPOCH), runner, worker, TokenizerFiles(b"{}", "template", {"bos_token": "<s>"})
    )
    server.listen(address, {SERVICE: lambda s: rpc.add_ExecutorServiceServicer_to_server(servicer, s)})
    await manager_server.start()
    await server.start()
    worker.start()
    registration = asyncio.create_task(client.run())
    async with open_channel(address) as channel:
        yield Stack(manager, runner, rpc.ExecutorServiceStub(channel), servicer)
    servicer.stop()
    await asyncio.to_thread(worker.stop)
    registration.cancel()
    await server.stop()
    await manager_server.stop()


async def test_the_model_and_the_executor_describe_themselves(stack: Stack) -> None:
    model = await stack.stub.GetModel(pb.GetModelRequest(), timeout=5)
    assert (model.vocab_size, model.max_positions, model.dtype) == (97, 256, "float32")
    assert (model.tokenizer_json, model.chat_template, dict(model.special_tokens)) == (
        b"{}",
        "template",
        {"bos_token": "<s>"},
    )
    executor = await stack.stub.GetExecutor(pb.GetExecutorRequest(), timeout=5)
    assert (executor.executor_epoch, executor.device, executor.num_groups) == (EPOCH, "cpu", 1)
    assert (executor.block_size, executor.max_tokens) == (BLOCK_SIZE, 800)


async def test_a_session_runs_steps_in_order(stack: Stack) -> None:
    async with stack.session() as stream:
        assert stream.next_step == 1
        first = await stream.run(**join(1))
        assert (first.step, list(first.sequences), first.num_tokens) == (1, [1], len(PROMPT))
        assert first.logprobs[0].top_token_ids[0] == first.token_ids[0]
        assert first.compute_time.ToTimedelta().total_seconds() > 0
        # Two in flight, as the scheduler keeps them.
        await stream.send()
        await stream.send(removed_sequences=[1])
        second, third = (await stream.read()).result, (await stream.read()).result
        assert (second.step, list(second.sequences)) == (2, [1])
        assert (third.step, list(third.sequences)) == (3, [])
        assert (await stack.stub.GetExecutor(pb.GetExecutorRequest(), timeout=5)).last_step == 3


async def test_answers_still_come_after_the_scheduler_has_said_everything(stack: Stack) -> None:
    async with stack.session() as stream:
        await stream.send(**join(1))
        await stream.send()
        await stream.call.done_writing()
        assert [(await stream.read()).result.step for _ in range(2)] == [1, 2]
        with pytest.raises(EOFError):
            await stream.read()


async def test_a_new_session_starts_empty_and_the_step_number_goes_on(stack: Stack) -> None:
    async with stack.session() as stream:
        await stream.run(**join(1))
    async with stack.session() as stream:
        assert stream.next_step == 2
        assert stack.runner.num_sequences == 0
        assert list((await stream.run(**join(1))).sequences) == [1]


async def test_a_newer_scheduler_ends_the_older_session(stack: Stack) -> None:
    async with stack.session(scheduler_epoch=1) as older:
        await older.run(**join(1))
        async with stack.session(scheduler_epoch=2) as newer:
            with pytest.raises(RemoteError) as caught:
                await older.read()
            assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.ABORTED, "SESSION_REPLACED")
            assert list((await newer.run(**join(1))).sequences) == [1]


async def test_an_older_scheduler_and_a_wrong_epoch_are_refused_and_change_nothing(stack: Stack) -> None:
    async with stack.session(scheduler_epoch=5) as current:
        await current.run(**join(1))
        for epochs, reason in (((4, EPOCH), "STALE_SCHEDULER_EPOCH"), ((6, EPOCH + 1), "WRONG_EXECUTOR_EPOCH")):
            with pytest.raises(RemoteError) as caught:
                async with stack.session(*epochs):
                    pass
            assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
        assert list((await current.run()).sequences) == [1]


async def test_a_session_must_be_opened_first(stack: Stack) -> None:
    call = stack.stub.StreamSteps()
    await call.write(pb.StreamStepsRequest(step=pb.Step(step=1)))
    with pytest.raises(RemoteError) as caught:
        await Stream(call).read()
    assert caught.value.reason == "SESSION_NOT_OPEN"


BAD = {
    "columns": ({"chunk_sequences": [1], "chunk_tokens": []}, "chunk_tokens"),
    "slots": ({"table_sequences": [1], "table_groups": [0], "table_counts": [2], "table_slots": [1]}, "table_slots"),
    "copies": ({"copy_tickets": [1], "copy_groups": [0], "copy_source_slots": [1]}, "copy_target_slots"),
    "twice": ({"chunk_sequences": [1, 1], "chunk_tokens": [1, 1]}, "chunk_sequences"),
    "sampling": (join(2, sampling=pb.SamplingParams(top_p=2)), "new_sequences.sampling.top_p"),
    "groups": (
        join(2, block_tables=[pb.StepBlockTable(group=1, slots=[1, 2])]),
        "new_sequences.block_tables.group",
    ),
    "unknown": ({"removed_sequences": [9]}, "removed_sequences"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_step_ends_its_session_with_the_fields_name(name: str, stack: Stack) -> None:
    changes, field_name = BAD[name]
    async with stack.session() as stream:
        await stream.run(**join(1))
        with pytest.raises(RemoteError) as caught:
            await stream.run(**changes)
        assert caught.value.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
        assert list(caught.value.fields) == [field_name]
    async with stack.session() as stream:
        assert list((await stream.run(**join(1))).sequences) == [1]


async def test_a_failing_model_ends_the_session_and_not_the_process(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stack.session() as stream:
        await stream.run(**join(1))
        with monkeypatch.context() as patch:
            # The device answers with an error, as it does when memory runs out.
            patch.setattr(torch.nn.functional, "embedding", lambda *_, **__: torch.empty(1, 2) @ torch.empty(1, 2))
            with pytest.raises(RemoteError) as caught:
                await stream.run()
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INTERNAL, "STEP_FAILED")
    async with stack.session() as stream:
        assert list((await stream.run(**join(1))).sequences) == [1]


async def test_stopping_ends_the_session(stack: Stack) -> None:
    async with stack.session() as stream:
        stack.servicer.stop()
        with pytest.raises(RemoteError) as caught:
            await stream.read()
        assert caught.value.reason == "STOPPING"


async def test_the_pools_are_announced_and_again_after_a_restart_with_their_last_writes(stack: Stack) -> None:
    manager = stack.manager
    await manager.until(lambda: bool(manager.registrations))
    first = manager.registrations[0]
    assert (first.executor_id, first.executor_epoch, first.block_size) == ("executor-0", EPOCH, BLOCK_SIZE)
    assert (first.pools[0].num_blocks, first.pools[0].num_layers, list(first.pools[0].last_write_steps)) == (200, 4, [])
    assert not first.pools[0].HasField("attention_window")
    async with stack.session() as stream:
        await stream.run(**join(0))
        manager.restart()
        await manager.until(lambda: len(manager.registrations) == 2)
        steps = list(manager.registrations[1].pools[0].last_write_steps)
        # Five tokens went to slots 1 and 2.
        assert steps == [1, 1] + [0] * 198
        assert list((await stream.run()).sequences) == [0]


async def test_copies_are_confirmed_also_when_the_manager_is_away_for_a_moment(stack: Stack) -> None:
    manager = stack.manager
    manager.refuse_confirmations = 2
    copies = {"copy_groups": [0], "copy_source_slots": [100], "copy_target_slots": [101]}
    async with stack.session() as stream:
        await stream.run(copy_tickets=[7], **copies)
        await manager.until(lambda: bool(manager.confirmations))
        assert list(manager.confirmations[0].tickets) == [7]
        with pytest.raises(RemoteError):
            await stream.run(copy_tickets=[8], removed_sequences=[99], **copies)
        await manager.until(lambda: len(manager.confirmations) == 2)
        assert list(manager.confirmations[1].failed_tickets) == [8]
    async with stack.session() as stream:
        with pytest.raises(RemoteError):
            await stream.run(copy_tickets=[9])
        await manager.until(lambda: len(manager.confirmations) == 3)
        assert list(manager.confirmations[2].failed_tickets) == [9]
