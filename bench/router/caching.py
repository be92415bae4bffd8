"""A cache manager as a separate process, and prompts that are cached in it over gRPC."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.router.made import BLOCK
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as rpc
from protos.rpc.channel import open_sync_channel
from tests.stack import Stack

SCHEDULER = "s"


class CachingManager:
    """The process, with executors e0, e1 and so on. events: the address of its events."""

    def __init__(self, stack: Stack, engines: int, blocks: int) -> None:
        """blocks: of each executor."""
        self.events = stack.admin
        self.redis_url = str(stack.own["cachemgr"].get("redis_url", ""))
        self._threads = Path(f"/proc/{stack.pid('cachemgr')}/task")
        self._channel = open_sync_channel(stack.cachemgr)
        self._stub: rpc.CacheManagerServiceStub = rpc.CacheManagerServiceStub(self._channel)
        self._syncs = itertools.count(1)
        scheduler = pb.RegisterSchedulerRequest(scheduler_id=SCHEDULER, scheduler_epoch=1)
        self._epoch = self._stub.RegisterScheduler(scheduler, timeout=10).manager_epoch
        pool = pb.PoolSpec(
            group=0, num_blocks=blocks, num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_bytes=1024
        )
        self._names = [f"e{number}" for number in range(engines)]
        for name in self._names:
            executor = pb.RegisterExecutorRequest(
                executor_id=name,
                executor_epoch=1,
                model="none",
                model_fingerprint=bytes(32),
                block_size=BLOCK,
                pools=[pool],
            )
            self._stub.RegisterExecutor(executor, timeout=60)

    def cache(self, number: int, blocks: int) -> None:
        """Caches a prompt of `blocks` blocks on the executors in turn; each number is a different prompt."""
        sync_number = next(self._syncs)
        name = f"q{sync_number}"
        first = number * blocks * BLOCK
        token_ids = range(first, first + blocks * BLOCK)
        admission = pb.AdmitSequenceRequest(
            sequence_id=name,
            scheduler_id=SCHEDULER,
            scheduler_epoch=1,
            executor_id=self._names[number % len(self._names)],
            token_ids=token_ids,
        )
        request = pb.AdmitSequencesRequest(admissions=[admission])
        [admitted] = self._stub.AdmitSequences(request, timeout=60).answers
        assert admitted.admitted
        sync = pb.SyncSequencesRequest(
            scheduler_id=SCHEDULER,
            scheduler_epoch=1,
            manager_epoch=self._epoch,
            sync_number=sync_number,
            step=1,
            handles=[admitted.sequence_handle],
            computed_tokens=[len(token_ids)],
            new_token_counts=[0],
            released_handles=[admitted.sequence_handle],
        )
        self._stub.SyncSequences(sync, timeout=60)

    def processor(self) -> float:
        """Seconds of processor time so far, of all threads."""
        # This clock counts nanoseconds; the process's own times count hundredths of a second.
        found = [(one / "schedstat").read_text().split()[0] for one in self._threads.iterdir()]
        return sum(map(int, found)) / 1e9

    def close(self) -> None:
        self._channel.close()


@contextmanager
def caching_manager(
    engines: int, blocks: int, *, with_redis: bool = False, **settings: object
) -> Iterator[CachingManager]:
    """Starts a cache manager, and stops it at the end of the with statement.

    blocks: of each executor. settings: of a Stack.
    """
    modules = {"cachemgr": "cachemgr"}
    without = {} if with_redis else {"redis_url": ""}
    with Stack(modules=modules, cachemgr_lease_seconds=3600, **without, **settings) as stack:
        found = CachingManager(stack, engines, blocks)
        try:
            yield found
        finally:
            found.close()
