"""What a fleet of 256 engines with ten million cached blocks on 16 shards needs: measured, and computed from that.

The view is really that large; rates and times of a whole fleet are computed from the cost of one event and one block.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from itertools import count

import psutil

from bench.router.caching import caching_manager
from bench.router.decision import Store, decisions, in_tiers, nowhere, on_all, on_one, shown
from bench.router.events import PROMPT_BLOCKS, RATE, Watcher, steady, taking
from bench.router.made import Caches, keys_of, prompt
from bench.router.size import chains
from bench.scale.row import Row
from tests.support.managers import sync_redis

ENGINES, SHARDS, BLOCKS, PROMPTS = 256, 16, 10_000_000, 24
# Of a key in a message.
KEY_BYTES = 8
# What the fleet does in a second, all shards together.
EVENTS = RATE * SHARDS
CASES: dict[str, Store] = {
    "nothing cached": nowhere,
    "all on one engine": on_one,
    "all on every engine": on_all,
    "a beginning on every engine, in three tiers": in_tiers,
}


def rows(blocks: int) -> Iterator[Row]:
    """The rows of this module."""
    blocks *= 10
    attempts = [prompt(number) for number in range(PROMPTS)]
    Caches(2)
    gc.collect()
    before = psutil.Process().memory_info().rss
    caches, begun = Caches(ENGINES, SHARDS), time.process_time()
    chains(caches, blocks)
    seconds = time.process_time() - begun
    gc.collect()
    resident = psutil.Process().memory_info().rss - before
    yield Row("measured: blocks of the view, 256 engines, 16 shards", len(caches.view), "blocks")
    yield Row("measured: engines that have a block", caches.stored / len(caches.view), "engines")
    yield Row("measured: bytes for a block, resident", resident / len(caches.view), "bytes", 200)
    yield Row("measured: different masks", len(caches.view._masks), "masks")
    yield Row("measured: longest turn for a message", caches.longest * 1e3, "ms")
    yield Row("measured: storing a block of an engine", seconds / caches.stored * 1e6, "µs")
    for name, store in CASES.items():
        for number, attempt in enumerate(attempts):
            store(caches, number, keys_of(attempt))
        taken, hashed = decisions(caches, attempts)
        yield from shown(f"measured: decision, {name}", taken, None)
    yield from shown("measured: hashing, beside each", hashed, None)
    yield from _loss(caches)
    del caches
    yield from _fleet(blocks)


def _loss(caches: Caches) -> Iterator[Row]:
    """One of the engines is lost."""
    caches.lose(0)
    begun = time.process_time()

    async def sweep() -> float:
        longest, sweeping = 0.0, asyncio.create_task(caches.view.sweep())
        while not sweeping.done():
            before = time.process_time()
            await asyncio.sleep(0)
            longest = max(longest, time.process_time() - before)
        return longest

    longest = asyncio.run(sweep())
    yield Row("measured: clearing the blocks of a lost engine", (time.process_time() - begun) * 1e3, "ms")
    yield Row("measured: of it the longest turn", longest * 1e3, "ms")


def _fleet(blocks: int) -> Iterator[Row]:
    """What follows from the cost of one event and one block."""
    with caching_manager(ENGINES // SHARDS, 10 * PROMPT_BLOCKS, with_redis=True) as manager:
        numbers = count()
        for _ in range(11 * ENGINES // SHARDS):
            manager.cache(next(numbers), PROMPT_BLOCKS)
        redis = sync_redis(manager.redis_url)
        watcher = Watcher(manager.events)
        time.sleep(1)
        before = redis.info("stats")["total_commands_processed"]
        steady(manager, numbers)
        time.sleep(1)
        commands = redis.info("stats")["total_commands_processed"] - before - 1
        messages = watcher.stop()
        redis.close()
    events = messages[-1].last_event_number - messages[0].last_event_number
    costs = {row.name: row.value for row in taking(messages, 10 * blocks // SHARDS)}
    event, size = costs["taking an event in, for the router"], costs["an event over the network"]
    block = costs["taking a block of a snapshot in, for the router"]
    yield Row("measured: commands of Redis for an event", commands / events, "")
    yield Row(f"computed: a router's share of a core for {EVENTS:,} events per second", event * EVENTS / 1e4, "%")
    yield Row("computed: their bandwidth, for each router", size * EVENTS / 1e6, "MB/s")
    yield Row("computed: snapshots of ten million blocks, for a router that starts", block * blocks / 1e6, "s")
    yield Row("computed: their messages", blocks * KEY_BYTES / 1e6, "MB")
    yield Row("computed: commands of Redis per second", commands / events * EVENTS, "1/s")
