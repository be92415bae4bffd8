"""The findings of http_load.py: faults, and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.callers import Tally
from bench.result import percentile, spread
from bench.tables import table

# Growth that allocators and measuring cause, as a share of a process's memory after the warm-up.
GROWTH_SHARE, GROWTH_MB = 0.02, 4
# Blocks of a disconnected caller must be free after this time.
FREE_SECONDS = 1.0

# Metrics by name, without the scheduler's prefix.
Counters = dict[str, float]


@dataclass
class Phase:
    """Cost and outcome of one load."""

    seconds: float
    tally: Tally
    # By process, and for the scheduler's main thread, which talks to callers.
    cpu: dict[str, float]
    main_thread: float
    others: float
    counted: Counters
    all_left: float = 0.0

    @property
    def tokens(self) -> float:
        """Output tokens, also of callers that disconnected."""
        return self.counted["output_tokens_total"]

    def per_token(self, seconds: float) -> float:
        """Microseconds per output token."""
        return seconds / self.tokens * 1e6

    def summary(self) -> dict[str, Any]:
        """The figures for the table and the file."""
        tally = self.tally
        loop = self.counted["step_planning_seconds_sum"] + self.counted["step_sending_seconds_sum"]
        return {
            "seconds": self.seconds,
            "requests_ended": tally.ended,
            "requests_left": tally.left,
            "refused_429": tally.refused,
            "errors": dict(tally.errors),
            "output_tokens_per_s": self.tokens / self.seconds,
            "prompt_tokens": tally.prompt_tokens,
            "cached_tokens": tally.cached_tokens,
            "pieces": len(tally.first) + len(tally.gaps),
            "first_piece_s": _percentiles(tally.first),
            "between_pieces_ms": {name: value * 1e3 for name, value in _percentiles(tally.gaps).items()},
            "steps": self.counted["step_planning_seconds_count"],
            "cpu_s": self.cpu,
            "cpu_us_per_token": {name: self.per_token(value) for name, value in self.cpu.items()},
            "scheduler_main_thread_us_per_token": self.per_token(self.main_thread),
            "step_loop_us_per_token": self.per_token(loop),
            "others_cpu": self.others,
            "freed_after_leaving_s": spread(tally.freed) if tally.freed else {},
            "freed_too_late": sum(seconds >= FREE_SECONDS for seconds in tally.freed),
            "all_freed_after_leaving_s": self.all_left,
        }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {"p50": percentile(values, 0.5), "p90": percentile(values, 0.9), "p99": percentile(values, 0.99)}


@dataclass
class Found:
    """All that was measured."""

    http: Phase
    grpc: Phase
    # How soon blocks were free without other callers, in seconds.
    alone: list[float]
    before: dict[str, Any]
    after: dict[str, Any]
    drift: dict[str, tuple[float, float]]
    violations: list[str]
    used_blocks: int

    def faults(self) -> Iterator[str]:
        """The faults."""
        for name, phase in (("HTTP", self.http), ("gRPC", self.grpc)):
            yield from (f"{name}: {count} x {error}" for error, count in phase.tally.errors.items())
            if phase.all_left >= FREE_SECONDS:
                yield f"{name}: when all callers had disconnected, blocks were in use for {phase.all_left:.2f} s"
            if slow := [seconds for seconds in phase.tally.freed if seconds >= FREE_SECONDS]:
                yield f"{name}: blocks of {len(slow)} disconnected callers were in use for up to {max(slow):.2f} s"
        if max(self.alone) >= FREE_SECONDS:
            yield f"blocks of a disconnected caller alone were in use for {max(self.alone):.2f} s"
        for name, (warm, last) in self.drift.items():
            if name != "client" and last - warm > GROWTH_MB + GROWTH_SHARE * warm:
                yield f"{name} grew from {warm:.1f} to {last:.1f} MB"
        if self.after["connections"]:
            yield f"{self.after['connections']} HTTP connections are still open"
        yield from self.violations
        if self.used_blocks:
            yield f"{self.used_blocks} blocks are still in use"


def show(found: Found) -> None:
    """Prints tables."""
    phases = {"HTTP": found.http.summary(), "gRPC": found.grpc.summary()}

    def row(name: str, form: str, *keys: str) -> list[str]:
        values = []
        for value in phases.values():
            for key in keys:
                value = value[key]
            values.append(format(value, form))
        return [name, *values]

    print(
        table(
            ("", *phases),
            [
                row("seconds", ".0f", "seconds"),
                row("requests that ended", "d", "requests_ended"),
                row("requests whose callers left", "d", "requests_left"),
                row("answers with 429, each asked again", "d", "refused_429"),
                ["other errors", *(str(one.tally.errors.total()) for one in (found.http, found.grpc))],
                row("output tokens per second", ".0f", "output_tokens_per_s"),
                *(row(f"first piece, s, {share}", ".2f", "first_piece_s", share) for share in ("p50", "p90", "p99")),
                *(
                    row(f"between pieces, ms, {share}", ".0f", "between_pieces_ms", share)
                    for share in ("p50", "p90", "p99")
                ),
                *(row(f"CPU us per output token: {name}", ".0f", "cpu_us_per_token", name) for name in found.http.cpu),
                row("of the scheduler's, in its main thread", ".0f", "scheduler_main_thread_us_per_token"),
                row("the step loop's planning and sending, us", ".1f", "step_loop_us_per_token"),
                row("used by other programs, of all cores", ".1%", "others_cpu"),
            ],
        )
    )
    rows = []
    for name, (warm, last) in found.drift.items():
        files = (str(look["files"][name]) for look in (found.before, found.after))
        rows.append([name, f"{warm:.1f}", f"{last:.1f}", f"{last / warm - 1:+.2%}", *files])
    print("\n" + table(("resident MB", "after a minute", "at the end", "drift", "files before", "after"), rows))
    rows = []
    for name, seconds in (
        ("under the load", found.http.tally.freed),
        ("the same over gRPC", found.grpc.tally.freed),
        ("alone", found.alone),
    ):
        times = spread(seconds) if seconds else {}
        shown = [f"{times[key] * 1e3:.0f}" if times else "" for key in ("lowest", "median", "highest")]
        rows.append([name, str(len(seconds)), *shown])
    rows.append(["all at once", "1", *[f"{found.http.all_left * 1e3:.0f}"] * 3])
    print("\n" + table(("blocks are free after leaving, ms", "times", "least", "median", "most"), rows))
