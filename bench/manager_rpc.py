"""Measures the same calls to a real cache manager: a separate process with Redis, reached over a unix socket."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import psutil

from bench.driver import prompt
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as rpc
from protos.rpc.channel import open_sync_channel
from tests.stack import Stack, metrics
from tests.support.ports import free_address

BLOCK = 16
PROMPT_TOKENS = 8_192
NUM_BLOCKS = 100_000
SEQUENCES = 256

Measured = tuple[str, str, Sequence[float], float | None]


class Client:
    """An executor and a scheduler in one client."""

    def __init__(self, address: str, num_blocks: int = NUM_BLOCKS) -> None:
        self._channel = open_sync_channel(address)
        self.stub = rpc.CacheManagerServiceStub(self._channel)
        self._syncs = itertools.count(1)
        scheduler = pb.RegisterSchedulerRequest(scheduler_id="s", scheduler_epoch=1)
        self._epoch = self.stub.RegisterScheduler(scheduler, timeout=10).manager_epoch
        pool = pb.PoolSpec(
            group=0, num_blocks=num_blocks, num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_bytes=1_024
        )
        executor = pb.RegisterExecutorRequest(
            executor_id="e",
            executor_epoch=1,
            model="none",
            model_fingerprint=bytes(32),
            block_size=BLOCK,
            pools=[pool],
        )
        self.stub.RegisterExecutor(executor, timeout=10)

    def admission(self, name: str, tokens: Sequence[int]) -> pb.AdmitSequenceRequest:
        """Makes a request for the blocks of a prompt."""
        return pb.AdmitSequenceRequest(
            sequence_id=name, scheduler_id="s", scheduler_epoch=1, executor_id="e", token_ids=tokens
        )

    def admit(self, name: str, tokens: Sequence[int]) -> pb.AdmitSequenceResponse:
        """Admits one sequence."""
        request = pb.AdmitSequencesRequest(admissions=[self.admission(name, tokens)])
        [answer] = self.stub.AdmitSequences(request, timeout=10).answers
        return answer

    def progress(self, step: int, **columns: object) -> pb.SyncSequencesRequest:
        """Makes the request of the next sync."""
        return pb.SyncSequencesRequest(
            scheduler_id="s",
            scheduler_epoch=1,
            manager_epoch=self._epoch,
            sync_number=next(self._syncs),
            step=step,
            **columns,  # type: ignore[arg-type]
        )

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()


class Server:
    """The metrics of the cache manager's process."""

    def __init__(self, pid: int, address: str) -> None:
        self._process = psutil.Process(pid)
        self._address = address

    def handling(self, method: str) -> float:
        """Seconds spent in the method so far, without reading and writing its messages."""
        labels = f'method="kvcache.v1.CacheManagerService/{method}"'
        return sum(
            value
            for name, found, value in metrics(self._address)
            if name == "kvkeep_rpc_seconds_sum" and found == labels
        )

    def processor(self) -> float:
        """Seconds of processor time so far, of all threads and everything that the process does."""
        times = self._process.cpu_times()
        return times.user + times.system


def _rows(
    server: Server, name: str, method: str, target: float, runs: int, call: Callable[[], float]
) -> Iterator[Measured]:
    """Round trips in milliseconds, and the server's share of them per call."""
    handling, processor = server.handling(method), server.processor()
    values = [call() * 1e3 for _ in range(runs)]
    busy = (server.processor() - processor) / runs * 1e3
    yield f"{name}: round trip", "ms", values, None
    yield "  of it in the server's handler, mean", "ms", [(server.handling(method) - handling) / runs * 1e3], target
    yield "  processor time of the server per call, all threads", "ms", [busy], None


def _measure(client: Client, server: Server, runs: int) -> Iterator[Measured]:
    tokens = prompt(0, PROMPT_TOKENS)
    first = client.admit("first", tokens)
    client.stub.SyncSequences(
        client.progress(1, handles=[first.sequence_handle], computed_tokens=[len(tokens)], new_token_counts=[0]),
        timeout=10,
    )
    names = (f"a{number}" for number in itertools.count())

    def admit() -> float:
        request = pb.AdmitSequencesRequest(admissions=[client.admission(next(names), tokens)])
        begin = time.perf_counter()
        [answer] = client.stub.AdmitSequences(request, timeout=10).answers
        taken = time.perf_counter() - begin
        assert answer.cached_tokens == PROMPT_TOKENS - 1
        tickets = [copy.ticket for copy in answer.transfers]
        client.stub.ConfirmTransfers(
            pb.ConfirmTransfersRequest(executor_id="e", executor_epoch=1, tickets=tickets), timeout=10
        )
        client.stub.SyncSequences(client.progress(1, released_handles=[answer.sequence_handle]), timeout=10)
        return taken

    yield from _rows(server, "admission of 8,192 cached tokens", "AdmitSequences", 3, runs, admit)

    handles, lengths = [], [512 + number for number in range(SEQUENCES)]
    for number, length in enumerate(lengths, 1):
        handles.append(client.admit(f"r{number}", prompt(number, 1_024)[:length]).sequence_handle)
    steps = itertools.count(2)

    def sync() -> float:
        step = next(steps)
        request = client.progress(
            step,
            handles=handles,
            computed_tokens=[length + step - 2 for length in lengths],
            new_token_counts=[1] * SEQUENCES,
            new_token_ids=[7] * SEQUENCES,
        )
        begin = time.perf_counter()
        answer = client.stub.SyncSequences(request, timeout=10)
        taken = time.perf_counter() - begin
        assert not answer.missing_blocks
        return taken

    sync()
    yield from _rows(server, f"{SEQUENCES} running sequences in one sync", "SyncSequences", 1.5, 8 * runs, sync)


def measure(runs: int) -> Iterator[Measured]:
    """Starts a cache manager; yields name, unit, values and target of each measurement."""
    address = free_address()
    stack = Stack(cachemgr_metrics_address=address, cachemgr_lease_seconds=600)
    try:
        stack.start("cachemgr")
        stack.wait_until_serving("cachemgr")
        client = Client(stack.cachemgr)
        try:
            yield from _measure(client, Server(stack.pid("cachemgr"), address), runs)
        finally:
            client.close()
    finally:
        stack.stop()
