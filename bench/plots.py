"""Pictures of the results of the speed benchmarks. Without matplotlib only the pictures are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#1b6ca8", "#e08a1e", "#5a9e4b", "#8a8a8a", "#a3486b", "#c9b458")


def _figure(panels: int, title: str) -> Any:
    """A figure with panels below each other, or None."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    # Without pyplot: no window system is needed, and nothing has to be closed.
    figure = Figure(figsize=(10, 1 + 3.4 * panels), dpi=110, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.subplots(panels, 1)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd")
        axes.set_axisbelow(True)
    return figure


def _bars(axes: Any, names: Sequence[str], series: Mapping[str, Sequence[tuple[float, str]]]) -> None:
    """Groups of bars, one for each name; a bar is its height and the words above it."""
    width = 0.8 / max(1, len(series))
    for number, (label, bars) in enumerate(series.items()):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(names))]
        heights = [height for height, _ in bars]
        drawn = axes.bar(places, heights, width * 0.92, label=label, color=COLOURS[number % len(COLOURS)])
        axes.bar_label(drawn, [words for _, words in bars], fontsize=8, padding=2)
    axes.set_xticks(range(len(names)), names)
    axes.margins(y=0.15)
    axes.legend(frameon=False, fontsize=9, ncols=len(series))


def serving(kept: Mapping[str, Any], target: Path) -> bool:
    """Draws each case's share of the limit, and CPU time per output token by process. False without matplotlib."""
    figure = _figure(2, f"kvkeep on {kept['machine']['cores']} cores, {kept['machine']['processor']}")
    if figure is None:
        return False
    near, cost = figure.axes
    runs = {(record["dtype"], record["case"]): record for record in kept["runs"]}
    cases = list(dict.fromkeys(case for _, case in runs))
    dtypes = list(dict.fromkeys(dtype for dtype, _ in runs))
    series = {}
    for dtype in dtypes:
        series[dtype] = [
            (100 * run["limit_s"] / run["seconds"], f"{run['output_tokens_per_s']:.0f} tok/s")
            for run in (runs[dtype, case] for case in cases)
        ]
    _bars(near, cases, series)
    near.set_ylabel("% of the limit with weights in this type")
    near.set_title("speed (above the bars: output tokens per second)", fontsize=10, loc="left")
    bottoms = [0.0] * len(runs)
    for number, process in enumerate(kept["runs"][0]["cpu_s"]):
        heights = [1e3 * run["cpu_s"][process] / (run["output_tokens_per_s"] * run["seconds"]) for run in runs.values()]
        cost.bar(range(len(runs)), heights, 0.7, bottom=bottoms, label=process, color=COLOURS[number % len(COLOURS)])
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    cost.set_xticks(range(len(runs)), [f"{case}\n{dtype}" for dtype, case in runs])
    cost.set_ylabel("CPU ms per output token")
    cost.set_title("whose CPU time an output token takes, prompts included", fontsize=10, loc="left")
    cost.legend(frameon=False, fontsize=9, ncols=5)
    figure.savefig(target)
    return True


def peers(kept: Mapping[str, Any], target: Path) -> bool:
    """Draws each engine's share of the limit, a panel for each model and data type. False without matplotlib."""
    panels: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for model, records in kept["runs"].items():
        for record in records:
            panels.setdefault((model, record["dtype"]), []).append(record)
    figure = _figure(len(panels), f"{kept['machine']['cores']} cores, {kept['machine']['processor']}")
    if figure is None:
        return False
    everything = [record for records in panels.values() for record in records]
    cases = sorted({record["case"] for record in everything})
    engines = list(dict.fromkeys(record["engine"] for record in everything))
    for axes, ((model, dtype), runs) in zip(figure.axes, panels.items(), strict=True):
        series = {engine: [_share(runs, case, engine) for case in cases] for engine in engines}
        _bars(axes, cases, series)
        axes.set_ylabel("% of the limit")
        axes.set_title(f"{model}\n{dtype} (above the bars: output tokens per second)", fontsize=9, loc="left")
    figure.savefig(target)
    return True


def _share(runs: Sequence[Mapping[str, Any]], case: str, engine: str) -> tuple[float, str]:
    """Height and words of a bar; no bar if nothing was measured."""
    for run in runs:
        if (run["case"], run["engine"]) == (case, engine):
            return 100 * run["limit_s"] / run["seconds"], f"{run['output_tokens_per_s']:.0f}"
    return 0.0, ""


def window(kept: Mapping[str, Any], target: Path) -> bool:
    """Draws all kept tokens over time, and the share of equal output with a window. False if not drawn."""
    figure = _figure(1 + len(kept["models"]), "A sliding window beside the full cache")
    if figure is None:
        return False
    *courses, agreement = figure.axes
    for number, (axes, (model, tables)) in enumerate(zip(courses, kept["models"].items(), strict=True)):
        for place, (label, points) in enumerate(tables["curves"].items()):
            axes.step(
                [time for time, _ in points],
                [total for _, total in points],
                where="post",
                label=label,
                color=COLOURS[place],
            )
        axes.set_ylabel("tokens kept")
        axes.set_xlabel("seconds")
        axes.set_title(f"{model}: 3 requests, 30 tokens each", fontsize=10, loc="left")
        axes.legend(frameon=False, fontsize=9)
        rows = tables["agreement"]
        names = ["full" if row["window"] is None else str(row["window"]) for row in rows]
        agreement.plot(names, [100 * row["agreement"] for row in rows], "o-", label=model, color=COLOURS[number])
    agreement.set_ylabel("% same tokens")
    agreement.set_xlabel("window")
    agreement.set_title("agreement with the full cache, 40 tokens", fontsize=10, loc="left")
    agreement.legend(frameon=False, fontsize=9)
    figure.savefig(target)
    return True


def memory_saved(kept: Mapping[str, Any], target: Path) -> bool:
    """Draws memory held over time, waste of each sequence, and savings of each way. False without matplotlib."""
    figure = _figure(3, f"Memory of {len(kept['max_tokens'])} conversations, in blocks and contiguous")
    if figure is None:
        return False
    course, waste, saved = figure.axes
    times = [point["at"] for point in kept["course"]]
    ways = [row["way"] for row in kept["rows"]]
    for place, way in enumerate(ways):
        course.step(times, [point[way] for point in kept["course"]], where="post", label=way, color=COLOURS[place])
        each = sorted(sequence[way] for sequence in kept["sequences"])
        waste.plot(range(1, len(each) + 1), each, "o-", markersize=3, color=COLOURS[place], label=way)
    course.step(
        times, [point["pool"] for point in kept["course"]], ":k", where="post", label="blocks in use of the pool"
    )
    course.fill_between(
        times, [point["tokens"] for point in kept["course"]], step="post", color="#dddddd", label="tokens"
    )
    course.set_xlabel("seconds")
    course.set_ylabel("tokens")
    course.set_title("held at once", fontsize=10, loc="left")
    waste.set_xlabel("sequences, each way by their waste")
    waste.set_ylabel("tokens")
    waste.set_title("held without a token, mean over a sequence's life", fontsize=10, loc="left")
    # The model's longest sequence would leave the others no room.
    held = [row for row in kept["savings"] if row["way"] != ways[0]]
    bars = saved.barh([row["way"] for row in held], [row["bytes"] / 1e6 for row in held], color=COLOURS[0])
    saved.bar_label(bars, [f"{100 * row['of_contiguous']:.0f} %" for row in held], fontsize=8, padding=2)
    saved.invert_yaxis()
    saved.margins(x=0.1)
    saved.set_xlabel("MB")
    saved.set_title("held per sequence, mean (beside the bars: share of contiguous)", fontsize=10, loc="left")
    for axes in (course, waste):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,.0f}")
    figure.legend(*course.get_legend_handles_labels(), frameon=False, fontsize=8, ncols=3, loc="outside lower center")
    figure.savefig(target)
    return True


def batchmax(kept: Mapping[str, Any], target: Path) -> bool:
    """Draws speed by method in both schedules, and similarity of output. False without matplotlib."""
    figure = _figure(3, "Eviction in the prompt (BM), after it (ED) and none (FKV)")
    if figure is None:
        return False
    decode, whole, quality = figure.axes
    names = [row["method"] for row in kept["together"]]
    for axes, key, title in (
        (decode, "decode_tokens_per_s", "decode phase of the first batch (above the bars: its requests)"),
        (whole, "tokens_per_s", "end to end (above the bars: requests of the first batch)"),
    ):
        series = {
            schedule: [(row[key], str(row["batch"])) for row in kept[schedule]]
            for schedule in ("together", "continuous")
        }
        _bars(axes, names, series)
        axes.set_ylabel("output tokens/s")
        axes.set_title(title, fontsize=10, loc="left")
    rows = [row for row in kept["quality"] if row["method"].startswith("BM")]
    budgets = [row["budget"] for row in rows]
    for place, (key, label) in enumerate({"rouge_2": "ROUGE-2", "agreement": "same tokens"}.items()):
        quality.plot(budgets, [row[key] for row in rows], "o-", label=label, color=COLOURS[place])
    quality.set_xlabel("budget in tokens")
    quality.set_title("output beside FKV's", fontsize=10, loc="left")
    quality.legend(frameon=False, fontsize=9)
    figure.savefig(target)
    return True


# The ticks of a logarithmic axis.
TICKS_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


def fleet(kept: Mapping[str, Any], target: Path) -> bool:
    """Draws throughput, time to first token and hit rate over the rate, a line per policy. False without matplotlib.

    Simulated policies are dotted, in the colour of the real policy.
    """
    figure = _figure(4, f"A fleet of {kept['engines']} engines under each policy (dotted: simulated)")
    if figure is None:
        return False
    stages = [one for one in kept["stages"] if one["rate"] != "cold"]
    rates = list(dict.fromkeys(one["rate"] for one in stages))
    policies = list(dict.fromkeys(one["policy"] for one in stages))
    measured = [policy for policy in policies if "simulated" not in policy]
    colours = dict(zip(measured, COLOURS * len(measured), strict=False))
    panels = (
        ("output_tokens_per_s", "output tokens/s", 1),
        ("ttft_p90_s", "TTFT p90, s", 1),
        ("ttft_p99_s", "TTFT p99, s", 1),
        ("hit_rate", "hit rate, %", 100),
    )
    for axes, (key, label, factor) in zip(figure.axes, panels, strict=True):
        for policy in policies:
            points = [(one["rate"], factor * one[key]) for one in stages if one["policy"] == policy and key in one]
            name = policy.partition(" ")[0]
            axes.plot(
                [rates.index(rate) for rate, _ in points],
                [value for _, value in points],
                "o-" if policy in measured else ":",
                label=policy if policy in measured or name not in colours else "",
                color=colours.get(name, "k"),
            )
        if key.startswith("ttft"):
            axes.set_yscale("log")
            axes.yaxis.set_ticks([tick for tick in TICKS_SECONDS if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]])
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
        axes.set_xticks(range(len(rates)), rates)
        axes.set_ylabel(label)
    figure.axes[0].legend(frameon=False, fontsize=9, ncols=4)
    figure.axes[-1].set_xlabel(kept["unit"])
    figure.savefig(target)
    return True
