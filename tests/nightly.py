"""What takes too long, or leaves too much to chance, for every change: `make nightly`, about two hours on two cores.

It runs every test, even tests that passed with the same sources; new random lives; new chaos, also of fleets; the tests
of every service several times beside a load on all cores, which finds tests that are flaky; and the same tests with the
newest versions of all packages, where every warning is an error. The result is a page, build/nightly/report.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.result import commit, machine, now
from tests.stack import ROOT

FOLDER = ROOT / "build/nightly"
# Length of a whole night; the parts that depend on chance are as much shorter as --minutes says.
MINUTES = 110.0
LIVES_SECONDS, CHAOS_SECONDS, CHAOS_RUNS, LOADED_RUNS = 900.0, 600.0, 3, 5
SERVICES = ("-n", "auto", "--dist", "loadfile", "-q", "-m", "not slow and not model")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+)")
_TIME = re.compile(r"^SLOW (.*) is ([\d.]+), not at most ([\d.]+)$")


@dataclass
class Part:
    """What a part found. notes: lines for the page."""

    name: str
    status: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def result(self) -> str:
        """In a word."""
        return "failed" if self.status else "passed"


class Night:
    """Runs programs and keeps the output of each in a separate file."""

    def __init__(self, folder: Path, share: float) -> None:
        self.folder = folder
        self.share = share
        # New in each run, and printed with whatever fails.
        self.seed = int(time.time())
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, command: Sequence[str], **environment: str) -> tuple[int, str]:
        """The status and the output of a program."""
        log = self.folder / f"{name}.log"
        # Without CI no test is left out because it passed before.
        inherited = {key: value for key, value in os.environ.items() if key != "CI"}
        with log.open("wb") as file:
            done = subprocess.run(
                command, cwd=ROOT, env={**inherited, **environment}, stdout=file, stderr=subprocess.STDOUT, check=False
            )
        return done.returncode, log.read_text(errors="replace")


def everything(night: Night) -> Part:
    """Every test."""
    status, text = night.run("tests", ["make", "-k", "test-all"])
    return Part("every test", status, notes=failed_tests(text) + [line for line in text.splitlines() if flaky(line)])


def lives(night: Night) -> Part:
    """Random lives of the cache manager from new seeds."""
    options = ["--seconds", f"{LIVES_SECONDS * night.share:.0f}", "--first", str(night.seed)]
    status, text = night.run("lives", [sys.executable, "-m", "tests.fuzz.cache_manager", *options])
    return Part("random lives", status, notes=[*text.splitlines()[-1:], *re.findall(r"^again: .*$", text, re.M)])


def chaos(night: Night) -> Part:
    """Faults under load, from new seeds. Times that break a promise count when most runs broke the same promise."""
    part, broken = Part("chaos"), dict[str, list[float]]()
    for number in range(CHAOS_RUNS):
        text = disturb(night, part, f"chaos-{number}", night.seed + number)
        for what, value in slow_times(text).items():
            broken.setdefault(what, []).append(value)
    for what, values in sorted(broken.items()):
        often = len(values) * 2 > CHAOS_RUNS
        part.status |= often
        ends = "in most runs" if often else "in one run"
        part.notes.append(f"slower than promised {ends}: {what}, median {statistics.median(values):.2f} of the promise")
    return part


def fleets(night: Night) -> Part:
    """Faults under load in a fleet with shards and routers, and in such a fleet on Ray."""
    part = Part("chaos in fleets")
    for kind in ("fleet", "ray"):
        disturb(night, part, f"chaos-{kind}", night.seed, f"--{kind}")
    return part


def disturb(night: Night, part: Part, name: str, seed: int, *options: str) -> str:
    """Runs chaos once, adds its faults to the part, and returns its output."""
    seconds = f"{max(60.0, CHAOS_SECONDS * night.share):.0f}"
    command = [sys.executable, "-m", "tests.chaos", "--seconds", seconds, "--seed", str(seed), *options]
    _, text = night.run(name, command)
    faults = [line for line in text.splitlines() if line.startswith("FAULT")]
    if not re.search(r"^faults +\d", text, re.M):
        faults.append("the run ended without a report")
    part.status |= bool(faults)
    part.notes += [f"{name}, seed {seed}: {fault}" for fault in faults]
    return text


def loaded(night: Night) -> Part:
    """The tests of every service, several times beside a load on all cores: which of them fail now and then?"""
    runs = max(1, round(LOADED_RUNS * night.share))
    failures = Counter[str]()
    part = Part(f"the tests of every service, {runs} x beside a load")
    with load_on_all_cores():
        for number in range(runs):
            status, text = night.run(f"loaded-{number}", [sys.executable, "-m", "pytest", *SERVICES])
            part.status |= status
            failures.update(failed_tests(text))
    part.notes = [f"{test}: failed in {count} of {runs}" for test, count in failures.most_common()]
    return part


def newest(night: Night) -> Part:
    """The tests of every service with the newest versions of all packages."""
    venv = night.folder / "newest"
    python = str(venv / "bin/python")
    part = Part("newest packages, every warning an error")
    part.status, text = night.run("newest-set-up", [sys.executable, "ops/update_lock.py", "--try", str(venv)])
    if part.status:
        part.notes = text.splitlines()[-3:]
        return part
    part.notes = [line for line in text.splitlines() if " -> " in line]
    part.status, text = night.run("newest", [python, "-m", "pytest", *SERVICES, "-W", "error"])
    part.notes += failed_tests(text)
    return part


PARTS: Mapping[str, Callable[[Night], Part]] = {
    "tests": everything,
    "lives": lives,
    "chaos": chaos,
    "fleets": fleets,
    "loaded": loaded,
    "newest": newest,
}


def failed_tests(text: str) -> list[str]:
    """The tests that pytest names as failed, each once."""
    return list(dict.fromkeys(found[1] for line in text.splitlines() if (found := _FAILED.match(line))))


def flaky(line: str) -> bool:
    """Whether a line names a test that failed only beside other tests."""
    return line.startswith("FLAKY ")


def slow_times(text: str) -> dict[str, float]:
    """Times of a report that broke a promise, as multiples of the promise; without what differs between runs."""
    found = dict[str, float]()
    for match in (_TIME.match(line) for line in text.splitlines()):
        if match:
            what = re.sub(r", killed at [\d.]+ s", "", match[1])
            found[what] = max(found.get(what, 0.0), float(match[2]) / float(match[3]))
    return found


@contextlib.contextmanager
def load_on_all_cores() -> Iterator[None]:
    """A process per core that never waits."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def page(parts: Sequence[Part]) -> str:
    """The report, as Markdown."""
    about = machine()
    rows = [f"| {part.name} | {part.result} | {part.seconds / 60:.1f} |" for part in parts]
    lines = [
        "# Nightly",
        "",
        f"{now()}, commit {commit()}, {about['cores']} cores of {about['processor']}",
        "",
        "| part | result | minutes |",
        "| --- | --- | --- |",
        *rows,
    ]
    for part in parts:
        if part.notes:
            lines += ["", f"## {part.name}", "", *(f"- {note}" for note in part.notes)]
    return "\n".join([*lines, ""])


def main() -> int:
    """The exit status: 1 when a part failed."""
    parser = argparse.ArgumentParser(
        prog="make nightly", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="about how long all parts take (%(default).0f)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART", help=", ".join(PARTS))
    options = parser.parse_args()
    if options.minutes <= 0:
        parser.error("--minutes must be greater than 0")
    night = Night(FOLDER, options.minutes / MINUTES)
    report = FOLDER / "report.md"
    parts = list[Part]()
    for name in options.only:
        print(f"{name} ...", flush=True)
        begin = time.monotonic()
        part = PARTS[name](night)
        part.seconds = time.monotonic() - begin
        parts.append(part)
        # Also what ran before Ctrl-C is told.
        report.write_text(page(parts))
        print(f"{name}: {part.result} after {part.seconds:.0f} s", flush=True)
        print(*(f"  {note}" for note in part.notes[:20]), sep="\n", flush=True)
    print(f"report: {report.relative_to(ROOT)}")
    return int(any(part.status for part in parts))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the report tells of the parts that ended")
