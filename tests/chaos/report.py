"""What a run found, for people and for programs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.tables import table
from tests.chaos.load import Tally
from tests.chaos.measuring import Death

ADMISSION_SECONDS = 2.0
DEVICE_SHARE = 0.99
LOWER_SHARE = 0.95


@dataclass
class Report:
    """Of one run; times in seconds. faults: everything that must not be; none is a pass."""

    name: str
    seed: int
    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)
    disturbances: Counter[str] = field(default_factory=Counter)
    messages: dict[str, int] = field(default_factory=dict)
    deaths: list[Death] = field(default_factory=list)
    # Share of a repeated prefix set's tokens that was cached: before, at once afterwards, and when asked again.
    hit_rates: list[float] = field(default_factory=list)
    # Whatever else was measured.
    figures: dict[str, float] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def judge(self, deaths: Sequence[Death], *, tiers: bool) -> None:
        """Adds a fault for each of these deaths that cost more than it may."""
        for death in deaths:
            what = f"{death.name}, killed at {death.at:.1f} s"
            if death.name == "cachemgr":
                self._within(f"{what}: seconds until an admission", death.seconds_to_admission, most=ADMISSION_SECONDS)
                self._within(f"{what}: share of device blocks restored", death.share(), least=DEVICE_SHARE)
            if death.name in ("cachemgr", "executor") and tiers and death.lower_blocks:
                share = death.share(lower=True)
                self._within(f"{what}: share of lower tiers' blocks restored", share, least=LOWER_SHARE)

    def _within(self, what: str, value: float | None, *, least: float = 0.0, most: float = float("inf")) -> None:
        if value is None:
            self.faults.append(f"{what} is not known")
        elif not least <= value <= most:
            self.faults.append(
                f"{what} is {value:.3f}, not {f'at least {least}' if value < least else f'at most {most}'}"
            )

    def rows(self) -> list[tuple[str, str]]:
        """Lines of the table."""
        tally = self.tally
        rows = [
            ("requests that ended", f"{tally.requests}"),
            *((f"  attempts: {kind}", f"{count}") for kind, count in sorted(tally.endings.items())),
            ("output tokens", f"{tally.output_tokens}"),
            ("prompt tokens from the cache", _percent(tally.cached_tokens / max(1, tally.prompt_tokens))),
            ("longest request, s", f"{tally.longest:.1f}"),
            *((f"  {name}", f"{count}") for name, count in sorted(self.disturbances.items())),
            *((f"  messages: {name}", f"{count}") for name, count in sorted(self.messages.items())),
        ]
        for name in sorted({death.name for death in self.deaths}):
            rows += _death_rows(name, [death for death in self.deaths if death.name == name])
        names = ("hit rate before", "hit rate at once afterwards", "hit rate when asked again")
        rows += [(name, _percent(rate)) for name, rate in zip(names, self.hit_rates, strict=False)]
        rows += [(name, f"{value:.3g}") for name, value in self.figures.items()]
        rows += [(f"checked: {what}", "yes") for what in self.checked]
        return [*rows, ("faults", f"{len(self.faults)}")]

    def text(self) -> str:
        """For people."""
        title = f"{self.name}, seed {self.seed}, {self.seconds:.0f} s"
        return "\n".join([table((title, ""), self.rows()), *(f"FAULT {fault}" for fault in self.faults)])

    def values(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "requests": self.tally.requests,
            "attempts": dict(self.tally.endings),
            "output_tokens": self.tally.output_tokens,
            "prompt_tokens": self.tally.prompt_tokens,
            "cached_tokens": self.tally.cached_tokens,
            "longest_request_s": round(self.tally.longest, 2),
            "disturbances": dict(self.disturbances),
            "messages": self.messages,
            "deaths": [
                {
                    "name": death.name,
                    "at_s": round(death.at, 2),
                    "back_s": round(death.back_seconds, 3),
                    "device_blocks": death.device_blocks,
                    "restored_blocks": death.restored_blocks,
                    "lower_blocks": death.lower_blocks,
                    "restored_lower_blocks": death.restored_lower_blocks,
                    "admission_s": None if death.seconds_to_admission is None else round(death.seconds_to_admission, 3),
                }
                for death in self.deaths
            ],
            "hit_rates": [round(rate, 4) for rate in self.hit_rates],
            "figures": {name: round(value, 4) for name, value in self.figures.items()},
            "checked": self.checked,
            "faults": self.faults,
        }


def _death_rows(name: str, deaths: Sequence[Death]) -> list[tuple[str, str]]:
    rows = [(f"deaths of {name}", f"{len(deaths)}")]
    rows += _spread("until it serves, s", [death.back_seconds for death in deaths])
    rows += _spread("until an admission, s", [death.seconds_to_admission for death in deaths])
    rows += _spread("device blocks restored, share", [death.share() for death in deaths])
    rows += _spread("lower tiers' blocks restored, share", [death.share(lower=True) for death in deaths])
    return rows


def _spread(what: str, values: Sequence[float | None]) -> list[tuple[str, str]]:
    """Least, median and most of the values that are known."""
    known = [value for value in values if value is not None]
    if not known:
        return []
    return [(f"  {what}", f"{min(known):.3f} / {statistics.median(known):.3f} / {max(known):.3f}")]


def _percent(share: float) -> str:
    return f"{share:.1%}"
