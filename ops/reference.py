"""The generated pages of docs/: `python ops/reference.py` checks them, and with --write updates them."""

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import prometheus_client.metrics
import reference_http
import reference_rpcs
import settings_table
import typer
from prometheus_client import CollectorRegistry, Metric
from reference_text import GENERATED, anchor, code, escaped, first_sentence, paragraph, table

import cachemgr.oplog.writer
import cachemgr.persistence.key_index
import cachemgr.persistence.redis_index
import cachemgr.rpc.vllm_event_publisher
import cachemgr.telemetry.prometheus
import executor.metrics
import protos.rpc.metrics
import scheduler.frontend.openai.middleware
from cachemgr.manager import CacheManager
from kvctl.app import app as kvctl_app
from kvctl.app import verbs as kvctl_verbs
from scheduler import metrics as scheduler_metrics
from scheduler.frontends import FrontEndMetrics
from scheduler.router.metrics import PREFIX, RouterMetrics

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FAMILIES = ROOT / "bench/results/zen4/families.json"

Row = tuple[str, str, str]


def metrics_page() -> str:
    """Every Prometheus metric by process: name, type, labels and help."""
    own, router = CollectorRegistry(), CollectorRegistry()
    requests = scheduler_metrics.EngineMetrics(own)
    # A counter with labels shows its labels after it has counted.
    requests.requests.labels("stop")
    scheduler_metrics.StepTimes(own)
    FrontEndMetrics(own).close()
    scheduler_metrics.RequestMetrics(router, PREFIX)
    RouterMetrics(router)
    executor.metrics.KindSeconds(dict, executors := CollectorRegistry())
    vllm = scheduler_metrics.VllmMetrics(
        requests, model_name="", block_size=0, num_blocks=0, cache_dtype="", max_adapters=0,
        adapters_in_use=lambda: ((), ()),
    )  # fmt: skip
    manager = CacheManager(0, lambda: 0.0)
    modules = (
        cachemgr.telemetry.prometheus, cachemgr.persistence.redis_index, cachemgr.persistence.key_index,
        cachemgr.rpc.vllm_event_publisher, cachemgr.oplog.writer,
    )  # fmt: skip
    sections: dict[str, tuple[str, Iterable[Row]]] = {
        "Every process": ("", _of_modules(protos.rpc.metrics)),
        "HTTP of scheduler and router": ("", _of_modules(scheduler.frontend.openai.middleware)),
        "Scheduler": ("", _of_registry(own)),
        "Scheduler, under vLLM's names": (
            "With `KVKEEP_SCHEDULER_VLLM_METRICS=1`. Other tools find here what vLLM would show.",
            _of_families(vllm.collect()),
        ),
        "Router": ("", _of_registry(router)),
        "Cache manager": (
            "",
            (*_of_families(cachemgr.telemetry.prometheus.families(manager.queries)), *_of_modules(*modules)),
        ),
        "Executor": ("", (*_of_modules(executor.metrics), *_of_registry(executors))),
    }
    text = (
        "# Metrics\n\n"
        + GENERATED
        + paragraph(
            "Each process serves these metrics for Prometheus at its `KVKEEP_…_METRICS_ADDRESS`. "
            "[Watching a stack](observing.md) says which to look at, and why. "
            "A histogram `NAME` has the series `NAME_bucket`, `NAME_sum` and `NAME_count`, a summary the last two."
        )
    )
    for title, (lead, rows) in sections.items():
        text += f"\n## {title}\n\n" + (paragraph(lead) + "\n" if lead else "")
        text += table(("metric", "type and labels", "meaning"), sorted(set(rows)))
    return text


def _of_modules(*modules: Any) -> Iterator[Row]:
    """Metrics that are variables of modules."""
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, prometheus_client.metrics.MetricWrapperBase):
                yield _wrapped(value)


def _of_registry(registry: CollectorRegistry) -> Iterator[Row]:
    for collector in registry._collector_to_names:
        if isinstance(collector, prometheus_client.metrics.MetricWrapperBase):
            yield _wrapped(collector)
        else:
            yield from _of_families(collector.collect())


def _wrapped(metric: prometheus_client.metrics.MetricWrapperBase) -> Row:
    return _row(metric._name, str(metric._type), metric._labelnames, metric._documentation)


def _of_families(families: Iterable[Metric]) -> Iterator[Row]:
    for family in families:
        of_samples = [name for sample in family.samples for name in sample.labels if name != "le"]
        labels = getattr(family, "_labelnames", ()) or dict.fromkeys(of_samples)
        yield _row(family.name, family.type, labels, family.documentation)


def _row(name: str, kind: str, labels: Iterable[str], text: str) -> Row:
    shown = ", ".join([kind, *map(code, labels)])
    return code(f"{name}_total" if kind == "counter" else name), shown, text


def kvctl_page() -> str:
    """Every verb of kvctl with its options."""
    group: Any = typer.main.get_command(kvctl_app)
    verbs = kvctl_verbs()
    contexts = {
        name: verb.make_context(f"kvctl {name}", [], resilient_parsing=True, terminal_width=1000)
        for name, verb in verbs.items()
    }
    options = {name: _options(verb, contexts[name]) for name, verb in verbs.items()}
    times = Counter(row for rows in options.values() for row in rows)
    common = [row for row in options["pools"] if times[row] > len(verbs) / 2]
    head, _, rest = group.help.partition("\n\n")
    text = "# kvctl\n\n" + GENERATED + paragraph(escaped(head)) + "\n" + paragraph(escaped(rest))
    text += "\n[Operations](operations.md) shows each verb with an answer.\n\n"
    text += table(
        ("verb", "what it does"),
        [
            (f"[{code(name)}](#{anchor(f'kvctl {name}')})", first_sentence(escaped(verb.help)))
            for name, verb in verbs.items()
        ],
    )
    text += "\n## Options of most verbs\n\n" + table(("option", "meaning"), common)
    statuses = group.epilog.removeprefix("Exit status: ").rstrip(".").split("; ")
    text += "\n## Exit status\n\n" + table(("status", "meaning"), [one.split(" ", 1) for one in statuses])
    text += "\n## Verbs\n"
    for name, verb in verbs.items():
        text += f"\n### kvctl {name}\n\n" + paragraph(escaped(verb.help))
        text += f"\nUsage: {code(verb.get_usage(contexts[name]).removeprefix('Usage: '))}\n"
        if verb.epilog:
            text += f"\nExample: {code(verb.epilog.removeprefix('Example: '))}\n"
        if own := [row for row in options[name] if row not in common]:
            text += "\n" + table(("option", "meaning"), own)
        if set(common) <= set(options[name]):
            text += "\nAnd the [options of most verbs](#options-of-most-verbs).\n"
    return text


def _options(verb: Any, context: Any) -> list[tuple[str, str]]:
    shown = [record for option in verb.get_params(context) if (record := option.get_help_record(context))]
    return [(code(name.replace(" range>", ">")), escaped(meaning)) for name, meaning in shown]


def families_table() -> str:
    """Decoder families of transformers by the results of `python -m bench.families`."""
    kept = json.loads(FAMILIES.read_text())
    outcomes = {
        name: (outcome, why)
        for outcome, details in kept["families"].items()
        for why, names in details.items()
        for name in names
    }
    found: dict[str, list[str]] = defaultdict(list)
    for name, (outcome, why) in sorted(outcomes.items()):
        family, _, variant = name.partition("/")
        # A variant appears only if it differs from its family.
        if variant and outcome in ("untried", outcomes[family][0]):
            continue
        shown = code(family) + (f" ({variant})" if variant else "")
        kind = outcome + (" fast" if outcome == "equal" and family in kept["fast"] else "")
        found[_reason(why) if kind == "refused" else kind].append(shown)
    fast, exact, untried = (", ".join(found.pop(kind, [])) for kind in ("equal fast", "equal", "untried"))
    text = paragraph(f"With transformers {kept['versions']['transformers']}:")
    text += "\n### Exact and fast\n\n" + paragraph(
        f"{fast}: compiled code on a CPU, fused kernels on a GPU, where a probe of the model's own weights agrees with "
        "transformers. Otherwise such a model runs as those below."
    )
    text += "\n### Exact\n\n" + paragraph(
        "Through transformers' modules, with attention over paged blocks, and slower: " + exact + ". A model of such a "
        "family, for example of `lfm2`, is refused where a layer of it is not attention."
    )
    text += "\n### Refused\n\n" + table(
        ("why", "families"), [(why, ", ".join(names)) for why, names in sorted(found.items())]
    )
    text += "\n### Not tried\n\n" + paragraph(
        "Transformers itself builds or runs no tiny model of these families; the executor probes each model that it "
        f"loads, and refuses what would not be exact: {untried}."
    )
    return text + "\n"


def _reason(detail: str) -> str:
    """Why a family is refused, without names and numbers of a single model."""
    reason = detail.partition(", which the executor does not run")[0].partition(" (")[0]
    reason = re.sub(r"^[\w-]+: |^[A-Z]\w+ (?=attends|asks|builds)", "", reason)
    reason = re.sub(r"^layers \[[\d, ]+\] of \d+ keep", "layers keep", reason)
    reason = re.sub(r"over a window of \w+ tokens, its configuration says \w+", "over a window not configured", reason)
    return escaped(reason.replace("layer 0 attends", "a layer attends").replace("layer 0 is", "a layer is"))


PAGES: dict[str, Callable[[], str]] = {
    "metrics.md": metrics_page,
    "http.md": reference_http.page,
    "openapi.json": lambda: json.dumps(reference_http.description(), indent=1) + "\n",
    "kvctl.md": kvctl_page,
}
# Pages that people write, with a generated part.
PARTS: dict[str, Callable[[], str]] = {"settings.md": settings_table.table, "models.md": families_table}
BEGIN, END = "<!-- written by make reference -->\n", "<!-- end of what make reference writes -->\n"


def wanted() -> dict[Path, str]:
    """The generated files of docs/ with the text that each should have."""
    texts = {DOCS / name: page() for name, page in PAGES.items()}
    texts |= {DOCS / name: text for name, text in reference_rpcs.pages().items()}
    for name, part in PARTS.items():
        before, _, rest = (DOCS / name).read_text().partition(BEGIN)
        texts[DOCS / name] = before + BEGIN + part() + END + rest.partition(END)[2]
    return texts


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Checks the generated pages of docs/.")
    parser.add_argument("--write", action="store_true", help="bring them up to date")
    write: bool = parser.parse_args().write
    stale = {path: text for path, text in wanted().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        if write:
            path.write_text(text)
        else:
            print(f"{path.relative_to(ROOT)} is not what the code says: make reference", file=sys.stderr)
    return 1 if stale and not write else 0


if __name__ == "__main__":
    sys.exit(main())
