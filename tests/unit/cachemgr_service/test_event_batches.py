"""Events as messages: many in each, made once for all that watch the same."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bench.scale.stalls import BLOCK, Cache
from cachemgr.blocks.events import Event
from cachemgr.rpc.event_feed import EventFeed
from cachemgr.rpc.event_service import MAX_BYTES, MAX_EVENTS, CacheEventService, Wanted, pack
from cachemgr.rpc.mutations import ManagerClock, Mutations, ServiceContext
from cachemgr.slices import at_once
from cachemgr.types import BlockFilter, BlockView, EventKind
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.tokens import pack as packed
from protos.kvcommon.tokens import packed_bytes


class Watched(Cache):
    """A manager, and the service of its events."""

    def __init__(self) -> None:
        super().__init__(2000)
        self.feed = EventFeed(self.manager.queries)
        mutations = Mutations(self.manager, ManagerClock(lambda: 0.0))
        self._service = CacheEventService(ServiceContext(mutations, self.feed))

    def store(self, num_blocks: int, first: int = 0, **options: object) -> None:
        """One event for each of the blocks."""
        self.run(first, BLOCK * num_blocks, **options)
        self.feed.notify()

    def watch(self, after: int, **request: Any) -> AsyncIterator[pb.WatchEventsResponse]:
        return self._service.WatchEvents(pb.WatchEventsRequest(after_event_number=after, **request), None)


@pytest.fixture
def world() -> Watched:
    return Watched()


def numbers(message: pb.WatchEventsResponse) -> list[int]:
    return [event.event_number for event in message.events]


async def test_events_that_wait_come_in_few_messages_without_a_gap(world: Watched) -> None:
    before = world.manager.queries.last_event
    world.store(2 * MAX_EVENTS + 7)
    watch = world.watch(before)
    found = [numbers(await anext(watch)) for _ in range(3)]
    assert [len(batch) for batch in found] == [MAX_EVENTS, MAX_EVENTS, 7]
    assert list(itertools.chain(*found)) == list(range(before + 1, world.manager.queries.last_event + 1))


async def test_an_event_that_comes_alone_is_sent_alone(world: Watched) -> None:
    watch = world.watch(world.manager.queries.last_event)
    for first in (1000, 2000):
        world.store(1, first)
        assert numbers(await anext(watch)) == [world.manager.queries.last_event]


async def test_equal_watchers_get_the_same_message_and_others_their_own(world: Watched) -> None:
    world.store(5)
    first, second, other = [await anext(world.watch(0, pool_id=pool)) for pool in ("", "", "e/0")]
    assert first is second
    assert other is not first
    assert other == first


async def test_a_message_with_prompts_is_not_kept(world: Watched) -> None:
    before = world.manager.queries.last_event
    world.store(1)
    shown = await anext(world.watch(before, include_token_ids=True))
    assert list(shown.events[0].block.token_ids) == list(range(BLOCK))
    assert await anext(world.watch(before, include_token_ids=True)) is not shown


async def test_a_filter_that_leaves_nothing_of_many_events_lets_others_run(world: Watched) -> None:
    world.store(2 * MAX_EVENTS)
    watch = world.watch(0, salt="nobody")
    # Of a filter by salt only the executor and its pool are left.
    assert numbers(await anext(watch)) == [1, 2]
    at_once(world.manager.operators.purge(BlockFilter(), validate_only=False))
    world.store(1, salt="nobody")
    assert numbers(await anext(watch)) == [world.manager.queries.last_event]


def test_a_message_with_long_blocks_stays_below_its_bound() -> None:
    tokens = packed_bytes(packed([1 << 20] * 20_000))
    events = [Event(number, EventKind.STORED, BlockView("e/0", 1, b"k", b"", tokens, 0, 35, 0)) for number in range(40)]
    messages = list(pack(Wanted("", None, token_ids=True, tenant=""), events, manager_epoch=1, snapshot=False))
    assert list(itertools.chain(*map(numbers, messages))) == list(range(40))
    assert len(messages) > 1
    assert all(message.ByteSize() < MAX_BYTES + 1000 for message in messages)
