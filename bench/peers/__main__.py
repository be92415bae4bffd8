"""kvkeep beside other engines on the same token ids, in turns, in one run.

Run it with `make bench-peers`. `make peers` installs the others first; one that is missing or fails is named with the
reason, and the rest continues. All engines of a data type stay loaded, and those whose turn it is not are stopped.
Every engine's greedy output is checked against the same references before it is measured: kvkeep's must be right, a
peer whose output is wrong is left out. Each repeat measures the machine and then every case on every engine, in another
order each time. A peer that was less than half as fast as the best one in the first repeat is not measured again in
that case: it decides nothing.

The table shows medians: output tokens per second, for W4 milliseconds per token. The ratio says how many times better
kvkeep is than the best peer; "of limit" is its share of what the machine could do (bench.limits).
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Any

from bench import limits, plots
from bench.peers.processes import PeerError, PeerProcess
from bench.peers.set_up import PEERS, default_folder
from bench.result import Result
from bench.serving import (
    Bench,
    Runs,
    WrongOutputError,
    keep,
    kvkeep,
    note,
    parse,
    parser,
    red_or_interrupted,
)
from bench.tables import table
from bench.workloads import Case

OURS = "kvkeep"
# A peer slower than this share of the best one is measured once.
NEAR = 0.5

Record = dict[str, Any]


def value(case: str, record: Mapping[str, Any]) -> float:
    """The figure that a case is about."""
    return float(record["inter_token_mean_ms"] if case == "W4" else record["output_tokens_per_s"])


def better(case: str, ours: float, theirs: float) -> float:
    """How many times better the first figure is."""
    return theirs / ours if case == "W4" else ours / theirs


def still_of_interest(name: str, case: str, records: Sequence[Record]) -> bool:
    """Whether an engine may still be the best peer in a case, after what was seen."""
    seen = {
        record["engine"]: value(case, record) for record in records if record["case"] == case and record["repeat"] == 1
    }
    if name == OURS or name not in seen:
        return True
    return all(better(case, seen[name], figure) >= NEAR for other, figure in seen.items() if other != OURS)


def row(dtype: str, case: str, engines: Sequence[str], records: Sequence[Record]) -> list[str]:
    """One line of the table; the records are those of this data type and case."""
    medians = {}
    for engine in engines:
        if figures := [value(case, record) for record in records if record["engine"] == engine]:
            medians[engine] = statistics.median(figures)
    ours = next(record for record in records if record["engine"] == OURS)
    if case == "W4":
        limit = ours["limit_step_ms"]
    else:
        tokens = ours["output_tokens_per_s"] * ours["seconds"]
        limit = tokens / ours["limit_s"]
    peers = {engine: figure for engine, figure in medians.items() if engine != OURS}
    best = max(peers, key=lambda engine: better(case, peers[engine], 1.0), default=None)
    return [
        f"{dtype} {case}",
        "ms per token" if case == "W4" else "tokens/s",
        *(f"{medians[engine]:.1f}" if engine in medians else "-" for engine in engines),
        best or "-",
        f"{better(case, medians[OURS], peers[best]):.2f}" if best else "-",
        f"{limit:.1f}",
        f"{better(case, medians[OURS], limit):.0%}",
    ]


def report(records: Sequence[Record], absent: Mapping[str, str]) -> str:
    """The table, and the engines that are not in it."""
    engines = list(dict.fromkeys(record["engine"] for record in records))
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["dtype"], record["case"]), []).append(record)
    head = ["", "", *engines, "best peer", "kvkeep by\nbest peer", "limit", "kvkeep\nof limit"]
    rows = [row(dtype, case, engines, group) for (dtype, case), group in groups.items()]
    repeats = max(record["repeat"] for record in records)
    others = statistics.median(record["others_cpu"] for record in records)
    most = max(record["others_cpu"] for record in records)
    lines = [f"\nmedians of {repeats}, engines in turns", "", table(head, rows), ""]
    lines += [f"other processes took {others:.0%} of the cores during a run, {most:.0%} at most"]
    return "\n".join([*lines, *(f"not measured: {name}: {reason}" for name, reason in absent.items())])


def started(
    bench: Bench, dtype: str, folder: Path, names: Sequence[str], stack: contextlib.ExitStack, absent: dict[str, str]
) -> dict[str, PeerProcess]:
    """The peers that are there and load the model; the others and why go to `absent`."""
    running = {}
    for peer in PEERS:
        if peer.name not in names:
            continue
        try:
            if reason := peer.missing(folder):
                raise PeerError(reason)
            note(f"{peer.name} {dtype}: starting")
            process = PeerProcess(peer, peer.python(folder), bench.model, dtype, folder / "cache")
            running[peer.name] = stack.enter_context(process)
        except (PeerError, OSError) as error:
            absent[f"{peer.name} {dtype}"] = str(error)
            note(f"{peer.name} {dtype}: {error}")
    return running


def one_dtype(
    bench: Bench, dtype: str, folder: Path, names: Sequence[str], absent: dict[str, str]
) -> tuple[list[Record], list[limits.Limits]]:
    """Every run of one data type, and what the machine could do meanwhile."""
    expected, margin = bench.references(dtype)
    records: list[Record] = []
    measured: list[limits.Limits] = []
    with contextlib.ExitStack() as stack:
        engines: dict[str, Runs] = {OURS: kvkeep(stack.enter_context(bench.stack(dtype)))}
        bench.check(f"{OURS} {dtype}", engines[OURS], expected, margin, whole=True)
        eager = {peer.name for peer in PEERS if peer.eager}
        for name, process in started(bench, dtype, folder, names, stack, absent).items():
            try:
                bench.check(f"{name} {dtype}", process.run, expected, margin, whole=name not in eager)
                engines[name] = process.run
            except (PeerError, WrongOutputError) as error:
                absent[f"{name} {dtype}"] = str(error)
                note(f"{name} {dtype}: {error}")
        for repeat in range(1, bench.repeats + 1):
            measured.append(bench.machine(dtype))
            for case in bench.cases:
                records += one_case(bench, dtype, case, repeat, engines, records, absent)
        measured.append(bench.machine(dtype))
    best = reduce(limits.Limits.best, measured)
    for record in records:
        needed = limits.work(bench.shape, next(case for case in bench.cases if case.name == record["case"]), dtype)
        record["limit_s"] = best.seconds(needed)
        record["limit_step_ms"] = best.step_seconds(needed) * 1e3
    return records, measured


def one_case(
    bench: Bench,
    dtype: str,
    case: Case,
    repeat: int,
    engines: dict[str, Runs],
    before: Sequence[Record],
    absent: dict[str, str],
) -> list[Record]:
    """One case on every engine, beginning with another one in each repeat; an engine that fails is dropped."""
    prompts = bench.corpus.prompts(case, repeat)
    order = list(engines)
    shift = repeat % len(order)
    done = []
    for name in order[shift:] + order[:shift]:
        if not still_of_interest(name, case.name, before):
            continue
        try:
            result = engines[name](case, prompts, case.output_tokens)
        except PeerError as error:
            absent[f"{name} {dtype}"] = str(error)
            note(f"{name} {dtype}: {error}")
            del engines[name]
            continue
        summary = {key: round(figure, 5) for key, figure in result.times.summary().items()}
        summary["others_cpu"] = round(result.usage.others, 4)
        done.append({"dtype": dtype, "case": case.name, "repeat": repeat, "engine": name, **summary})
        note(f"{dtype} {case.name}, repeat {repeat}, {name}: {value(case.name, summary):.1f}")
    return done


def main() -> int:
    """Measures and reports."""
    made = parser(__doc__)
    names = [peer.name for peer in PEERS]
    made.add_argument("--peers", nargs="+", choices=names, default=names)
    made.add_argument("--folder", type=Path, default=default_folder(), help="where `make peers` put them")
    given, bench = parse(made)
    kept: dict[str, Any] = {"limits": {}, "runs": []}
    absent: dict[str, str] = {}

    def measure() -> None:
        for dtype in given.dtypes:
            records, measured = one_dtype(bench, dtype, given.folder, given.peers, absent)
            kept["runs"] += records
            kept["limits"][dtype] = [asdict(one) for one in measured]
            # Beside each other, whatever the order they were measured in.
            kept["runs"].sort(key=lambda record: [OURS, *names].index(record["engine"]))
            kept["absent"] = absent
            keep(Result("peers", kept, bench.settings), given.json, plots.peers)
        print(report(kept["runs"], absent), flush=True)

    return red_or_interrupted(measure)


if __name__ == "__main__":
    sys.exit(main())
