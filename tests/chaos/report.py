"""The results of a run."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.tables import table
from tests.chaos.load import DIED, STARVED, Tally
from tests.chaos.measuring import Death
from tests.chaos.recovery import Recovery, summary

ADMISSION_SECONDS = 2.0
DEVICE_SHARE = 0.99
LOWER_SHARE = 0.95


@dataclass
class Report:
    """Results of a run; times in seconds. faults: everything that must not happen; without faults the run has passed.

    slow: promises about time that the run broke. A busy machine breaks such promises too: no test judges them.
    """

    name: str
    seed: int
    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)
    disturbances: Counter[str] = field(default_factory=Counter)
    messages: dict[str, int] = field(default_factory=dict)
    deaths: list[Death] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    # How the streams of a fleet's callers ended.
    streams: dict[str, int] = field(default_factory=dict)
    # Share of cached tokens of repeated prompts: before the load and after it.
    hit_rates: list[float] = field(default_factory=list)
    # Other measurements.
    figures: dict[str, float] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)

    def judge(self, deaths: Sequence[Death]) -> None:
        """Adds a fault for each of these deaths that lost more blocks than allowed, and notes slow admissions."""
        for death in deaths:
            what = f"{death.name}, killed at {death.at:.1f} s"
            if death.name == "cachemgr":
                if death.seconds_to_admission is None:
                    self.faults.append(f"{what}: no sequence was admitted")
                else:
                    self.note_time(f"{what}: seconds until an admission", death.seconds_to_admission, ADMISSION_SECONDS)
                self._share(f"{what}: share of device blocks restored", death.share(), DEVICE_SHARE)
            if death.name in ("cachemgr", "executor") and death.lower_blocks:
                share = death.share(lower=True)
                self._share(f"{what}: share of lower tiers' blocks restored", share, LOWER_SHARE)

    def note_time(self, what: str, value: float, most: float) -> None:
        """Notes a time, or a ratio of two times, above its promise."""
        if value > most:
            self.slow.append(f"{what} is {value:.3f}, not at most {most}")

    def _share(self, what: str, value: float | None, least: float) -> None:
        if value is None:
            self.faults.append(f"{what} is not known")
        elif value < least:
            self.faults.append(f"{what} is {value:.3f}, not at least {least}")

    def values(self) -> dict[str, object]:
        """The report's data for a Result."""
        found = {"tally": vars(self.tally), "deaths": self._death_rows(), "recoveries": summary(self.recoveries)}
        return {**vars(self), **found}

    def _death_rows(self) -> list[tuple[str, str]]:
        """What the deaths of each process cost."""
        names = sorted({death.name for death in self.deaths})
        return [row for one in names for row in _death_rows(one, [death for death in self.deaths if death.name == one])]

    def text(self) -> str:
        """A table, and the faults after it."""
        tally = self.tally
        rows = [
            ("requests that ended", f"{tally.requests}"),
            *((f"  attempts: {kind}", f"{count}") for kind, count in sorted(tally.endings.items())),
            *((f"  streams: {kind}", f"{count}") for kind, count in self.streams.items()),
            ("output tokens", f"{tally.output_tokens}"),
            ("prompt tokens from the cache", f"{tally.cached_tokens / max(1, tally.prompt_tokens):.1%}"),
            ("longest request, s", f"{tally.longest:.1f}"),
            *((f"  {name}", f"{count}") for name, count in sorted(self.disturbances.items())),
            *((f"  messages: {name}", f"{count}") for name, count in sorted(self.messages.items())),
        ]
        rows += self._death_rows()
        hit_rates = zip(("hit rate before", "hit rate after"), self.hit_rates, strict=False)
        rows += [(name, f"{rate:.1%}") for name, rate in hit_rates]
        rows += [(name, f"{value:.3g}") for name, value in self.figures.items()]
        rows += [(f"checked: {what}", "yes") for what in self.checked]
        rows += [("faults", f"{len(self.faults)}"), ("slower than promised", f"{len(self.slow)}")]
        title = f"{self.name}, seed {self.seed}, {self.seconds:.0f} s"
        parts = [table((title, ""), rows)]
        if self.recoveries:
            heads = ("role", "disturbance", "recovered, s:\nmedian / max (count)")
            form = "{median:.1f} / {highest:.1f} ({repeats})"
            told = [(one["role"], one["disturbance"], form.format(**one)) for one in summary(self.recoveries)]
            parts.append(table(heads, told))
        lines = [f"\nFAULT {fault}" for fault in self.faults] + [f"\nSLOW {slow}" for slow in self.slow]
        return "\n\n".join(parts) + "".join(lines)


def streams(tally: Tally, continued: int) -> dict[str, int]:
    """Endings of streams. continued: went on at another engine. repeated: sent again, as their server was away.

    starved: sent again until their callers gave up.
    """
    ended = tally.endings
    return {
        "exact": ended["exact"],
        "wrong": tally.wrong,
        "lost": ended["failed"],
        "starved": ended[STARVED],
        "cancelled by their callers": ended["cancelled"],
        "continued on another engine": continued,
        "repeated by their callers": ended[DIED] + ended["server stopped"],
        "refused and sent again": ended["queue full"] + ended["server not ready"],
    }


def _death_rows(name: str, deaths: Sequence[Death]) -> list[tuple[str, str]]:
    """Minimum, median and maximum of the known values."""
    columns: dict[str, list[float | None]] = {
        "until it serves, s": [death.back_seconds for death in deaths],
        "until an admission, s": [death.seconds_to_admission for death in deaths],
        "device blocks restored, share": [death.share() for death in deaths],
        "lower tiers' blocks restored, share": [death.share(lower=True) for death in deaths],
    }
    rows = [(f"deaths of {name}", f"{len(deaths)}")]
    for what, values in columns.items():
        known = [value for value in values if value is not None]
        if known:
            rows.append((f"  {what}", f"{min(known):.3f} / {statistics.median(known):.3f} / {max(known):.3f}"))
    return rows
