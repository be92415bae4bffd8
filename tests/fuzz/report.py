"""What came of the calls: statuses and times by method or route, and everything that must not be."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bench.tables import table
from tests.fuzz.pauses import Pauses

# Faults of the same kind at the same field that are kept.
_KEPT = 5


@dataclass
class Row:
    """Calls of one method or route."""

    statuses: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    # Calls that were left, or that were given hardly any time.
    left: int = 0
    # The largest cost of a single call for any process, if it was measured.
    most_bytes: int = 0
    most_loop_seconds: float = 0.0
    # The longest time for which other calls waited while the loop worked for one call.
    longest_stall: float = 0.0


@dataclass
class Report:
    """folder: where calls with a fault are kept, to be repeated. Any thread may add to it."""

    seed: int
    folder: Path
    rows: dict[str, Row] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pauses: Pauses = field(default_factory=Pauses)
    _kinds: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str, status: str, seconds: float, *, left: bool = False) -> None:
        """One call."""
        with self._lock:
            row = self.rows.setdefault(name, Row())
            row.statuses[status] += 1
            row.left += left
            row.slowest = max(row.slowest, seconds)

    def cost(self, name: str, grown_bytes: int, loop_seconds: float, stall: float) -> None:
        """The cost of a call for one process. stall: seconds for which other calls waited meanwhile."""
        with self._lock:
            row = self.rows.setdefault(name, Row())
            row.most_bytes = max(row.most_bytes, grown_bytes)
            row.most_loop_seconds = max(row.most_loop_seconds, loop_seconds)
            row.longest_stall = max(row.longest_stall, stall)

    def fault(self, kind: str, text: str, call: dict[str, object] | None = None) -> None:
        """Adds a fault. call: leads to the fault again, as `repeat` takes it."""
        with self._lock:
            self._kinds[kind] += 1
            if self._kinds[kind] > _KEPT:
                return
            if call is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                path = self.folder / f"{len(self.faults)}.json"
                path.write_text(json.dumps({"seed": self.seed, **call}))
                text += f"\n  repeat it: python -m tests.fuzz --repeat {path}"
            self.faults.append(f"{kind}: {text}")

    def hang(self, kind: str, text: str, begin: float, call: dict[str, object] | None = None) -> None:
        """Something that began then and took too long: a fault, unless the machine was paused meanwhile."""
        if not self.pauses.any_since(begin):
            self.fault(kind, text, call)

    def note(self, text: str) -> None:
        """Something worth knowing."""
        with self._lock:
            self.notes.append(text)

    @property
    def calls(self) -> int:
        """All of them."""
        return self.statuses.total()

    @property
    def statuses(self) -> Counter[str]:
        """How many calls of all methods had each status."""
        return sum((row.statuses for row in self.rows.values()), Counter[str]())

    @property
    def num_faults(self) -> int:
        """The number of all faults, including those that were not kept."""
        return self._kinds.total()

    def figures(self) -> dict[str, object]:
        """For a Result, all methods and routes together."""
        told = {"notes": self.notes, "pauses": self.pauses.count, "faults": self.faults}
        rows = self.rows.values()
        costs = ("slowest", "most_bytes", "most_loop_seconds", "longest_stall")
        most = {name: max((getattr(row, name) for row in rows), default=0) for name in costs}
        counts = {"methods": len(rows), "left": sum(row.left for row in rows), "statuses": dict(self.statuses)}
        return {"calls": self.calls, "num_faults": self.num_faults, **told, **counts, "most_of_a_call": most}

    def text(self) -> str:
        """For people."""
        heads = ("method or route", "calls", "left early", "slowest s", "most MB", "most of a loop s", "stall s")
        rows = []
        for name, row in sorted(self.rows.items()):
            costs = f"{row.most_bytes / 1e6:.0f}", f"{row.most_loop_seconds:.3f}", f"{row.longest_stall:.3f}"
            calls = str(row.statuses.total()), str(row.left), f"{row.slowest:.2f}"
            rows.append((name, *calls, *costs, _counts(row.statuses)))
        lines = [table((*heads, "statuses"), rows), "", f"{self.calls} calls: {_counts(self.statuses)}", *self.notes]
        if self.pauses.count:
            lines.append(f"the machine was paused {self.pauses.count} times: what took too long then is no fault")
        if self.num_faults:
            lines += ["", f"{self.num_faults} faults", *self.faults]
        else:
            lines.append("no crash, no hang, no error of the server's own, nothing left behind")
        return "\n".join(lines)


def _counts(statuses: Counter[str]) -> str:
    return ", ".join(f"{status} {count}" for status, count in statuses.most_common())
