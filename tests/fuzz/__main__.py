"""Calls every gRPC method of a real stack with requests that no client would send: `python -m tests.fuzz`.

Messages are made from descriptors, of every service on every address. It ends with status 1 when a process ended, a
call hung or met an internal error, or something was left behind. A folder keeps what led to it. HTTP has
tests/e2e/test_http_fuzz.py; with --bounds, half of the calls go over HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import grpc

from bench.result import Result
from tests.fuzz import http_bounds
from tests.fuzz.calls import repeat
from tests.fuzz.meter import Meter
from tests.fuzz.methods import discover
from tests.fuzz.report import Report
from tests.fuzz.run import fuzz_grpc
from tests.fuzz.stage import Stage

REPEAT_SECONDS = 60.0


def main() -> int:
    """Runs, and says what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument("--bounds", action="store_true", help="numbers at their types' bounds, and costs measured")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=Path, help="folder for calls that met a fault; a temporary one if absent")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results")
    parser.add_argument("--repeat", type=Path, metavar="FILE", help="send one such call again, to a fresh stack")
    given = parser.parse_args()
    if given.repeat:
        return _repeat(json.loads(given.repeat.read_text()))
    begin = time.monotonic()

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f}] {line}", file=sys.stderr, flush=True)

    report = Report(given.seed, given.faults or Path(tempfile.mkdtemp(prefix="kvkeep-fuzz-")))
    with Stage() as stage:
        tell("the stack serves")
        over_http = given.calls // 2 if given.bounds else 0
        if over_http:
            http_bounds.fuzz(stage.stack.http, report, over_http, Meter(stage, report), tell)
            asyncio.run(stage.check(report))
        asyncio.run(fuzz_grpc(stage, report, given.calls - over_http, tell, at_bounds=given.bounds))
        if not stage.crashes():
            tell("starting all processes again")
            asyncio.run(stage.recover(report))
    print(report.text())
    seconds = round(time.monotonic() - begin)
    print(f"seed {given.seed}, {seconds} s")
    asked = {"seed": given.seed, "calls": given.calls}
    Result("fuzz_bounds" if given.bounds else "fuzz", report.data() | {"seconds": seconds}, asked).write(given.json)
    return int(report.num_faults > 0)


def _repeat(call: dict[str, object]) -> int:
    with Stage() as stage:
        if "curl" in call:
            print(f"send this to http://{stage.stack.http}:\n{call['curl']}\n{call['body']}")
        else:
            print(asyncio.run(_repeat_grpc(stage, call)))
        asyncio.run(stage.check(report := Report(0, Path())))
        print(report.text())
        return int(report.num_faults > 0)


async def _repeat_grpc(stage: Stage, call: dict[str, object]) -> str:
    stack = stage.stack
    messages = [bytes.fromhex(one) for one in call["messages"]]  # type: ignore[attr-defined]
    for address in (stack.scheduler, stack.admin, stack.cachemgr, stack.executor):
        for method in await asyncio.to_thread(discover, address):
            if method.name == call["method"]:
                async with grpc.aio.insecure_channel(address) as channel:
                    return await repeat(channel, method, messages, REPEAT_SECONDS)
    return f"there is no {call['method']}"


if __name__ == "__main__":
    sys.exit(main())
