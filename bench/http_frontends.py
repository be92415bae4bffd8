"""Measures how separate front-end processes affect many long HTTP streams.

Run it with `make bench-http-frontends`. The executor is a stub whose steps take a fixed time, so that only kvkeep has
work. For each number of streams and of front ends, it prints messages per second and stream, the time between messages,
the device's idle time between steps, and each process's processor time per token and per message. On a shared machine,
processor time is the most reliable figure.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import psutil
import uvloop

from bench.callers import ask, http_request
from bench.http_load import STUB, STUB_SETTINGS
from bench.result import Result, add_json_argument, percentile
from bench.runs import Others
from bench.stub_executor import read_records
from bench.tables import table
from tests.stack import MODULES, Stack, metrics
from tests.support.ports import free_address

OUTPUT_TOKENS = "kvkeep_scheduler_output_tokens_total"
# Warm-up seconds after every stream has begun; longest wait in seconds for streams to begin.
WARM_SECONDS, BEGIN_SECONDS = 5.0, 60.0
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
EVENT = b"data: {"
MAIN, OTHERS = "scheduler's main thread", "scheduler's other threads"

Processes = Mapping[str, list[psutil.Process]]


@dataclass
class Tally:
    """Events since its creation, and the seconds between events of one stream."""

    events: int = 0
    gaps: array[float] = field(default_factory=lambda: array("d"))

    def count(self, events: int, gap: float) -> None:
        """Records events received in one read; `gap` is the time since the previous read."""
        self.events += events
        self.gaps.append(gap)
        self.gaps.extend(itertools.repeat(0.0, events - 1))


class Caller(asyncio.Protocol):
    """Sends a request and only counts the events in the answer; doing more would disturb the measurement."""

    def __init__(self, request: bytes) -> None:
        self.tally = Tally()
        self.begun = asyncio.get_running_loop().create_future()
        self._request = request
        self._last = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the request."""
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        """Counts the events in `data`; the first data must be a 200 response."""
        now, events = time.perf_counter(), data.count(EVENT)
        if not self._last:
            if not data.startswith(b"HTTP/1.1 200"):
                self.begun.set_exception(RuntimeError(data.decode()))
                return
            self.begun.set_result(None)
        elif events:
            self.tally.count(events, now - self._last)
        self._last = now


def processes(stack: Stack) -> Processes:
    """The processes of a stack, by kind."""
    found = {name: [psutil.Process(stack.pid(name))] for name in (*stack.modules, "redis")}
    return {**found, "front ends": found["scheduler"][0].children(), "client": [psutil.Process()]}


def cpu_seconds(running: Processes) -> dict[str, float]:
    """Processor seconds so far, for the scheduler also by thread."""
    found = {name: sum(sum(one.cpu_times()[:2]) for one in those) for name, those in running.items()}
    [scheduler] = running["scheduler"]
    main = sum(one.user_time + one.system_time for one in scheduler.threads() if one.id == scheduler.pid)
    return found | {MAIN: main, OTHERS: found["scheduler"] - main}


def output_tokens(stack: Stack) -> float:
    """Tokens that the scheduler has received from the executor."""
    return sum(value for name, _, value in metrics(stack.http) if name == OUTPUT_TOKENS)


async def measure(stack: Stack, streams: int, seconds: float, step_seconds: float) -> dict[str, Any]:
    """Measures `streams` concurrent streams for `seconds` seconds."""
    tokens = round(2 * (BEGIN_SECONDS + WARM_SECONDS + seconds) / step_seconds)
    host, _, port = stack.http.rpartition(":")
    loop, callers, transports = asyncio.get_running_loop(), [], []
    for number in range(streams):
        asked = ask(f"{number} tells a story.", tokens, leaves=None, step=round(step_seconds * 1e6))
        caller = Caller(http_request(asked))
        transport, _ = await loop.create_connection(lambda caller=caller: caller, host, int(port))  # type: ignore[misc]
        callers.append(caller)
        transports.append(transport)
    async with asyncio.timeout(BEGIN_SECONDS):
        await asyncio.gather(*(caller.begun for caller in callers))
    await asyncio.sleep(WARM_SECONDS)
    running = processes(stack)
    others, steps = Others(one for those in running.values() for one in those), len(read_records(stack.folder))
    before, tokens_before = cpu_seconds(running), await asyncio.to_thread(output_tokens, stack)
    for caller in callers:
        caller.tally = Tally()
    begin = time.perf_counter()
    await asyncio.sleep(seconds)
    tallies, took = [caller.tally for caller in callers], time.perf_counter() - begin
    for caller in callers:
        caller.tally = Tally()
    after, output = cpu_seconds(running), await asyncio.to_thread(output_tokens, stack) - tokens_before
    share, records = others.share(), read_records(stack.folder, steps)
    for transport in transports:
        transport.abort()
    events, gaps = sum(tally.events for tally in tallies), [gap for tally in tallies for gap in tally.gaps]
    cpu = {name: after[name] - before[name] for name in after}
    return {
        "streams": streams,
        "front_ends": len(running["front ends"]),
        "seconds": took,
        "output_tokens_per_s": output / took,
        "messages_per_s": events / took,
        "messages_per_s_per_stream": events / took / streams,
        "fewest_messages_per_s_of_a_stream": min(tally.events for tally in tallies) / took,
        "between_messages_ms": {name: percentile(gaps, part) * 1e3 for name, part in SHARES.items()},
        "executor_idle": sum(record.idle for record in records) / took,
        "cpu_us_per_token": {name: value / output * 1e6 for name, value in cpu.items()},
        "cpu_us_per_message": {name: value / events * 1e6 for name, value in cpu.items()},
        "resident_mb": {name: sum(one.memory_info().rss for one in those) / 1e6 for name, those in running.items()},
        "others_cpu": share,
    }


def show(runs: list[dict[str, Any]]) -> None:
    """Prints a table, a column for each run."""

    def row(name: str, form: str, *keys: str) -> list[str]:
        values = []
        for value in runs:
            for key in keys:
                value = value[key]
            values.append(format(value, form))
        return [name, *values]

    names = runs[0]["cpu_us_per_token"]
    print(
        table(
            ("streams\nfront ends", *(f"{run['streams']}\n{run['front_ends']}" for run in runs)),
            [
                row("output tokens per second", ".0f", "output_tokens_per_s"),
                row("messages per second", ".0f", "messages_per_s"),
                row("messages per second per stream", ".1f", "messages_per_s_per_stream"),
                row("the same, of the stream with fewest", ".1f", "fewest_messages_per_s_of_a_stream"),
                *(row(f"between messages, ms, {name}", ".1f", "between_messages_ms", name) for name in SHARES),
                row("executor idle", ".1%", "executor_idle"),
                *(row(f"CPU us per token: {name}", ".1f", "cpu_us_per_token", name) for name in names),
                *(row(f"CPU us per message: {name}", ".1f", "cpu_us_per_message", name) for name in names),
                row("front ends, MB", ".0f", "resident_mb", "front ends"),
                row("used by other programs, of all cores", ".0%", "others_cpu"),
            ],
        )
    )


def main() -> None:
    """Measures every combination, each with a new stack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--frontends", type=int, nargs="+", default=[0, 1, 2], help="KVKEEP_SCHEDULER_FRONTENDS")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--step-ms", type=float, default=20)
    add_json_argument(parser)
    given = parser.parse_args()
    runs = []
    for streams, frontends in itertools.product(given.streams, given.frontends):
        with Stack(
            modules=MODULES | {"executor": STUB},
            scheduler_http_address=free_address(),
            scheduler_frontends=frontends,
            scheduler_max_running=streams,
            scheduler_max_waiting=streams,
            executor_max_tokens=1 << 21,
            **STUB_SETTINGS,
        ) as stack:
            runs.append(uvloop.run(measure(stack, streams, given.seconds, given.step_ms / 1e3)))
    show(runs)
    asked = {name: value for name, value in vars(given).items() if name != "json"}
    Result("http_frontends", {"runs": runs}, asked).write(given.json)


if __name__ == "__main__":
    main()
