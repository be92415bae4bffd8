"""Time until the view of a router that has just started is complete, with a real cache manager's events over gRPC.

The router does nothing else. Times on the clock show the duration, including other work of the machine; process times
show the cost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from bench.router.caching import CachingManager, caching_manager
from bench.scale.row import Row
from protos.rpc.security import PLAIN
from scheduler.router.view import CacheView, ViewFeed

ENGINES, PROMPT_BLOCKS = 16, 250
TARGET_SECONDS = 1.0
RUNS = 3


def rows(blocks: int) -> Iterator[Row]:
    """The rows of this module."""
    for count in sorted({min(blocks, 100_000), blocks}):
        with caching_manager(ENGINES, -(-count // ENGINES) + PROMPT_BLOCKS) as manager:
            for number in range(count // PROMPT_BLOCKS):
                manager.cache(number, PROMPT_BLOCKS)
            runs = [asyncio.run(_follow(manager, count)) for _ in range(RUNS)]
        least = min(runs)
        name = f"view of {count:,} blocks"
        yield Row(f"{name}: until it is complete, best of {RUNS}", least[0], "s", TARGET_SECONDS * count / 100_000)
        yield Row(f"{name}: until it is complete, worst of {RUNS}", max(runs)[0], "s")
        for at, what in ((1, "process time of the router"), (2, "process time of the cache manager")):
            yield Row(f"{name}: {what} for each block", min(run[at] for run in runs) / count * 1e6, "µs")
        yield Row(f"{name}: longest stall of the router, least of {RUNS}", min(run[3] for run in runs) * 1e3, "ms")


async def _follow(manager: CachingManager, blocks: int) -> tuple[float, float, float, float]:
    """Seconds until the view is complete, process times of router and cache manager, and the longest stall."""
    view, longest = CacheView(), 0.0
    processor, process, begun = manager.processor(), time.process_time(), time.perf_counter()
    feed = asyncio.create_task(ViewFeed(view, manager.events, PLAIN).run())
    while not view.executors:
        before = time.process_time()
        await asyncio.sleep(0.0002)
        longest = max(longest, time.process_time() - before)
    taken = time.perf_counter() - begun, time.process_time() - process, manager.processor() - processor
    feed.cancel()
    await asyncio.wait([feed])
    assert blocks * 0.99 <= len(view) <= blocks
    return *taken, longest
