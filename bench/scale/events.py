"""The cost of watchers of events for the cache manager, with all their messages but without the network."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

from bench.scale.row import Row
from bench.scale.stalls import BLOCK, Cache
from cachemgr.rpc.event_feed import EventFeed
from cachemgr.rpc.event_service import CacheEventService
from cachemgr.rpc.mutations import ManagerClock, Mutations, ServiceContext
from protos.kvcache.v1 import kvcache_pb2 as pb

EVENTS, PROMPT_BLOCKS = 50_000, 50


def rows(blocks: int) -> Iterator[Row]:
    """The rows of this module."""
    cache = Cache(EVENTS)
    begin = cache.manager.queries.last_event
    for number in range(EVENTS // PROMPT_BLOCKS):
        cache.run(number * PROMPT_BLOCKS * BLOCK, PROMPT_BLOCKS * BLOCK)
    for watchers in (1, 4, 16):
        seconds, messages = asyncio.run(_watched(cache, begin, watchers))
        yield Row(f"events for {watchers} watchers: each, for all of them", seconds / EVENTS * 1e6, "µs")
        yield Row(f"events for {watchers} watchers: in a message", EVENTS * watchers / messages, "events")


async def _watched(cache: Cache, begin: int, watchers: int) -> tuple[float, int]:
    """Process time until all watchers have all events, and the messages that the watchers got."""
    manager = cache.manager
    context = ServiceContext(Mutations(manager, ManagerClock(lambda: 0.0)), EventFeed(manager.queries))
    service, last = CacheEventService(context), manager.queries.last_event

    async def watch() -> int:
        stream: Any = service.WatchEvents(pb.WatchEventsRequest(after_event_number=begin), None)
        messages = 0
        async for message in stream:
            messages += 1
            message.SerializeToString()
            # Other tasks get their turn, as they do while the network sends.
            await asyncio.sleep(0)
            if message.events[-1].event_number == last:
                break
        await stream.aclose()
        return messages

    begun = time.process_time()
    counts = await asyncio.gather(*(watch() for _ in range(watchers)))
    return time.process_time() - begun, sum(counts)
