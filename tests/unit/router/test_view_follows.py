"""The view of the caches follows real cache managers over gRPC through whatever happens to them and on the way.

Each shard has a random life: blocks are stored, evicted, offloaded, purged and forgotten, executors are lost and
register again, the cache manager restarts. Its events are cut off, and come back behind a gap or without one.
"""

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cachemgr.errors import SequenceTooLongError
from cachemgr.rpc import event_service
from cachemgr.rpc.event_feed import EventFeed
from cachemgr.rpc.event_service import CacheEventService
from cachemgr.rpc.mutations import ManagerClock, Mutations, ServiceContext
from cachemgr.sequences import release
from cachemgr.types import AdmitRequest, ExecutorSpec, PoolSpec, SyncRequest
from protos.kvcache.v1 import kvcache_pb2_grpc as rpc
from protos.kvcommon.block_keys import low_keys
from protos.rpc.security import PLAIN
from protos.rpc.server import Server
from scheduler.router import view as view_module
from scheduler.router.view import CacheView, Owner, ViewFeed
from tests.support.cache_view import assert_nothing_leaks, known
from tests.support.in_process_manager import BLOCK, FINGERPRINT
from tests.support.patience import patience
from tests.support.random_operations import RandomLife

SHARDS, PHASES = 3, 12


class Shard(rpc.CacheEventServiceServicer):
    """A cache manager with the executor "e", which leads a random life, the executor "f", and its event service."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.address = f"unix:{folder}/{seed}"
        self.life = RandomLife(seed)
        # It expects one executor to answer these.
        self.life._weights |= {"pin": 0, "hint": 0}
        self._random = Random(seed)
        self._epoch = 0
        self._server: Server | None = None
        self._serve()

    def _serve(self) -> None:
        """A new process would offer a new service."""
        self.manager = manager = self.life.world.manager
        self.feed = EventFeed(manager.queries)
        mutations = Mutations(manager, ManagerClock(lambda: self.life.world.now))
        self._service = CacheEventService(ServiceContext(mutations, self.feed), keys_seconds=0)

    async def WatchEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for message in self._service.WatchEvents(request, context):
            yield message

    async def connect(self) -> None:
        self._server = Server("cachemgr", drain_seconds=0)
        add = partial(rpc.add_CacheEventServiceServicer_to_server, self)
        self._server.listen(self.address, {"kvcache.v1.CacheEventService": add})
        await self._server.start()

    async def disconnect(self) -> None:
        if self._server is not None:
            self.feed.close()
            await self._server.stop()
            self._server = None
            self._serve()

    def operate(self) -> None:
        """Anything."""
        if self._random.random() < 0.2:
            self._use_other()
        else:
            self.life.operate()
        if self.life.world.manager is not self.manager:
            self.feed.close()
            self._serve()
        self.feed.notify()

    def _use_other(self) -> None:
        """A prompt on the other executor, which registers where it is unknown, and now and then again."""
        manager, draw = self.life.world.manager, self._random.random
        self._epoch += 1
        manager.register_scheduler("g", self._epoch)
        if not manager.queries.knows_executor("f") or draw() < 0.1:
            self._executor_epoch = self._epoch
            pool = PoolSpec(0, self._random.choice([6, 12]), host_blocks=6)
            manager.register_executor(ExecutorSpec("f", self._epoch, "m", FINGERPRINT, BLOCK, [pool]))
        tokens, name = array("I", self.life.prompt()), f"g{self._epoch}"
        try:
            admission = manager.admit(AdmitRequest(name, "g", self._epoch, "f", tokens))
        except SequenceTooLongError:
            # An operator has made the pool small.
            return
        if admission.admitted:
            manager.confirm_transfers("f", self._executor_epoch, [copy.ticket for copy in admission.transfers], [])
            handles, computed = [admission.sequence_handle], [len(tokens)]
            manager.sync(
                SyncRequest("g", self._epoch, manager.epoch, 1, 1, handles, computed, [0], [], released_handles=handles)
            )

    def truth(self) -> dict[Owner, dict[int, int]]:
        """The tier of each key, of the pools with full attention."""
        found: dict[Owner, dict[int, int]] = {}
        for spec in self.manager.queries.executors():
            group = next((pool.group for pool in spec.pools if pool.attention_window is None), 0)
            views = (one[1] for one in self.manager.queries.blocks(f"{spec.executor_id}/{group}") if one is not None)
            found[Owner(self.address, spec.executor_id)] = {
                key: TIERS[view.tier.name] for view in views if view.key for key in low_keys([view.key])
            }
        return found


TIERS = {"DEVICE": 1, "HOST": 2, "DISK": 3}


class Router:
    """A view with a feed for each shard."""

    def __init__(self, shards: list[Shard]) -> None:
        self.view, self._shards = CacheView(), shards
        self._feeds = [self._follow(shard) for shard in shards]

    def _follow(self, shard: Shard) -> tuple[ViewFeed, asyncio.Task[None]]:
        feed = ViewFeed(self.view, shard.address, PLAIN)
        return feed, asyncio.create_task(feed.run())

    async def stop(self, number: int) -> None:
        _, task = self._feeds[number]
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    async def follow_again(self, number: int) -> None:
        await self.stop(number)
        assert self._shards[number].address not in {owner.shard for owner in self.view.executors}
        self._feeds[number] = self._follow(self._shards[number])

    def _positions(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The last event that each feed has, and that each cache manager has, with the epochs of these."""
        has = [(feed._number, feed._manager_epoch) for feed, _ in self._feeds]
        return has, [(shard.manager.queries.last_event, shard.manager.epoch) for shard in self._shards]

    async def check(self) -> None:
        """Once all events have come, the view is the truth, without anything else in it."""
        end = time.monotonic() + patience(20)
        while (positions := self._positions())[0] != positions[1]:
            assert time.monotonic() < end, f"the view does not follow: {positions}"
            await asyncio.sleep(0.002)
        truth = {owner: blocks for shard in self._shards for owner, blocks in shard.truth().items()}
        assert known(self.view) == truth
        for shard in self._shards:
            # The keys of prompts follow from it.
            executor = self.view.find(Owner(shard.address, "e"))
            assert executor is None or executor.space.weight_version == shard.life.world.weight_version
        await self.view.sweep()
        assert known(self.view) == truth
        assert len(self.view) == len({key for blocks in truth.values() for key in blocks})
        assert_nothing_leaks(self.view)


@contextlib.asynccontextmanager
async def routed(folder: Path, seed: int) -> AsyncIterator[tuple[Router, list[Shard]]]:
    shards = [Shard(folder, seed * SHARDS + number) for number in range(SHARDS)]
    for shard in shards:
        await shard.connect()
    router = Router(shards)
    try:
        yield router, shards
    finally:
        for number, shard in enumerate(shards):
            await router.stop(number)
            await shard.disconnect()


@pytest.fixture(autouse=True)
def small_and_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots in many parts, and attempts soon after each other."""
    monkeypatch.setattr(event_service, "MAX_KEYS", 4)
    monkeypatch.setattr(view_module, "RETRY_SECONDS", 0.01)


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_the_view_is_what_the_caches_hold(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of a lost executor have separate events only if they are few.
    monkeypatch.setattr(release, "MOST_REPORTED", 4096 if seed % 2 else 5)
    random = Random(seed)
    async with routed(tmp_path, seed) as (router, shards):
        for _ in range(PHASES):
            number = random.randrange(SHARDS)
            shard, draw = shards[number], random.random()
            if draw < 0.3:
                await shard.disconnect()
            elif draw < 0.4:
                await router.follow_again(number)
            # Of the events 50 are kept: sometimes the feed must begin again.
            yields = random.random() < 0.6
            for _ in range(random.choice([3, 20, 60])):
                shard.operate()
                if yields:
                    await asyncio.sleep(0)
            if shard._server is None:
                await shard.connect()
            if random.random() < 0.4:
                await router.check()
            if random.random() < 0.3:
                await router.view.sweep()
        await router.check()
