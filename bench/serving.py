"""Speed of the whole stack on four workloads, beside the machine's limits.

Run it with `make bench-serving`, for example ARGS="--workloads W1 W4 --dtypes bfloat16 --repeats 1". Each data type has
a separate stack. Its greedy output is checked first, which also warms up the stack; a failed check ends the run
without a speed. Each repeat measures the machine and then each case once, with text that no cache has seen. Tables
show medians; "of limit" compares with the least time that bench.limits computes from the best rates of the same
run. A JSON file has the medians, and a picture of the same name is beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from bench import gate, limits, plots
from bench.gguf_file import in_floats
from bench.limits import Limits, ModelShape
from bench.result import Result, add_json_argument, middle
from bench.runs import Run, WrongCountError, run
from bench.tables import table
from bench.workloads import Case, Corpus, chosen
from executor.errors import ModelError
from executor.models.files import resolve
from tests.stack import Stack, model_cache
from tests.support.ports import free_address
from tests.support.reference import TIE, Reference, references

RED, INTERRUPTED = 1, 130

# Runs requests of a case to their number of output tokens.
Runs = Callable[[Case, Sequence[Sequence[int]], int], Run]


class WrongOutputError(Exception):
    """Greedy output that differs from the expected output."""


def note(line: str) -> None:
    """Prints progress, which is no result, to standard error."""
    print(line, file=sys.stderr, flush=True)


@dataclass
class Bench:
    """The inputs and results of a run.

    model: the folder that transformers reads. gguf: the file that the folder was made from, which is served instead.
    """

    model: Path
    cases: list[Case]
    repeats: int
    settings: dict[str, str] = field(default_factory=dict)
    gguf: Path | None = None

    def __post_init__(self) -> None:
        self.shape = ModelShape.read(self.model)
        self.corpus = Corpus.of(self.model)

    def stack(self, dtype: str) -> Stack:
        """A stack that runs the model in `dtype`."""
        served = self.gguf or self.model
        settings = {"executor_dtype": dtype, "executor_model": served, "executor_metrics_address": free_address()}
        return Stack(**{**settings, **self.settings})

    def references(self, dtype: str) -> tuple[dict[str, list[Reference]], float]:
        """Expected output of each case's sample, and the margin below which a different token is no error."""
        note(f"{dtype}: expected output")
        found, margin = {}, TIE
        for case in self.cases:
            prompts = self.corpus.prompts(case, 0)
            inputs = (self.model, [prompts[index] for index in gate.sample(case)], gate.tokens_compared(case))
            found[case.name] = gate.apart(references, *inputs, model_cache())
            if dtype != "float32":
                margin = max(margin, gate.apart(gate.allowed_margin, *inputs, model_cache()))
        return found, margin

    def check(self, name: str, runs: Runs, expected: dict[str, list[Reference]], margin: float, *, whole: bool) -> None:
        """Runs variant 0 of every case, or only of its sample, and so warms up the stack. Raises WrongOutputError."""
        wrong: list[str] = []
        for case in self.cases:
            prompts, picked = self.corpus.prompts(case, 0), gate.sample(case)
            if not (whole and case.reuse):
                # Without reuse the whole batch takes long, and shows no more than the sample.
                prompts, picked = [prompts[index] for index in picked], list(range(len(picked)))
            outputs = runs(case, prompts, gate.tokens_compared(case)).outputs
            label = f"{name} {case.name}"
            found, near = gate.differences(label, expected[case.name], [outputs[index] for index in picked], margin)
            wrong += found
            differing = f"; margins where others differ: {', '.join(map('{:.2g}'.format, near))}" if near else ""
            note(f"{label}: {len(picked) - len(near) - len(found)} of {len(picked)} as expected{differing}")
        if wrong:
            raise WrongOutputError("\n".join(wrong))

    def machine(self, dtype: str) -> Limits:
        """The limits of the machine at this moment."""
        note(f"{dtype}: the machine's limits")
        return gate.apart(limits.measure, self.shape, dtype)


@dataclass
class Report:
    """Everything about one data type."""

    dtype: str
    limits: list[Limits] = field(default_factory=list)
    runs: list[tuple[Case, Run]] = field(default_factory=list)

    @property
    def best_limits(self) -> Limits:
        """The machine's best rates in the same run."""
        return reduce(Limits.best, self.limits)

    def records(self, shape: ModelShape) -> list[dict[str, Any]]:
        """The medians of each case, for JSON."""
        repeats: dict[Case, list[dict[str, Any]]] = {}
        for case, result in self.runs:
            figures = {**result.times.summary(), **result.usage.summary(), "cached_tokens": result.cached_tokens}
            repeats.setdefault(case, []).append(figures)
        return [
            {
                "dtype": self.dtype,
                "case": case.name,
                "repeats": len(found),
                **middle(found),
                "limit_s": self.best_limits.seconds(limits.work(shape, case, self.dtype)),
                "limit_step_ms": self.best_limits.step_seconds(limits.work(shape, case, self.dtype)) * 1e3,
            }
            for case, found in repeats.items()
        ]


def show(records: Sequence[dict[str, Any]], lines: Sequence[str]) -> str:
    """The tables of one data type: speed and limits, use of each process, and time of the executor's steps."""
    speed, cost, kinds = [], [], []
    processes, names_of_kinds = list(records[0]["cpu_s"]), list(records[0]["kind_s"])
    for one in records:
        speed.append(
            [
                one["case"],
                f"{one['output_tokens_per_s']:.1f}",
                f"{one['total_tokens_per_s']:.0f}",
                f"{one['limit_s'] / one['seconds']:.0%}",
                *(f"{one[f'first_token_{kind}_s']:.2f}" for kind in ("mean", "p99")),
                *(f"{one[f'inter_token_{kind}_ms']:.1f}" for kind in ("mean", "p50", "p99")),
                f"{one['inter_token_mean_ms'] / one['limit_step_ms']:.2f}",
                f"{one['kv_blocks']:.0f}",
                f"{one['cached_tokens']:.0f}",
                f"{one['others_cpu']:.0%}",
            ]
        )
        used = [f"{one['cpu_s'][process]:.2f} s {one['resident_mb'][process]:5.0f} MB" for process in processes]
        cost.append([one["case"], *used])
        spent = [one["kind_s"][kind] for kind in names_of_kinds]
        kinds.append([one["case"], f"{sum(spent):.2f}", *(f"{seconds / sum(spent):.1%}" for seconds in spent)])
    head = (
        "",
        "output\ntokens/s",
        "total\ntokens/s",
        "of\nlimit",
        "first token\nmean s",
        "\np99 s",
        "inter-token\nmean ms",
        "\np50 ms",
        "\np99 ms",
        "mean by\nlimit",
        "KV\nblocks",
        "cached\ntokens",
        "others\nof CPU",
    )
    title = f"{records[0]['dtype']}, medians of {records[0]['repeats']}"
    tables = [table(head, speed), table(("CPU time and resident memory", *processes), cost)]
    if names_of_kinds:
        tables.append(table(("the executor's steps", "s", *names_of_kinds), kinds))
    return "\n\n".join(["\n".join([f"\n{title}", *lines]), *tables])


def kvkeep(stack: Stack) -> Runs:
    """Runs cases on a stack."""
    return lambda case, prompts, count: asyncio.run(run(stack, case, prompts, count))


def one_dtype(bench: Bench, dtype: str) -> Report:
    """Checks and measures one data type."""
    report = Report(dtype)
    expected, margin = bench.references(dtype)
    with bench.stack(dtype) as stack:
        runs = kvkeep(stack)
        bench.check(f"kvkeep {dtype}", runs, expected, margin, whole=True)
        for repeat in range(1, bench.repeats + 1):
            report.limits.append(bench.machine(dtype))
            for case in bench.cases:
                result = runs(case, bench.corpus.prompts(case, repeat), case.output_tokens)
                report.runs.append((case, result))
                note(f"{dtype} {case.name}, repeat {repeat}: {result.times.output_rate:.1f} output tokens/s")
        report.limits.append(bench.machine(dtype))
    return report


def parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments that the benchmarks of speed have in common."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--workloads", nargs="+", default=["W1", "W2", "W3", "W4"], help="W1 W2 W2-on W2-off W3 W4")
    made.add_argument("--dtypes", nargs="+", choices=limits.ELEMENT_BYTES, default=[*limits.ELEMENT_BYTES])
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--model", default="", help="as KVKEEP_EXECUTOR_MODEL: a folder or a GGUF file")
    made.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings: executor_threads=1")
    add_json_argument(made)
    return made


def parse(made: argparse.ArgumentParser) -> tuple[argparse.Namespace, Bench]:
    """The command line, and the benchmark it asks for."""
    given = made.parse_args()
    try:
        cases = chosen(given.workloads)
        settings = dict(pair.split("=", 1) for pair in given.set)
        model = resolve(given.model)
        gguf = model if model.is_file() else None
        if gguf is not None:
            note(f"{gguf.name}: its floats, for the expected output")
            model = gate.apart(in_floats, gguf, model_cache())
    except (ValueError, ModelError) as error:
        made.error(str(error))
    if given.repeats < 1:
        made.error("--repeats must be at least 1")
    return given, Bench(model, cases, given.repeats, settings, gguf)


def keep(result: Result, target: Path | None, plot: Callable[[dict[str, Any], Path], bool]) -> None:
    """Writes the results and their picture."""
    written = result.write(target)
    note(f"the figures are in {written}")
    picture = written.with_suffix(".png")
    note(f"drawn in {picture}" if plot(result.values(), picture) else "not drawn: there is no matplotlib")


def red_or_interrupted(measure: Callable[[], None]) -> int:
    """Runs a benchmark to its end; returns the exit status."""
    try:
        measure()
    except (WrongOutputError, WrongCountError) as error:
        print(f"The output is wrong, so no speed is shown:\n{error}")
        return RED
    except KeyboardInterrupt:
        note("interrupted")
        return INTERRUPTED
    return 0


def main() -> int:
    """Measures and reports."""
    given, bench = parse(parser(__doc__))
    kept: dict[str, Any] = {"limits": {}, "runs": []}

    def measure() -> None:
        for dtype in given.dtypes:
            report = one_dtype(bench, dtype)
            records = report.records(bench.shape)
            kept["limits"][dtype] = asdict(report.best_limits)
            kept["runs"] += records
            print(show(records, report.best_limits.lines()), flush=True)
            keep(Result("serving", kept, bench.settings), given.json, plots.serving)

    return red_or_interrupted(measure)


if __name__ == "__main__":
    sys.exit(main())
