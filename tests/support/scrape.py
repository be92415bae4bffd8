"""The present metrics of a cache manager, as Prometheus would get them."""

from cachemgr.manager import CacheManager
from cachemgr.telemetry.prometheus import families


def scraped(manager: CacheManager, name: str, **labels: str) -> float | None:
    """The value of a sample, None if there is no such sample."""
    samples = (sample for family in families(manager.queries) for sample in family.samples)
    found = [sample.value for sample in samples if sample.name == f"kvkeep_{name}" and sample.labels == labels]
    return found[0] if found else None
