"""Some of the scheduler's metrics under the names and labels that vLLM gives them, for dashboards that exist."""

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.metrics import RequestMetrics


class VllmMetrics(Collector):
    """Reads, when somebody looks, what is counted anyway."""

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
        """The families."""
        for name, source in self._sources:
            for family in source.collect():
                renamed = Metric(f"vllm:{name}", family.documentation, family.type)
                for sample in family.samples:
                    suffix = sample.name.removeprefix(family.name)
                    renamed.add_sample(renamed.name + suffix, self._labels | _renamed(sample.labels), sample.value)
                yield renamed
        config = self._labels | self._config
        info = GaugeMetricFamily("vllm:cache_config_info", "The cache as it is set up.", labels=list(config))
        info.add_metric(list(config.values()), 1)
        yield info


def _renamed(labels: Mapping[str, str]) -> dict[str, str]:
    return {"finished_reason" if name == "finish_reason" else name: value for name, value in labels.items()}
