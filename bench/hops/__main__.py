"""Files and functions on the path of an admission and of a decode step, in the order of their calls.

The processes are real and have a model. They record every call of a function of the product while requests run, one at
a time. A function is on a path if there is a call for nearly each admission, or each decode step. Validation, metrics,
logs and tracing are left out, with all that they call. So are functions that no reader jumps to: properties,
comprehensions, lambdas and special methods. A detail is a function that calls nothing in a different file: its name is
enough for a reader. `--details` shows the details, too.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import functools
import importlib
import inspect
import itertools
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.result import Result, add_json_argument
from tests.stack import ROOT, Stack
from tests.support.generation import generate_all, greedy_request

PROMPT_TOKENS, TOKENS, REQUESTS = 100, 60, 12
# A function on a path is called at least this often per admission, or step; rarer functions run on timers.
ALWAYS = 0.9
# Functions that hand over to a different thread, which calls a different file.
HAND_OVERS = ("Worker.submit",)
# Files and functions that belong to no path.
BESIDE_FILES = ("validation", "bounds", "metrics", "telemetry", "tracing", "timing", "logs", "audit", "settings")
BESIDE_NAMES = ("check_", "_check", "observe", "log_")


class Call(NamedTuple):
    """A call of a function; at: in nanoseconds. process: the service. leads_on: whether it led to a different file."""

    at: int
    process: str
    file: str
    function: str
    leads_on: bool = False


class Step(NamedTuple):
    """A function on a path."""

    process: str
    file: str
    function: str
    leads_on: bool


class Route(NamedTuple):
    """The name of a path, and the functions at whose calls the path begins and ends."""

    name: str
    begin: str
    end: str


PATHS = (
    Route("an admission", "CacheClient._admit", "RunningBatch.admit"),
    Route("a decode step", "build_step", "build_step"),
)


def is_beside(file: str, function: str) -> bool:
    """Whether a call, with all that it calls, is left out."""
    parts = file.removesuffix(".py").split("/")
    name = function.rpartition(".")[2]
    return bool({*parts} & {*BESIDE_FILES}) or name.startswith(BESIDE_NAMES) or parts[-1].endswith("_pb2")


@functools.cache
def is_hop(file: str, function: str) -> bool:
    """Whether a reader jumps to the called function."""
    name = function.rpartition(".")[2]
    return "<" not in name and not name.startswith("__") and not is_property(file, function)


def is_property(file: str, function: str) -> bool:
    """Whether a name stands for a property of a class."""
    found: Any = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    for name in function.split("."):
        found = inspect.getattr_static(found, name, None)
    return isinstance(found, property)


def windows(calls: Sequence[Call], route: Route) -> Iterator[Sequence[Call]]:
    """Yields the calls of each pass along a path. calls: in the order of their times."""
    begun: int | None = None
    for at, call in enumerate(calls):
        if begun is not None and call.function == route.end:
            yield calls[begun : at + (route.begin != route.end)]
            begun = None
        if begun is None and call.function == route.begin:
            begun = at


def on_paths(process: str, recorded: Sequence[tuple[int, int, str, str]]) -> Iterator[Call]:
    """Yields the calls of a process to which a reader jumps, as `traced/sitecustomize.py` has recorded all."""
    beside: set[int] = set()
    # By the index of a call, the nearest call from the call itself outwards to which a reader jumps.
    nearest: dict[int, int] = {}
    leads: set[int] = set()
    for index, (_at, caller, file, function) in enumerate(recorded):
        if caller in beside or is_beside(file, function):
            beside.add(index)
            continue
        outer = nearest.get(caller, -1)
        nearest[index] = index if is_hop(file, function) else outer
        if nearest[index] != index:
            continue
        # A helper of the same file may be what leads to a different file.
        while outer >= 0 and outer not in leads and recorded[outer][2] != file:
            leads.add(outer)
            outer = nearest.get(recorded[outer][1], -1)
    for index, found in nearest.items():
        if index == found:
            at, _caller, file, function = recorded[index]
            yield Call(at, process, file, function, index in leads or function in HAND_OVERS)


def path_of(calls: Sequence[Call], route: Route) -> list[Step]:
    """The functions on a path, in order."""
    offsets: dict[tuple[str, str, str], list[int]] = {}
    counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
    leads: set[tuple[str, str, str]] = set()
    passes = 0
    for window in windows(calls, route):
        passes += 1
        called = collections.Counter(call[1:4] for call in window)
        # Steps overlap: the call for a step may come in the window of the step before, which then has two of them.
        counts.update({name: min(number, 2) for name, number in called.items()})
        first = {call[1:4]: call.at - window[0].at for call in reversed(window)}
        for name, offset in first.items():
            offsets.setdefault(name, []).append(offset)
        leads |= {call[1:4] for call in window if call.leads_on}
    kept = [name for name, number in counts.items() if number >= ALWAYS * passes]
    return [Step(*name, name in leads) for name in sorted(kept, key=lambda name: statistics.median(offsets[name]))]


def traced(folder: Path) -> list[Call]:
    """Runs requests, and returns the calls of all processes in the order of their times."""
    stack = Stack(executor_max_tokens=8_192)
    stack.variables = {
        "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent / "traced"), str(ROOT))),
        "TRACED_ROOT": str(ROOT),
        "TRACED_FOLDER": str(folder),
    }
    with stack:
        requests = [
            greedy_request([1_000 + 7 * number + at for at in range(PROMPT_TOKENS)], TOKENS)
            for number in range(REQUESTS)
        ]
        asyncio.run(generate_all(stack.scheduler, requests[:1], concurrency=1))
        for name in stack.modules:
            os.kill(stack.pid(name), signal.SIGUSR2)
        asyncio.run(generate_all(stack.scheduler, requests[1:], concurrency=1))
        calls: list[Call] = []
        for name in stack.modules:
            os.kill(stack.pid(name), signal.SIGUSR2)
            written = folder / f"{stack.pid(name)}.json"
            while not written.exists():
                time.sleep(0.05)
            calls += on_paths(name, json.loads(written.read_text()))
    return sorted(calls)


def lines(path: Iterable[Step]) -> Iterator[str]:
    """A path for people: a line for each file, with the functions that are called there one after the other."""
    for (process, file), group in itertools.groupby(path, key=lambda step: step[:2]):
        yield f"  {process:<9}  {file}: {', '.join(step.function for step in group)}"


def main() -> None:
    """Traces, prints and keeps both paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--details", action="store_true", help="also functions that call nothing in another file")
    add_json_argument(parser)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calls = traced(Path(folder))
    figures = {}
    for route in PATHS:
        path = path_of(calls, route)
        main_path = [step for step in path if step.leads_on]
        files = len({step.file for step in main_path})
        details = len(path) - len(main_path)
        print(f"{route.name}: {files} files, {len(main_path)} calls, and {details} details")
        print(*lines(path if given.details else main_path), "", sep="\n")
        names = [f"{step.process} {step.file} {step.function}" for step in main_path]
        figures[route.name] = {"files": files, "calls": len(main_path), "details": details, "path": names}
    print(f"both are in {Result('hops', figures).write(given.json)}")


if __name__ == "__main__":
    main()
