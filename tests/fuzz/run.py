"""Calls of gRPC on one stack, and what must hold afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import grpc

from tests.fuzz.calls import Caller
from tests.fuzz.meter import Meter
from tests.fuzz.methods import Method, discover
from tests.fuzz.report import Report
from tests.fuzz.stage import Stage

CONCURRENCY = 12
TELL_EVERY = 500
_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 << 20)]

Tell = Callable[[str], None]


async def fuzz_grpc(stage: Stage, report: Report, count: int, tell: Tell, *, at_bounds: bool = False) -> None:
    """Makes calls of gRPC: first those of callers and operators, then those of the stack's own processes.

    A caller of the data plane can register in the names of the others, which then know themselves replaced: less is
    asked of the stack then, see `Stage.check`. at_bounds: most of them with numbers at the bounds of their types, one
    at a time, and the cost of each is measured.
    """
    stack = stage.stack
    outer, inner = [
        [method for address in addresses for method in await asyncio.to_thread(discover, address)]
        for addresses in ((stack.scheduler, stack.admin), (stack.cachemgr, stack.executor))
    ]
    first = round(count * sum(map(_weight, outer)) / sum(map(_weight, outer + inner)))
    async with contextlib.AsyncExitStack() as opened:
        channels = {
            address: await opened.enter_async_context(grpc.aio.insecure_channel(address, options=_OPTIONS))
            for address in (stack.scheduler, stack.admin, stack.cachemgr, stack.executor)
        }
        caller = Caller(channels, report, Meter(stage, report) if at_bounds else None)
        for methods, numbers in ((outer, range(first)), (inner, range(first, count))):
            async with stage.kept(report), asyncio.TaskGroup() as tasks:
                # Each method once; then as their weights say.
                waiting = zip(numbers, itertools.chain(methods, itertools.repeat(None)), strict=False)
                for _ in range(1 if at_bounds else CONCURRENCY):
                    tasks.create_task(_send(caller, methods, waiting, stage, report, tell))
            await stage.check(report, fenced=methods is inner)


def _weight(method: Method) -> int:
    """Requests with much in them are sent more often."""
    return 5 + method.fields


async def _send(
    caller: Caller,
    methods: Sequence[Method],
    waiting: Iterator[tuple[int, Method | None]],
    stage: Stage,
    report: Report,
    tell: Tell,
) -> None:
    """Calls until nothing is waiting any more, of which all senders take, or a process has ended.

    waiting: numbers of calls, and the method that is called; None for one of `methods` at random.
    """
    weights = list(itertools.accumulate(map(_weight, methods)))
    for number, given in waiting:
        rng = random.Random(f"{report.seed} {number}")
        await caller.call(given or rng.choices(methods, cum_weights=weights)[0], rng)
        if number % TELL_EVERY == 0:
            tell(f"gRPC: call {number}, {report.num_faults} faults")
        if stage.crashes():
            return
