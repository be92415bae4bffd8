"""Metrics of the router, beside those of its requests."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "kvkeep_router"
_DECISION_BUCKETS = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 0.1)


class RouterMetrics:
    """Written on the asyncio loop only."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)

        self.requests = counter("routed_requests", "Samples sent to engines, by engine.", "engine")
        self.routed_tokens = counter("routed_tokens", "Prompt tokens of samples sent to engines.")
        self.expected_tokens = counter(
            "expected_cached_tokens", "Routed prompt tokens that were expected to be cached."
        )
        self.regret_tokens = counter("regret_tokens", "Cached tokens that were expected and not found.")
        self.continued = counter("continued_requests", "Samples that were started again on another engine.")
        self.lookups = counter(
            "index_lookups", "Prompts looked up in the index by key, by whether an engine had some of it.", "result"
        )
        self.decision = Histogram(
            f"{PREFIX}_decision_seconds", "Time to choose an engine.", buckets=_DECISION_BUCKETS, registry=registry
        )
        engines = Gauge(
            f"{PREFIX}_engines", "Engines, by state: ready, away or other model.", ["state"], registry=registry
        )
        # Present from the start: a router that has not found any engine yet has no ready engine.
        self.ready, self.away, self.other_model = map(engines.labels, ("ready", "away", "other model"))
        self.incomplete_views = Gauge(
            f"{PREFIX}_incomplete_views",
            "Engines that answer and whose cached blocks the view does not know.",
            registry=registry,
        )
        self.blocks = Gauge(f"{PREFIX}_view_blocks", "Blocks that the view of the caches knows.", registry=registry)
