"""A cache manager's counters for Prometheus, read at each scrape."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import Gauge
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from cachemgr.types import RemovalCause
from protos.rpc.logs import short_hash

if TYPE_CHECKING:
    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.blocks.tier import Tier
    from cachemgr.queries import Queries

LONGEST_STALL = Gauge(
    "kvkeep_cachemgr_longest_stall_seconds", "Longest time of the last minute without an answer to any call."
)
# A scrape during a longer stall gets the previous scrape's answer.
_SCRAPE_SECONDS = 5.0
_POOL, _TIER = ["pool"], ["pool", "tier"]


class CacheCollector(Collector):
    """Reads a manager's counters in the thread that made the collector, while scrapes come in another thread."""

    def __init__(self, queries: Queries) -> None:
        """Must be called in the event loop that runs the queries."""
        self._queries = queries
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._families: list[Metric] = []

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registering the collector reads no counter."""
        return []

    def collect(self) -> list[Metric]:
        if threading.get_ident() == self._thread:
            return list(families(self._queries))
        with contextlib.suppress(TimeoutError):
            self._families = asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(_SCRAPE_SECONDS)
        return self._families

    async def _read(self) -> list[Metric]:
        return list(families(self._queries))


def families(queries: Queries) -> Iterator[Metric]:
    """Yields all families of a manager's pools, tiers, salts and sequences, without pools of lost executors."""
    pools = queries.block_pools()
    yield from _pool_families(pools)
    yield from _tier_families(pools)
    yield from _lower_tier_families([pool for pool in pools if len(_tiers(pool)) > 1])
    yield from _salt_families(pools)
    evicting = CounterMetricFamily(
        "kvkeep_cachemgr_evicting_sequences", "Sequences that began to evict tokens.", labels=["kind"]
    )
    for kind, count in queries.evicted_sequences().items():
        evicting.add_metric([kind.name.lower()], count)
    yield evicting
    windows = CounterMetricFamily(
        "kvkeep_cachemgr_window_changes",
        "Longer adaptive windows that were granted, refused, taken back or returned.",
        labels=["change"],
    )
    for change, count in queries.window_changes().items():
        windows.add_metric([change.value], count)
    yield windows
    granted = GaugeMetricFamily(
        "kvkeep_cachemgr_window_granted_blocks", "Blocks granted to adaptive windows beyond their least length."
    )
    granted.add_metric([], sum(s.eviction.granted_blocks for s in queries.sequences() if s.eviction is not None))
    yield granted


def _tiers(pool: BlockPool) -> list[Tier]:
    return [tier for tier in pool.tiers if tier.size]


def _pool_families(pools: list[BlockPool]) -> Iterator[Metric]:
    total = GaugeMetricFamily("kvkeep_pool_blocks", "Usable blocks.", labels=_POOL)
    free = GaugeMetricFamily(
        "kvkeep_pool_free_blocks", "Blocks that can be allocated, including cached blocks.", labels=_POOL
    )
    used = GaugeMetricFamily("kvkeep_pool_used_blocks", "Blocks with at least one reference.", labels=_POOL)
    cached = GaugeMetricFamily("kvkeep_pool_cached_blocks", "Free blocks in the prefix cache.", labels=_POOL)
    evicted = CounterMetricFamily(
        "kvkeep_pool_evicted_blocks",
        "Device blocks dropped for other blocks, or because the pool shrank; offloaded blocks do not count.",
        labels=_POOL,
    )
    queried = CounterMetricFamily(
        "kvkeep_pool_queried_tokens", "Prompt tokens looked up in the prefix cache.", labels=_POOL
    )
    hit = CounterMetricFamily("kvkeep_pool_hit_tokens", "Prompt tokens with a prefix hit.", labels=_POOL)
    honoured = CounterMetricFamily(
        "kvkeep_pool_honoured_leases",
        "Leases that lasted until their end or until their holder replaced them.",
        labels=_POOL,
    )
    broken = CounterMetricFamily(
        "kvkeep_pool_broken_leases",
        "Leases that broke before their end: a block was lost, a rule or weights changed, or there were too many.",
        labels=_POOL,
    )
    for pool in pools:
        device, tokens = pool.device, pool.tokens.total
        for family, value in (
            (total, device.total),
            (free, device.free),
            (used, device.used),
            (cached, device.cached),
            (evicted, device.counters.evicted),
            (queried, tokens.queried),
            (hit, tokens.hit),
            (honoured, pool.honoured_leases),
            (broken, pool.broken_leases),
        ):
            family.add_metric([pool.pool_id], value)
    yield from (total, free, used, cached, evicted, queried, hit, honoured, broken)


def _tier_families(pools: list[BlockPool]) -> Iterator[Metric]:
    allocated = CounterMetricFamily(
        "kvkeep_tier_allocated_blocks", "Slots allocated on the device; 0 for lower tiers.", labels=_TIER
    )
    removed = CounterMetricFamily(
        "kvkeep_tier_removed_blocks", "Cached blocks removed from the index, by cause.", labels=[*_TIER, "cause"]
    )
    gaps = SummaryMetricFamily(
        "kvkeep_tier_idle_before_eviction_seconds",
        "Time from the last use of a block until it is evicted or offloaded, for every eighth slot.",
        labels=_TIER,
    )
    for pool in pools:
        for tier in _tiers(pool):
            labels, counts = [pool.pool_id, tier.kind.name.lower()], tier.counters
            allocated.add_metric(labels, counts.allocated)
            gaps.add_metric(labels, counts.timed_evictions, counts.idle_before_eviction_seconds)
            for cause in list(RemovalCause)[1:]:
                removed.add_metric([*labels, cause.name.lower()], counts.removed[cause])
    yield from (allocated, removed, gaps)


def _lower_tier_families(pools: list[BlockPool]) -> Iterator[Metric]:
    """Yields the families of pools with lower tiers."""
    total = GaugeMetricFamily("kvkeep_tier_blocks", "Usable slots of a tier.", labels=_TIER)
    used = GaugeMetricFamily(
        "kvkeep_tier_used_blocks",
        "Slots that copies, holds or pins use; on the device, also slots that sequences use.",
        labels=_TIER,
    )
    cached = GaugeMetricFamily(
        "kvkeep_tier_cached_blocks", "Free slots with a block of the prefix cache.", labels=_TIER
    )
    offloaded = CounterMetricFamily("kvkeep_tier_offloaded_blocks", "Blocks offloaded from this tier.", labels=_TIER)
    onloaded = CounterMetricFamily(
        "kvkeep_tier_onloaded_blocks", "Blocks onloaded from this tier to the device.", labels=_TIER
    )
    written_through = CounterMetricFamily(
        "kvkeep_tier_written_through_blocks", "Device blocks copied to this tier by write-through.", labels=_TIER
    )
    restored = CounterMetricFamily(
        "kvkeep_tier_restored_blocks", "Blocks of this tier restored after a restart.", labels=_TIER
    )
    failed = CounterMetricFamily("kvkeep_tier_failed_copies", "Failed copies from this tier.", labels=_TIER)
    copies = GaugeMetricFamily(
        "kvkeep_pool_written_through_blocks", "Device blocks with a write-through copy in the next tier.", labels=_POOL
    )
    for pool in pools:
        copies.add_metric([pool.pool_id], len(pool.write_through.copies))
        for tier in _tiers(pool):
            counts = tier.counters
            for family, value in (
                (total, tier.total),
                (used, tier.used),
                (cached, tier.cached),
                (offloaded, counts.offloaded),
                (onloaded, counts.onloaded),
                (written_through, counts.written_through),
                (restored, counts.restored),
                (failed, counts.failed_copies),
            ):
                family.add_metric([pool.pool_id, tier.kind.name.lower()], value)
    yield from (total, used, cached, offloaded, onloaded, written_through, restored, failed, copies)


def _salt_families(pools: list[BlockPool]) -> Iterator[Metric]:
    # Hashed, since knowing a salt gives access to everything cached under it.
    labels = [*_POOL, "salt_sha256"]
    queried = CounterMetricFamily(
        "kvkeep_salt_queried_tokens", "Prompt tokens looked up in the prefix cache, by salt.", labels=labels
    )
    hit = CounterMetricFamily("kvkeep_salt_hit_tokens", "Prompt tokens with a prefix hit, by salt.", labels=labels)
    for pool in pools:
        counts = {"" if salt is None else short_hash(salt): count for salt, count in pool.tokens.salts.items()}
        for salt, count in (counts | {"others": pool.tokens.others}).items():
            queried.add_metric([pool.pool_id, salt], count.queried)
            hit.add_metric([pool.pool_id, salt], count.hit)
    yield from (queried, hit)


class Stalls:
    """The longest stall of the last minute, kept for the current half minute and the previous one."""

    _PERIOD_SECONDS = 30.0

    def __init__(self, now: float) -> None:
        self._begun = now
        self._longest = self._before = 0.0

    def note(self, now: float, seconds: float) -> None:
        """Notes that the event loop was late by N = `seconds` seconds."""
        if now - self._begun >= self._PERIOD_SECONDS:
            is_next = now - self._begun < 2 * self._PERIOD_SECONDS
            self._before, self._longest, self._begun = self._longest if is_next else 0.0, 0.0, now
        self._longest = max(self._longest, seconds)
        LONGEST_STALL.set(max(self._longest, self._before))
