"""One run: calls of gRPC on one stack, and what must be true of it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Sequence

import grpc

from tests.fuzz import bounds
from tests.fuzz.calls import Caller
from tests.fuzz.messages import Maker
from tests.fuzz.meter import Meter
from tests.fuzz.methods import Method, discover
from tests.fuzz.report import Report
from tests.fuzz.stage import Stage

CONCURRENCY = 12
TELL_SECONDS = 5.0

Tell = Callable[[str], None]


async def fuzz_grpc(stage: Stage, report: Report, count: int, tell: Tell, *, at_bounds: bool = False) -> None:
    """So many calls of gRPC: first what callers and operators may, then what only the stack's own processes do.

    Whoever speaks to the data plane can register in the names of the others, which then know themselves replaced: what
    is asked of the stack then is less, see `Stage.check`. at_bounds: most of them with numbers at the bounds of their
    types, one at a time, and the cost of each is measured.
    """
    stack = stage.stack
    outer, inner = [
        [method for address in addresses for method in await asyncio.to_thread(discover, address)]
        for addresses in ((stack.scheduler, stack.admin), (stack.cachemgr, stack.executor))
    ]
    share = sum(map(_weight, outer)) / sum(map(_weight, outer + inner))
    first = round(count * share)
    async with contextlib.AsyncExitStack() as opened:
        channels = {
            address: await opened.enter_async_context(grpc.aio.insecure_channel(address, options=_OPTIONS))
            for address in (stack.scheduler, stack.admin, stack.cachemgr, stack.executor)
        }
        maker = bounds.MakerAtBounds if at_bounds else Maker
        caller = Caller(channels, report, maker, Meter(stage, report) if at_bounds else None)
        concurrency = 1 if at_bounds else CONCURRENCY
        async with stage.kept(report):
            await _send(caller, outer, range(first), stage, report, tell, concurrency)
        await stage.check(report)
        async with stage.kept(report):
            await _send(caller, inner, range(first, count), stage, report, tell, concurrency)
        await stage.check(report, fenced=True)


_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 << 20)]


def _weight(method: Method) -> int:
    """Requests with much in them are sent more often."""
    return 5 + method.fields


async def _send(
    caller: Caller,
    methods: Sequence[Method],
    numbers: range,
    stage: Stage,
    report: Report,
    tell: Tell,
    concurrency: int,
) -> None:
    weights = list(itertools.accumulate(map(_weight, methods)))
    waiting, done, told = iter(numbers), 0, time.monotonic()

    async def work() -> None:
        nonlocal done, told
        for number in waiting:
            rng = random.Random(f"{report.seed} {number}")
            await caller.call(rng.choices(methods, cum_weights=weights)[0], rng)
            done += 1
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                tell(f"gRPC: {done} of {len(numbers)} calls, {report.num_faults} faults")
            if stage.crashes():
                return

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(work())
