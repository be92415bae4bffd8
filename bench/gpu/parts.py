"""Independent parts of a measurement: time limits, gates, errors, and the table at the end."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.tables import table

OUT_OF_TIME = ("not run", "out of time")


class WrongError(Exception):
    """Something computes wrong values; the message says what."""


class CannotRunError(Exception):
    """A part cannot run on this machine; the message says why."""


class OutOfTimeError(BaseException):
    """A part took longer than it may. Not an Exception: a part that catches exceptions must not catch this."""


@dataclass(frozen=True)
class Figure:
    """One measured number, and its target if there is one."""

    name: str
    value: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def target(self) -> str:
        """The target in words."""
        if self.at_least is not None:
            return f">= {self.at_least:g} {self.unit}".rstrip()
        return f"<= {self.at_most:g} {self.unit}".rstrip() if self.at_most is not None else ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if there is no target."""
        if self.at_least is not None:
            return self.value >= self.at_least
        return self.value <= self.at_most if self.at_most is not None else None


@dataclass
class Bench:
    """What parts share: figures by name, and objects that are too expensive to make twice."""

    figures: dict[str, Figure] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)

    def value(self, name: str) -> float:
        """Returns a figure of an earlier part."""
        return self.figures[name].value


@dataclass(frozen=True)
class Part:
    """One part. seconds: its time limit. needs: parts that must have succeeded, including its gates."""

    name: str
    run: Callable[[Bench], Sequence[Figure]]
    seconds: float
    needs: tuple[str, ...] = ()


@dataclass
class Result:
    """The result of a part.

    status: done, wrong (wrong values), failed (an error), skipped (it cannot run here), or not run (time or a needed
    part is missing). detail: the reason.
    """

    status: str
    detail: str = ""
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises OutOfTimeError in the main thread after this time."""

    def over(*_: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def note(line: str) -> None:
    """Prints progress, which is no result, to standard error."""
    print(line, file=sys.stderr, flush=True)


def run_all(parts: Sequence[Part], results: dict[str, Result], ends: float) -> None:
    """Runs parts in order and stores their results in `results`. ends: the deadline, by time.monotonic."""
    bench = Bench()
    for part in parts:
        note(f"{part.name} ...")
        result = results[part.name] = _run(part, bench, results, ends - time.monotonic())
        note(f"{part.name}: {result.status} {result.detail} ({result.seconds:.0f} s)")
        bench.figures |= {figure.name: figure for figure in result.figures}


def _run(part: Part, bench: Bench, results: Mapping[str, Result], left: float) -> Result:
    for name in part.needs:
        if (status := results[name].status) != "done":
            return Result("skipped" if status == "skipped" else "not run", f"{name} is {status}")
    if left <= 0:
        return Result(*OUT_OF_TIME)
    begin = time.monotonic()

    def result(status: str, detail: str = "", figures: Sequence[Figure] = ()) -> Result:
        return Result(status, detail, time.monotonic() - begin, list(figures))

    try:
        with deadline(min(part.seconds, left)):
            return result("done", figures=part.run(bench))
    except OutOfTimeError:
        return result(*OUT_OF_TIME)
    except CannotRunError as error:
        return result("skipped", str(error))
    except WrongError as error:
        return result("wrong", str(error))
    except ModuleNotFoundError as error:
        return result("failed", f"the Python package {error.name} is missing")
    except Exception as error:  # An error must not lose the results of other parts.
        traceback.print_exc()
        return result("failed", f"{type(error).__name__}: {error}".splitlines()[0][:100])


def show(results: Mapping[str, Result]) -> str:
    """One table of all figures, and a line for each part that has none."""
    rows = []
    for name, result in results.items():
        if result.status != "done":
            rows.append([name, "", f"{result.status}: {result.detail}", ""])
        for figure in result.figures:
            met = {True: "yes", False: "NO", None: ""}[figure.met]
            rows.append([figure.name, figure.target, f"{figure.value:.4g} {figure.unit}".rstrip(), met])
        if result.status == "done" and not result.figures:
            rows.append([name, "", "right", ""])
    return table(("", "target", "measured", "met"), rows)


def exit_status(results: Mapping[str, Result], parts: Sequence[Part]) -> int:
    """0 if every part is done or skipped; a missed target is a result, not an error."""
    return 0 if all(results[part.name].status in ("done", "skipped") for part in parts) else 1


def values(results: Mapping[str, Result], facts: Mapping[str, Any]) -> dict[str, Any]:
    """All results and facts, for JSON."""
    parts = [
        {"part": name, "status": result.status, "seconds": result.seconds, "detail": result.detail}
        for name, result in results.items()
    ]
    figures = [
        {"part": name, **asdict(figure), "met": figure.met}
        for name, result in results.items()
        for figure in result.figures
    ]
    return {"facts": dict(facts), "parts": parts, "figures": figures}
