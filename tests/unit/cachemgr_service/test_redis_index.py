"""The index in Redis: stored data is read back, and an unreachable Redis costs nothing but time."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from cachemgr.blocks.block_record import BlockRecord, CopyRecord
from cachemgr.persistence.pending_changes import Changes
from cachemgr.persistence.redis_index import PENDING
from cachemgr.types import TierKind
from protos.rpc.redis_client import open_redis
from tests.support.index_copy import Copied, CopiedStore, block
from tests.support.patience import patience
from tests.support.redis_servers import Server

EXECUTOR = "gpu/0 {x}"
KEYS = "kvkeep:{gpu%2F0%20%7Bx%7D}:"


@pytest.fixture
async def redis(any_server: Server) -> AsyncIterator[Redis]:
    client = open_redis(any_server.url)
    yield client
    await client.aclose()


@pytest.fixture
def life(redis: Redis) -> CopiedStore:
    """The first life of a manager, in which an executor has registered."""
    life = CopiedStore(redis)
    life.queue.cleared(EXECUTOR, 7)
    return life


async def loaded(life: CopiedStore, epoch: int = 7) -> list[BlockRecord]:
    """The blocks that Redis remembers."""
    reading, blocks = await life.register(EXECUTOR, epoch)
    assert reading.is_of(epoch)
    return blocks


async def test_stored_blocks_are_read_back_parents_first_by_a_new_manager(life: CopiedStore, redis: Redis) -> None:
    blocks = [block(slot, depth=9 - slot, group=slot % 2) for slot in range(1, 9)]
    for one in blocks:
        life.note(EXECUTOR, one)
    life.queue.removed(EXECUTOR, *blocks[0].tier_slot)
    assert await life.store.flush()
    for key in (f"{KEYS}blocks", f"{KEYS}clock", f"{KEYS}epoch", "kvkeep:{operators}:schema"):
        assert await redis.exists(key)
    restarted = CopiedStore(redis)
    assert await loaded(restarted) == blocks[:0:-1]


async def test_another_epoch_voids_what_redis_remembers(life: CopiedStore, redis: Redis) -> None:
    life.note(EXECUTOR, block(1))
    await life.store.flush()
    restarted = CopiedStore(redis)
    for executor_id, epoch in ((EXECUTOR, 8), ("another", 7)):
        reading, blocks = await restarted.register(executor_id, epoch)
        assert (blocks, reading.pins, reading.is_of(epoch)) == ([], [], False)
    assert await redis.exists(f"{KEYS}blocks")
    await restarted.store.flush()
    assert not await redis.exists(f"{KEYS}blocks")
    assert await loaded(restarted, 8) == []


async def test_another_epoch_leaves_what_lies_in_lower_tiers(life: CopiedStore, redis: Redis) -> None:
    copied = block(2)._replace(lower_copy=CopyRecord(TierKind.HOST, 5, 77))
    host, disk = (block(1)._replace(tier=tier, generation=9) for tier in (TierKind.HOST, TierKind.DISK))
    for one in (block(1), copied, host, disk):
        life.note(EXECUTOR, one)
    await life.store.flush()
    reading, blocks = await CopiedStore(redis).register(EXECUTOR, 8)
    assert not reading.is_of(8)
    assert {one.tier_slot: one.generation for one in blocks} == {
        (0, TierKind.HOST, 1): 9,
        (0, TierKind.DISK, 1): 9,
        (0, TierKind.HOST, 5): 77,
    }


async def test_blocks_of_an_unknown_version_are_left_out(life: CopiedStore, redis: Redis) -> None:
    life.note(EXECUTOR, block(1))
    await life.store.flush()
    await redis.hset(f"{KEYS}blocks", b"12345678", b"\xff future")
    assert await loaded(life) == [block(1)]


async def test_too_many_changes_become_a_copy_of_everything(life: CopiedStore, any_server: Server) -> None:
    life.note(EXECUTOR, block(999))
    assert await life.store.flush()
    any_server.stop()
    for slot in range(1, 701):
        life.copied.index[block(slot).tier_slot] = block(slot)
        life.note(EXECUTOR, block(slot))
        assert life.store.pending <= 50
        if slot % 100 == 0:
            assert not await life.store.flush()
    any_server.start()
    assert await life.store.flush()
    assert {one.slot for one in await loaded(life)} == set(range(1, 701))


async def test_the_gauge_counts_what_a_slow_redis_has_not_taken_yet(
    life: CopiedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, write = asyncio.Event(), asyncio.Event(), life.store._write

    async def slowly(executor_id: str, changes: Changes) -> None:
        begun.set()
        await may_end.wait()
        await write(executor_id, changes)

    monkeypatch.setattr(life.store, "_write", slowly)
    for slot in range(1, 10):
        life.note(EXECUTOR, block(slot))
    flushing = asyncio.create_task(life.store.flush())
    await begun.wait()
    assert PENDING._value.get() == 9
    may_end.set()
    assert await flushing
    assert PENDING._value.get() == 0


async def test_a_registration_while_redis_is_away_deletes_nothing_that_is_not_read(
    life: CopiedStore, redis: Redis, any_server: Server
) -> None:
    life.note(EXECUTOR, block(1))
    life.note(EXECUTOR, block(2))
    await life.store.flush()
    any_server.stop()
    restarted = CopiedStore(redis)
    reading = await restarted.store.recall(EXECUTOR, 0.1)
    assert not reading.is_complete.is_set()
    restarted.store.registered(EXECUTOR, 7)
    # More than the limit of waiting changes: everything must be written again.
    for slot in range(2, 100):
        restarted.copied.index[block(slot).tier_slot] = block(slot, step=9)
        restarted.note(EXECUTOR, block(slot, step=9))
    any_server.start()
    await reading.is_complete.wait()
    for _ in range(3):
        assert await restarted.store.flush()
    assert await redis.hlen(f"{KEYS}blocks") == 2
    await restarted.store.restore(reading)
    assert {one.slot for one in restarted.copied.put_back_blocks} == {1, 2}
    assert await restarted.store.flush()
    assert {one.slot: one.stored_step for one in await loaded(restarted)} == {1: 3} | dict.fromkeys(range(2, 100), 9)


async def test_a_redis_that_loses_everything_between_the_reading_and_the_first_write_is_found_out(
    life: CopiedStore, redis: Redis
) -> None:
    life.note(EXECUTOR, block(1))
    await life.store.flush()
    restarted = CopiedStore(redis, Copied({block(1).tier_slot: block(1)}))
    assert await loaded(restarted) == [block(1)]
    await redis.delete(*[f"{KEYS}{name}" for name in ("blocks", "clock", "epoch")])
    for _ in range(2):
        assert await restarted.store.flush()
    assert await loaded(restarted) == [block(1)]


@pytest.mark.parametrize("ticks", range(12))
async def test_the_background_task_ends_when_it_is_cancelled_at_any_moment(ticks: int, tmp_path: Path) -> None:
    life = CopiedStore(open_redis(f"unix://{tmp_path}/nobody"), interval=0.001)
    running = asyncio.create_task(life.store.run())
    await asyncio.sleep(0.01)
    for _ in range(ticks):
        await asyncio.sleep(0)
    life.queue.cleared(EXECUTOR, 1)
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=patience(5))
    assert done
    await life.store.close()


async def test_a_registration_after_the_first_parts_were_taken_gets_all_blocks(life: CopiedStore, redis: Redis) -> None:
    for slot in range(1, 4):
        life.note(EXECUTOR, block(slot))
    assert await life.store.flush()
    other = CopiedStore(redis)
    other.copied.is_waiting = False
    first, _ = await other.register(EXECUTOR, 7)
    other.copied.is_waiting = True
    again, blocks = await other.register(EXECUTOR, 7)
    assert again is not first
    assert len(blocks) == 3
    await other.store.flush()
    assert len(await loaded(CopiedStore(redis))) == 3
