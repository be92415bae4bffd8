"""Summary of the measurements, its tables, and whether results from the literature hold here."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.research.eviction import adaptive
from bench.research.eviction.policies import FULL, RANDOM, SINKS, WINDOW
from bench.research.eviction.statistics import Interval, mean, ratio
from bench.research.eviction.stream import FRESH
from bench.tables import table

Record = Mapping[str, Any]
# Policies that must be at least as good as a window with sinks.
_SCORED = ("SUM", "NORM_SUM", "SNAPKV")
# Pairs of policies; the perplexities of a pair are compared window by window.
_PAIRS = ((RANDOM, WINDOW), (WINDOW, SINKS), *((name, SINKS) for name in _SCORED))
# Figures of the windows besides perplexity: title and form.
_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "top1": ("same best token as the full cache, %", lambda value: f"{100 * value:.1f}"),
    "kl": ("KL divergence from the full cache, nats per token", lambda value: f"{value:.3f}"),
    "mass": ("share of the next tokens' true attention that stays, %", lambda value: f"{100 * value:.1f}"),
    "error": ("relative error of what attention returns, %, mean of layers", lambda value: f"{100 * value:.1f}"),
}
_CLOSE = 1.02
_FAR = 1.5
_DRIFT = 0.10
_SETTLED = 4


class Windows:
    """Records of the windows by policy and budget."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._known: dict[tuple[str, int], list[Record]] = {}
        sizes = Counter(record["window"] for record in records)
        # The measurement of a window may have been interrupted.
        whole = {window for window, size in sizes.items() if size == max(sizes.values())}
        self._count = len(whole)
        for record in records:
            if record["window"] in whole:
                self._known.setdefault((record["policy"], record["budget"]), []).append(record)
        self._full = next((self._known.pop(key) for key in list(self._known) if key[0] == FULL), [])

    def summary(self) -> dict[str, Any]:
        """The full cache's perplexity; for each policy and budget the ratio to it, and means of all other figures."""
        rows = []
        for (policy, budget), records in self._known.items():
            means = {
                figure: statistics.mean(record[figure] for record in records if figure in record)
                for figure in _FIGURES
                if any(figure in record for record in records)
            }
            rows.append({"policy": policy, "budget": budget, **asdict(_ratio(records, self._full)), **means})
        compared = [
            {"policy": name, "other": other, "budget": budget, **asdict(_ratio(records, self._known[other, budget]))}
            for name, other in _PAIRS
            for (policy, budget), records in self._known.items()
            if policy == name and (other, budget) in self._known
        ]
        perplexity = math.exp(statistics.mean(record["nll"] for record in self._full))
        return {"count": self._count, "perplexity": perplexity, "policies": rows, "compared": compared}


def _ratio(records: Sequence[Record], others: Sequence[Record]) -> Interval:
    """Ratio of the perplexities of the same windows."""
    return ratio([record["nll"] for record in records], [record["nll"] for record in others])


def summary(records: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of the records of all parts."""
    parts: dict[str, Callable[[Any], Any]] = {
        "windows": lambda found: Windows(found).summary(),
        "passkeys": _passkeys,
        "rouge": _rouges,
        "streams": list,
        "adaptive": adaptive.means,
    }
    return {name: part(records[name]) for name, part in parts.items() if records.get(name)}


def _passkeys(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Share of right answers by length and, for the longest prompts, by depth."""
    lengths, depths = (sorted({record[key] for record in records}) for key in ("length", "depth"))
    rows = []
    for name, budget in dict.fromkeys((record["policy"], record["budget"]) for record in records):
        mine = [record for record in records if (record["policy"], record["budget"]) == (name, budget)]
        longest = [record for record in mine if record["length"] == lengths[-1]]
        by_length = {str(one): _right(record for record in mine if record["length"] == one) for one in lengths}
        by_depth = {
            f"{lengths[-1]} at {one}": _right(record for record in longest if record["depth"] == one) for one in depths
        }
        rows.append({"policy": name, "budget": budget, **by_length, **by_depth})
    return rows


def _right(records: Iterable[Record]) -> float:
    return statistics.mean(record["right"] for record in records)


def _rouges(records: Sequence[Record]) -> list[dict[str, Any]]:
    """ROUGE means with intervals."""
    rows = []
    for name in dict.fromkeys(record["policy"] for record in records if record["policy"] != FULL):
        mine = [record for record in records if record["policy"] == name]
        scores = {key: asdict(mean([record[key] for record in mine])) for key in ("rouge2", "rougel")}
        rows.append({"policy": name, **scores})
    return rows


def _interval(one: Record) -> str:
    return "{value:.3f} [{low:.3f}, {high:.3f}]".format(**one)


def perplexities(windows: Record) -> str:
    """A table of perplexities relative to the full cache, with intervals."""
    title = "perplexity beside the full cache's, {perplexity:.2f} ({count} windows, 95 % intervals)".format(**windows)
    return _grid(title, windows["policies"], _interval)


def figures(rows: Sequence[Record]) -> list[str]:
    """Tables of all other figures of the windows, one per figure."""

    def cell(figure: str, form: Callable[[float], str]) -> Callable[[Record], str]:
        return lambda row: form(row[figure]) if figure in row else ""

    return [
        _grid(title, rows, cell(figure, form))
        for figure, (title, form) in _FIGURES.items()
        if any(figure in row for row in rows)
    ]


def _grid(title: str, rows: Sequence[Record], cell: Callable[[Record], str]) -> str:
    budgets = sorted({row["budget"] for row in rows})
    cells = {(row["policy"], row["budget"]): cell(row) for row in rows}
    names = dict.fromkeys(row["policy"] for row in rows)
    lines = [[name, *(cells.get((name, budget), "") for budget in budgets)] for name in names]
    return f"{title}\n{table(['tokens kept', *map(str, budgets)], lines)}"


def passkeys(rows: Sequence[Record]) -> str:
    """A table of right answers."""
    _, _, *places = rows[0]
    header = ["pass keys found, %", "kept", *(place.replace(" ", "\n", 1) for place in places)]
    lines = [
        [row["policy"], str(row["budget"] or "all"), *(f"{100 * row[place]:.0f}" for place in places)] for row in rows
    ]
    return table(header, lines)


def rouges(rows: Sequence[Record]) -> str:
    """A table of ROUGE means with intervals."""
    form = "{value:.2f} [{low:.2f}, {high:.2f}]"
    lines = [[row["policy"], *(form.format(**row[key]) for key in ("rouge2", "rougel"))] for row in rows]
    return table(["greedy output beside the full cache's", "ROUGE-2", "ROUGE-L"], lines)


def stream_bins(records: Sequence[Record]) -> dict[str, list[float]]:
    """Perplexity of each bin by kind of positions, over all streams."""
    kinds = dict.fromkeys(record["positions"] for record in records)
    return {
        kind: [
            math.exp(statistics.mean(losses))
            for losses in zip(*(record["nll"] for record in records if record["positions"] == kind), strict=True)
        ]
        for kind in kinds
    }


def streams(records: Sequence[Record], size: int) -> str:
    """A table of the perplexity of each bin, with its ratio to the perplexity of a recomputed cache."""
    bins = stream_bins(records)
    fresh = bins[FRESH]
    others = [kind for kind in bins if kind != FRESH]
    rows = []
    for band, known in enumerate(fresh):
        pairs = [(bins[kind][band], bins[kind][band] / known) for kind in others]
        cells = [f"{value:.1f} ({share:.3f})" for value, share in pairs]
        rows.append([f"{band * size + 1}-{(band + 1) * size}", *cells, f"{known:.1f}"])
    return f"perplexity over the stream (beside a cache computed anew)\n{table(['tokens', *others, FRESH], rows)}"


def expectations(kept: Mapping[str, Any]) -> list[str]:
    """The expected results, each with its figures and whether it is met."""
    windows = kept.get("windows", {"policies": [], "compared": []})
    lines = []

    def note(met: bool, text: str) -> None:
        lines.append(f"{'met   ' if met else 'MISSED'}  {text}")

    for one in windows["compared"]:
        name, other = one["policy"], one["other"]
        met, words = one["low"] <= 1, "not more than 1, within the interval"
        if name == RANDOM:
            met, words = one["value"] >= _FAR, f"at least {_FAR}"
        elif name == WINDOW:
            met, words = one["low"] > 1, "more than 1"
        note(met, f"{one['budget']}: perplexity of {name} is {_interval(one)} of that of {other}: {words}")
    for row in windows["policies"]:
        if row["policy"] in ("NORM_SUM", "SNAPKV") and row["budget"] == 512:
            text = f"512: perplexity of {row['policy']} is {row['value']:.3f} of the full cache's: at most {_CLOSE}"
            note(row["value"] <= _CLOSE, text)
    bins = stream_bins(kept.get("streams", []))
    if len(bins.get("compacted", [])) > _SETTLED:
        for words, values in (
            ("", bins["compacted"]),
            (
                " beside a cache computed anew",
                [one / other for one, other in zip(bins["compacted"], bins[FRESH], strict=True)],
            ),
        ):
            settled = values[_SETTLED - 1]
            worst = max(abs(value / settled - 1) for value in values[_SETTLED:])
            text = f"stream: compacted perplexity{words} moves by up to {100 * worst:.1f} % from its value at 4,000"
            note(worst <= _DRIFT, f"{text}: at most {100 * _DRIFT:.0f} %")
    return lines


def report(kept: Mapping[str, Any]) -> str:
    """All measurements as text."""
    parts: list[str] = []
    if kept.get("windows"):
        parts += [perplexities(kept["windows"]), *figures(kept["windows"]["policies"])]
    if kept.get("passkeys"):
        parts.append(passkeys(kept["passkeys"]))
    if kept.get("rouge"):
        parts.append(rouges(kept["rouge"]))
    if kept.get("streams"):
        parts.append(streams(kept["streams"], kept["settings"]["bin"]))
    if kept.get("adaptive"):
        parts.append(adaptive.Report(kept["adaptive"]).text())
    parts.append("\n".join(expectations(kept)))
    return "\n\n".join(parts)
