"""The real cache manager behind its real servers, on unix sockets."""

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cachemgr.process import CacheManagerProcess
from cachemgr.settings import CachemgrSettings
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc.channel import open_channel
from tests.support.local_redis import LocalRedis
from tests.support.redis_cluster import RedisCluster
from tests.unit.cachemgr_service import servers

EXECUTOR, SCHEDULER = "gpu-0", "front"
BLOCK_SIZE = 4
NUM_BLOCKS = 32
# How the scheduler names itself in every call about a sequence.
SCHEDULED = {"scheduler_id": SCHEDULER, "scheduler_epoch": 1}


def settings_for(folder: Path, **values: object) -> CachemgrSettings:
    """Settings with both addresses in a folder and no metrics port."""
    return CachemgrSettings(
        cachemgr_address=f"unix:{folder}/data",
        cachemgr_admin_address=f"unix:{folder}/admin",
        metrics_address="",
        drain_seconds=1.0,
        capacity_ahead_tokens=4,
        state_dir=folder,
        **values,  # type: ignore[arg-type]
    )


@dataclass
class Client:
    """Calls of an executor, a scheduler and an operator against one cache manager."""

    settings: CachemgrSettings
    epoch: int = 7
    manager_epoch: int = 0
    sync_numbers: itertools.count = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.data_channel = open_channel(self.settings.cachemgr_address)
        self.admin_channel = open_channel(self.settings.cachemgr_admin_address)
        self.manager = pb_grpc.CacheManagerServiceStub(self.data_channel)
        self.admin = pb_grpc.CacheAdminServiceStub(self.admin_channel)
        self.events = pb_grpc.CacheEventServiceStub(self.admin_channel)

    async def close(self) -> None:
        await self.data_channel.close()
        await self.admin_channel.close()

    def registration(
        self, *, last_write_steps: tuple[int, ...] = (), **lower_tiers: object
    ) -> pb.RegisterExecutorRequest:
        pool = pb.PoolSpec(
            group=0,
            num_blocks=NUM_BLOCKS,
            num_layers=2,
            num_kv_heads=1,
            head_dim=8,
            dtype="float32",
            block_bytes=2 * 2 * BLOCK_SIZE * 8 * 4,
            last_write_steps=last_write_steps,
            **lower_tiers,  # type: ignore[arg-type]
        )
        return pb.RegisterExecutorRequest(
            executor_id=EXECUTOR,
            executor_epoch=self.epoch,
            model="tiny",
            model_fingerprint=bytes(32),
            block_size=BLOCK_SIZE,
            pools=[pool],
        )

    def admission(self, sequence_id: str, tokens: int | list[int], **values: object) -> pb.AdmitSequenceRequest:
        return pb.AdmitSequenceRequest(
            sequence_id=sequence_id,
            scheduler_id=SCHEDULER,
            scheduler_epoch=1,
            executor_id=EXECUTOR,
            token_ids=tokens if isinstance(tokens, list) else range(tokens),
            **values,  # type: ignore[arg-type]
        )

    async def register(
        self, *, last_write_steps: tuple[int, ...] = (), **lower_tiers: object
    ) -> pb.RegisterExecutorResponse:
        registered = await self.manager.RegisterScheduler(
            pb.RegisterSchedulerRequest(scheduler_id=SCHEDULER, scheduler_epoch=1), timeout=5
        )
        self.manager_epoch = registered.manager_epoch
        registration = self.registration(last_write_steps=last_write_steps, **lower_tiers)
        return await self.manager.RegisterExecutor(registration, timeout=5)

    async def admit(self, sequence_id: str, tokens: int | list[int], **values: object) -> pb.AdmitSequenceResponse:
        return await self.manager.AdmitSequence(self.admission(sequence_id, tokens, **values), timeout=5)

    async def sync(self, step: int, **columns: object) -> pb.SyncSequencesResponse:
        request = pb.SyncSequencesRequest(
            scheduler_id=SCHEDULER,
            scheduler_epoch=1,
            manager_epoch=self.manager_epoch,
            sync_number=next(self.sync_numbers),
            step=step,
            **columns,  # type: ignore[arg-type]
        )
        return await self.manager.SyncSequences(request, timeout=5)

    async def compute(self, admitted: pb.AdmitSequenceResponse, tokens: int, *, step: int = 1) -> None:
        """Reports a sequence's tokens as computed and releases it."""
        await self.sync(step, handles=[admitted.sequence_handle], computed_tokens=[tokens], new_token_counts=[0])
        await self.sync(step, released_handles=[admitted.sequence_handle])

    async def pool(self) -> pb.Pool:
        return (await self.admin.GetPool(pb.GetPoolRequest(pool_id=f"{EXECUTOR}/0"), timeout=5)).pool

    async def check(self) -> None:
        answer = await self.admin.CheckPool(pb.CheckPoolRequest(), timeout=5)
        assert list(answer.violations) == []


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RedisCluster]]:
    """The cluster of a family of servers: starting one takes seconds."""
    made: dict[str, RedisCluster] = {}

    def cluster(family: str) -> RedisCluster:
        if family not in made:
            made[family] = RedisCluster(servers.binary_of(family), tmp_path_factory.mktemp(f"{family}-cluster"))
        return made[family]

    yield cluster
    for one in made.values():
        one.stop()


@pytest.fixture(params=servers.SERVERS)
def server(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    clusters: Callable[[str], RedisCluster],
) -> Iterator[servers.Server]:
    """Each kind of Redis, empty; still running at the end of the test or not."""
    started = servers.open_server(request.param, tmp_path, monkeypatch, clusters)
    yield started
    if isinstance(started, LocalRedis):
        started.stop()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[LocalRedis]:
    """A Redis of the test's own."""
    server = LocalRedis(tmp_path / "redis-server")
    yield server
    server.stop()


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    settings = settings_for(tmp_path)
    process = CacheManagerProcess(settings)
    await process.start()
    client = Client(settings)
    yield client
    await client.close()
    await process.stop()
