"""A synthetic view of a router, and its engines: filled through messages like those of cache managers."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from random import Random

from prometheus_client import CollectorRegistry

from protos.execution.v1 import execution_pb2
from protos.generation.v1 import generation_pb2
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.security import PLAIN
from scheduler.request import AdmissionAttempt, Request
from scheduler.router.engine_link import EngineLink
from scheduler.router.fleet import Fleet
from scheduler.router.key_space import KeySpace
from scheduler.router.metrics import RouterMetrics
from scheduler.router.policies import POLICIES
from scheduler.router.view import CacheView, ShardView

BLOCK, PROMPT_TOKENS = 16, 100_000
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK
FINGERPRINT = bytes(32)
# Keys in each message, as cache managers send them.
KEYS_OF_A_MESSAGE = 4096
SHARD = "made-up"


def registered(name: str) -> pb.CacheChange:
    """An executor with one pool."""
    return pb.CacheChange(
        registered=pb.Executor(
            executor_id=name,
            executor_epoch=1,
            model_fingerprint=FINGERPRINT,
            block_size=BLOCK,
            pools=[pb.PoolSpec(group=0, num_blocks=1)],
        )
    )


def messages(name: str, tier: int, keys: Sequence[int]) -> Iterator[bytes]:
    """Blocks of an executor, as a message over the network."""
    for first in range(0, len(keys), KEYS_OF_A_MESSAGE):
        blocks = pb.BlockKeys(pool_id=f"{name}/0", tier=tier, keys=keys[first : first + KEYS_OF_A_MESSAGE])
        yield pb.WatchEventsResponse(changes=[pb.CacheChange(blocks=blocks)]).SerializeToString()


class Caches:
    """The view of `engines` executors, named e0, e1 and so on, of one or several cache managers."""

    def __init__(self, engines: int, shards: int = 1) -> None:
        self.view = CacheView()
        # The longest process time of a message, in seconds.
        self.longest = 0.0
        # Blocks of all executors, counted for each executor.
        self.stored = 0
        self.names = [f"e{number}" for number in range(engines)]
        self.shards = [f"{SHARD}-{number}" for number in range(shards)]
        self._shard_views = [ShardView(shard) for shard in self.shards]
        for number, name in enumerate(self.names):
            self.view.apply(self._of(number), [registered(name)])
        for shard_view in self._shard_views:
            self.view.show(shard_view)

    def shard(self, engine: int) -> str:
        """The cache manager of an executor."""
        return self.shards[engine % len(self.shards)]

    def _of(self, engine: int) -> ShardView:
        return self._shard_views[engine % len(self.shards)]

    def store(self, engine: int, tier: int, keys: Sequence[int]) -> None:
        """Reports that the executor has these blocks."""
        self.stored += len(keys)
        self.take(engine, messages(self.names[engine], tier, keys))

    def take(self, engine: int, sent: Iterable[bytes]) -> None:
        """Takes messages from the executor's cache manager."""
        for message in sent:
            begun = time.process_time()
            self.view.apply(self._of(engine), pb.WatchEventsResponse.FromString(message).changes)
            self.longest = max(self.longest, time.process_time() - begun)

    def lose(self, engine: int) -> None:
        """Reports that the executor is lost."""
        lost = pb.CacheChange(lost=pb.Executor(executor_id=self.names[engine]))
        self.view.apply(self._of(engine), [lost])


class TimedFleet(Fleet):
    """Takes the time of the hashing of prompts: seconds of process time so far."""

    hashing = 0.0

    def _keys(self, *arguments):  # type: ignore[no-untyped-def]
        begun = time.process_time()
        found = super()._keys(*arguments)
        self.hashing += time.process_time() - begun
        return found


def fleet(caches: Caches) -> TimedFleet:
    """A router's fleet with an engine for each executor, none of which is connected."""
    found = TimedFleet(caches.view, POLICIES["cost"](), RouterMetrics(CollectorRegistry()), "bench")
    random = Random(1)
    for number, name in enumerate(caches.names):
        executor = execution_pb2.GetExecutorResponse(executor_id=name, block_size=BLOCK)
        engine = generation_pb2.GetEngineResponse(executor=executor, cachemgr_admin_address=caches.shard(number))
        link = EngineLink(f"engine-{number}", PLAIN, engine)
        link.engine, link.is_open = engine, True
        loads = generation_pb2.GetLoadsResponse(
            running_requests=random.randrange(64),
            max_waiting_requests=256,
            max_running_requests=64,
            queued_prompt_tokens=random.randrange(20_000),
        )
        loads.prompt_token_time.FromNanoseconds(random.randrange(50_000, 60_000))
        loads.host_block_time.FromNanoseconds(100_000)
        loads.disk_block_time.FromNanoseconds(400_000)
        link.take_loads(generation_pb2.StreamRequestsResponse(loads=loads))
        found.links[link.address] = link
    return found


def prompt(number: int, tokens: int = PROMPT_TOKENS) -> AdmissionAttempt:
    """A request with a unique prompt."""
    token_ids = array("I", Random(number).choices(range(100_000), k=tokens))
    request = Request(f"r{number}", token_ids, 16, execution_pb2.SamplingParams(), arrival=number, arrived_at=0.0)
    return AdmissionAttempt(request, token_ids)


def keys_of(attempt: AdmissionAttempt) -> list[int]:
    """The keys of the prompt's full blocks."""
    return list(KeySpace(FINGERPRINT, BLOCK).keys(attempt.token_ids, None))


def other_keys(seed: int, count: int) -> list[int]:
    """Keys of other prompts' blocks."""
    data = array("Q", Random(seed).randbytes(8 * count))
    return list(data)
