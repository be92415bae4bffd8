"""Random lives of the cache manager that nobody has seen: `make fuzz-manager`, and a part of CI.

Each run begins at another seed. Seeds that failed are kept in a file, and come first in the next run.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from tests.support.random_operations import live_long

# The settings of a life by its seed and its number of operations; any exception says that it failed.
Life = Callable[[int, int], dict[str, Any]]


class FailedSeeds:
    """Lives that failed, as lines of a seed and a number of operations."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "failed_seeds.txt"

    def read(self) -> list[tuple[int, int]]:
        """All of them, oldest first. Raises ValueError for a line that is not two numbers."""
        if not self.path.exists():
            return []
        lives = [tuple(map(int, line.split())) for line in self.path.read_text().splitlines()]
        if not all(len(life) == 2 for life in lives):
            raise ValueError(f"{self.path}: each line must be a seed and a number of operations")
        return [(seed, operations) for seed, operations in lives]

    def write(self, lives: Iterable[tuple[int, int]]) -> None:
        """Keeps these, and no others."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(f"{seed} {operations}\n" for seed, operations in lives))


def run(
    failed: FailedSeeds, fresh: Iterator[tuple[int, int]], may_go_on: Callable[[], bool], life: Life = live_long
) -> int:
    """Runs the lives that failed before, then fresh ones as long as it may; returns how many failed.

    A stored life that passes is dropped from the file.
    """
    stored = failed.read()
    failing: list[tuple[int, int]] = []
    lived = windows = tiers = 0

    def fails(seed: int, operations: int) -> bool:
        nonlocal lived, windows, tiers
        lived += 1
        try:
            drawn = life(seed, operations)
        except Exception:
            traceback.print_exc()
            print(f'again: make fuzz-manager ARGS="--first {seed} --lives 1 --operations {operations}"', flush=True)
            return True
        windows += any(drawn["windows"])
        tiers += bool(drawn["host"] or drawn["disk"])
        return False

    for at, one in enumerate(stored):
        if fails(*one):
            failing.append(one)
        failed.write([*failing, *stored[at + 1 :]])
    for one in fresh:
        if not may_go_on():
            break
        if one not in stored and fails(*one):
            failing.append(one)
            failed.write(failing)
    print(f"{lived} lives, {windows} with windows and {tiers} with lower tiers among those that passed")
    print(f"{len(failing)} failed" + (f", kept in {failed.path}" if failing else ""))
    return len(failing)


def main(arguments: list[str] | None = None) -> int:
    """The status of the process: 1 when a life has failed."""
    parser = argparse.ArgumentParser(prog="make fuzz-manager", description=__doc__)
    parser.add_argument("--lives", type=int, help="how many fresh lives; 500 unless --seconds says how long")
    parser.add_argument("--seconds", type=float, help="for how long fresh lives are begun")
    parser.add_argument("--operations", type=int, default=400, help="of each fresh life")
    parser.add_argument("--first", type=int, help="seed of the first fresh life, by default from the clock")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/fuzz-manager"), help="where seeds that failed are kept"
    )
    options = parser.parse_args(arguments)
    for name in ("lives", "seconds", "operations"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} must be greater than 0")
    lives = 500 if options.lives is None and options.seconds is None else options.lives
    # Milliseconds: runs that follow each other have different seeds.
    first = time.time_ns() // 1_000_000 if options.first is None else options.first
    end = None if options.seconds is None else time.monotonic() + options.seconds
    print(f"fresh lives from seed {first} on, {options.operations} operations each", flush=True)
    fresh = islice(((seed, options.operations) for seed in count(first)), lives)
    return int(run(FailedSeeds(options.folder), fresh, lambda: end is None or time.monotonic() < end) > 0)


if __name__ == "__main__":
    sys.exit(main())
