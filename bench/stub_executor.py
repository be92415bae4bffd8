"""An executor without a model, `python -m bench.stub_executor`: every step takes a time that is set.

A device that runs beside its process, as a GPU does: it begins a step when the one before has ended and the step is
there, and needs no processor. The seed of the sequence that joined last says how long, in microseconds, so that one
process serves runs of any step time.
"""

import os
import queue
import signal
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from executor.settings import ExecutorSettings
from protos.execution.v1 import execution_pb2 as pb
from protos.execution.v1 import execution_pb2_grpc as rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kv_rpc
from protos.rpc.channel import open_sync_channel
from protos.rpc.settings import load
from tests.support.scheduler.tokenizers import EOS, byte_level_tokenizer

SERVICE = "execution.v1.ExecutorService"
RECORDS = "steps.bin"
BLOCK = 16
# So many ids that prompts begin with one of their own each, and never match by chance.
VOCABULARY = 1 << 20
# Ids from 1 on that are characters of ASCII.
_CHARACTERS = 94
EPOCH = 1


class Record(NamedTuple):
    """One step: its begin on the device, idle time before it, both in seconds; samples; bytes of step and result."""

    begin: float
    idle: float
    sampled: int
    step_bytes: int
    result_bytes: int


_RECORD = struct.Struct("ddiii")


def read_records(folder: Path, skip: int = 0) -> list[Record]:
    """All steps so far but the first ones."""
    with (folder / RECORDS).open("rb") as file:
        file.seek(skip * _RECORD.size)
        return [Record(*values) for values in _RECORD.iter_unpack(file.read())]


class RunningSet:
    """Which sequences decode, and how many tokens of their prompts the others still have to compute."""

    def __init__(self) -> None:
        self.decoding: dict[int, None] = {}
        self.remaining: dict[int, int] = {}
        self.step_seconds = 0.0

    def __len__(self) -> int:
        return len(self.decoding) + len(self.remaining)

    def remove(self, handles: Iterator[int]) -> None:
        """These leave."""
        for handle in handles:
            if self.remaining.pop(handle, None) is None:
                del self.decoding[handle]

    def run(self, step: pb.Step) -> pb.StepResult:
        """What the step samples; any token will do that is a whole character."""
        assert not step.copy_tickets, "there must be no hits"
        for new in step.new_sequences:
            count = len(new.token_ids) - new.num_computed_tokens
            assert count > 0
            if count > 1:
                self.remaining[new.sequence] = count
            else:
                self.decoding[new.sequence] = None
            self.step_seconds = new.sampling.seed / 1e6
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
                # One token left to compute is what decoding means, also when it is the prompt's.
                del self.remaining[handle]
                self.decoding[handle] = None
        return pb.StepResult(
            step=step.step,
            sequences=sampled,
            token_ids=[1 + step.step % _CHARACTERS] * len(sampled),
            stopped=[False] * len(sampled),
            num_tokens=tokens,
        )


class StubExecutor(rpc.ExecutorServiceServicer):
    """Serves one scheduler."""

    def __init__(self, executor_id: str, max_tokens: int, records: IO[bytes]) -> None:
        self._executor_id = executor_id
        self._max_tokens = max_tokens
        self._records = records

    def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return pb.GetModelResponse(
            model="stub",
            vocab_size=VOCABULARY,
            max_positions=1 << 20,
            eos_token_ids=[EOS],
            tokenizer_json=byte_level_tokenizer().to_str().encode(),
            dtype="float32",
        )

    def GetExecutor(self, request: pb.GetExecutorRequest, context: Any) -> pb.GetExecutorResponse:
        return pb.GetExecutorResponse(
            executor_id=self._executor_id,
            executor_epoch=EPOCH,
            device="none",
            block_size=BLOCK,
            max_tokens=self._max_tokens,
            num_groups=1,
        )

    def StreamSteps(self, requests: Iterator[pb.StreamStepsRequest], context: Any) -> Iterator[pb.StreamStepsResponse]:
        """The device: a thread takes the steps in, this one lets time pass."""
        assert next(requests).HasField("open")
        yield pb.StreamStepsResponse(opened=pb.SessionOpened(first_step=1))
        arrived: queue.SimpleQueue[tuple[float, pb.Step] | None] = queue.SimpleQueue()
        threading.Thread(target=_take, args=(requests, arrived), daemon=True).start()
        running, end = RunningSet(), time.perf_counter()
        while (item := arrived.get()) is not None:
            at, step = item
            begin = max(at, end)
            running.remove(iter(step.removed_sequences))
            idle = begin - end if running else 0.0
            result = running.run(step)
            end = begin + running.step_seconds
            result.compute_time.FromNanoseconds(int(running.step_seconds * 1e9))
            result.idle_time.FromNanoseconds(int(idle * 1e9))
            record = Record(begin, idle, len(result.sequences), step.ByteSize(), result.ByteSize())
            self._records.write(_RECORD.pack(*record))
            time.sleep(max(0.0, end - time.perf_counter()))
            yield pb.StreamStepsResponse(result=result)


def _take(
    requests: Iterator[pb.StreamStepsRequest], arrived: "queue.SimpleQueue[tuple[float, pb.Step] | None]"
) -> None:
    try:
        for request in requests:
            arrived.put((time.perf_counter(), request.step))
    except grpc.RpcError:
        pass
    finally:
        arrived.put(None)


def register(settings: ExecutorSettings) -> None:
    """Registers the pool at the cache manager, once: its lease must be longer than the benchmark."""
    pool = kv.PoolSpec(
        group=0,
        num_blocks=settings.max_tokens // BLOCK,
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        dtype="float32",
        block_bytes=1_024,
    )
    request = kv.RegisterExecutorRequest(
        executor_id=settings.executor_id,
        executor_epoch=EPOCH,
        model="stub",
        model_fingerprint=bytes(32),
        block_size=BLOCK,
        pools=[pool],
    )
    with open_sync_channel(settings.cachemgr_address) as channel:
        kv_rpc.CacheManagerServiceStub(channel).RegisterExecutor(request, timeout=60, wait_for_ready=True)


def main() -> None:
    """Serves until SIGTERM."""
    settings = load(ExecutorSettings, os.environ)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    server = grpc.server(ThreadPoolExecutor(8))
    with (settings.state_dir.parent / RECORDS).open("wb", buffering=0) as records:
        servicer = StubExecutor(settings.executor_id, settings.max_tokens, records)
        rpc.add_ExecutorServiceServicer_to_server(servicer, server)
        status = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(status, server)
        server.add_insecure_port(settings.executor_address)
        server.start()
        register(settings)
        for name in ("", SERVICE):
            status.set(name, health_pb2.HealthCheckResponse.SERVING)
        stopped.wait()
        server.stop(None).wait()


if __name__ == "__main__":
    main()
