"""Metrics of the pools, brought up to date by the process's housekeeping."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from cachemgr.blocks.tier import Tier
from cachemgr.telemetry.counters import TokenMeter
from cachemgr.types import PoolView, RemovalCause
from protos.kvcache.eviction import Kind
from protos.rpc.logs import short_hash

_POOL = ["pool"]
TOTAL = Gauge("kvkeep_pool_blocks", "Usable blocks.", _POOL)
FREE = Gauge("kvkeep_pool_free_blocks", "Blocks that may be taken, cached ones among them.", _POOL)
USED = Gauge("kvkeep_pool_used_blocks", "Blocks with at least one reference.", _POOL)
CACHED = Gauge("kvkeep_pool_cached_blocks", "Free blocks that can still be matched.", _POOL)
EVICTED = Counter("kvkeep_pool_evicted_blocks", "Cached blocks lost to make room.", _POOL)
QUERIED = Counter("kvkeep_pool_queried_tokens", "Prompt tokens that were looked up.", _POOL)
HIT = Counter("kvkeep_pool_hit_tokens", "Prompt tokens that were found.", _POOL)
_TIER = ["pool", "tier"]
TIER_TOTAL = Gauge("kvkeep_tier_blocks", "Usable slots of a tier.", _TIER)
TIER_USED = Gauge("kvkeep_tier_used_blocks", "Slots under a copy, a hold or a pin; on the device also in use.", _TIER)
TIER_CACHED = Gauge("kvkeep_tier_cached_blocks", "Free slots with a block that can be matched.", _TIER)
BACKUPS = Gauge("kvkeep_pool_backup_blocks", "Blocks of the device that lie one tier below, too.", _POOL)
OFFLOADED = Counter("kvkeep_tier_offloaded_blocks", "Blocks that went from here to a lower tier.", _TIER)
ONBOARDED = Counter("kvkeep_tier_onboarded_blocks", "Blocks copied from here to the device.", _TIER)
BACKED_UP = Counter("kvkeep_tier_backed_up_blocks", "Blocks copied here in the background, to be in both.", _TIER)
RESTORED = Counter("kvkeep_tier_restored_blocks", "Blocks that were here still after a restart.", _TIER)
FAILED = Counter("kvkeep_tier_failed_copies", "Copies from here that failed.", _TIER)
EVICTING = Counter("kvkeep_cachemgr_evicting_sequences", "Sequences that began to evict tokens.", ["kind"])
LONGEST_STALL = Gauge(
    "kvkeep_cachemgr_longest_stall_seconds", "Longest time in the last minute in which no call was answered."
)


_TIER_GAUGES = (TIER_TOTAL, TIER_USED, TIER_CACHED)
_TIER_COUNTERS = (OFFLOADED, ONBOARDED, BACKED_UP, RESTORED, FAILED)


class PoolMetrics:
    """Turns what the manager counts since its start into what Prometheus wants."""

    def __init__(self) -> None:
        self._counted: dict[str, tuple[int, int, int]] = {}

    def update(self, pools: Iterable[PoolView]) -> None:
        """Sets every pool's metrics; those of a pool that is gone disappear."""
        present = set()
        for pool in pools:
            present.add(pool.pool_id)
            for gauge, value in (
                (TOTAL, pool.total_blocks),
                (FREE, pool.free_blocks),
                (USED, pool.used_blocks),
                (CACHED, pool.cached_blocks),
            ):
                gauge.labels(pool.pool_id).set(value)
            counts = (pool.evicted_blocks, pool.queried_tokens, pool.hit_tokens)
            before = self._counted.get(pool.pool_id, (0, 0, 0))
            for counter, count, last in zip((EVICTED, QUERIED, HIT), counts, before, strict=True):
                # A pool registered anew counts from zero again.
                counter.labels(pool.pool_id).inc(count - last if count >= last else count)
            self._counted[pool.pool_id] = counts
        for gone in self._counted.keys() - present:
            del self._counted[gone]
            for metric in (TOTAL, FREE, USED, CACHED, EVICTED, QUERIED, HIT):
                metric.remove(gone)


class TierMetrics:
    """The same for the tiers of pools that have several."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, str], tuple[int, ...]] = {}

    def update(self, pools: Mapping[str, tuple[Sequence[Tier], int]]) -> None:
        """Takes the tiers of each pool and how many backups it has; those of a pool that is gone disappear."""
        present = set()
        for pool_id, (tiers, backups) in pools.items():
            if len(tiers) < 2:
                continue
            BACKUPS.labels(pool_id).set(backups)
            for tier in tiers:
                labels = (pool_id, tier.kind.name.lower())
                present.add(labels)
                for gauge, value in zip(_TIER_GAUGES, (tier.total, tier.used, tier.cached), strict=True):
                    gauge.labels(*labels).set(value)
                of = tier.counters
                counts = (of.offloaded, of.onboarded, of.backed_up, of.restored, of.failed_copies)
                before = self._counted.get(labels, (0,) * len(counts))
                for counter, count, last in zip(_TIER_COUNTERS, counts, before, strict=True):
                    counter.labels(*labels).inc(count - last if count >= last else count)
                self._counted[labels] = counts
        for gone in self._counted.keys() - present:
            del self._counted[gone]
            for metric in (*_TIER_GAUGES, *_TIER_COUNTERS):
                metric.remove(*gone)
            if gone[1] == "device":
                BACKUPS.remove(gone[0])


class Stalls:
    """The longest stall of the last minute: kept for the half minute that runs and for the one before."""

    _PERIOD_SECONDS = 30.0

    def __init__(self, now: float) -> None:
        self._begun = now
        self._longest = self._before = 0.0

    def note(self, now: float, seconds: float) -> None:
        """The event loop was late by so many seconds."""
        if now - self._begun >= self._PERIOD_SECONDS:
            is_next = now - self._begun < 2 * self._PERIOD_SECONDS
            self._before, self._longest, self._begun = self._longest if is_next else 0.0, 0.0, now
        self._longest = max(self._longest, seconds)
        LONGEST_STALL.set(max(self._longest, self._before))


class EvictionMetrics:
    """The same for sequences that evict tokens."""

    def __init__(self) -> None:
        self._counted: dict[Kind, int] = {}

    def update(self, sequences: Mapping[Kind, int]) -> None:
        """Counts those that have come since."""
        for kind, count in sequences.items():
            EVICTING.labels(kind.name.lower()).inc(count - self._counted.get(kind, 0))
        self._counted = dict(sequences)


class PoolCounts(NamedTuple):
    """What a pool counts; leases that ended as they should, and that broke."""

    tiers: Sequence[Tier]
    tokens: TokenMeter
    leases: tuple[int, int]


class CountedMetrics(Collector):
    """What pools count by themselves, as it was at the last update: Prometheus asks in a thread of its own."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._families: list[Metric] = []
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The families."""
        return iter(self._families)

    def update(self, pools: Mapping[str, PoolCounts]) -> None:
        """Takes what all pools have counted."""
        allocated = CounterMetricFamily("kvkeep_tier_allocated_blocks", "Slots given to blocks.", labels=_TIER)
        removed = CounterMetricFamily(
            "kvkeep_tier_removed_blocks", "Cached blocks that went, by why.", labels=[*_TIER, "cause"]
        )
        gaps = SummaryMetricFamily(
            "kvkeep_tier_reuse_gap_seconds", "From the last use of an evicted block to its end.", labels=_TIER
        )
        honoured = CounterMetricFamily("kvkeep_pool_honoured_leases", "Leases that ended in time.", labels=_POOL)
        broken = CounterMetricFamily("kvkeep_pool_broken_leases", "Leases whose block was lost before.", labels=_POOL)
        # Who knows a salt may use what is cached under it.
        salts = [*_POOL, "salt_sha256"]
        queried = CounterMetricFamily("kvkeep_salt_queried_tokens", "Prompt tokens looked up, by salt.", labels=salts)
        hit = CounterMetricFamily("kvkeep_salt_hit_tokens", "Of these, tokens that were found.", labels=salts)
        for pool_id, counts in pools.items():
            for tier in counts.tiers:
                labels, of = [pool_id, tier.kind.name.lower()], tier.counters
                allocated.add_metric(labels, of.allocated)
                gaps.add_metric(labels, of.reuse_gaps, of.reuse_gap_seconds)
                for cause in list(RemovalCause)[1:]:
                    removed.add_metric([*labels, cause.name.lower()], of.removed[cause])
            for family, count in zip((honoured, broken), counts.leases, strict=True):
                family.add_metric([pool_id], count)
            named = {"" if salt is None else short_hash(salt): found for salt, found in counts.tokens.salts.items()}
            for salt, found in (named | {"others": counts.tokens.others}).items():
                queried.add_metric([pool_id, salt], found.queried)
                hit.add_metric([pool_id, salt], found.hit)
        self._families = [allocated, removed, gaps, honoured, broken, queried, hit]


COUNTED = CountedMetrics()
