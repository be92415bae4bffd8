"""Metrics of steps and requests, for Prometheus and for benchmarks."""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_PREFIX = "kvkeep_scheduler"
_STEP_BUCKETS = (1e-5, 3e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1, 5)
_LATENCY_BUCKETS = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


# A function that adds what other processes have counted under the same names.
Summed = Callable[[Iterable[Metric]], Iterator[Metric]]


@dataclass(slots=True)
class StepTiming:
    """Times of one step, in seconds."""

    planning: float = 0.0
    sending: float = 0.0
    # Time in which no live sequence could compute for lack of blocks.
    waiting_for_cachemgr: float = 0.0
    waiting_for_executor: float = 0.0
    # Idle time of the device before the step, as reported by the executor.
    executor_idle: float = 0.0


class StepLoad(NamedTuple):
    """What the running batch still has to compute, and how fast the device is. Times in seconds; None: not measured.

    prefill_tokens: prompt tokens that running sequences still have to compute. step: time of a step that only decodes.
    prompt_token: time of a prompt token in a prefill, with all that its step computes besides. host_block, disk_block:
    time of a block's copy to the device. sequence: time that one more sequence adds to a step that only decodes.
    """

    prefill_tokens: int = 0
    step: float | None = None
    prompt_token: float | None = None
    host_block: float | None = None
    disk_block: float | None = None
    sequence: float | None = None


class PlainHistogram(Collector):
    """A histogram without labels and locks, for what every step measures. One thread writes; any thread may read."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._text, self._buckets = name, text, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, seconds: float, times: int = 1) -> None:
        """Counts a duration, in seconds, `times` times: most tokens of a step have the same latency."""
        self._counts[bisect_left(self._buckets, seconds)] += times
        self._sum += seconds * times

    def collect(self) -> Iterator[Metric]:
        bounds = map(floatToGoString, (*self._buckets, float("inf")))
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class StepTimes:
    """The last steps' timings, and histograms over all of them. Written by the step loop only."""

    def __init__(self, registry: CollectorRegistry = REGISTRY, kept: int = 4096) -> None:
        self.last: deque[StepTiming] = deque(maxlen=kept)
        self.steps = 0
        # As of the last step; always replaced as a whole, so that any thread may read it.
        self.load = StepLoad()
        # Seconds for which the executor has not answered, beyond what its steps take. Any thread may read it.
        self.executor_silence = 0.0

        def histogram(name: str, text: str) -> PlainHistogram:
            return PlainHistogram(f"{_PREFIX}_step_{name}_seconds", text, _STEP_BUCKETS, registry)

        self._planning = histogram("planning", "Time to plan a step.")
        self._sending = histogram("sending", "Time to build and send a step's message.")
        self._cachemgr = histogram("cachemgr_wait", "Time in which all live sequences waited for blocks.")
        self._executor = histogram("executor_wait", "Time until the executor's answer.")
        self._idle = histogram("executor_idle", "Idle time of the device before a step.")
        self.max_tokens = Gauge(
            f"{_PREFIX}_step_max_tokens",
            "Most tokens of a step: the setting, or less if the executor keeps or has no memory for more.",
            registry=registry,
        )

    def add(self, timing: StepTiming) -> None:
        self.steps += 1
        self.last.append(timing)
        self._planning.observe(timing.planning)
        self._sending.observe(timing.sending)
        self._cachemgr.observe(timing.waiting_for_cachemgr)
        self._executor.observe(timing.waiting_for_executor)
        self._idle.observe(timing.executor_idle)


class RequestMetrics:
    """Counts and latencies of requests. Written on the asyncio loop only."""

    def __init__(self, registry: CollectorRegistry = REGISTRY, prefix: str = _PREFIX) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"{prefix}_{name}", text, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{prefix}_{name}", text, labels, registry=registry)

        def latency(name: str, text: str, buckets: Sequence[float] = _LATENCY_BUCKETS) -> Histogram:
            return Histogram(f"{prefix}_{name}_seconds", text, buckets=buckets, registry=registry)

        self.running = gauge("running_requests", "Samples in the running batch.")
        self.waiting = gauge(
            "waiting_requests",
            "Samples that wait for blocks or an engine, for tokenization, or for their first sample.",
        )
        self.preemptions = counter("preemptions", "Samples preempted.")
        self.swaps = counter("swaps", "Preempted samples whose blocks were onloaded from lower tiers.")
        self.recomputations = counter("recomputations", "Preempted samples whose blocks were computed again.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests whose computation has begun.")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens with a prefix hit.")
        self.onloaded_tokens = counter("onloaded_tokens", "Tokens whose blocks were onloaded, by tier.", "tier")
        self.onload_timeouts = counter("onload_timeouts", "Samples that stopped waiting for onloaded blocks.")
        self.output_tokens = counter("output_tokens", "Tokens generated.")
        self.draft_tokens = counter("draft_tokens", "Drafted tokens computed.")
        self.accepted_draft_tokens = counter("accepted_draft_tokens", "Drafted tokens that were accepted.")
        self.evicted_tokens = counter("evicted_tokens", "Tokens evicted by eviction policies.")
        self.queue = latency("queue", "Time from a request's arrival to its first step.")
        self.first_token = latency("time_to_first_token", "Time to first token (TTFT).")
        self.inter_token = PlainHistogram(
            f"{prefix}_inter_token_latency_seconds", "Inter-token latency (ITL) of samples.", _LATENCY_BUCKETS, registry
        )
        self.request = latency("request", "Time from a request's arrival to its end.")
        self.requests = counter("requests", "Ended requests, by finish reason.", "finish_reason")
        self.refused = counter("refused_requests", "Refused requests, by reason.", "reason")

    @property
    def used_share(self) -> float:
        """The share of blocks in use; 0 where it is not measured, as in a router."""
        return 0.0


class EngineMetrics(RequestMetrics):
    """The metrics of an engine's scheduler: those of its requests, and of its calls to the cache manager."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(registry)
        self.sync_seconds = Histogram(
            f"{_PREFIX}_sync_seconds",
            "Time of a sync with the cache manager.",
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self.manager_silence = Gauge(
            f"{_PREFIX}_cachemgr_silence_seconds",
            "Time for which a call to the cache manager has had no answer; 0 without such a call.",
            registry=registry,
        )
        self.cache_usage = Gauge(
            f"{_PREFIX}_cache_usage_ratio",
            "Share of blocks in use, of the layer group with the fewest free blocks, as of the last sync.",
            registry=registry,
        )

    @property
    def used_share(self) -> float:
        """The share of blocks in use, of the layer group with the fewest free blocks."""
        [family] = self.cache_usage.collect()
        return family.samples[0].value


class VllmMetrics(Collector):
    """Some of the metrics under the names and labels that vLLM gives them, for existing dashboards and routers."""

    def __init__(
        self,
        metrics: EngineMetrics,
        *,
        model_name: str,
        block_size: int,
        num_blocks: int,
        cache_dtype: str,
        max_adapters: int,
        adapters_in_use: Callable[[], tuple[Sequence[str], Sequence[str]]],
        summed: Summed = iter,
    ) -> None:
        """adapters_in_use: returns the adapters' names of running and of waiting requests; called from any thread."""
        self._max_adapters = max_adapters
        self._adapters_in_use = adapters_in_use
        self._summed = summed
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
            ("spec_decode_num_draft_tokens", metrics.draft_tokens),
            ("spec_decode_num_accepted_tokens", metrics.accepted_draft_tokens),
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
            for family in self._summed(source.collect()):
                renamed = Metric(f"vllm:{name}", family.documentation, family.type)
                for sample in family.samples:
                    suffix = sample.name.removeprefix(family.name)
                    renamed.add_sample(renamed.name + suffix, self._labels | _renamed(sample.labels), sample.value)
                yield renamed
        config = self._labels | self._config
        info = GaugeMetricFamily("vllm:cache_config_info", "Configuration of the cache.", labels=list(config))
        info.add_metric(list(config.values()), 1)
        yield info
        # Endpoint pickers report an error if a scrape lacks this metric. They take the sample with the largest value,
        # which is a time.
        running, waiting = self._adapters_in_use()
        labels = {
            "max_lora": str(self._max_adapters),
            "running_lora_adapters": ",".join(running),
            "waiting_lora_adapters": ",".join(waiting),
        }
        lora = GaugeMetricFamily("vllm:lora_requests_info", "LoRA adapters of requests.", labels=list(labels))
        lora.add_metric(list(labels.values()), time.time())
        yield lora


def _renamed(labels: Mapping[str, str]) -> dict[str, str]:
    return {"finished_reason" if name == "finish_reason" else name: value for name, value in labels.items()}
