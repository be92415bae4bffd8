"""Bytes of the view for each block, of a million blocks on 16 engines.

Each layout is measured in a separate process, twice: memory that Python and numpy have allocated, and resident
memory. Keys come out of messages, as they do in a router.
"""

from __future__ import annotations

import gc
import multiprocessing
import tracemalloc
from collections.abc import Callable, Iterator
from random import Random

import psutil

from bench.router.made import Caches, other_keys
from bench.scale.row import Row

ENGINES, TARGET_BYTES = 16, 200
# Blocks of a prompt.
CHAIN = 250


def alone(caches: Caches, blocks: int) -> None:
    """Each block is on one engine."""
    engines = len(caches.names)
    for engine in range(engines):
        caches.store(engine, 1, other_keys(engine, blocks // engines))


def chains(caches: Caches, blocks: int) -> None:
    """Prompts on up to eight engines, each with a beginning of a different length in each of three tiers."""
    random, engines = Random(len(caches.view)), len(caches.names)
    for _ in range(blocks // CHAIN):
        keys = other_keys(random.getrandbits(64), CHAIN)
        caches.store(random.randrange(engines), 1, keys)
        for engine in random.sample(range(engines), min(engines, random.randrange(8))):
            ends = [0, *sorted(random.choices(range(CHAIN + 1), k=3))]
            for tier in (1, 2, 3):
                caches.store(engine, tier, keys[ends[tier - 1] : ends[tier]])


def scattered(caches: Caches, blocks: int) -> None:
    """Each block is on eight random engines, a layout that no prefix cache produces."""
    random, engines = Random(1), len(caches.names)
    keys = other_keys(0, blocks)
    on: list[list[int]] = [[] for _ in range(engines)]
    for key in keys:
        for engine in random.sample(range(engines), 8):
            on[engine].append(key)
    for engine, found in enumerate(on):
        caches.store(engine, 1, found)


LAYOUTS: dict[str, tuple[Callable[[Caches, int], None], float | None]] = {
    "each block on one engine": (alone, TARGET_BYTES),
    "prompts on up to eight engines, in three tiers": (chains, TARGET_BYTES),
    "each block on any eight engines": (scattered, None),
}


def rows(blocks: int) -> Iterator[Row]:
    """The rows of this module."""
    yield from sizes(blocks, ENGINES, 1)


def sizes(blocks: int, engines: int, shards: int) -> Iterator[Row]:
    """Bytes for each block by layout."""
    for name, (_, target) in LAYOUTS.items():
        for traced, how in ((True, "allocated"), (False, "resident")):
            if target is None and not traced:
                # Memory for making this layout is resident, too.
                continue
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found = pool.apply(_measure, (name, blocks, engines, shards, traced))
            yield Row(f"bytes for a block, {name}, {how}", found, "bytes", target)


def _measure(name: str, blocks: int, engines: int, shards: int, traced: bool) -> float:
    store, _ = LAYOUTS[name]
    # Everything that is loaded or made once exists before the measurement.
    store(Caches(engines, shards), 10 * CHAIN)
    gc.collect()
    if traced:
        tracemalloc.start()
    before = psutil.Process().memory_info().rss
    caches = Caches(engines, shards)
    store(caches, blocks)
    gc.collect()
    size = tracemalloc.get_traced_memory()[0] if traced else psutil.Process().memory_info().rss - before
    return size / len(caches.view)
