"""Cache managers one after the other, and calls of operators."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from cachemgr.persistence import redis_index
from cachemgr.process import CacheManagerProcess
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.settings import cluster_nodes
from tests.support.cachemgr_client import EXECUTOR, NUM_BLOCKS, Client, settings_for
from tests.support.patience import patience

POOL = f"{EXECUTOR}/0"


class Managers:
    """Cache managers one after the other, on one Redis, with a clock that the test sets."""

    def __init__(self, folder: Path, url: str) -> None:
        self.now = 1000.0
        self.epoch = 7
        self.url = url
        self._folder = folder
        self._numbers = itertools.count()

    @asynccontextmanager
    async def run(
        self, *, epoch: int = 0, executor_id: str = EXECUTOR, patient: bool = True, **settings: object
    ) -> AsyncIterator[Client]:
        """A manager that ends in order, and is checked before its end. epoch: of the executor from now on.

        patient: its start waits for Redis as long as a busy machine takes. Otherwise it waits like any start, for tests
        in which Redis is slow or away.
        """
        self.epoch = epoch or self.epoch
        folder = self._folder / str(next(self._numbers))
        folder.mkdir()
        values = {"pin_budget": 0.5, "lease_seconds": 1e9, "redis_flush_seconds": 0.001} | settings
        read = settings_for(folder, redis_url=self.url, **values)
        # The monotonic clock of each manager begins at another time.
        shift = 5000.0 * next(self._numbers)
        process = CacheManagerProcess(read, clock=lambda: self.now + shift)
        with pytest.MonkeyPatch.context() as patch:
            if patient:
                patch.setattr(redis_index, "START_SECONDS", 60.0)
            await process.start()
        client = Client(read, epoch=self.epoch, executor_id=executor_id)
        try:
            yield client
            await client.check()
        finally:
            await client.close()
            await process.stop()


async def rules(client: Client) -> list[pb.RetentionRule]:
    return list((await client.admin.ListRetentionRules(pb.ListRetentionRulesRequest())).rules)


async def quotas(client: Client) -> list[pb.Quota]:
    return [usage.quota for usage in (await client.admin.ListQuotas(pb.ListQuotasRequest())).quotas]


async def share(client: Client, total_blocks: int) -> None:
    pool = pb.Pool(pool_id=POOL, total_blocks=total_blocks)
    await client.admin.UpdatePool(pb.UpdatePoolRequest(pool=pool, update_mask=FieldMask(paths=["total_blocks"])))


async def holds(client: Client) -> list[pb.Hold]:
    return list((await client.admin.ListHolds(pb.ListHoldsRequest())).holds)


async def make_rule(client: Client, name: str = "r", **action: object) -> pb.RetentionRule:
    rule = pb.RetentionRule(name=name, action=pb.RuleAction(**action or {"retention_priority": 60}))
    return (await client.admin.CreateRetentionRule(pb.CreateRetentionRuleRequest(rule=rule))).rule


def written(admitted: pb.AdmitSequenceResponse, step: int) -> tuple[int, ...]:
    """last_write_steps of a pool in which a sequence wrote in this step."""
    slots = set(admitted.block_tables[0].slots)
    return tuple(step if slot in slots else 0 for slot in range(1, NUM_BLOCKS + 1))


async def cached(client: Client, tokens: int = 9, **options: object) -> tuple[int, ...]:
    """Computes all of `tokens` tokens but one, and releases them."""
    admitted = await client.admit("a", tokens, **options)
    await client.compute(admitted, tokens - 1)
    return written(admitted, 1)


async def pin(client: Client, prefix: pb.PrefixSelector, owner: str, seconds: int) -> pb.PinPrefixResponse:
    request = pb.PinPrefixRequest(prefix=prefix, owner=owner, duration=Duration(seconds=seconds))
    return await client.admin.PinPrefix(request)


async def leases(client: Client) -> list[pb.BlockLease]:
    return list((await client.admin.ListLeases(pb.ListLeasesRequest(pool_id=POOL))).leases)


async def remaining(client: Client) -> list[float]:
    """Remaining seconds of each lease."""
    return [one.lease.remaining_duration.ToTimedelta().total_seconds() for one in await leases(client)]


async def refusal(call: Awaitable[object]) -> grpc.StatusCode | None:
    """The code of a call's error, None without an error."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


def sync_redis(url: str) -> Any:
    """A client of the server or cluster."""
    first, nodes = cluster_nodes(url)
    return redis.RedisCluster.from_url(first) if nodes else redis.Redis.from_url(url)


async def state_of(client: Client, kind: str) -> list[str]:
    """Lines of one kind in the state."""
    dumped = [message async for message in client.admin.DumpState(pb.DumpStateRequest())]
    return [line for message in dumped for line in message.lines if f'"kind":"{kind}"' in line]


async def compared(client: Client, pool_id: str = "") -> list[str] | None:
    """Differences between manager and Redis; None if they could not be compared."""
    answer = await client.admin.CheckPool(
        pb.CheckPoolRequest(pool_id=pool_id, compare_with_store=True), timeout=patience(30)
    )
    return [f"{one.pool_id} {one.slot}: {one.message}" for one in answer.violations] if answer.store_compared else None


async def agreed(client: Client) -> None:
    """Waits until manager and Redis can be compared; then they must agree."""
    async with asyncio.timeout(patience(30)):
        while (found := await compared(client)) is None:
            await asyncio.sleep(0.05)
    assert found == []
