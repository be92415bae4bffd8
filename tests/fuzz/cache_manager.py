"""Random lives of the cache manager: `make fuzz-manager`. CI runs those of the seeds 0 to 499.

Without --first each run has lives that no run before had. For each life that fails, how to run it again is printed.
"""

import argparse
import sys
import time
import traceback
from itertools import count

from tests.support.random_operations import live_long, live_long_as_twins

# Seeds of which one also begins a life of two engines behind one cache manager.
TWINS_EVERY = 5


def main(arguments: list[str] | None = None) -> int:
    """The status of the process: 1 when a life has failed."""
    parser = argparse.ArgumentParser(prog="make fuzz-manager", description=__doc__)
    parser.add_argument("--lives", type=int, help="how many lives; 500 unless --seconds says how long")
    parser.add_argument("--seconds", type=float, help="for how long lives are begun")
    parser.add_argument("--operations", type=int, default=400, help="of each life")
    parser.add_argument("--first", type=int, help="seed of the first life, by default from the clock")
    options = parser.parse_args(arguments)
    for name in ("lives", "seconds", "operations"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} must be greater than 0")
    lives = 500 if options.lives is None and options.seconds is None else options.lives
    # Milliseconds: runs that follow each other have different seeds.
    first = time.time_ns() // 1_000_000 if options.first is None else options.first
    end = None if options.seconds is None else time.monotonic() + options.seconds
    print(f"lives from seed {first} on, {options.operations} operations each", flush=True)
    failed = 0
    for seed in count(first):
        if seed - first == lives or (end is not None and time.monotonic() >= end):
            break
        try:
            live_long(seed, options.operations)
            if seed % TWINS_EVERY == 0:
                live_long_as_twins(seed, options.operations)
        except Exception:
            failed += 1
            traceback.print_exc()
            again = f"--first {seed} --lives 1 --operations {options.operations}"
            print(f'again: make fuzz-manager ARGS="{again}"', flush=True)
    print(f"{seed - first} lives, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
