"""Metrics of steps and requests, for Prometheus and for benchmarks."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_STEP_BUCKETS = (1e-5, 3e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1, 5)
_LATENCY_BUCKETS = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


@dataclass(slots=True)
class StepTiming:
    """Times of one step, in seconds."""

    planning: float = 0.0
    sending: float = 0.0
    # Time in which no live sequence could compute for want of blocks.
    waiting_for_cachemgr: float = 0.0
    waiting_for_executor: float = 0.0
    # Idle time of the device before the step, as reported by the executor.
    executor_idle: float = 0.0


class StepTimes:
    """The last steps' timings, and histograms over all of them. Written by the step loop only."""

    def __init__(self, registry: CollectorRegistry = REGISTRY, kept: int = 4096) -> None:
        self.last: deque[StepTiming] = deque(maxlen=kept)
        self.steps = 0

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"kvkeep_scheduler_step_{name}_seconds", text, buckets=_STEP_BUCKETS, registry=registry)

        self._planning = histogram("planning", "Time to plan a step.")
        self._sending = histogram("sending", "Time to build and send a step's message.")
        self._cachemgr = histogram("cachemgr_wait", "Time in which all live sequences waited for blocks.")
        self._executor = histogram("executor_wait", "Time until the executor's answer.")
        self._idle = histogram("executor_idle", "Idle time of the device before a step.")

    def add(self, timing: StepTiming) -> None:
        self.steps += 1
        self.last.append(timing)
        self._planning.observe(timing.planning)
        self._sending.observe(timing.sending)
        self._cachemgr.observe(timing.waiting_for_cachemgr)
        self._executor.observe(timing.waiting_for_executor)
        self._idle.observe(timing.executor_idle)


class InterTokenHistogram(Collector):
    """A histogram that counts a value many times at once: most tokens of a step have the same latency."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name, self._text = name, text
        self._counts = [0] * (len(_LATENCY_BUCKETS) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, seconds: float, times: int) -> None:
        """Counts a latency, in seconds, so many times."""
        self._counts[bisect_left(_LATENCY_BUCKETS, seconds)] += times
        self._sum += seconds * times

    def collect(self) -> Iterator[Metric]:
        bounds = map(floatToGoString, (*_LATENCY_BUCKETS, float("inf")))
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class RequestMetrics:
    """Counts and latencies of requests. Written on the asyncio loop only."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        prefix = "kvkeep_scheduler"
        self.running = Gauge(f"{prefix}_running_requests", "Samples in the running batch.", registry=registry)
        self.waiting = Gauge(f"{prefix}_waiting_requests", "Samples in the waiting queue.", registry=registry)
        self.preemptions = Counter(f"{prefix}_preemptions", "Samples preempted.", registry=registry)
        self.swaps = Counter(
            f"{prefix}_swaps", "Preempted samples whose blocks were onloaded from lower tiers.", registry=registry
        )
        self.recomputations = Counter(
            f"{prefix}_recomputations", "Preempted samples whose blocks were computed again.", registry=registry
        )
        self.prompt_tokens = Counter(
            f"{prefix}_prompt_tokens", "Prompt tokens of admitted requests.", registry=registry
        )
        self.cached_tokens = Counter(f"{prefix}_cached_tokens", "Prompt tokens with a prefix hit.", registry=registry)
        self.onloaded_tokens = Counter(
            f"{prefix}_onloaded_tokens", "Tokens whose blocks were onloaded, by tier.", ["tier"], registry=registry
        )
        self.onload_timeouts = Counter(
            f"{prefix}_onload_timeouts", "Samples that stopped waiting for onloaded blocks.", registry=registry
        )
        self.output_tokens = Counter(f"{prefix}_output_tokens", "Tokens generated.", registry=registry)
        self.evicted_tokens = Counter(
            f"{prefix}_evicted_tokens", "Tokens evicted by eviction policies.", registry=registry
        )
        self.sync_seconds = Histogram(
            f"{prefix}_sync_seconds", "Time of a sync with the cache manager.", buckets=_STEP_BUCKETS, registry=registry
        )
        self.manager_silence = Gauge(
            f"{prefix}_cachemgr_silence_seconds",
            "Time since the oldest unanswered call to the cache manager; 0 without one.",
            registry=registry,
        )
        self.cache_usage = Gauge(
            f"{prefix}_cache_usage_ratio",
            "Share of blocks in use, of the fullest layer group, as the last sync reported.",
            registry=registry,
        )

        def latency(name: str, text: str) -> Histogram:
            return Histogram(f"{prefix}_{name}_seconds", text, buckets=_LATENCY_BUCKETS, registry=registry)

        self.queue = latency("queue", "Time from a request's arrival to its first step.")
        self.first_token = latency("time_to_first_token", "Time to first token (TTFT).")
        self.inter_token = InterTokenHistogram(
            f"{prefix}_inter_token_latency_seconds", "Inter-token latency (ITL) of samples.", registry
        )
        self.request = latency("request", "Time from a request's arrival to its end.")
        self.requests = Counter(
            f"{prefix}_requests", "Ended requests, by finish reason.", ["finish_reason"], registry=registry
        )
        self.refused = Counter(
            f"{prefix}_refused_requests", "Refused requests, by reason.", ["reason"], registry=registry
        )


class VllmMetrics(Collector):
    """Some of the metrics under the names and labels that vLLM gives them, for dashboards that exist."""

    def __init__(
        self, metrics: RequestMetrics, *, model_name: str, block_size: int, num_blocks: int, cache_dtype: str
    ) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._config = {
            "block_size": str(block_size),
            "num_gpu_blocks": str(num_blocks),
            "cache_dtype": cache_dtype,
            "enable_prefix_caching": "True",
        }
        # Families have no "_total" in their names.
        self._sources = (
            ("kv_cache_usage_perc", metrics.cache_usage),
            ("num_requests_running", metrics.running),
            ("num_requests_waiting", metrics.waiting),
            ("num_preemptions", metrics.preemptions),
            ("prompt_tokens", metrics.prompt_tokens),
            ("generation_tokens", metrics.output_tokens),
            ("prefix_cache_queries", metrics.prompt_tokens),
            ("prefix_cache_hits", metrics.cached_tokens),
            ("request_success", metrics.requests),
            ("request_queue_time_seconds", metrics.queue),
            ("time_to_first_token_seconds", metrics.first_token),
            ("inter_token_latency_seconds", metrics.inter_token),
            ("e2e_request_latency_seconds", metrics.request),
        )

    def collect(self) -> Iterator[Metric]:
        for name, source in self._sources:
            for family in source.collect():
                renamed = Metric(f"vllm:{name}", family.documentation, family.type)
                for sample in family.samples:
                    suffix = sample.name.removeprefix(family.name)
                    renamed.add_sample(renamed.name + suffix, self._labels | _renamed(sample.labels), sample.value)
                yield renamed
        config = self._labels | self._config
        info = GaugeMetricFamily("vllm:cache_config_info", "Configuration of the cache.", labels=list(config))
        info.add_metric(list(config.values()), 1)
        yield info


def _renamed(labels: Mapping[str, str]) -> dict[str, str]:
    return {"finished_reason" if name == "finish_reason" else name: value for name, value in labels.items()}
