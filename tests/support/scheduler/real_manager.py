"""The cache manager between a scheduler and a fake executor, without Redis; it records calls and fails on request."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from cachemgr.manager import CacheManager
from cachemgr.persistence.key_index import KeyIndex
from cachemgr.rpc.admin_service import CacheAdminService
from cachemgr.rpc.data_service import CacheManagerService
from cachemgr.rpc.event_feed import EventFeed
from cachemgr.rpc.event_service import CacheEventService
from cachemgr.rpc.mutations import ManagerClock, Mutations, ServiceContext
from cachemgr.slices import at_once
from cachemgr.types import ExecutorSpec, ManagerConfig, PoolSpec, Quota, RetentionRule, RuleAction, RuleMatch
from protos.errors import ServiceError
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as rpc
from protos.kvcommon.eviction_message import EvictionPolicyRequest
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import UnexpectedError
from protos.rpc.redis_client import open_redis
from tests.support.patience import patience
from tests.support.scheduler.fake_executor import FakeExecutor

CONFIG = ManagerConfig(lease_seconds=60, capacity_ahead_tokens=8, free_watermark=0.0)
# Seconds between the end of a copy and its report to the manager.
CONFIRM_SECONDS = 0.002


class ForgottenError(ServiceError):
    """The error of a manager that has started again."""

    reason = "MANAGER_RESTARTED"


class NotForkedError(ServiceError):
    """The error for a parent that cannot be shared now."""

    reason = "PARENT_NOT_SETTLED"


class RealManager(rpc.CacheManagerServiceServicer):
    """`unused()` waits until no sequence has blocks, and recounts them.

    Calls wait while `gate` is closed, and answers to forks while `forks_end` is. The next `failing_forks` forks and the
    next `failing_registrations` registrations of schedulers fail, the sequences in `void_next` are voided by the next
    sync, no scheduler registers while `refuses_schedulers`, and no watcher of events gets any while `hides_events`.
    """

    def __init__(self, executor: FakeExecutor, *, host_blocks: int = 0, disk_blocks: int = 0) -> None:
        self.gate, self.forks_end = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.forks_end.set()
        self.failing_forks = self.failing_registrations = 0
        self.void_next: set[str] = set()
        self.refuses_schedulers = self.hides_events = False
        # Calls of AdmitSequences, answered or not; the answered admissions, and how many of them found no blocks.
        self.calls = 0
        self.admissions: list[pb.AdmitSequenceRequest] = []
        self.refusals = 0
        self.admitted_ids: list[str] = []
        self.forked_ids: list[str] = []
        # Slots by sequence id, at the admission.
        self.tables: dict[str, list[int]] = {}
        self.epoch = 0
        self._executor = executor
        self._pool = PoolSpec(
            0, executor.max_tokens // executor.block_size, None, host_blocks=host_blocks, disk_blocks=disk_blocks
        )
        executor.confirm, executor.refuse = self.confirm, self.refuse
        self._others: list[FakeExecutor] = []
        self.restart()

    def join(self, executor: FakeExecutor) -> None:
        """The executor of one more engine registers. Its copies are not confirmed."""
        self._others.append(executor)
        self.register()

    def restart(self) -> None:
        """Begins with nothing, like a process that dies and starts again without Redis."""
        self.epoch += 1
        clock = ManagerClock(time.monotonic)
        self._manager = CacheManager(self.epoch, clock, CONFIG)
        context = ServiceContext(Mutations(self._manager, clock), EventFeed(self._manager.queries))
        self._service = CacheManagerService(context)
        self.events, self.admin = CacheEventService(context), CacheAdminService(context)
        self.register()

    def register(self) -> None:
        """Registers the executors, as they do at their start."""
        for executor in (self._executor, *self._others):
            self._manager.register_executor(
                ExecutorSpec(
                    executor.executor_id,
                    executor.epoch,
                    "fake",
                    executor.model_fingerprint,
                    executor.block_size,
                    [self._pool],
                )
            )

    async def update_weights(self, version: str) -> None:
        """Reports that the executor computes with other weights."""
        executor = self._executor
        request = pb.UpdateWeightsRequest(
            executor_id=executor.executor_id, executor_epoch=executor.epoch, weight_version=version
        )
        await self._service.UpdateWeights(request)

    async def RegisterScheduler(self, request: pb.RegisterSchedulerRequest, context: object) -> Any:
        if self.refuses_schedulers:
            raise ForgottenError("no scheduler is taken")
        if self.failing_registrations:
            self.failing_registrations -= 1
            raise UnexpectedError("a registration fails")
        return await self._service.RegisterScheduler(request, context)

    async def AdmitSequences(self, request: pb.AdmitSequencesRequest, context: object) -> pb.AdmitSequencesResponse:
        self.calls += 1
        await self.gate.wait()
        response = await self._service.AdmitSequences(request, context)
        for admission, answer in zip(request.admissions, response.answers, strict=False):
            self.admissions.append(admission)
            self.refusals += not answer.admitted
            if answer.admitted:
                self.admitted_ids.append(admission.sequence_id)
                self.tables[admission.sequence_id] = list(answer.block_tables[0].slots)
        return response

    async def ForkSequence(self, request: pb.ForkSequenceRequest, context: object) -> pb.ForkSequenceResponse:
        await self.gate.wait()
        if self.failing_forks:
            self.failing_forks -= 1
            raise NotForkedError("there is nothing to share")
        answer = await self._service.ForkSequence(request, context)
        if answer.admitted:
            self.forked_ids.append(request.sequence_id)
            self.tables[request.sequence_id] = list(answer.block_tables[0].slots)
        await self.forks_end.wait()
        return answer

    async def SyncSequences(self, request: pb.SyncSequencesRequest, context: object) -> pb.SyncSequencesResponse:
        await self.gate.wait()
        answer = await self._service.SyncSequences(request, context)
        void = [view.handle for view in self._manager.queries.sequences() if view.sequence_id in self.void_next]
        self.void_next.clear()
        answer.void_handles.extend(void)
        return answer

    def key_index(self, url: str) -> KeyIndex:
        """A writer of the manager's index by key in a Redis."""
        queries = self._manager.queries
        return KeyIndex(open_redis(url), queries, epoch=self.epoch, shard="", interval=0.001, max_pending=1000)

    def rule(self, salt: str, policy: common.EvictionPolicy) -> None:
        """An operator gives a salt this eviction policy."""
        action = RuleAction(eviction_policy=EvictionPolicyRequest.of(policy))
        at_once(
            self._manager.operators.create_rule(
                RetentionRule(salt, 0, RuleMatch(salt=salt), action), validate_only=False
            )
        )

    def bound(self, salt: str, blocks: int) -> None:
        """An operator gives a salt a ceiling of device blocks."""
        at_once(self._manager.operators.set_quota(Quota(salt=salt, device_ceiling=blocks), validate_only=False))

    def register_scheduler(self, name: str, epoch: int) -> None:
        """Another process of the same name registers."""
        self._manager.register_scheduler(name, epoch)

    def shrink(self, total_blocks: int) -> None:
        """An operator resizes the pool."""
        at_once(self._manager.operators.update_pool("executor/0", total_blocks, "", validate_only=False))

    def confirm(self, ticket: int) -> None:
        """A copy has run."""
        self._hear([ticket], [])

    def refuse(self, ticket: int) -> None:
        """A copy has failed."""
        self._hear([], [ticket])

    def _hear(self, done: list[int], failed: list[int]) -> None:
        epoch = self._executor.epoch

        def confirm() -> None:
            if epoch == self._executor.epoch:
                self._manager.confirm_transfers(self._executor.executor_id, epoch, done, failed)

        asyncio.get_running_loop().call_later(CONFIRM_SECONDS, confirm)

    @property
    def live(self) -> list[str]:
        """Ids of the live sequences, by handle."""
        return [view.sequence_id for view in self._manager.queries.sequences()]

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits until a condition of this manager holds."""
        async with asyncio.timeout(patience(20)):
            while not condition():
                await asyncio.sleep(0.001)

    async def asked(self, count: int) -> None:
        """Waits until there were `count` calls for admission, answered or not."""
        await self.until(lambda: self.calls >= count)

    async def admitted(self, count: int) -> None:
        """Waits until `count` sequences are live."""
        await self.until(lambda: len(self.live) >= count)

    async def released(self) -> None:
        """Waits until no sequence is live."""
        await self.until(lambda: not self.live)

    async def unused(self) -> None:
        """Waits until every block is free or cached, in all tiers."""
        await self.released()
        await self.until(lambda: not self._used_blocks())
        assert self._manager.queries.check_pool() == []

    def _used_blocks(self) -> int:
        return sum(
            pool.used_blocks + sum(tier.used_blocks for tier in pool.lower_tiers)
            for pool in self._manager.queries.pools()
        )
