"""Calls every gRPC method of a real stack with requests that no client would send: `python -m tests.fuzz`.

Messages are made from descriptors, of every service on every address. It ends with status 1 when a process ended, a
call hung or met an internal error, or something was left behind. A folder keeps the calls that led to it. HTTP has
tests/e2e/test_http_fuzz.py; with --bounds, half of the calls go over HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from bench.result import Result
from tests.fuzz import http_bounds
from tests.fuzz.calls import repeat
from tests.fuzz.meter import Meter
from tests.fuzz.methods import discover
from tests.fuzz.report import Report
from tests.fuzz.run import fuzz_grpc
from tests.fuzz.stage import Stage


def main() -> int:
    """Runs the fuzz, and reports the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument("--bounds", action="store_true", help="numbers at their types' bounds, and costs measured")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeat", type=Path, metavar="FILE", help="send a call that met a fault to a fresh stack")
    given = parser.parse_args()
    begin = time.monotonic()

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f}] {line}", file=sys.stderr, flush=True)

    report = Report(given.seed, Path(tempfile.mkdtemp(prefix="kvkeep-fuzz-")))
    with Stage() as stage:
        tell("the stack serves")
        if given.repeat:
            print(asyncio.run(_repeat(stage, json.loads(given.repeat.read_text()))))
            asyncio.run(stage.check(report))
        else:
            _fuzz(stage, report, given.calls, tell, at_bounds=given.bounds)
    print(report.text())
    settings = {"seed": given.seed, "calls": given.calls, "bounds": given.bounds}
    if not given.repeat:
        Result("fuzz", report.figures() | {"seconds": round(time.monotonic() - begin)}, settings).write()
    return int(report.num_faults > 0)


def _fuzz(stage: Stage, report: Report, calls: int, tell: Callable[[str], None], *, at_bounds: bool) -> None:
    over_http = calls // 2 if at_bounds else 0
    if over_http:
        http_bounds.fuzz(stage.stack.http, report, over_http, Meter(stage, report), tell)
        asyncio.run(stage.check(report))
    asyncio.run(fuzz_grpc(stage, report, calls - over_http, tell, at_bounds=at_bounds))
    if not stage.crashes():
        tell("starting all processes again")
        asyncio.run(stage.recover(report))


async def _repeat(stage: Stage, call: dict[str, Any]) -> str:
    if "curl" in call:
        return f"send this to http://{stage.stack.http}:\n{call['curl']}\n{call['body']}"
    stack = stage.stack
    messages = [bytes.fromhex(one) for one in call["messages"]]
    for address in (stack.scheduler, stack.admin, stack.cachemgr, stack.executor):
        for method in await asyncio.to_thread(discover, address):
            if method.name == call["method"]:
                async with grpc.aio.insecure_channel(address) as channel:
                    return await repeat(channel, method, messages)
    return f"there is no {call['method']}"


if __name__ == "__main__":
    sys.exit(main())
