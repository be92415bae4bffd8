"""Kills, pauses and disturbs a stack under load, and checks that nothing is lost: `make chaos`.

Every disturbance happens to one stack, in an order that follows from the seed: processes are killed, terminated and
paused; Redis is away, slow, cut off and full; messages between services are late, lost and repeated; writes to the
disk tier fail. Clients send requests whose greedy outputs are known. The command ends with status 1 when an output
differed, a request failed while its scheduler lived, a call hung, a block was lost, or something was slower than
promised.

With --fleet the same happens to engines, shards and routers, one disturbance after the other, and the report says how
soon requests succeed again. Executors of the fleet compute tokens without a model, from the contents of their blocks.
With --ray a fleet on a Ray cluster of this machine loses processes, actors and nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from bench.result import Result
from tests.chaos import run
from tests.chaos.report import Report

if TYPE_CHECKING:
    from tests.chaos.on_ray import Report as RayReport


def main() -> int:
    """Runs and judges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--soak", action="store_true", help="disturb nothing, and watch the memory of each process")
    parser.add_argument("--fleet", action="store_true", help="engines, shards and routers, without a model")
    parser.add_argument("--ray", action="store_true", help="a fleet on a Ray cluster, without a model")
    parser.add_argument("--real", action="store_true", help="with --fleet: executors that run the default model")
    parser.add_argument("--seconds", type=float, help="length of the run, about: 600, or 1800 for a soak")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.ray + given.fleet + given.soak > 1:
        parser.error("arguments --soak, --fleet and --ray: only one of them")
    if given.real and not given.fleet:
        parser.error("argument --real: only with --fleet")
    seconds = given.seconds or (1800.0 if given.soak else 600.0)
    begin = time.monotonic()

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f}] {line}", file=sys.stderr, flush=True)

    report: Report | RayReport
    if given.ray:
        # Ray changes the environment of the processes that are started after its import.
        from tests.chaos import on_ray

        report = on_ray.lose_all(given.seed, seconds, tell)
    else:
        kind = partial(run.fleet, real=given.real) if given.fleet else run.soak if given.soak else run.mixed
        report = asyncio.run(kind(given.seed, seconds, tell))
    print(report.text())
    name = "chaos_ray" if given.ray else "chaos_fleet" if given.fleet else "chaos"
    Result(name, report.values(), {"seed": given.seed, "seconds": seconds, "real": given.real}).write()
    return 1 if report.faults or report.slow else 0


if __name__ == "__main__":
    sys.exit(main())
