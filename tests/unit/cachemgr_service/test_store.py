"""The index in Redis: what was stored is read back, and a Redis that is away costs nothing but time."""

import asyncio
from collections.abc import AsyncIterator
from itertools import chain
from pathlib import Path

import pytest
from redis.asyncio import Redis

from cachemgr.blocks.block_record import BackupRecord, BlockRecord
from cachemgr.persistence.index_reading import Reading
from cachemgr.persistence.redis_client import open_redis
from cachemgr.persistence.redis_index import IndexStore
from cachemgr.persistence.write_queue import Place
from cachemgr.types import TierKind
from tests.unit.cachemgr_service.servers import Server

EXECUTOR = "gpu/0 {x}"
KEYS = "kvkeep:{gpu%2F0%20%7Bx%7D}:"


def block(slot: int, depth: int = 0, group: int = 0, step: int = 3) -> BlockRecord:
    salt = None if slot % 2 else "salt\x00ü"
    return BlockRecord(group, slot, bytes([slot % 256] * 32), None, depth, bytes(12), salt, 0, step)


class Index(dict[Place, BlockRecord]):
    """The truth that the store copies."""

    def snapshot(self, executor_id: str) -> list[BlockRecord]:
        return list(self.values())


def note(store: IndexStore, record: BlockRecord) -> None:
    """A block entered the index."""
    store.stored(EXECUTOR, *record.place, lambda: record)


async def recalled(store: IndexStore, epoch: int, executor_id: str = EXECUTOR) -> tuple[Reading, list[BlockRecord]]:
    """What Redis remembers, and the blocks that an executor of this epoch may have."""
    reading = await store.recall(executor_id)
    assert reading.is_complete.is_set()
    store.registered(executor_id, epoch)
    blocks = list(chain.from_iterable(store.parts(reading)))
    store.taken_back(reading)
    return reading, blocks


async def loaded(store: IndexStore, epoch: int) -> list[BlockRecord]:
    """The blocks that Redis remembers."""
    reading, blocks = await recalled(store, epoch)
    assert reading.is_of(epoch)
    return blocks


@pytest.fixture
async def redis(server: Server) -> AsyncIterator[Redis]:
    client = open_redis(server.url)
    yield client
    await client.aclose()


@pytest.fixture
def index() -> Index:
    return Index()


@pytest.fixture
def store(redis: Redis, index: Index) -> IndexStore:
    return IndexStore(redis, index.snapshot, max_pending=50)


async def test_stored_blocks_are_read_back_parents_first_by_a_new_manager(store: IndexStore, redis: Redis) -> None:
    store.cleared(EXECUTOR, 7)
    blocks = [block(slot, depth=9 - slot, group=slot % 2) for slot in range(1, 9)]
    for one in blocks:
        note(store, one)
    store.removed(EXECUTOR, *blocks[0].place)
    assert await store.flush()
    for key in (f"{KEYS}blocks", f"{KEYS}clock", f"{KEYS}epoch", "kvkeep:{operators}:schema"):
        assert await redis.exists(key)
    restarted = IndexStore(redis, lambda _: [])
    assert await loaded(restarted, 7) == blocks[:0:-1]


async def test_another_epoch_voids_what_redis_remembers(store: IndexStore, redis: Redis) -> None:
    store.cleared(EXECUTOR, 7)
    note(store, block(1))
    await store.flush()
    restarted = IndexStore(redis, lambda _: [])
    for executor_id, epoch in ((EXECUTOR, 8), ("another", 7)):
        reading, blocks = await recalled(restarted, epoch, executor_id)
        assert (blocks, reading.pins, reading.is_of(epoch)) == ([], [], False)
    assert await redis.exists(f"{KEYS}blocks")
    await restarted.flush()
    assert not await redis.exists(f"{KEYS}blocks")
    assert await loaded(restarted, 8) == []


async def test_another_epoch_leaves_what_lies_in_lower_tiers(store: IndexStore, redis: Redis) -> None:
    store.cleared(EXECUTOR, 7)
    copied = block(2)._replace(backup=BackupRecord(TierKind.HOST, 5, 77))
    host, disk = (block(1)._replace(tier=tier, generation=9) for tier in (TierKind.HOST, TierKind.DISK))
    for one in (block(1), copied, host, disk):
        note(store, one)
    await store.flush()
    reading, blocks = await recalled(IndexStore(redis, lambda _: []), 8)
    assert not reading.is_of(8)
    assert {one.place: one.generation for one in blocks} == {
        (0, TierKind.HOST, 1): 9,
        (0, TierKind.DISK, 1): 9,
        (0, TierKind.HOST, 5): 77,
    }


async def test_a_new_block_in_a_slot_replaces_the_old_one(store: IndexStore) -> None:
    store.cleared(EXECUTOR, 7)
    note(store, block(1, step=3))
    await store.flush()
    note(store, block(1, step=9))
    assert await loaded(store, 7) == [block(1, step=9)]


async def test_blocks_of_an_unknown_version_are_left_out(store: IndexStore, redis: Redis) -> None:
    store.cleared(EXECUTOR, 7)
    note(store, block(1))
    await store.flush()
    await redis.hset(f"{KEYS}blocks", b"12345678", b"\xff future")
    assert await loaded(store, 7) == [block(1)]


async def test_changes_made_while_redis_is_away_arrive_when_it_is_back(store: IndexStore, server: Server) -> None:
    store.cleared(EXECUTOR, 7)
    note(store, block(1))
    assert await store.flush()
    server.stop()
    note(store, block(2))
    store.removed(EXECUTOR, *block(1).place)
    assert not await store.flush()
    assert not store.up
    assert store.pending == 2
    server.start()
    assert await store.flush()
    assert store.up
    assert await loaded(store, 7) == [block(2)]


async def test_too_many_changes_become_a_copy_of_everything(
    store: IndexStore, index: Index, redis: Redis, server: Server
) -> None:
    store.cleared(EXECUTOR, 7)
    note(store, block(999))
    assert await store.flush()
    server.stop()
    for slot in range(1, 701):
        index[block(slot).place] = block(slot)
        note(store, block(slot))
        assert store.pending <= 50
        if slot % 100 == 0:
            assert not await store.flush()
    server.start()
    assert await store.flush()
    assert {one.slot for one in await loaded(store, 7)} == set(range(1, 701))


async def test_a_registration_while_redis_is_away_deletes_nothing_that_is_not_read(
    store: IndexStore, redis: Redis, server: Server
) -> None:
    store.cleared(EXECUTOR, 7)
    note(store, block(1))
    note(store, block(2))
    await store.flush()
    server.stop()
    index = Index()
    restarted = IndexStore(redis, index.snapshot, max_pending=50, interval=0.01)
    reading = await restarted.recall(EXECUTOR, 0.1)
    assert not reading.is_complete.is_set()
    restarted.registered(EXECUTOR, 7)
    # More than what may wait: everything is to be written again.
    for slot in range(2, 100):
        index[block(slot).place] = block(slot, step=9)
        note(restarted, block(slot, step=9))
    server.start()
    await reading.is_complete.wait()
    for _ in range(3):
        assert await restarted.flush()
    assert await redis.hlen(f"{KEYS}blocks") == 2
    assert {one.slot for one in chain.from_iterable(restarted.parts(reading))} == {1, 2}
    index[block(1).place] = block(1)
    restarted.taken_back(reading)
    assert await restarted.flush()
    assert {one.slot: one.stored_step for one in await loaded(restarted, 7)} == {1: 3} | dict.fromkeys(range(2, 100), 9)


async def test_a_redis_that_loses_everything_between_the_reading_and_the_first_write_is_found_out(
    store: IndexStore, redis: Redis
) -> None:
    store.cleared(EXECUTOR, 7)
    note(store, block(1))
    await store.flush()
    restarted = IndexStore(redis, lambda _: [block(1)])
    assert await loaded(restarted, 7) == [block(1)]
    await redis.delete(*[f"{KEYS}{name}" for name in ("blocks", "clock", "epoch")])
    for _ in range(2):
        assert await restarted.flush()
    assert await loaded(restarted, 7) == [block(1)]


async def test_the_background_task_writes_without_being_asked(store: IndexStore, redis: Redis) -> None:
    task = asyncio.create_task(store.run())
    store.cleared(EXECUTOR, 7)
    note(store, block(1))
    async with asyncio.timeout(10):
        while not await redis.exists(f"{KEYS}blocks"):
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait({task})
    store.removed(EXECUTOR, *block(1).place)
    await store.close()
    assert not await redis.exists(f"{KEYS}blocks")


@pytest.mark.parametrize("ticks", range(12))
async def test_the_background_task_ends_when_it_is_cancelled_at_any_moment(ticks: int, tmp_path: Path) -> None:
    store = IndexStore(open_redis(f"unix://{tmp_path}/nobody"), lambda _: [], interval=0.001)
    running = asyncio.create_task(store.run())
    await asyncio.sleep(0.01)
    for _ in range(ticks):
        await asyncio.sleep(0)
    store.cleared(EXECUTOR, 1)
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=5)
    assert done
    await store.close()


async def test_a_registration_after_the_first_parts_were_taken_gets_all_blocks(store: IndexStore, redis: Redis) -> None:
    store.cleared(EXECUTOR, 7)
    for slot in range(1, 4):
        note(store, block(slot))
    assert await store.flush()
    other = IndexStore(redis, lambda _: [])
    first = await other.recall(EXECUTOR)
    other.registered(EXECUTOR, 7)
    assert next(other.parts(first))
    again, blocks = await recalled(other, 7)
    assert again is not first
    assert not other.is_current(first)
    assert len(blocks) == 3
    await other.flush()
    assert len(await loaded(IndexStore(redis, lambda _: []), 7)) == 3
