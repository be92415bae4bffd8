"""The metrics of the executor."""

from collections.abc import Callable, Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)

STEP_SECONDS = Histogram("kvkeep_executor_step_seconds", "Time of a step's work on the device.", buckets=_BUCKETS)
IDLE_SECONDS = Counter(
    "kvkeep_executor_idle_seconds", "Idle time of the device between steps, and while steps waited for copies."
)
TOKENS = Counter("kvkeep_executor_tokens", "Tokens computed.")
SAMPLED = Counter("kvkeep_executor_sampled_tokens", "Tokens sampled.")
DRAFTED = Counter("kvkeep_executor_drafted_tokens", "Drafted tokens computed.", ["method"])
ACCEPTED = Counter("kvkeep_executor_accepted_drafts", "Drafted tokens that were accepted.", ["method"])
FAILED_STEPS = Counter("kvkeep_executor_failed_steps", "Failed steps.")

COPIED_BYTES = Counter("kvkeep_executor_copied_bytes", "Bytes copied between tiers.", ["source", "target"])
FAILED_COPIES = Counter("kvkeep_executor_failed_copies", "Failed copies between tiers.", ["source", "target"])
CHECKSUM_MISMATCHES = Counter("kvkeep_executor_checksum_mismatches", "Blocks whose checksum did not match.", ["tier"])
PENDING_COPIES = Gauge("kvkeep_executor_pending_copies", "Copies between tiers in flight.")
COPY_WAIT_SECONDS = Counter("kvkeep_executor_copy_wait_seconds", "Time in which steps waited for copies between tiers.")

WEIGHT_BYTES = Gauge("kvkeep_executor_weight_bytes", "Bytes of the model's matrices in compiled CPU code.")


class KindSeconds(Collector):
    """Time of steps by kind of work, read when Prometheus asks: steps pay nothing for this metric."""

    def __init__(self, seconds: Callable[[], dict[str, float]], registry: CollectorRegistry = REGISTRY) -> None:
        self._seconds = seconds
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The counters, one per kind."""
        family = CounterMetricFamily(
            "kvkeep_executor_kind_seconds", "Time of steps in compiled CPU code by kind of work.", labels=["kind"]
        )
        for kind, seconds in self._seconds().items():
            family.add_metric([kind], seconds)
        yield family
