"""The needs of a fleet of many engines and shards with millions of cached blocks, measured and computed.

The measured view really has this size. Rates and times of the whole fleet are computed from the cost of an event, a
block and a decision: `computed` has the formulas.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import psutil

from bench.result import percentile
from bench.router.caching import caching_manager
from bench.router.decision import Store, decisions, in_tiers, nowhere, on_all, on_one, shown
from bench.router.events import PROMPT_BLOCKS, Watcher, steady, taking
from bench.router.made import BLOCK, Caches, keys_of, prompt
from bench.router.made import PROMPT_BLOCKS as LONG_PROMPT_BLOCKS
from bench.router.size import chains
from bench.scale.row import Row
from protos.kvcache.v1 import kvcache_pb2 as pb
from tests.support.managers import sync_redis

PROMPTS = 24
SHORT_PROMPT_BLOCKS = 64
# Bytes of a key in a message.
KEY_BYTES = 8
CASES: dict[str, Store] = {
    "nothing cached": nowhere,
    "all on one engine": on_one,
    "all on every engine": on_all,
    "a beginning on every engine, in three tiers": in_tiers,
}


class Size(NamedTuple):
    """A fleet. blocks: different blocks of all engines. events: per shard and second."""

    blocks: int
    engines: int
    shards: int
    events: int


@dataclass(frozen=True)
class Costs:
    """The cost of each item, in the units of UNITS; times are process times of a router.

    copies: engines that have a block, on average. decision_engine: of a whole decision, per engine. decision_block,
    hashing: of a decision, per block of the prompt. snapshot_block: of a snapshot, per engine that has the block.
    commands: Redis commands per event. indexed: further commands per event with the index by key.
    """

    block_bytes: float
    copies: float
    decision_engine: float
    decision_block: float
    hashing: float
    event: float
    event_bytes: float
    snapshot_block: float
    commands: float
    indexed: float


UNITS = {
    "block_bytes": "bytes",
    "copies": "engines",
    "decision_engine": "µs",
    "decision_block": "µs",
    "hashing": "µs",
    "event": "µs",
    "event_bytes": "bytes",
    "snapshot_block": "µs",
    "commands": "",
    "indexed": "",
}


def rows(size: Size) -> Iterator[Row]:
    """The rows of this module."""
    of_view = yield from view(size)
    messages, commands = _shard(size)
    _, indexed = _shard(size, cachemgr_key_index=1)
    taken = {row.name: row.value for row in taking(messages, size.blocks, size.engines)}
    costs = Costs(
        event=taken["taking an event in, for the router"],
        event_bytes=taken["an event over the network"],
        snapshot_block=taken["taking a block of a snapshot in, for the router"],
        commands=commands,
        indexed=indexed - commands,
        **of_view,
    )
    for name, value in vars(costs).items():
        yield Row(f"cost: {name}", value, UNITS[name])
    yield from computed(size, costs)


def view(size: Size) -> Generator[Row, None, dict[str, float]]:
    """The memory of a view of this size, and the resulting costs. Starts no process."""
    attempts = [prompt(number) for number in range(PROMPTS)]
    Caches(2)
    gc.collect()
    before = psutil.Process().memory_info().rss
    caches, begun = Caches(size.engines, size.shards), time.process_time()
    chains(caches, size.blocks)
    seconds = time.process_time() - begun
    gc.collect()
    resident = psutil.Process().memory_info().rss - before
    different, copies = len(caches.view), caches.stored / len(caches.view)
    yield Row(f"measured: blocks of the view, {size.engines} engines, {size.shards} shards", different, "blocks")
    yield Row("measured: engines that have a block", copies, "engines")
    yield Row("measured: bytes for a block, resident", resident / different, "bytes", 200)
    yield Row("measured: different masks", len(caches.view._masks), "masks")
    yield Row("measured: longest turn for a message", caches.longest * 1e3, "ms")
    yield Row("measured: storing a block of an engine", seconds / caches.stored * 1e6, "µs")
    tokens = SHORT_PROMPT_BLOCKS * BLOCK
    found, _ = decisions(caches, [prompt(PROMPTS + number, tokens) for number in range(PROMPTS)])
    short = percentile(found, 0.5)
    yield from shown(f"measured: decision, {tokens:,} tokens, nothing cached", found, None)
    for name, store in CASES.items():
        for number, attempt in enumerate(attempts):
            store(caches, number, keys_of(attempt))
        found, hashed = decisions(caches, attempts)
        yield from shown(f"measured: decision, {name}", found, None)
    yield from shown("measured: hashing, beside each", hashed, None)
    yield from _loss(caches)
    return {
        "block_bytes": resident / different,
        "copies": copies,
        "decision_engine": short / size.engines * 1e6,
        # The last case takes longest.
        "decision_block": (percentile(found, 0.5) - short) / LONG_PROMPT_BLOCKS * 1e6,
        "hashing": percentile(hashed, 0.5) / LONG_PROMPT_BLOCKS * 1e6,
    }


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


def _shard(size: Size, **settings: object) -> tuple[list[pb.WatchEventsResponse], float]:
    """Messages of a cache manager with its share of the engines, and Redis commands for an event of these engines."""
    engines = size.engines // size.shards
    with caching_manager(engines, 10 * PROMPT_BLOCKS, with_redis=True, **settings) as manager:
        numbers = count()
        for _ in range(11 * engines):
            manager.cache(next(numbers), PROMPT_BLOCKS)
        redis = sync_redis(manager.redis_url)
        watcher = Watcher(manager.events)
        time.sleep(1)
        before = redis.info("stats")["total_commands_processed"]
        steady(manager, numbers, size.events)
        time.sleep(1)
        commands = redis.info("stats")["total_commands_processed"] - before - 1
        messages = watcher.stop()
        redis.close()
    return messages, commands / (messages[-1].last_event_number - messages[0].last_event_number)


def computed(size: Size, costs: Costs) -> Iterator[Row]:
    """The needs of the fleet, computed from the costs."""
    events, stored = size.events * size.shards, size.blocks * costs.copies
    yield Row("computed: memory of the view, for each router", size.blocks * costs.block_bytes / 1e9, "GB")
    for blocks in (SHORT_PROMPT_BLOCKS, LONG_PROMPT_BLOCKS):
        decision = size.engines * costs.decision_engine + blocks * (costs.decision_block + costs.hashing)
        name = f"prompts of {blocks * BLOCK:,} tokens"
        yield Row(f"computed: decision with hashing, {name}", decision / 1e3, "ms")
        yield Row(f"computed: {name} that fill a core of a router", 1e6 / decision, "1/s")
    yield Row(f"computed: a router's share of a core for {events:,} events per second", events * costs.event / 1e4, "%")
    yield Row("computed: their bandwidth, for each router", events * costs.event_bytes / 1e6, "MB/s")
    yield Row("computed: snapshots of all shards, for a router that starts", stored * costs.snapshot_block / 1e6, "s")
    yield Row("computed: their messages", stored * KEY_BYTES / 1e6, "MB")
    yield Row("computed: commands of Redis per second", events * costs.commands, "1/s")
    yield Row("computed: the index by key in addition", events * costs.indexed, "1/s")
