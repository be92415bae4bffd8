"""Kills, pauses and disturbs a stack under load, and checks that nothing is lost: `make chaos`.

Without --only everything that there is happens to one stack, in an order that follows from the seed: processes are
killed, asked to end and paused; Redis is slow, cut off and full; messages between services are late, lost and repeated;
writes to the disk tier fail. Clients send requests whose greedy outputs are known. It ends with status 1 when an
output was another one, a request failed though its scheduler lived, somebody hung, or a block was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

from tests.chaos import plans
from tests.chaos.run import run


def main() -> int:
    """Runs one plan and judges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--only", choices=("cachemgr", "executor", "redis"), help="disturb only one process")
    chosen.add_argument("--soak", action="store_true", help="disturb nothing, and watch the memory of each process")
    parser.add_argument("--seconds", type=float, help="length of the whole, about")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="folder for the logs; a temporary one where something is wrong")
    parser.add_argument("--model", default="", help="another model than the default one")
    given = parser.parse_args()
    plan = plans.make("soak" if given.soak else given.only or "mixed", given.seed, given.seconds)
    plan.settings["executor_model"] = given.model
    begin = time.monotonic()

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f}] {line}", file=sys.stderr, flush=True)

    report = asyncio.run(run(plan, given.seed, tell, given.logs))
    print(report.text())
    print(json.dumps(report.values()))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
