"""Events for routers: keys by tier, executors, a snapshot in parts, and when a watcher must begin again."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cachemgr.errors import EventsGoneError
from cachemgr.rpc import event_service
from cachemgr.rpc.event_feed import EventFeed
from cachemgr.rpc.event_service import CacheEventService
from cachemgr.rpc.mutations import ManagerClock, Mutations, ServiceContext
from cachemgr.slices import at_once
from cachemgr.types import BlockFilter
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.block_keys import low_keys
from protos.rpc.identity import Identity, Role, assume
from tests.support.in_process_manager import BLOCK, FINGERPRINT, World
from tests.support.patience import patience


class Watch:
    """A watcher that keeps the contents of the messages."""

    def __init__(self, service: CacheEventService, **request: Any) -> None:
        self._stream: AsyncIterator[pb.WatchEventsResponse] = service.WatchEvents(
            pb.WatchEventsRequest(keys_only=True, **request), None
        )
        self.executors: dict[str, pb.Executor] = {}
        self.pools: dict[str, dict[int, str]] = {}
        self.messages: list[pb.WatchEventsResponse] = []

    async def take(self) -> pb.WatchEventsResponse:
        message = await asyncio.wait_for(anext(self._stream), patience(10))
        self.messages.append(message)
        for change in message.changes:
            getattr(self, f"_{change.WhichOneof('change')}")(getattr(change, change.WhichOneof("change")))
        return message

    async def take_snapshot(self) -> pb.WatchEventsResponse:
        while not (message := await self.take()).snapshot_end:
            assert message.snapshot
        return message

    async def take_up_to(self, number: int) -> None:
        while (await self.take()).last_event_number < number:
            pass

    def _registered(self, executor: pb.Executor) -> None:
        self.executors[executor.executor_id] = executor
        for pool in executor.pools:
            self.pools.setdefault(f"{executor.executor_id}/{pool.group}", {})

    def _lost(self, executor: pb.Executor) -> None:
        del self.executors[executor.executor_id]
        for pool_id in [one for one in self.pools if one.startswith(f"{executor.executor_id}/")]:
            del self.pools[pool_id]

    def _blocks(self, blocks: pb.BlockKeys) -> None:
        # A watcher that continues knows its executors already.
        pool = self.pools.setdefault(blocks.pool_id, {})
        for key in blocks.keys:
            if blocks.kind == pb.EVENT_KIND_REMOVED:
                assert not blocks.tier
                pool.pop(key, None)
            else:
                assert blocks.kind == pb.EVENT_KIND_STORED
                pool[key] = pb.Tier.Name(blocks.tier).removeprefix("TIER_")


class Watched:
    """A manager, and the service that reports its events at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.world = World(*arguments, **options)
        self.serve()

    def serve(self) -> None:
        manager = self.world.manager
        self.feed = EventFeed(manager.queries)
        mutations = Mutations(manager, ManagerClock(lambda: self.world.now))
        self.service = CacheEventService(ServiceContext(mutations, self.feed), keys_seconds=0)

    def watch(self, **request: Any) -> Watch:
        return Watch(self.service, **request)

    @property
    def last(self) -> int:
        return self.world.queries.last_event

    def truth(self) -> dict[str, dict[int, str]]:
        return {
            pool.pool_id: {
                low: view.tier.name
                for _, view in filter(None, self.world.queries.blocks(pool.pool_id))
                if view.key
                for low in low_keys([view.key])
            }
            for pool in self.world.queries.pools()
        }


async def test_a_snapshot_names_executors_and_the_keys_of_all_blocks_by_tier_and_says_where_it_ends() -> None:
    watched = Watched(4, host_blocks=8, windows=(None, 5))
    for first in (0, 100):
        watched.world.cache(list(range(first, first + 12)))
    watch = watched.watch()
    end = await watch.take_snapshot()
    assert watch.pools == watched.truth()
    assert {tier for pool in watch.pools.values() for tier in pool.values()} == {"DEVICE", "HOST"}
    assert (end.last_event_number, end.manager_epoch) == (watched.last, 1)
    (executor,) = watch.executors.values()
    assert (executor.executor_id, executor.executor_epoch, executor.block_size) == ("e", 1, BLOCK)
    assert executor.model_fingerprint == FINGERPRINT
    windows = [pool.attention_window if pool.HasField("attention_window") else None for pool in executor.pools]
    assert windows == [None, 5]


async def test_an_empty_cache_has_a_snapshot_too() -> None:
    watch = Watched(4).watch()
    assert (await watch.take_snapshot()).last_event_number == 2
    assert watch.pools == {"e/0": {}}


async def test_many_events_of_a_block_come_to_its_last_tier() -> None:
    watched = Watched(4, host_blocks=8)
    watch = watched.watch(after_event_number=0)
    for first in (0, 100, 200, 300):
        watched.world.cache(list(range(first, first + 13)))
    at_once(watched.world.operators.purge(BlockFilter(), validate_only=False))
    watched.world.cache(list(range(8)))
    await watch.take_up_to(watched.last)
    assert watch.pools == watched.truth()
    (message,) = watch.messages
    keys = [key for change in message.changes if change.HasField("blocks") for key in change.blocks.keys]
    assert len(keys) == len(set(keys)) < watched.last


async def test_a_loss_and_a_new_epoch_keep_their_order_among_the_changes_of_blocks() -> None:
    watched = Watched(8)
    watch = watched.watch(after_event_number=0)
    watched.world.cache(list(range(12)))
    watched.world.expire_executor()
    watched.world.register_again()
    watched.world.cache(list(range(8)))
    await watch.take_up_to(watched.last)
    kinds = [change.WhichOneof("change") for change in watch.messages[0].changes]
    assert kinds == ["registered", "blocks", "lost", "registered", "blocks"]
    assert watch.executors["e"].executor_epoch == 2
    assert watch.pools == watched.truth()


async def test_blocks_of_lower_tiers_stay_over_a_restart_of_their_executor() -> None:
    watched = Watched(4, host_blocks=8)
    for first in (0, 100):
        watched.world.cache(list(range(first, first + 12)))
    watched.world.open_write_through_copies()
    watch = watched.watch()
    await watch.take_snapshot()
    watched.world.start_executor()
    watched.feed.notify()
    await watch.take_up_to(watched.last)
    assert watch.executors["e"].executor_epoch == 2
    assert set(watch.pools["e/0"].values()) == {"HOST"}
    assert watch.pools == watched.truth()


async def test_a_snapshot_that_is_read_while_the_cache_changes_is_right_at_its_end(monkeypatch) -> None:
    monkeypatch.setattr(event_service, "MAX_KEYS", 3)
    watched = Watched(12, host_blocks=12)
    for first in range(0, 500, 100):
        watched.world.cache(list(range(first, first + 12)))
    watch = watched.watch()
    for first in range(1000, 2000, 100):
        await watch.take()
        watched.world.cache(list(range(first, first + 12)))
        if first == 1400:
            # What stays in the host tier has another index than before.
            watched.world.open_write_through_copies()
            watched.world.num_blocks = 4
            watched.world.start_executor()
    end = await watch.take_snapshot()
    assert len(watch.messages) > 8
    assert end.last_event_number == watched.last
    assert watch.executors["e"].executor_epoch == 2
    assert watch.pools == watched.truth()


async def test_blocks_that_move_before_the_reader_of_a_snapshot_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_service, "MAX_KEYS", 3)
    watched = Watched(12, host_blocks=12)
    for first in range(0, 800, 100):
        watched.world.cache(list(range(first, first + 12)))
    watched.world.open_write_through_copies()
    watch = watched.watch()
    while len(watch.messages) < 5:
        await watch.take()
    # No event says that blocks of the host tier stay, at smaller indexes than those that were read.
    watched.world.num_blocks = 4
    watched.world.start_executor()
    await watch.take_snapshot()
    assert set(watch.pools["e/0"].values()) == {"HOST"}
    assert watch.pools == watched.truth()


async def test_equal_watchers_get_the_same_message_and_many_events_come_in_parts(monkeypatch) -> None:
    monkeypatch.setattr(event_service, "MAX_KEYS", 4)
    watched = Watched(20)
    watched.world.cache(list(range(40)))
    first, second, other = watched.watch(after_event_number=0), watched.watch(after_event_number=0), None
    while first.messages[-1:] == [] or first.messages[-1].last_event_number < watched.last:
        assert await first.take() is await second.take()
    assert [message.last_event_number for message in first.messages] == [4, 8, watched.last]
    other = watched.watch(after_event_number=0, pool_id="e/0")
    assert await other.take() is not first.messages[0]
    assert other.messages[0] == first.messages[0]


async def test_events_that_come_within_a_turn_come_together() -> None:
    watched = Watched(40)
    mutations = Mutations(watched.world.manager, ManagerClock(lambda: 0.0))
    service = CacheEventService(ServiceContext(mutations, watched.feed), keys_seconds=0.5)
    first, second = (Watch(service, after_event_number=watched.last) for _ in range(2))
    goal = watched.last + 20
    taking = [asyncio.create_task(watch.take_up_to(goal)) for watch in (first, second)]
    for number in range(10):
        for _ in range(5):
            await asyncio.sleep(0)
        watched.world.cache([number] * 8)
        watched.feed.notify()
    await asyncio.gather(*taking)
    assert watched.last == goal
    # One, or two if a turn ends meanwhile.
    assert len(first.messages) <= 3
    assert [id(message) for message in first.messages] == [id(message) for message in second.messages]


async def test_only_blocks_under_a_salt_of_a_pool_and_of_a_tenant_are_shown() -> None:
    watched = Watched(40, windows=(None, 5))
    for number, salt in enumerate((None, "a", "a/x", "b")):
        watched.world.cache([number] * 8, salt=salt)
    truth = watched.truth()

    def of(pool_id: str, *salts: str | None) -> dict[int, str]:
        queries = watched.world.queries
        views = [view for _, view in filter(None, queries.blocks(pool_id)) if view.key and view.scope.salt in salts]
        return {low: truth[pool_id][low] for low in low_keys(view.key for view in views)}

    async def shown(**request: Any) -> dict[str, dict[int, str]]:
        begun, resumed = watched.watch(**request), watched.watch(after_event_number=0, **request)
        await begun.take_snapshot()
        await resumed.take_up_to(watched.last)
        assert begun.pools == resumed.pools
        return begun.pools

    assert await shown(salt="b") == {"e/0": of("e/0", "b"), "e/1": of("e/1", "b")}
    assert await shown(pool_id="e/1") == {"e/0": {}, "e/1": truth["e/1"]}
    try:
        assume(Identity("token", Role.VIEWER, tenant="a"))
        assert await shown() == {pool_id: of(pool_id, "a", "a/x") for pool_id in truth}
    finally:
        assume(None)


async def test_a_watcher_continues_at_the_same_manager_only_and_not_behind_a_gap() -> None:
    watched = Watched(20)
    watched.world.cache(list(range(12)))
    number, epoch = watched.last, watched.world.manager.epoch
    watched.world.cache(list(range(100, 112)))
    assert (await watched.watch(after_event_number=number, manager_epoch=epoch).take()).manager_epoch == epoch
    with pytest.raises(EventsGoneError):
        await watched.watch(after_event_number=watched.last + 1, manager_epoch=epoch).take()
    watched.world.restart_manager()
    watched.serve()
    # It has as many events, with other meanings.
    assert watched.last >= number
    with pytest.raises(EventsGoneError) as refused:
        await watched.watch(after_event_number=number, manager_epoch=epoch).take()
    assert refused.value.fields == {"manager_epoch": "is not 2"}


async def test_others_run_between_the_parts_of_a_snapshot(monkeypatch) -> None:
    monkeypatch.setattr(event_service, "MAX_KEYS", 2)
    watched = Watched(40)
    watched.world.cache(list(range(100)))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count())
    watch = watched.watch()
    # Not by way of a task, which would let the other one run.
    while not (await anext(watch._stream)).snapshot_end:
        pass
    other.cancel()
    assert turns >= 20
