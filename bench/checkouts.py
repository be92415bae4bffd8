"""Speed of this checkout beside another: start-up, and the four workloads, in turns.

Run it with `python -m bench checkouts FOLDER`, where FOLDER is a checkout of another commit, for example by
`git worktree add FOLDER COMMIT`. Processes of both run in this environment, so its packages must suit both. Each repeat
starts a stack of each checkout, sends every case to one and then to the other, and stops both; the order alternates.
New processes for each repeat are necessary: where a process has its memory makes its speed differ by several percent
until it ends. A ratio is taken between the two runs of a repeat, so that a machine that becomes slower changes both.
The table shows medians, and the quartiles of the ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.result import ROOT, Result, add_json_argument, commit, middle
from bench.runs import Run, run
from bench.tables import table
from bench.workloads import Case, Corpus, chosen
from executor.models.files import resolve
from tests.stack import Stack
from tests.support.ports import free_address

# Requests that warm up both stacks for a case.
_WARM_UP = 2
# What is compared, and how many decimals are shown.
_FIGURES = {"output_tokens_per_s": 1, "first_token_mean_s": 3, "inter_token_mean_ms": 2}


def _stack(root: Path, dtype: str) -> Stack:
    metrics = free_address()
    # Earlier checkouts do not know the setting of front ends, which serve HTTP alone.
    return Stack(root=root, executor_dtype=dtype, executor_metrics_address=metrics, scheduler_frontends=None)


def _order(repeat: int) -> tuple[int, int]:
    return (0, 1) if repeat % 2 else (1, 0)


def started(root: Path, dtype: str, exits: ExitStack) -> tuple[Stack, float]:
    """A stack of this checkout, and the seconds until it serves, from the start of its Redis."""
    stack = _stack(root, dtype)
    began = time.monotonic()
    exits.enter_context(stack)
    return stack, time.monotonic() - began


def measure(stacks: Sequence[Stack], corpus: Corpus, case: Case, repeat: int) -> list[Run]:
    """One run of the case on each stack, in the order of the repeat. Some of another text's requests warm both up."""
    found: dict[int, Run] = {}
    for prompts in (corpus.prompts(case, 0)[:_WARM_UP], corpus.prompts(case, 1 + repeat)):
        for index in _order(repeat):
            found[index] = asyncio.run(run(stacks[index], case, prompts))
    return [found[0], found[1]]


def compared(case: Case, pairs: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """Medians of this checkout and of the other, and ratios of the figures: first quartile, median, third quartile."""
    summaries = [[one.times.summary() | one.usage.summary() for one in pair] for pair in pairs]
    this, other = (middle([pair[index] for pair in summaries]) for index in (0, 1))
    kept = (*_FIGURES, "cpu_s")
    return {
        "case": case.name,
        "repeats": len(pairs),
        "this": {name: this[name] for name in kept},
        "other": {name: other[name] for name in kept},
        "ratio": {name: _quartiles([a[name] / b[name] for a, b in summaries]) for name in _FIGURES},
        "different_outputs": sum(a != b for one, two in pairs for a, b in zip(one.outputs, two.outputs, strict=True)),
    }


def _quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3


def show(figures: Sequence[Mapping[str, Any]]) -> str:
    """The table: a row for each case and figure."""
    rows = [
        [
            one["case"],
            name.replace("_", " "),
            *(f"{one[side][name]:.{decimals}f}" for side in ("this", "other")),
            *(f"{ratio:.3f}" for ratio in one["ratio"][name]),
            str(one["different_outputs"]),
        ]
        for one in figures
        for name, decimals in _FIGURES.items()
    ]
    return table(["", "", "this", "other", "ratio\n25 %", "\n50 %", "\n75 %", "different\noutputs"], rows)


def main(arguments: list[str]) -> int:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2", "W3", "W4"], help="W1 W2 W2-on W2-off W3 W4")
    parser.add_argument(
        "--repeats", type=int, default=5, help="starts, and runs of each case, of each checkout (%(default)s)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    add_json_argument(parser)
    given = parser.parse_args(arguments)
    if not (given.other / "scheduler").is_dir():
        parser.error(f"{given.other} is no checkout: it has no folder scheduler")
    if given.repeats < 1:
        parser.error("--repeats must be at least 1")
    try:
        cases = chosen(given.workloads)
    except ValueError as error:
        parser.error(str(error))
    roots = (ROOT, given.other.resolve())
    starts: list[list[float]] = [[], []]
    pairs: dict[Case, list[list[Run]]] = {case: [] for case in cases}
    corpus = Corpus.of(Path(resolve("")))
    for repeat in range(given.repeats):
        with ExitStack() as exits:
            stacks: dict[int, Stack] = {}
            for index in _order(repeat):
                stacks[index], seconds = started(roots[index], given.dtype, exits)
                starts[index].append(seconds)
                print(f"{roots[index]}: serves after {seconds:.1f} s", file=sys.stderr, flush=True)
            for case in cases:
                pairs[case].append(measure([stacks[0], stacks[1]], corpus, case, repeat))
                print(show([compared(case, pairs[case])]), file=sys.stderr, flush=True)
        figures = [compared(case, found) for case, found in pairs.items()]
        kept = {"start_s": dict(zip(("this", "other"), starts, strict=True)), "cases": figures}
        # After each repeat, so that an interrupted run keeps its figures.
        Result("checkouts", kept, {"other": commit(roots[1]), "dtype": given.dtype}).write(given.json)
    print(f"this: {commit()}, other: {commit(roots[1])}")
    this, other = map(statistics.median, starts)
    print(f"start-up: {this:.1f} s, other {other:.1f} s, medians of {given.repeats}")
    print(show(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
