"""Curves of the measurements. Without matplotlib only the curves are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from bench.research.eviction.adaptive import Report as AdaptiveReport
from bench.research.eviction.report import stream_bins

_MARKS = "osv^D<>Pp*Xh+xd"


def _figure(rows: int, columns: int) -> Any:
    """A figure with panels, or None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(5 * columns, 4.4 * rows), dpi=110, layout="constrained")
    figure.subplots(rows, columns)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#dddddd")
        axes.set_axisbelow(True)
    return figure


def budgets(rows: Sequence[Mapping[str, Any]], target: Path) -> bool:
    """Draws perplexity, kept attention and divergence against the budget. False without matplotlib."""
    figure = _figure(1, 3)
    if figure is None:
        return False
    from matplotlib import colormaps

    by_policy: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=itemgetter("budget")):
        by_policy.setdefault(row["policy"], []).append(row)
    sizes = sorted({row["budget"] for row in rows})
    perplexity, mass, divergence = figure.axes
    for number, name in enumerate(dict.fromkeys(row["policy"] for row in rows)):
        style = {"label": name, "color": colormaps["tab20"](number), "marker": _MARKS[number % len(_MARKS)]}
        mine = by_policy[name]
        for axes, value in ((perplexity, "value"), (mass, "mass"), (divergence, "kl")):
            places, heights = ([row[key] for row in mine] for key in ("budget", value))
            axes.plot(places, heights, markersize=4, linewidth=1.2, **style)
    for axes, title in (
        (perplexity, "perplexity beside the full cache's"),
        (mass, "share of the true attention that stays"),
        (divergence, "KL divergence from the full cache, nats"),
    ):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel("tokens kept")
        axes.set_title(title, fontsize=10, loc="left")
    # Higher values are only in the table: here they would hide the differences between the others.
    perplexity.set_ylim(0.99, 1.3)
    divergence.set_yscale("log")
    handles, labels = perplexity.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8, frameon=False, fontsize=8)
    figure.savefig(target)
    return True


def adaptive_windows(records: Sequence[Mapping[str, Any]], target: Path) -> bool:
    """Draws quality against mean memory, for adaptive and fixed windows. False without matplotlib."""
    figure = _figure(1, 2)
    if figure is None:
        return False
    report = AdaptiveReport(records)
    for axes, value, title in (
        (
            figure.axes[0],
            lambda name: 100 * report.found(name),
            "keys found, %, of those that reach far",
        ),
        (figure.axes[1], report.perplexity, "perplexity beside the full cache's, of the others"),
    ):
        for style, names, label in (
            ({"color": "#8a8a8a", "linestyle": "-"}, report.fixed, "fixed windows"),
            ({"color": "#1b6ca8", "linestyle": ":"}, report.adaptive, "adaptive windows"),
        ):
            slots = [report.mean(name, "mixed", "slots") for name in names]
            axes.plot(slots, [value(name) for name in names], marker="o", markersize=5, label=label, **style)
        axes.set_xlabel("slots in use, mean of both kinds of sequences")
        axes.set_title(title, fontsize=10, loc="left")
    figure.axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(target)
    return True


def streams(records: Sequence[Mapping[str, Any]], size: int, target: Path) -> bool:
    """Draws perplexity over the stream. False without matplotlib."""
    figure = _figure(1, 1)
    if figure is None:
        return False
    (axes,) = figure.axes
    for name, values in stream_bins(records).items():
        axes.plot([size * (place + 1) for place in range(len(values))], values, marker="o", markersize=4, label=name)
    axes.set_xlabel("tokens")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title("perplexity, window of 1,020 tokens and 4 sinks", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(target)
    return True
