"""Tables of the measurements, and whether results from the literature hold here."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.research.eviction import adaptive
from bench.research.eviction.policies import FULL, RANDOM, SINKS, WINDOW
from bench.research.eviction.statistics import Interval, mean, ratio
from bench.research.eviction.stream import FRESH
from bench.tables import table

Record = Mapping[str, Any]
# Policies that must be at least as good as a window with sinks.
_SCORED = ("SUM", "NORM_SUM", "SNAPKV")
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
        self.count = len(whole)
        for record in records:
            if record["window"] not in whole:
                continue
            self._known.setdefault((record["policy"], record["budget"]), []).append(record)
        self._full = next((self._known[key] for key in self._known if key[0] == FULL), [])
        self.policies = list(dict.fromkeys(name for name, _ in self._known if name != FULL))
        self.budgets = sorted({budget for name, budget in self._known if name != FULL})

    def values(self, name: str, budget: int, figure: str) -> list[float]:
        """A figure of each window for which it was measured."""
        return [record[figure] for record in self._known.get((name, budget), []) if figure in record]

    @property
    def full(self) -> float:
        """The full cache's perplexity."""
        return math.exp(statistics.mean(record["nll"] for record in self._full))

    def ratio(self, name: str, budget: int) -> Interval:
        """Ratio of a policy's perplexity to the full cache's."""
        return ratio(self.values(name, budget, "nll"), [record["nll"] for record in self._full])

    def between(self, name: str, other: str, budget: int) -> Interval:
        """Ratio of a policy's perplexity to a different policy's."""
        return ratio(self.values(name, budget, "nll"), self.values(other, budget, "nll"))

    def has(self, *names: str) -> bool:
        """Whether all these policies were measured."""
        return all(name in self.policies for name in names)


def perplexities(windows: Windows) -> str:
    """A table of perplexities relative to the full cache, with intervals."""

    def cell(name: str, budget: int) -> str:
        one = windows.ratio(name, budget)
        return f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]"

    title = f"perplexity beside the full cache's, {windows.full:.2f} ({windows.count} windows, 95 % intervals)"
    return _grid(title, windows, cell)


def figures(windows: Windows) -> list[str]:
    """Tables of all other figures of the windows, one per figure."""
    shown = []
    for figure, title, form in (
        ("top1", "same best token as the full cache, %", lambda value: f"{100 * value:.1f}"),
        ("kl", "KL divergence from the full cache, nats per token", lambda value: f"{value:.3f}"),
        ("mass", "share of the next tokens' true attention that stays, %", lambda value: f"{100 * value:.1f}"),
        ("error", "relative error of what attention returns, %, mean of layers", lambda value: f"{100 * value:.1f}"),
    ):
        if any(windows.values(name, budget, figure) for name in windows.policies for budget in windows.budgets):
            shown.append(_grid(title, windows, _mean_cell(windows, figure, form)))
    return shown


def _mean_cell(windows: Windows, figure: str, form: Callable[[float], str]) -> Callable[[str, int], str]:
    def cell(name: str, budget: int) -> str:
        values = windows.values(name, budget, figure)
        return form(statistics.mean(values)) if values else ""

    return cell


def _grid(title: str, windows: Windows, cell: Callable[[str, int], str]) -> str:
    rows = [[name, *(cell(name, budget) for budget in windows.budgets)] for name in windows.policies]
    return f"{title}\n{table(['tokens kept', *map(str, windows.budgets)], rows)}"


def passkeys(records: Sequence[Record]) -> str:
    """A table of right answers by length and, for the longest prompts, by depth."""
    lengths, depths = (sorted({record[key] for record in records}) for key in ("length", "depth"))
    cases = list(dict.fromkeys((record["policy"], record["budget"]) for record in records))
    rows = []
    for name, budget in cases:
        mine = [record for record in records if (record["policy"], record["budget"]) == (name, budget)]
        row = [name, str(budget or "all")]
        row += [_right(record for record in mine if record["length"] == length) for length in lengths]
        longest = [record for record in mine if record["length"] == lengths[-1]]
        row += [_right(record for record in longest if record["depth"] == depth) for depth in depths]
        rows.append(row)
    header = ["pass keys found, %", "kept", *map(str, lengths), *(f"{lengths[-1]}\nat {depth}" for depth in depths)]
    return table(header, rows)


def _right(records: Iterable[Record]) -> str:
    return f"{100 * statistics.mean(record['right'] for record in records):.0f}"


def rouges(records: Sequence[Record]) -> str:
    """A table of ROUGE means with intervals."""
    rows = []
    for name in dict.fromkeys(record["policy"] for record in records if record["policy"] != FULL):
        mine = [record for record in records if record["policy"] == name]
        scores = [mean([record[key] for record in mine]) for key in ("rouge2", "rougel")]
        rows.append([name, *(f"{one.value:.2f} [{one.low:.2f}, {one.high:.2f}]" for one in scores)])
    return table(["greedy output beside the full cache's", "ROUGE-2", "ROUGE-L"], rows)


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
    windows = Windows(kept.get("windows", []))
    lines = []

    def note(met: bool, text: str) -> None:
        lines.append(f"{'met   ' if met else 'MISSED'}  {text}")

    def compare(name: str, other: str, met: Callable[[Interval], bool], words: str) -> None:
        if windows.has(name, other):
            for budget in windows.budgets:
                one = windows.between(name, other, budget)
                figures = f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]"
                note(met(one), f"{budget}: perplexity of {name} is {figures} of that of {other}: {words}")

    compare(RANDOM, WINDOW, lambda one: one.value >= _FAR, f"at least {_FAR}")
    compare(WINDOW, SINKS, lambda one: one.low > 1, "more than 1")
    for name in _SCORED:
        compare(name, SINKS, lambda one: one.low <= 1, "not more than 1, within the interval")
    for name in ("NORM_SUM", "SNAPKV"):
        if windows.has(name) and 512 in windows.budgets:
            value = windows.ratio(name, 512).value
            note(value <= _CLOSE, f"512: perplexity of {name} is {value:.3f} of the full cache's: at most {_CLOSE}")
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
        windows = Windows(kept["windows"])
        parts += [perplexities(windows), *figures(windows)]
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
