"""The cache manager itself between a scheduler and a fake executor with lower tiers; nothing is kept in Redis."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from cachemgr.manager import CacheManager
from cachemgr.rpc.data_service import CacheManagerService
from cachemgr.rpc.event_feed import EventFeed
from cachemgr.rpc.mutations import ManagerClock, Mutations, ServiceContext
from cachemgr.steps import at_once
from cachemgr.types import ExecutorSpec, ManagerConfig, PoolSpec, Quota, RetentionRule, RuleAction, RuleMatch
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.eviction_message import EvictionPolicyRequest
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.support.scheduler.fake_executor import FakeExecutor

CONFIG = ManagerConfig(lease_seconds=60, capacity_ahead_tokens=8, free_watermark=0.0)
# Between the end of a copy and the manager's knowledge of it.
CONFIRM_SECONDS = 0.002


class RealManager(CacheManagerService):
    """Notes every admission; `settled()` waits until nobody has blocks, and recounts them."""

    def __init__(self, executor: FakeExecutor, *, host_blocks: int = 0, disk_blocks: int = 0) -> None:
        self.faults: list[str] = []
        self.admissions: list[pb.AdmitSequenceRequest] = []
        self.epoch = 0
        self._executor = executor
        self._pool = PoolSpec(
            0, executor.max_tokens // executor.block_size, None, host_blocks=host_blocks, disk_blocks=disk_blocks
        )
        self.restart()

    def restart(self) -> None:
        """Begins with nothing, as a process that dies and comes back without Redis."""
        self.epoch += 1
        clock = ManagerClock(time.monotonic)
        manager = CacheManager(self.epoch, clock, CONFIG)
        super().__init__(ServiceContext(Mutations(manager, clock), EventFeed(manager.queries)))
        self.register()

    def register(self) -> None:
        """What the executor says when it begins."""
        executor = self._executor
        self._manager.register_executor(
            ExecutorSpec("executor", executor.epoch, "fake", b"f" * 32, executor.block_size, [self._pool])
        )

    def rule(self, salt: str, policy: common.EvictionPolicy) -> None:
        """An operator's: who has this salt evicts so."""
        action = RuleAction(eviction_policy=EvictionPolicyRequest.of(policy))
        at_once(
            self._manager.operators.create_rule(
                RetentionRule(salt, 0, RuleMatch(salt=salt), action), validate_only=False
            )
        )

    def bound(self, salt: str, blocks: int) -> None:
        """An operator's: who has this salt may have so many blocks of the device."""
        at_once(self._manager.operators.set_quota(Quota(salt=salt, device_ceiling=blocks), validate_only=False))

    def replace_scheduler(self, name: str) -> None:
        """Another process is given the same name."""
        self._manager.register_scheduler(name, 1 << 63)

    def register_scheduler(self, name: str, epoch: int) -> None:
        """A scheduler that was here before."""
        self._manager.register_scheduler(name, epoch)

    def shrink(self, total_blocks: int) -> None:
        """An operator's: the pool has so many blocks."""
        at_once(self._manager.operators.update_pool("executor/0", total_blocks, "", validate_only=False))

    def confirm(self, ticket: int) -> None:
        """A copy has run."""
        self._hear([ticket], [])

    def refuse(self, ticket: int) -> None:
        """A copy has failed."""
        self._hear([], [ticket])

    def _hear(self, done: list[int], failed: list[int]) -> None:
        epoch = self._executor.epoch

        def tell() -> None:
            if epoch == self._executor.epoch:
                self._manager.confirm_transfers("executor", epoch, done, failed)

        asyncio.get_running_loop().call_later(CONFIRM_SECONDS, tell)

    async def AdmitSequence(self, request: pb.AdmitSequenceRequest, context: Any = None) -> pb.AdmitSequenceResponse:
        self.admissions.append(request)
        return await super().AdmitSequence(request, context)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that happens here."""
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.001)

    async def admitted(self, count: int) -> None:
        """Waits until so many sequences are live."""
        await self.until(lambda: len(list(self._manager.queries.sequences())) >= count)

    async def released(self) -> None:
        """Waits until no sequence is live."""
        await self.until(lambda: not list(self._manager.queries.sequences()))

    async def settled(self) -> None:
        """Waits until every block is free or cached, in all tiers."""
        await self.released()
        await self.until(lambda: not self._used_blocks())
        assert self._manager.queries.check_pool() == []

    def _used_blocks(self) -> int:
        [pool] = self._manager.queries.pools()
        return pool.used_blocks + sum(tier.used_blocks for tier in pool.lower_tiers)
