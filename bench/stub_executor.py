"""An executor without a model, `python -m bench.stub_executor`: time passes as on a device, but nothing is computed.

The device runs beside its process, as a GPU does. It begins a step as soon as the step has arrived and the step before
has ended, and needs no processor. A step takes the step time or the time of its prompt tokens, whichever is longer, and
then a time for each sequence that decodes; cached tokens take no time. Copies between tiers run one after the other
beside the steps. To the cache manager, the pools look like pools of a model of 8 billion parameters, and are
registered, renewed and confirmed like a real executor's. The settings are KVKEEP_EXECUTOR_STUB_<NAME>. Without a step
time, the seed of the sequence that joined last is the step time in microseconds, so that one process serves runs of any
step time.
"""

import asyncio
import itertools
import os
import queue
import signal
import struct
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from pydantic import Field

from executor.cache.tiers.hazards import SlotRef
from executor.core.outbox import OnloadTracker
from executor.rpc.manager_client import ManagerClient, TransferLog
from executor.rpc.sessions import SchedulerLeases
from executor.settings import ExecutorSettings
from executor.step import Copy, Tier
from protos.execution.v1 import execution_pb2 as pb
from protos.execution.v1 import execution_pb2_grpc as rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.rpc import logs
from protos.rpc.channel import open_channel
from protos.rpc.settings import load
from tests.support.scheduler.tokenizers import EOS, byte_level_tokenizer

SERVICE = "execution.v1.ExecutorService"
# Enough ids that each prompt begins with a unique id, and prompts never match by chance.
VOCABULARY = 1 << 20
# Ids from 1 on that are characters of ASCII.
_CHARACTERS = 94
# Sizes of the model's K and V, in bfloat16.
LAYERS, KV_HEADS, HEAD_DIM, ELEMENT_BYTES = 32, 8, 128, 2
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * ELEMENT_BYTES
# As the number of a step in a registration: a slot's contents are lost.
_NEVER = (1 << 64) - 1
# Number of copies that end together, so that they seldom wake the process.
_COPIES_AT_ONCE = 16
# How long a step that only waits for onloads may take.
_AWAIT_SECONDS = 0.02


class StubSettings(ExecutorSettings):
    """Settings of the time that work takes."""

    stub_step_seconds: float = Field(0.0, ge=0, description="Shortest step that computes; 0: as the seed says.")
    stub_sequence_seconds: float = Field(0.0, ge=0, description="What each sequence that decodes adds to a step.")
    stub_prefill_rate: float = Field(0.0, ge=0, description="Prompt tokens per second; 0: they take no time.")
    stub_copy_rate: float = Field(25e9, gt=0, description="Bytes per second between tiers.")

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_size * TOKEN_BYTES

    @property
    def copy_seconds(self) -> float:
        """Seconds to copy a block between tiers."""
        return self.block_bytes / self.stub_copy_rate

    def seconds(self, prompt_tokens: int, num_tokens: int, seed: int) -> float:
        """Seconds of a step of `num_tokens` tokens, of which `prompt_tokens` are of prompts; 0 without any tokens."""
        if not num_tokens:
            return 0.0
        prefill = prompt_tokens / self.stub_prefill_rate if self.stub_prefill_rate else 0.0
        decoding = self.stub_sequence_seconds * (num_tokens - prompt_tokens)
        return max(self.stub_step_seconds or seed / 1e6, prefill) + decoding

    def slots(self, tier: Tier) -> int:
        """Blocks of a tier, which take no memory."""
        sizes = {Tier.HOST: self.host_cache_size, Tier.DISK: self.disk_cache_size}
        return self.max_tokens // self.block_size if tier is Tier.DEVICE else sizes[tier] // self.block_bytes


class Record(NamedTuple):
    """One step: its begin, idle time before it, its length, in seconds; samples; bytes of step and result."""

    begin: float
    idle: float
    seconds: float
    sampled: int
    step_bytes: int
    result_bytes: int


_RECORD = struct.Struct("dddiii")


def records_file(folder: Path, executor_id: str) -> Path:
    """The file for the records of an executor of a stack in this folder."""
    return folder / f"{executor_id}.steps"


def read_records(folder: Path, skip: int = 0, executor_id: str = "executor-0") -> list[Record]:
    """All steps so far, except the first `skip` steps."""
    with records_file(folder, executor_id).open("rb") as file:
        file.seek(skip * _RECORD.size)
        return [Record(*values) for values in _RECORD.iter_unpack(file.read())]


class RunningSet:
    """The decoding sequences, and the prompt tokens that all other sequences still have to compute."""

    def __init__(self) -> None:
        self.decoding: dict[int, None] = {}
        self.remaining: dict[int, int] = {}
        self.last_seed = 0

    def __len__(self) -> int:
        return len(self.decoding) + len(self.remaining)

    def remove(self, handles: Iterator[int]) -> None:
        """Removes these sequences."""
        for handle in handles:
            if self.remaining.pop(handle, None) is None:
                del self.decoding[handle]

    def run(self, step: pb.Step) -> pb.StepResult:
        """Runs a step, in which all sequences sample the same token, an ASCII character."""
        assert not step.evicting_sequences, "no tokens to evict here"
        for new in step.new_sequences:
            count = len(new.token_ids) - new.num_computed_tokens
            assert count > 0
            if count > 1:
                self.remaining[new.sequence] = count
            else:
                self.decoding[new.sequence] = None
            self.last_seed = new.sampling.seed
        tokens = sum(step.chunk_tokens)
        sampled = list(self.decoding)
        if step.idle_sequences:
            idle = set(step.idle_sequences)
            sampled = [handle for handle in sampled if handle not in idle]
        tokens += len(sampled)
        for handle, count in zip(step.chunk_sequences, step.chunk_tokens, strict=True):
            self.remaining[handle] -= count
            if not self.remaining[handle]:
                sampled.append(handle)
            if self.remaining[handle] <= 1:
                # A sequence with one token left to compute decodes, even if this token is the last of its prompt.
                del self.remaining[handle]
                self.decoding[handle] = None
        return pb.StepResult(
            step=step.step,
            sequences=sampled,
            token_ids=[1 + step.step % _CHARACTERS] * len(sampled),
            stopped=[False] * len(sampled),
            num_tokens=tokens,
        )


def copies_of(step: pb.Step) -> list[Copy]:
    """The copies that a step asks for; without tiers all are within the device."""
    device = itertools.repeat(Tier.DEVICE)
    columns = step.copy_tickets, step.copy_groups, step.copy_source_slots, step.copy_target_slots
    named = step.copy_source_tiers, step.copy_target_tiers
    tiers = (map(Tier, column) if column else device for column in named)
    return [Copy(*values) for values in zip(*columns, *tiers, strict=False)]


class CopyLine:
    """Runs copies between tiers one after the other, and reports when they have ended."""

    def __init__(self, copy_seconds: float, transfers: TransferLog) -> None:
        self._copy_seconds = copy_seconds
        self._transfers = transfers
        self._waiting: queue.SimpleQueue[tuple[Copy, OnloadTracker | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="copies", daemon=True).start()

    def begin(self, copies: Iterable[Copy], onloads: OnloadTracker | None = None) -> list[int]:
        """Begins copies; returns the tickets of those within the device, which take no time.

        onloads: of the session that asks for the copies; None for the cache manager.
        """
        within = []
        for copy in copies:
            if copy.within_device:
                within.append(copy.ticket)
                continue
            if onloads is not None and copy.is_onload:
                onloads.expect(1)
            self._waiting.put((copy, onloads))
        return within

    def _run(self) -> None:
        end = 0.0
        while True:
            batch = [self._waiting.get()]
            while len(batch) < _COPIES_AT_ONCE and not self._waiting.empty():
                batch.append(self._waiting.get())
            end = max(end, time.perf_counter()) + self._copy_seconds * len(batch)
            time.sleep(max(0.0, end - time.perf_counter()))
            for copy, onloads in batch:
                if onloads is not None and copy.is_onload:
                    onloads.ended(copy.ticket, True)
            self._transfers.confirm(tuple(copy.ticket for copy, _ in batch), ())


class StubExecutor(rpc.ExecutorServiceServicer):
    """Serves one scheduler, and runs the cache manager's copies."""

    def __init__(
        self,
        settings: StubSettings,
        epoch: int,
        transfers: TransferLog,
        records: IO[bytes],
        running_set: type[RunningSet],
    ) -> None:
        self._settings = settings
        self._running_set = running_set
        self._epoch = epoch
        self._transfers = transfers
        self._records = records
        self._copies = CopyLine(settings.copy_seconds, transfers)
        self.last_step = 0

    def transfer(self, copies: tuple[Copy, ...]) -> None:
        """Begins copies for the cache manager."""
        if within := self._copies.begin(copies):
            self._transfers.confirm(tuple(within), ())

    def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return pb.GetModelResponse(
            model="stub",
            vocab_size=VOCABULARY,
            max_positions=1 << 20,
            eos_token_ids=[EOS],
            tokenizer_json=byte_level_tokenizer().to_str().encode(),
            dtype="bfloat16",
        )

    def GetExecutor(self, request: pb.GetExecutorRequest, context: Any) -> pb.GetExecutorResponse:
        return pb.GetExecutorResponse(
            executor_id=self._settings.executor_id,
            executor_epoch=self._epoch,
            device="none",
            block_size=self._settings.block_size,
            max_tokens=self._settings.max_tokens,
            last_step=self.last_step,
            num_groups=1,
        )

    def StreamSteps(self, requests: Iterator[pb.StreamStepsRequest], context: Any) -> Iterator[pb.StreamStepsResponse]:
        """Acts as the device: a second thread receives the steps, and this thread lets time pass."""
        assert next(requests).HasField("open")
        yield pb.StreamStepsResponse(opened=pb.SessionOpened(first_step=self.last_step + 1))
        arrived: queue.SimpleQueue[tuple[float, pb.Step] | None] = queue.SimpleQueue()
        threading.Thread(target=_take, args=(requests, arrived), daemon=True).start()
        running, onloads, end = self._running_set(), OnloadTracker(), time.perf_counter()
        while (item := arrived.get()) is not None:
            at, step = item
            begin = max(at, end)
            running.remove(iter(step.removed_sequences))
            idle = begin - end if running else 0.0
            within = self._copies.begin(copies_of(step), onloads)
            result = running.run(step)
            self.last_step = step.step
            seconds = self._settings.seconds(sum(step.chunk_tokens), result.num_tokens, running.last_seed)
            end = begin + seconds
            result.compute_time.FromNanoseconds(int(seconds * 1e9))
            result.idle_time.FromNanoseconds(int(idle * 1e9))
            record = Record(begin, idle, seconds, len(result.sequences), step.ByteSize(), result.ByteSize())
            self._records.write(_RECORD.pack(*record))
            time.sleep(max(0.0, end - time.perf_counter()))
            if step.awaits_copies:
                onloads.wait(_AWAIT_SECONDS)
            self._report_copies(result, onloads)
            if within:
                self._transfers.confirm(tuple(within), ())
            yield pb.StreamStepsResponse(result=result)

    def _report_copies(self, result: pb.StepResult, onloads: OnloadTracker) -> None:
        copied, failed = onloads.take()
        result.copied_tickets.extend(copied)
        result.failed_tickets.extend(failed)
        nanoseconds = int(self._settings.copy_seconds * 1e9)
        if self._settings.host_cache_size:
            result.host_block_time.FromNanoseconds(nanoseconds)
        if self._settings.disk_cache_size:
            result.disk_block_time.FromNanoseconds(nanoseconds)


def _take(
    requests: Iterator[pb.StreamStepsRequest], arrived: "queue.SimpleQueue[tuple[float, pb.Step] | None]"
) -> None:
    try:
        for request in requests:
            if request.HasField("step"):
                arrived.put((time.perf_counter(), request.step))
    except grpc.RpcError:
        pass
    finally:
        arrived.put(None)


class StubAnnouncement:
    """A stub's registration, of one pool. A stub does not know its slots' contents: a new manager finds it empty."""

    def __init__(self, settings: StubSettings, epoch: int) -> None:
        self._settings = settings
        self.executor_id = settings.executor_id
        self.epoch = epoch

    def request(self, *, again: bool, awaited: Collection[SlotRef]) -> kv.RegisterExecutorRequest:
        """The registration, with all contents lost."""
        settings = self._settings
        blocks, host, disk = map(settings.slots, (Tier.DEVICE, Tier.HOST, Tier.DISK))
        pool = kv.PoolSpec(
            group=0,
            num_blocks=blocks,
            num_layers=LAYERS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype="bfloat16",
            block_bytes=settings.block_bytes,
            last_write_steps=[_NEVER] * blocks if again else [],
            host_blocks=host,
            disk_blocks=disk,
            host_generations=[0] * host,
            disk_generations=[0] * disk,
        )
        return kv.RegisterExecutorRequest(
            executor_id=self.executor_id,
            executor_epoch=self.epoch,
            model="stub",
            model_fingerprint=bytes(32),
            block_size=settings.block_size,
            pools=[pool],
        )


class NoFence:
    """Nothing is ever restored, so steps may write everywhere."""

    manager_epoch = 0

    async def cut_off(self) -> None:
        """Is never called."""

    def admit_again(self) -> None:
        """No session was cut off."""


async def serve(settings: StubSettings, running_set: type[RunningSet]) -> None:
    """Serves until SIGTERM."""
    loop, stopped, epoch = asyncio.get_running_loop(), asyncio.Event(), time.time_ns()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    # Threads wake on time; an asyncio loop counts whole milliseconds.
    server, status = grpc.server(ThreadPoolExecutor(8)), health.HealthServicer()

    def set_serving(registered: bool) -> None:
        for name in ("", SERVICE):
            serving = health_pb2.HealthCheckResponse
            status.set(name, serving.SERVING if registered else serving.NOT_SERVING)

    with records_file(settings.state_dir.parent, settings.executor_id).open("wb", buffering=0) as records:
        transfers = TransferLog(loop)
        servicer = StubExecutor(settings, epoch, transfers, records, running_set)
        rpc.add_ExecutorServiceServicer_to_server(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(status, server)
        set_serving(False)
        server.add_insecure_port(settings.executor_address)
        server.start()
        async with open_channel(settings.cachemgr_address) as channel:
            announcement = StubAnnouncement(settings, epoch)
            leases = SchedulerLeases()
            client = ManagerClient(channel, announcement, servicer, transfers, set_serving, leases, NoFence())
            registration = asyncio.create_task(client.run())
            await stopped.wait()
            registration.cancel()
            server.stop(None).wait()


def main(running_set: type[RunningSet] = RunningSet) -> None:
    """Serves until SIGTERM. running_set: says which tokens the steps sample."""
    settings = load(StubSettings, os.environ)
    logs.configure("executor", settings.log_level)
    asyncio.run(serve(settings, running_set))


if __name__ == "__main__":
    main()
