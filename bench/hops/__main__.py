"""Files and functions on the path of an admission and of a decode step, in the order of their calls.

The processes are real and have a model. They record every call of a function of the product while requests run, one at
a time. A function is on a path if nearly each admission, or each decode step, calls it. Validation, metrics, logs and
tracing are left out, with all that they call. So are functions that no reader jumps to: properties, comprehensions,
lambdas and special methods. A detail is a function that calls nothing in a different file: its name is enough for a
reader. `--details` shows the details, too.
"""

from __future__ import annotations

import argparse
import asyncio
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
# A function on a path is called in at least this share of all admissions, or steps; rarer functions run on timers.
ALWAYS = 0.9
# Files and functions that belong to no path.
BESIDE_FILES = ("validation", "bounds", "metrics", "telemetry", "tracing", "timing", "logs", "audit", "settings")
BESIDE_NAMES = ("check_", "_check", "observe", "log_")


class Call(NamedTuple):
    """A call of a function; at: in nanoseconds. process: the service. leads_on: whether it called a different file."""

    at: int
    process: str
    thread: int
    depth: int
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


def is_beside(call: Call) -> bool:
    """Whether a call, with all that it calls, is left out."""
    parts = call.file.removesuffix(".py").split("/")
    name = call.function.rpartition(".")[2]
    return bool({*parts} & {*BESIDE_FILES}) or name.startswith(BESIDE_NAMES) or parts[-1].endswith("_pb2")


def is_hop(call: Call) -> bool:
    """Whether a reader jumps to the called function."""
    name = call.function.rpartition(".")[2]
    return "<" not in name and not name.startswith("__") and not is_property(call.file, call.function)


def is_property(file: str, function: str) -> bool:
    """Whether a name stands for a property of a class."""
    found: Any = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    for name in function.split("."):
        found = inspect.getattr_static(found, name, None)
    return isinstance(found, property)


def without_beside(calls: Iterable[Call]) -> Iterator[Call]:
    """The calls of one thread that are on a path."""
    left_out: int | None = None
    for call in calls:
        if left_out is not None and call.depth > left_out:
            continue
        left_out = call.depth if is_beside(call) else None
        if left_out is None:
            yield call


def windows(calls: Sequence[Call], route: Route) -> Iterator[Sequence[Call]]:
    """Yields the calls of each pass along a path. calls: in the order of their times."""
    begun: int | None = None
    for at, call in enumerate(calls):
        if begun is not None and call.function == route.end:
            yield calls[begun : at + (route.begin != route.end)]
            begun = None
        if begun is None and call.function == route.begin:
            begun = at


def leading(calls: Iterable[Call]) -> Iterator[Call]:
    """Yields the calls of one thread, each with whether it called a different file."""
    above: list[Call] = []
    leads: dict[int, bool] = {}
    kept = []
    for call in calls:
        while above and above[-1].depth >= call.depth:
            above.pop()
        for outer in above:
            leads[outer.at] = leads.get(outer.at, False) or outer.file != call.file
        above.append(call)
        kept.append(call)
    return (call._replace(leads_on=leads.get(call.at, False)) for call in kept)


def path_of(calls: Sequence[Call], route: Route) -> list[Step]:
    """The functions on a path, in order."""
    found: dict[tuple[str, str, str], list[int]] = {}
    leads: set[tuple[str, str, str]] = set()
    taken = 0
    for window in windows(calls, route):
        taken += 1
        seen: dict[tuple[str, str, str], int] = {}
        for call in window:
            name = call.process, call.file, call.function
            seen.setdefault(name, call.at - window[0].at)
            if call.leads_on:
                leads.add(name)
        for name, offset in seen.items():
            found.setdefault(name, []).append(offset)
    kept = {name: statistics.median(offsets) for name, offsets in found.items() if len(offsets) >= ALWAYS * taken}
    path = [Step(*name, name in leads) for name in sorted(kept, key=kept.__getitem__)]
    # A call that hands over to a different process leads on, too.
    return [
        step._replace(leads_on=True) if after is None or after.process != step.process else step
        for step, after in itertools.zip_longest(path, path[1:])
    ]


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
            by_thread: dict[int, list[Call]] = {}
            for at, thread, depth, file, function in json.loads(written.read_text()):
                by_thread.setdefault(thread, []).append(Call(at, name, thread, depth, file, function))
            for thread in by_thread.values():
                calls += leading(filter(is_hop, without_beside(thread)))
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
