"""Names of all settings and metrics, for tests of files that mention them."""

import re

from prometheus_client import CollectorRegistry
from settings_table import PROCESSES

from protos.rpc.settings import variable
from scheduler.metrics import EngineMetrics, RequestMetrics, StepTimes
from scheduler.router.metrics import PREFIX, RouterMetrics
from tests.stack import ROOT

SOURCE = "\n".join(
    path.read_text()
    for folder in ("cachemgr", "executor", "scheduler", "protos", "kvctl", "ops")
    for path in sorted((ROOT / folder).rglob("*.py"))
)
SETTINGS = {variable(cls, name) for cls in PROCESSES for name in cls.model_fields}
# Suffixes that Prometheus' client adds to a metric's name.
_SUFFIXES = re.compile(r"(_total|_sum|_count|_bucket)$")


def _scheduler_metrics() -> set[str]:
    registry = CollectorRegistry()
    EngineMetrics(registry)
    StepTimes(registry)
    RequestMetrics(registry, PREFIX)
    RouterMetrics(registry)
    return {family.name for family in registry.collect()}


# The scheduler and the router compose their names; names of other processes stand in their source.
_SCHEDULER_METRICS = _scheduler_metrics()


def settings_in(text: str) -> set[str]:
    """Names of variables of ours in a text."""
    return set(re.findall(r"\bKVKEEP_[A-Z_]+[A-Z]\b", text))


def unknown_settings(text: str) -> set[str]:
    """Names of variables of ours in a text that are neither a setting nor a shared setting for one process."""
    own = re.compile(r"^KVKEEP_(SCHEDULER|CACHEMGR|EXECUTOR|CONSOLE|ROUTER)_")
    return {name for name in settings_in(text) - SETTINGS if own.sub("KVKEEP_", name) not in SETTINGS}


def metrics_in(text: str) -> set[str]:
    """Names of metrics of ours in a text."""
    return set(re.findall(r"\bkvkeep_\w+", text))


def unknown_metrics(text: str) -> set[str]:
    """Names of metrics of ours in a text that are in no process's code."""
    return {name for name in metrics_in(text) if not _is_metric(name)}


def _is_metric(name: str) -> bool:
    plain = _SUFFIXES.sub("", name)
    return plain in _SCHEDULER_METRICS or f'"{plain}"' in SOURCE
