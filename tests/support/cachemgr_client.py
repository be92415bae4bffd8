"""Callers of a cache manager through its real servers, on unix sockets."""

import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cachemgr.settings import CachemgrSettings
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc.channel import open_channel, open_sync_channel
from tests.support.patience import patience

SERVING = health_pb2.HealthCheckResponse.SERVING
EXECUTOR, SCHEDULER = "gpu-0", "front"
BLOCK_SIZE = 4
NUM_BLOCKS = 32
# The scheduler's fields in every call about a sequence.
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
    executor_id: str = EXECUTOR
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
        self, *, last_write_steps: tuple[int, ...] = (), steps_manager_epoch: int = 0, **lower_tiers: object
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
            executor_id=self.executor_id,
            executor_epoch=self.epoch,
            model="tiny",
            model_fingerprint=bytes(32),
            block_size=BLOCK_SIZE,
            pools=[pool],
            steps_manager_epoch=steps_manager_epoch,
        )

    def admission(self, sequence_id: str, tokens: int | list[int], **values: object) -> pb.AdmitSequenceRequest:
        return pb.AdmitSequenceRequest(
            sequence_id=sequence_id,
            scheduler_id=SCHEDULER,
            scheduler_epoch=1,
            executor_id=self.executor_id,
            token_ids=tokens if isinstance(tokens, list) else range(tokens),
            **values,  # type: ignore[arg-type]
        )

    async def register(
        self, *, last_write_steps: tuple[int, ...] = (), **lower_tiers: object
    ) -> pb.RegisterExecutorResponse:
        registered = await self.manager.RegisterScheduler(
            pb.RegisterSchedulerRequest(scheduler_id=SCHEDULER, scheduler_epoch=1), timeout=patience(5)
        )
        self.manager_epoch = registered.manager_epoch
        registration = self.registration(
            last_write_steps=last_write_steps, steps_manager_epoch=self.manager_epoch, **lower_tiers
        )
        return await self.manager.RegisterExecutor(registration, timeout=patience(5))

    async def admit(self, sequence_id: str, tokens: int | list[int], **values: object) -> pb.AdmitSequenceResponse:
        request = pb.AdmitSequencesRequest(admissions=[self.admission(sequence_id, tokens, **values)])
        [answer] = (await self.manager.AdmitSequences(request, timeout=patience(5))).answers
        return answer

    async def sync(self, step: int, **columns: object) -> pb.SyncSequencesResponse:
        request = pb.SyncSequencesRequest(
            scheduler_id=SCHEDULER,
            scheduler_epoch=1,
            manager_epoch=self.manager_epoch,
            sync_number=next(self.sync_numbers),
            step=step,
            **columns,  # type: ignore[arg-type]
        )
        return await self.manager.SyncSequences(request, timeout=patience(5))

    async def compute(self, admitted: pb.AdmitSequenceResponse, tokens: int, *, step: int = 1) -> None:
        """Reports a sequence's tokens as computed and releases it."""
        await self.sync(step, handles=[admitted.sequence_handle], computed_tokens=[tokens], new_token_counts=[0])
        await self.sync(step, released_handles=[admitted.sequence_handle])

    async def pool(self) -> pb.Pool:
        return (await self.admin.GetPool(pb.GetPoolRequest(pool_id=f"{self.executor_id}/0"), timeout=patience(5))).pool

    async def check(self) -> None:
        answer = await self.admin.CheckPool(pb.CheckPoolRequest(), timeout=patience(5))
        assert list(answer.violations) == []


def environment(folder: Path, **values: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")}
    return {
        **kept,
        "KVKEEP_CACHEMGR_ADDRESS": f"unix:{folder}/data",
        "KVKEEP_CACHEMGR_ADMIN_ADDRESS": f"unix:{folder}/admin",
        "KVKEEP_CACHEMGR_METRICS_ADDRESS": "",
        "KVKEEP_STATE_DIR": str(folder),
        **values,
    }


def wait_until_serving(address: str, service: str) -> None:
    with open_sync_channel(address) as channel:
        grpc.channel_ready_future(channel).result(patience(20))
        stub = health_pb2_grpc.HealthStub(channel)
        for answer in stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=patience(20)):
            if answer.status == SERVING:
                return
