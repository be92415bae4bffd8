"""kvkeep beside other engines on the same token ids, in turns, in one run.

Run it with `make bench-peers`. `make peers` installs the others first. A peer that is missing or fails is named with
the reason, and the rest continues. Two models are measured: weights that nothing quantized (bench.unquantized), then
the default model's weights, which kvkeep keeps in the few bits that their author chose. All engines of a model and data
type stay loaded; all but the measured engine are stopped. Every engine's greedy output is checked against the same
references before the engine is measured: kvkeep's must be right, a peer whose output is wrong is left out. Each repeat
measures the machine and then every case on every engine, each time in a new order. A peer that was less than half as
fast as the best peer in the first repeat is not measured again in this case: it decides nothing. A peer that finds a
common prefix only after a first request is measured twice in cases with a common prefix: all at once, and "ahead".

With --gguf FILE llama.cpp and kvkeep run a GGUF file without conversion, only on W3 and W4.

The tables show medians: output tokens per second, for W4 milliseconds per token. The ratio says how many times better
kvkeep is than the best peer; "of limit" is an engine's share of the machine's limit (bench.limits). llama-bench
is llama.cpp's own measurement of W4, without a server.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

from bench import gate, limits, plots, unquantized
from bench.gguf_file import in_floats
from bench.peers import gguf_file, llama_bench
from bench.peers.processes import PeerError, PeerProcess
from bench.peers.set_up import PEERS, Peer, default_folder
from bench.result import Result, middle
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
from executor.errors import ModelError, first_line
from tests.stack import model_cache

OURS, LLAMA = "kvkeep", "llamacpp"
# A peer slower than this share of the best peer is measured only once.
NEAR = 0.5
# The models that are measured by default, by the names of --models.
MODELS = {
    "unquantized": "weights that nothing quantized: the default model's, changed by 0.3 % and rounded to bfloat16",
    "default": "the default model's weights, which their author quantized; peers get them as floats",
}
GGUF_CASES = ("W3", "W4")

Record = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model to measure, its name in tables, and its GGUF file if the model is a GGUF file."""

    title: str
    bench: Bench
    file: Path | None = None

    def gguf(self, dtype: str, folder: Path) -> Path:
        """The file for peers that read GGUF files. Raises ValueError when there is no such file of the model."""
        return self.file or gate.apart(gguf_file.written, self.bench.model, dtype, folder)

    def work(self, case: Case, dtype: str) -> limits.Work:
        """The least work of a case."""
        weight_bytes = gguf_file.step_bytes(self.file) if self.file else None
        return limits.work(self.bench.shape, case, dtype, weight_bytes)


@dataclass
class Measured:
    """Everything that was found, for JSON and the tables."""

    # The medians of each case and engine by model.
    runs: dict[str, list[Record]]
    # The machine's best rates, and milliseconds per token, by model and data type.
    limits: dict[str, dict[str, Record]]
    llama_bench: dict[str, dict[str, float]]
    # Versions of the peers.
    engines: dict[str, str]
    # Why an engine is not measured, or the error in the output of an engine that is measured.
    absent: dict[str, str]
    differing: dict[str, str]


def value(case: str, record: Mapping[str, Any]) -> float:
    """The main figure of a case."""
    return float(record["inter_token_mean_ms"] if case == "W4" else record["output_tokens_per_s"])


def better(case: str, ours: float, theirs: float) -> float:
    """How many times better the first figure is than the second."""
    return theirs / ours if case == "W4" else ours / theirs


def still_of_interest(name: str, case: str, records: Sequence[Record]) -> bool:
    """Whether an engine may still be the best peer in a case, judged by the records so far."""
    seen = {
        record["engine"]: value(case, record) for record in records if record["case"] == case and record["repeat"] == 1
    }
    if name == OURS or name not in seen:
        return True
    return all(better(case, seen[name], figure) >= NEAR for other, figure in seen.items() if other != OURS)


def row(dtype: str, case: str, engines: Sequence[str], records: Sequence[Record]) -> list[str]:
    """One line of the table, from the records of one model in this data type and case."""
    medians = {record["engine"]: value(case, record) for record in records}
    some = records[0]
    tokens = round(some["output_tokens_per_s"] * some["seconds"])
    limit = some["limit_step_ms"] if case == "W4" else tokens / some["limit_s"]
    peers = {engine: figure for engine, figure in medians.items() if engine != OURS}
    best = max(peers, key=lambda engine: better(case, peers[engine], 1.0), default="")
    ours = medians.get(OURS)
    return [
        f"{dtype} {case}",
        "ms per token" if case == "W4" else "tokens/s",
        *(f"{medians[engine]:.1f}" if engine in medians else "-" for engine in engines),
        best or "-",
        f"{better(case, ours, peers[best]):.2f}" if ours and best else "-",
        f"{limit:.1f}",
        f"{better(case, ours, limit):.0%}" if ours else "-",
        f"{better(case, peers[best], limit):.0%}" if best else "-",
    ]


def report(found: Measured) -> str:
    """A table for each model, and the engines that the tables lack."""
    lines: list[str] = []
    for model, records in found.runs.items():
        engines = list(dict.fromkeys(record["engine"] for record in records))
        groups: dict[tuple[str, str], list[Record]] = {}
        for record in records:
            groups.setdefault((record["dtype"], record["case"]), []).append(record)
        names = [engine.replace(" ", "\n") for engine in engines]
        head = ["", "", *names, "best peer", "kvkeep by\nbest peer", "limit", "kvkeep\nof limit", "best peer\nof limit"]
        rows = [row(dtype, case, engines, group) for (dtype, case), group in groups.items()]
        repeats = max(record["repeats"] for record in records)
        lines += [f"\n{model}\nmedians of {repeats}, engines in turns", "", table(head, rows), ""]
        alone = found.llama_bench.get(model, {})
        lines += [f"llama-bench {dtype} W4: {figure:.1f} ms per token" for dtype, figure in alone.items()]
        usual = statistics.median(record["others_cpu"] for record in records)
        most = max(record["most_others_cpu"] for record in records)
        lines += [f"other processes took {usual:.0%} of the cores during a run, {most:.0%} at most"]
    lines += [f"measured though its output differs: {name}: {reason}" for name, reason in found.differing.items()]
    return "\n".join([*lines, *(f"not measured: {name}: {reason}" for name, reason in found.absent.items())])


def started(
    subject: Subject, dtype: str, folder: Path, peers: Sequence[Peer], stack: contextlib.ExitStack, found: Measured
) -> dict[str, PeerProcess]:
    """The installed peers that load the model; the reasons against the other peers are noted."""
    running = {}
    for peer in peers:
        try:
            if reason := peer.missing(folder):
                raise PeerError(reason)
            note(f"{peer.name} {dtype}: starting")
            cache = folder / "cache"
            model = subject.gguf(dtype, cache) if peer.gguf else subject.bench.model
            process = stack.enter_context(PeerProcess(peer, peer.python(folder), model, dtype, cache))
            running[peer.name] = process
            found.engines[peer.name] = ", ".join([process.version, *filter(None, [peer.source])])
        except (PeerError, OSError, ValueError) as error:
            leave_out(peer.name, dtype, error, found)
    return running


def leave_out(name: str, dtype: str, reason: object, found: Measured) -> None:
    """Notes why an engine is not measured, or no longer measured."""
    found.absent[f"{name} {dtype}"] = str(reason)
    note(f"{name} {dtype}: {reason}")


def ours(subject: Subject, dtype: str, stack: contextlib.ExitStack, found: Measured) -> dict[str, Runs]:
    """kvkeep, or nothing for a GGUF file that it does not load."""
    try:
        return {OURS: kvkeep(stack.enter_context(subject.bench.stack(dtype)))}
    except RuntimeError as error:
        if not subject.file:
            raise
        leave_out(OURS, dtype, first_line(error), found)
        return {}


def one_dtype(subject: Subject, dtype: str, folder: Path, peers: Sequence[Peer], found: Measured) -> None:
    """Makes all runs of one data type, and measures the machine's limits in between."""
    bench = subject.bench
    expected, margin = bench.references(dtype)
    records: list[Record] = []
    token_ms: list[float] = []
    measured: list[limits.Limits] = []
    with contextlib.ExitStack() as stack:
        engines = ours(subject, dtype, stack, found)
        for name, runs in engines.items():
            bench.check(f"{name} {dtype}", runs, expected, margin, whole=True)
        known = {peer.name: peer for peer in peers}
        for name, process in started(subject, dtype, folder, peers, stack, found).items():
            peer = known[name]
            try:
                bench.check(f"{name} {dtype}", process.run, expected, margin, whole=not peer.eager)
            except PeerError as error:
                leave_out(name, dtype, error, found)
                continue
            except WrongOutputError as error:
                if not subject.file:
                    leave_out(name, dtype, error, found)
                    continue
                # llama.cpp rounds the numbers that it multiplies with weights in few bits.
                found.differing[f"{name} {dtype}"] = str(error)
            engines[name] = process.run
            if peer.ahead:
                engines[f"{name} ahead"] = partial(process.run, ahead=True)
        for repeat in range(1, bench.repeats + 1 if engines else 1):
            measured.append(bench.machine(dtype))
            for case in bench.cases:
                records += one_case(subject, dtype, case, repeat, engines, records, found)
                if case.name == "W4" and LLAMA in engines:
                    program = known[LLAMA].python(folder).with_name("llama-bench")
                    token_ms += alone(program, subject, dtype, case, repeat, folder / "cache", found)
        measured.append(bench.machine(dtype))
    add(subject, dtype, records, reduce(limits.Limits.best, measured), found)
    if token_ms:
        found.llama_bench.setdefault(subject.title, {})[dtype] = statistics.median(token_ms)


def add(subject: Subject, dtype: str, records: Sequence[Record], best: limits.Limits, found: Measured) -> None:
    """Adds the medians of all runs of one data type, with their limits by the machine's best rates."""
    cases = {case.name: case for case in subject.bench.cases}
    for record in records:
        needed = subject.work(cases[record["case"]], dtype)
        record["limit_s"] = best.seconds(needed)
        record["limit_step_ms"] = best.step_seconds(needed) * 1e3
    if records:
        found.runs.setdefault(subject.title, []).extend(medians(records))
    found.limits.setdefault(subject.title, {})[dtype] = asdict(best)


def medians(records: Sequence[Record]) -> list[Record]:
    """One record for each case and engine, from the records of their repeats."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["case"], record["engine"]), []).append(record)
    return [
        {"repeats": len(group), **middle(group), "most_others_cpu": max(record["others_cpu"] for record in group)}
        for group in groups.values()
    ]


def one_case(
    subject: Subject,
    dtype: str,
    case: Case,
    repeat: int,
    engines: dict[str, Runs],
    before: Sequence[Record],
    found: Measured,
) -> list[Record]:
    """Runs one case on every engine, with a different engine first in each repeat; drops an engine that fails."""
    prompts = subject.bench.corpus.prompts(case, repeat)
    order = list(engines)
    shift = repeat % max(1, len(order))
    done = []
    for name in order[shift:] + order[:shift]:
        if name.endswith(" ahead") and not (case.shared and case.reuse):
            continue
        if not still_of_interest(name, case.name, before):
            continue
        try:
            result = engines[name](case, prompts, case.output_tokens)
        except PeerError as error:
            leave_out(name, dtype, error, found)
            del engines[name]
            continue
        summary = result.times.summary() | {"others_cpu": result.usage.others}
        del summary["total_tokens_per_s"]
        where = {"dtype": dtype, "case": case.name, "repeat": repeat, "engine": name}
        done.append({**where, **summary})
        note(f"{dtype} {case.name}, repeat {repeat}, {name}: {value(case.name, summary):.1f}")
    return done


def alone(
    program: Path, subject: Subject, dtype: str, case: Case, repeat: int, cache: Path, found: Measured
) -> list[float]:
    """Measures W4 with llama-bench: milliseconds per token, or nothing if it fails."""
    threads = len(os.sched_getaffinity(0))
    try:
        taken = llama_bench.token_ms(program, subject.gguf(dtype, cache), dtype, threads, case)
    except PeerError as error:
        leave_out("llama-bench", dtype, error, found)
        return []
    note(f"{dtype} {case.name}, repeat {repeat}, llama-bench: {taken:.1f}")
    return [taken]


def subjects(names: Sequence[str], model: str, file: Path | None, bench: Bench) -> list[Subject]:
    """The models to measure: one if --model or --gguf names it, else --models. Raises ModelError for a bad file."""
    if file:
        folder = gate.apart(in_floats, file.resolve(), model_cache())
        cases = [case for case in bench.cases if case.name in GGUF_CASES]
        settings = {**bench.settings, "executor_model": str(file.resolve())}
        title = f"{file.name} as it is; the limit is that of its bytes"
        return [Subject(title, replace(bench, model=folder, cases=cases, settings=settings), file.resolve())]
    if model:
        return [Subject(model, bench)]
    changed: dict[str, Callable[[], Path]] = {
        "unquantized": lambda: gate.apart(unquantized.made, bench.model, model_cache() / "models"),
        "default": lambda: bench.model,
    }
    return [Subject(MODELS[name], replace(bench, model=changed[name]())) for name in MODELS if name in names]


def main() -> int:
    """Measures and reports."""
    made = parser(__doc__)
    names = [peer.name for peer in PEERS]
    made.add_argument("--peers", nargs="+", choices=names, default=names)
    made.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], help="without --model and --gguf")
    made.add_argument(
        "--gguf", type=Path, metavar="FILE", help="a model that llama.cpp and kvkeep run without conversion"
    )
    made.add_argument(
        "--folder", type=Path, default=default_folder(), help="folder of the environments of `make peers`"
    )
    given, bench = parse(made)
    if given.gguf and not given.gguf.is_file():
        made.error(f"--gguf: there is no file {given.gguf}")
    peers = [peer for peer in PEERS if peer.name in given.peers and (peer.gguf or not given.gguf)]
    found = Measured({}, {}, {}, {}, {}, {})

    def measure() -> None:
        for subject in subjects(given.models, given.model, given.gguf, bench):
            for dtype in given.dtypes:
                one_dtype(subject, dtype, given.folder, peers, found)
                # The engines stand in this order, whatever order they were measured in.
                order = [name for peer in PEERS for name in (peer.name, f"{peer.name} ahead")]
                for rows in found.runs.values():
                    rows.sort(key=lambda record: [OURS, *order].index(record["engine"]))
                keep(Result("peers", vars(found), bench.settings), given.json, plots.peers)
        print(report(found), flush=True)

    try:
        return red_or_interrupted(measure)
    except ModelError as error:
        made.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
