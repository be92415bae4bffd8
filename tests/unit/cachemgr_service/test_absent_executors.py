"""Of executors that never come again nothing is kept for ever, and nothing is deleted that may still be taken back."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.redis_client import open_redis
from tests.support.cachemgr_client import EXECUTOR, Client
from tests.support.index_copy import Copied, CopiedStore, block
from tests.support.managers import Managers, agreed, cached, sync_redis
from tests.support.patience import patience
from tests.support.redis_servers import Server

HOUR = 3600.0
NAMES = "kvkeep:{operators}:executors"
POD = "pod-1"


class Time:
    """The managers' time, and the registered executors."""

    def __init__(self) -> None:
        self.copied = Copied({block(1).tier_slot: block(1)}, here=set())

    @property
    def here(self) -> set[str]:
        assert self.copied.here is not None
        return self.copied.here

    def store(self, redis: Redis) -> CopiedStore:
        """A manager's store."""
        self.here.clear()
        return CopiedStore(redis, self.copied)

    async def register(self, life: CopiedStore, executor_id: str) -> int:
        """Registers an executor; returns how many blocks Redis stored."""
        self.here.add(executor_id)
        _, blocks = await life.register(executor_id, 7)
        assert await life.store.flush()
        return len(blocks)

    async def pass_by(self, life: CopiedStore, hours: int) -> None:
        """A manager runs for so long."""
        for _ in range(hours):
            self.copied.now += HOUR
            assert await life.store.flush()


@pytest.fixture
async def redis(server: Server) -> AsyncIterator[Redis]:
    client = open_redis(server.url)
    yield client
    await client.aclose()


async def is_kept(redis: Redis, executor_id: str = POD) -> bool:
    keys = [f"kvkeep:{{{executor_id}}}:{what}" for what in ("blocks", "epoch", "clock")]
    there = [bool(await redis.exists(key)) for key in keys]
    named = executor_id.encode() in await redis.hkeys(NAMES)
    assert len({*there, named}) == 1, (there, named)
    return named


async def test_registered_executors_are_kept_and_those_away_for_a_day_are_forgotten(redis: Redis) -> None:
    time = Time()
    store = time.store(redis)
    await time.register(store, EXECUTOR)
    await time.register(store, POD)
    await time.pass_by(store, 30)
    assert await is_kept(redis)
    time.here.discard(POD)
    await time.pass_by(store, 23)
    assert await is_kept(redis)
    await time.pass_by(store, 3)
    assert not await is_kept(redis)
    # Nor is a clock written any more.
    await time.pass_by(store, 3)
    assert not await is_kept(redis)
    assert await is_kept(redis, EXECUTOR)
    assert await time.register(store, POD) == 0
    assert await is_kept(redis)


async def test_executors_of_earlier_managers_are_forgotten_when_managers_have_run_for_a_day(redis: Redis) -> None:
    time = Time()
    await time.register(time.store(redis), POD)
    for hours in (11, 11):
        store = time.store(redis)
        # While no manager runs no executor can register.
        time.copied.now += 100 * HOUR
        await time.register(store, EXECUTOR)
        await time.pass_by(store, hours)
        assert await is_kept(redis)
    await time.pass_by(store, 5)
    assert not await is_kept(redis)
    assert await time.register(time.store(redis), EXECUTOR) == 1


async def test_an_executor_that_registers_again_within_the_day_has_its_blocks(redis: Redis) -> None:
    time = Time()
    await time.register(time.store(redis), POD)
    store = time.store(redis)
    await time.pass_by(store, 22)
    assert await time.register(store, POD) == 1
    time.here.discard(POD)
    await time.pass_by(store, 22)
    assert await is_kept(redis)


async def test_what_is_being_read_is_not_deleted(redis: Redis) -> None:
    time = Time()
    await time.register(time.store(redis), POD)
    store = time.store(redis)
    reading = await store.store.recall(POD)
    await time.pass_by(store, 30)
    assert reading.num_blocks == 1
    assert await is_kept(redis)


async def test_a_new_manager_gives_all_an_hour_however_long_redis_was_away(redis: Redis) -> None:
    time = Time()
    store = time.store(redis)
    await time.register(store, POD)
    await redis.hset(NAMES, POD, repr(-100 * HOUR))
    store = time.store(redis)
    assert await store.store.flush()
    assert await time.register(store, POD) == 1
    await time.pass_by(store, 2)
    assert await is_kept(redis)


@pytest.mark.parametrize("value", ["", "soon", "nan", "-inf", "1e300"])
async def test_a_note_that_cannot_be_right_begins_anew(redis: Redis, value: str) -> None:
    time = Time()
    await time.register(time.store(redis), POD)
    await redis.hset(NAMES, POD, value)
    store = time.store(redis)
    await time.pass_by(store, 23)
    assert await is_kept(redis)
    await time.pass_by(store, 4)
    assert not await is_kept(redis)


async def test_a_redis_that_has_lost_the_notes_gets_them_again(redis: Redis) -> None:
    time = Time()
    store = time.store(redis)
    await time.register(store, POD)
    await redis.delete(NAMES, "kvkeep:{operators}:time")
    assert await store.store.flush()
    assert await store.store.flush()
    assert await is_kept(redis)


async def test_a_cache_manager_forgets_executors_that_never_come_again(tmp_path: Path, server: Server) -> None:
    managers = Managers(tmp_path, server.url)
    async with managers.run() as client:
        await client.register()
        await cached(client, 9)
        other = client.registration()
        other.executor_id = POD
        await client.manager.RegisterExecutor(other, timeout=patience(5))
        await agreed(client)
    with sync_redis(server.url) as redis:
        assert redis.exists(f"kvkeep:{{{POD}}}:clock")
        async with managers.run() as client:
            await register_again(client)
            managers.now += 26 * HOUR
            async with asyncio.timeout(patience(30)):
                while redis.exists(f"kvkeep:{{{POD}}}:clock"):
                    await asyncio.sleep(0.05)
            await agreed(client)
        assert not [key for key in redis.scan_iter("*") if POD.encode() in key]
        assert redis.hkeys(NAMES) == [EXECUTOR.encode()]


async def register_again(client: Client) -> None:
    answer: pb.RegisterExecutorResponse = await client.register()
    assert answer.manager_epoch
