"""The result of a benchmark: its figures, and where, when and with which versions they were measured."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_05UP, Context
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Ignored by git. Chosen results are kept below bench/results, in a folder for each machine.
_SHORT = "build/bench"
RESULTS = ROOT / _SHORT
COLUMNS, SHORT = 120, 80
# A kept number is rounded so that rounding it again, to fewer digits, gives the same as rounding the measured number.
_DIGITS = Context(prec=5, rounding=ROUND_05UP)
PACKAGES = ("torch", "triton", "transformers", "grpcio", "protobuf", "redis", "uvloop")


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, and bytes of memory."""
    found = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": found[0].partition(": ")[2] if found else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def commit(root: Path = ROOT) -> str:
    """The commit of a checkout, with "+" if files differ from it; empty outside of git."""
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def versions() -> dict[str, str]:
    """Versions of Python and of each installed package that figures depend on."""
    installed = {package.name.lower(): package.version for package in metadata.distributions()}
    return {"python": platform.python_version()} | {name: installed[name] for name in PACKAGES if name in installed}


def now() -> str:
    """Date and time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Result:
    """Figures of one benchmark; `settings` are its arguments."""

    name: str
    figures: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=machine)
    versions: Mapping[str, str] = field(default_factory=versions)
    commit: str = field(default_factory=commit)
    date: str = field(default_factory=now)

    def values(self) -> dict[str, Any]:
        """The result for JSON: the figures stand beside all other values."""
        rest = {name: value for name, value in vars(self).items() if name != "figures"}
        return rest | dict(self.figures)

    def write(self, target: Path | None = None) -> Path:
        """Writes JSON to this file, by default to RESULTS; returns where. Floats have 5 digits, rows are tables."""
        target = target or RESULTS / f"{self.name}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(pretty(_short(self.values())) + "\n")
        return target


def read(path: Path) -> dict[str, Any]:
    """What `Result.write` has written, with rows again. Rows lack the values that are None."""

    def restored(value: dict[str, Any]) -> Any:
        if value.keys() != {"columns", "rows"}:
            return value
        rows = (zip(value["columns"], row, strict=True) for row in value["rows"])
        return [{name: one for name, one in row if one is not None} for row in rows]

    found: dict[str, Any] = json.loads(path.read_text(), object_hook=restored)
    return found


def _short(value: Any) -> Any:
    """Rounds floats to few digits, and makes a table of a list of mappings: each column is named once."""
    if isinstance(value, float):
        return float(_DIGITS.create_decimal(f"{value:.12g}"))
    if isinstance(value, Mapping):
        return {name: _short(one) for name, one in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) > 1 and all(isinstance(one, Mapping) for one in value):
        columns = list(dict.fromkeys(name for one in value for name in one))
        return {"columns": columns, "rows": [[_short(one.get(name)) for name in columns] for one in value]}
    return [_short(one) for one in value]


def pretty(value: Any, indent: str = "", name: str = "") -> str:
    """JSON in few lines of at most 120 columns: short values share a line. name: what stands before the value."""
    flat = name + json.dumps(value, default=str)
    if len(indent) + len(flat) < COLUMNS or not isinstance(value, (Mapping, list, tuple)):
        return flat
    inner = indent + " "
    if isinstance(value, Mapping):
        # The names as strings, as in JSON.
        names = json.loads(json.dumps(dict.fromkeys(value)))
        parts = [pretty(one, inner, f"{json.dumps(key)}: ") for key, one in zip(names, value.values(), strict=True)]
        begin, end = "{}"
    else:
        parts = [pretty(one, inner) for one in value]
        begin, end = "[]"
    lines, was_short = [name + begin], False
    # Where all values are short, they begin beside the bracket.
    beside = all(len(part) <= SHORT for part in parts)
    for part in parts:
        is_short = len(part) <= SHORT
        separator = "" if len(lines) == 1 and lines[0] == name + begin else ", "
        room = COLUMNS - len(inner) - len(lines[-1]) - len(separator) - len(part) - 2
        if (was_short or (beside and not separator)) and is_short and room >= 0:
            lines[-1] += separator + part
        else:
            lines[-1] += separator.strip()
            lines.append(part)
        was_short = is_short
    return f"\n{inner}".join(lines) + (end if beside else f"\n{indent}{end}")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --json, the file that `Result.write` takes as its target."""
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"file of the results (NAME.json in {_SHORT})")


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def middle(repeats: Sequence[Any]) -> Any:
    """The medians of all numbers of the repeats, also inside of mappings and lists. Other values are the first's."""
    first = repeats[0]
    if isinstance(first, Mapping):
        return {name: middle([one[name] for one in repeats]) for name in first}
    if isinstance(first, (list, tuple)):
        return [middle(column) for column in zip(*repeats, strict=True)]
    return statistics.median(repeats) if isinstance(first, (int, float)) else first


def spread(repeats: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest of the repeats, and their number."""
    return {
        "median": statistics.median(repeats),
        "lowest": min(repeats),
        "highest": max(repeats),
        "repeats": len(repeats),
    }
