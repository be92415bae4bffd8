"""The result of a benchmark: its figures, and where, when and with which versions they were measured."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Ignored by git. Chosen results are kept below bench/results, in a folder for each machine.
_SHORT = "build/bench"
RESULTS = ROOT / _SHORT
COLUMNS, SHORT = 120, 40
PACKAGES = ("torch", "triton", "transformers", "grpcio", "protobuf", "redis", "uvloop")


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, and bytes of memory."""
    found = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": found[0].partition(": ")[2] if found else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def commit() -> str:
    """The checkout's commit, with "+" if files differ from it; empty outside of git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
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
        """Writes JSON to this file, by default to RESULTS; returns where."""
        target = target or RESULTS / f"{self.name}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(pretty(self.values()) + "\n")
        return target


def pretty(value: Any, indent: str = "") -> str:
    """JSON in few lines of at most 120 columns: short values share a line."""
    flat = json.dumps(value, default=str)
    if len(indent) + len(flat) <= COLUMNS or not isinstance(value, (Mapping, list, tuple)):
        return flat
    inner = indent + " "
    if isinstance(value, Mapping):
        # The names as strings, as in JSON.
        names = json.loads(json.dumps(dict.fromkeys(value)))
        parts = [f"{json.dumps(name)}: {pretty(one, inner)}" for name, one in zip(names, value.values(), strict=True)]
        begin, end = "{}"
    else:
        parts = [pretty(one, inner) for one in value]
        begin, end = "[]"
    lines: list[str] = []
    was_short = False
    for part in parts:
        is_short = len(part) <= SHORT
        if is_short and was_short and len(inner) + len(lines[-1]) + len(part) + 3 <= COLUMNS:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
        was_short = is_short
    return f"{begin}\n" + ",\n".join(inner + line for line in lines) + f"\n{indent}{end}"


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --json, the file that `Result.write` takes as its target."""
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"file of the results (NAME.json in {_SHORT})")


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
