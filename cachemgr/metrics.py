"""Metrics of the pools, brought up to date by the process's housekeeping."""

from collections.abc import Iterable, Mapping

from prometheus_client import Counter, Gauge

from cachemgr.api import PoolView
from protos.kvcache.eviction import Kind

_POOL = ["pool"]
TOTAL = Gauge("kvkeep_pool_blocks", "Usable blocks.", _POOL)
FREE = Gauge("kvkeep_pool_free_blocks", "Blocks that may be taken, cached ones among them.", _POOL)
USED = Gauge("kvkeep_pool_used_blocks", "Blocks with at least one reference.", _POOL)
CACHED = Gauge("kvkeep_pool_cached_blocks", "Free blocks that can still be matched.", _POOL)
EVICTED = Counter("kvkeep_pool_evicted_blocks", "Cached blocks lost to make room.", _POOL)
QUERIED = Counter("kvkeep_pool_queried_tokens", "Prompt tokens that were looked up.", _POOL)
HIT = Counter("kvkeep_pool_hit_tokens", "Prompt tokens that were found.", _POOL)
EVICTING = Counter("kvkeep_cachemgr_evicting_sequences", "Sequences that began to evict tokens.", ["kind"])


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


class EvictionMetrics:
    """The same for sequences that evict tokens."""

    def __init__(self) -> None:
        self._counted: dict[Kind, int] = {}

    def update(self, sequences: Mapping[Kind, int]) -> None:
        """Counts those that have come since."""
        for kind, count in sequences.items():
            EVICTING.labels(kind.name.lower()).inc(count - self._counted.get(kind, 0))
        self._counted = dict(sequences)
