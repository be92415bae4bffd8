"""What callers see of each outage, as a table: `make outages`.

Greedy streams run over HTTP while a process is paused, killed or started with a clock that went back, while Redis
comes late, while disks are full and while thousands of connections stay idle. Each row says how many streams were lost
or wrong, the longest gap between two tokens, the health during the outage, how long a new request waited, and how much
the cache still held afterwards. The command ends with status 1 when a row breaks a promise of docs/runbook.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import grpc
import openai
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.result import Result
from bench.tables import table
from protos.kvcache.v1 import kvcache_pb2 as kv
from tests.chaos import fleet_outages
from tests.chaos.checks import CHECK_SECONDS
from tests.chaos.measuring import Manager, longest_gap
from tests.chaos.stage import REDIS, Stage, single
from tests.stack import MODULES
from tests.support.patience import patience
from tests.support.ports import free_address

T = TypeVar("T", "Outage", fleet_outages.Outage)

STREAMS, OUTPUT_TOKENS = 16, 120
# An outage begins once every stream has this many pieces.
FIRST_PIECES = 4
PROBE_SECONDS = 0.5
PROBE_TIMEOUT = 2.0  # subject: the table says which processes answer within it
ROUND_SECONDS = patience(60)
# Time until the processes serve again and the cache manager knows all blocks.
SETTLE_SECONDS = patience(60)
IDLE_CONNECTIONS = 5_000
BATCH = 50
# Every idle connection is closed after this time.
IDLE_SECONDS = patience(60)
# Pauses of at least these seconds may restart sequences.
RESTARTS_BEHIND = {"scheduler": 10.0, "executor": 30.0}
# A shell's usual soft limit of open files, which processes must raise themselves.
SOFT_FILES = 1_024
SYSTEM = "You are the clerk of a small library in the mountains, and you know where every book is and when it returns. "


@dataclass
class Stream:
    """One caller's stream: its text, when each piece arrived, and how it ended."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    cached_tokens: int = 0

    @property
    def longest_gap(self) -> float:
        """The longest time between two pieces; 0 for fewer than two pieces."""
        return longest_gap(self.times)


@dataclass
class Row:
    """The cost of an outage."""

    outage: str
    lost: int = 0
    wrong: int = 0
    longest_gap_s: float = 0.0
    restarted: int = 0
    # Answers of each process's health and of /health during the outage, in the order of first appearance.
    health: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    new_request: str = ""
    cached_blocks_before: int = 0
    cached_blocks_after: int = 0
    violations: int = 0
    next_round_right: int = 0
    next_round_cached_tokens: int = 0
    faults: list[str] = field(default_factory=list)

    def cells(self) -> dict[str, str]:
        """The row's values by the table's heads."""
        health = "; ".join(
            f"{name} " + ", ".join(f"{count} {said}" for said, count in counts.items())
            for name, counts in sorted(self.health.items())
        )
        return {
            "outage": self.outage,
            "streams\nlost": f"{self.lost}/{STREAMS}",
            "wrong": str(self.wrong),
            "longest\ngap s": f"{self.longest_gap_s:.1f}",
            "restarted": str(self.restarted),
            "new request\nmeanwhile": self.new_request,
            "cached\nblocks": f"{self.cached_blocks_before}>{self.cached_blocks_after}",
            "viola-\ntions": str(self.violations),
            "next\nround": f"{self.next_round_right}/{STREAMS}",
            "health meanwhile": health,
        }


@dataclass(frozen=True)
class Outage:
    """act: performs the outage until it is over; returns the faults that it found.

    loses: the outage may end streams, as the process that holds them dies. restarts: sequences may be restarted.
    """

    name: str
    act: Callable[[Stage], Awaitable[Sequence[str] | None]]
    loses: bool = False
    restarts: bool = True
    # Processes whose health is not checked, as they are away.
    away: tuple[str, ...] = ()


def _body(number: int, tokens: int = OUTPUT_TOKENS) -> dict[str, Any]:
    prompt = f"{SYSTEM * 2}Visitor {number} asks about the number {number * 37 % 101}. You answer:"
    return {
        "model": "",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"ignore_eos": True},
    }


async def _follow(client: openai.AsyncOpenAI, body: dict[str, Any], stream: Stream) -> Stream:
    """Reads a stream to its end; an error is kept as words."""
    try:
        async for event in await client.completions.create(**body):
            if event.usage and event.usage.prompt_tokens_details:
                stream.cached_tokens = event.usage.prompt_tokens_details.cached_tokens or 0
            for choice in event.choices:
                if choice.text:
                    stream.text += choice.text
                    stream.times.append(time.monotonic())
                stream.finish = choice.finish_reason or stream.finish
    # A broken connection within a stream is an error of the client's transport, which openai does not wrap.
    except Exception as error:
        stream.error = f"{type(error).__name__}: {str(error)[:200]}"
    return stream


class Table:
    """Runs outages on one stage and keeps a row of each."""

    def __init__(self, stage: Stage, http: str, tell: Callable[[str], None]) -> None:
        self._stage = stage
        self._http = http
        self._tell = tell
        self._reference: list[str] = []
        self.rows: list[Row] = []

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[openai.AsyncOpenAI]:
        address = f"http://{self._http}/v1"
        async with openai.AsyncOpenAI(base_url=address, api_key="-", max_retries=0, timeout=ROUND_SECONDS) as client:
            yield client

    async def learn(self) -> None:
        """Computes the reference texts in calm, and checks that they can be reproduced."""
        async with self._client() as client:
            first = await self._round(client)
            again = await self._round(client)
        self._reference = [stream.text for stream in first]
        if any(stream.error for stream in first) or [stream.text for stream in again] != self._reference:
            raise RuntimeError(f"calm rounds differ or fail: {[stream.error for stream in (*first, *again)]}")

    async def run(self, outage: Outage) -> None:
        """Performs one outage under load and measures it."""
        stage, row = self._stage, Row(outage.name)
        self._tell(outage.name)
        row.cached_blocks_before = await self._cached_blocks()
        restarts = self._restarted_so_far()
        async with self._client() as client:
            streams = [Stream() for _ in range(STREAMS)]
            tasks = [asyncio.create_task(_follow(client, _body(n), stream)) for n, stream in enumerate(streams)]
            leaving = asyncio.create_task(_follow(client, _body(STREAMS, 2_000), Stream()))
            await self._until_begun(streams)
            async with self._probing(outage, row):
                late = asyncio.create_task(self._late_request(outage))
                leave = asyncio.get_running_loop().call_later(1.0, leaving.cancel)
                try:
                    row.faults += await outage.act(stage) or []
                except TimeoutError:
                    row.faults.append("a process did not serve again in time")
                leave.cancel()
                leaving.cancel()
            await asyncio.wait([*tasks, late], timeout=ROUND_SECONDS)
            for name in (*MODULES, REDIS):
                await stage.until_serving(name)
            row.new_request = late.result() if late.done() else f"none within {ROUND_SECONDS:.0f} s"
            unfinished = sum(not task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            self._judge_streams(outage, row, streams, unfinished)
            await self._judge_rest(outage, row, restarts, client)
        self.rows.append(row)
        self._tell("  ".join(row.cells().values()) + "".join(f"\n  FAULT {fault}" for fault in row.faults))

    def _judge_streams(self, outage: Outage, row: Row, streams: Sequence[Stream], unfinished: int) -> None:
        for stream, whole in zip(streams, self._reference, strict=True):
            ended = bool(stream.finish) and not stream.error
            row.lost += not ended
            row.wrong += stream.text != whole if ended else not whole.startswith(stream.text)
        row.longest_gap_s = max(stream.longest_gap for stream in streams)
        lost = next((stream.error or "ended without a finish_reason" for stream in streams if not stream.finish), "")
        if unfinished:
            row.faults.append(f"{unfinished} streams hang")
        if row.wrong:
            row.faults.append(f"{row.wrong} streams have wrong text")
        if row.lost and not outage.loses:
            row.faults.append(f"{row.lost} streams are lost: {lost}")
        if any(stream.finish == "" and not stream.error for stream in streams):
            row.faults.append("a stream that was cut off ended like a whole one")

    async def _judge_rest(self, outage: Outage, row: Row, restarts: int, client: openai.AsyncOpenAI) -> None:
        await self._until_served(client)
        row.restarted = self._restarted_so_far() - restarts
        if row.restarted and not outage.restarts:
            row.faults.append(f"{row.restarted} sequences were restarted")
        deadline = time.monotonic() + SETTLE_SECONDS
        while (blocks := await self._cached_blocks()) < row.cached_blocks_before and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
        row.cached_blocks_after = blocks
        if blocks < row.cached_blocks_before:
            row.faults.append(f"{row.cached_blocks_before - blocks} cached blocks are lost")
        row.violations = await self._violations()
        if row.violations:
            row.faults.append(f"CheckPool: {row.violations} violations")
        after = await self._round(client)
        row.next_round_right = sum(stream.text == whole for stream, whole in zip(after, self._reference, strict=True))
        row.next_round_cached_tokens = sum(stream.cached_tokens for stream in after)
        if row.next_round_right < STREAMS:
            row.faults.append(f"{STREAMS - row.next_round_right} streams are wrong or lost in the next round")

    async def _round(self, client: openai.AsyncOpenAI) -> list[Stream]:
        return await asyncio.gather(*[_follow(client, _body(number), Stream()) for number in range(STREAMS)])

    async def _until_begun(self, streams: Iterable[Stream]) -> None:
        deadline = time.monotonic() + ROUND_SECONDS
        while any(len(stream.times) < FIRST_PIECES and not stream.error for stream in streams):
            if time.monotonic() > deadline:
                raise TimeoutError("the streams do not begin")
            await asyncio.sleep(0.02)

    async def _until_served(self, client: openai.AsyncOpenAI) -> None:
        async with asyncio.timeout(SETTLE_SECONDS):
            while (await _follow(client, _body(STREAMS + 2, 1), Stream())).error:
                await asyncio.sleep(0.2)

    async def _late_request(self, outage: Outage) -> str:
        """How long a request takes that arrives during the outage, or its error."""
        await asyncio.sleep(1.0)
        if "scheduler" in outage.away:
            return "-"
        begin = time.monotonic()
        async with self._client() as client:
            stream = await _follow(client, _body(STREAMS + 1, 5), Stream())
        taken = f"{time.monotonic() - begin:.1f} s"
        return f"{stream.error[:40]} after {taken}" if stream.error else taken

    @contextlib.asynccontextmanager
    async def _probing(self, outage: Outage, row: Row) -> AsyncIterator[None]:
        """Asks every process that is not away for its health, again and again."""
        asks: dict[str, Callable[[], Awaitable[str]]] = {}
        async with contextlib.AsyncExitStack() as opened:
            for name in (name for name in MODULES if name not in outage.away):
                address = getattr(self._stage.stack, name)
                channel = grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
                asks[name] = partial(_ask_health, await opened.enter_async_context(channel))
            if "scheduler" in asks:
                asks["/health"] = partial(asyncio.to_thread, _get_health, f"http://{self._http}/health")
            probes = [asyncio.create_task(_probe(row.health[name], ask)) for name, ask in asks.items()]
            try:
                yield
            finally:
                for probe in probes:
                    probe.cancel()
                await asyncio.gather(*probes, return_exceptions=True)

    async def _cached_blocks(self) -> int:
        """Blocks in the index, in any tier, as soon as the cache manager answers; 0 if it does not answer in time."""
        deadline = time.monotonic() + SETTLE_SECONDS
        async with Manager(self._stage.stack.admin) as manager:
            while time.monotonic() < deadline:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    return len({(pool, key) for (pool, _, _), (key, *_) in (await manager.index()).items()})
                await asyncio.sleep(0.2)
        return 0

    async def _violations(self) -> int:
        async with Manager(self._stage.stack.admin) as manager:
            answer = await manager.admin.CheckPool(kv.CheckPoolRequest(), timeout=CHECK_SECONDS)
        return len(answer.violations)

    def _restarted_so_far(self) -> int:
        """Sequences that the scheduler restarted, by its log."""
        path = self._stage.stack.log_path("scheduler")
        found = 0
        for line in path.read_text(errors="replace").splitlines():
            if "cache manager lost" in line or "executor lost" in line:
                with contextlib.suppress(ValueError):
                    found += json.loads(line).get("sequences", 0)
        return found


async def _probe(answers: Counter[str], ask: Callable[[], Awaitable[str]]) -> None:
    while True:
        answers[await ask()] += 1
        await asyncio.sleep(PROBE_SECONDS)


async def _ask_health(channel: grpc.aio.Channel) -> str:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _get_health(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except OSError as error:
        return type(error).__name__


def _pause(name: str, seconds: float) -> Outage:
    async def act(stage: Stage) -> None:
        await stage.pause(name, seconds)

    # A scheduler's lease ends while it is paused; an executor is given up after the time limit of a step. A paused
    # cache manager counts no time.
    restarts = seconds > RESTARTS_BEHIND.get(name, seconds)
    return Outage(f"pause {name} {seconds:.0f} s", act, restarts=restarts, away=(name,))


def _kill(*names: str) -> Outage:
    async def act(stage: Stage) -> None:
        for name in names:
            os.kill(stage.pid(name), signal.SIGKILL) if len(names) > 1 else None
        await asyncio.gather(*[stage.restart(name) for name in names])

    title = "all" if len(names) > 1 else names[0]
    return Outage(f"kill {title}", act, loses="scheduler" in names, away=names)


def _late_redis(seconds: float) -> Outage:
    async def act(stage: Stage) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stage.restart(REDIS, away=seconds))
            # Redis is away when the cache manager starts.
            await asyncio.sleep(0.1)
            tasks.create_task(stage.restart("cachemgr"))

    return Outage(f"redis {seconds:.0f} s later than cachemgr", act, away=("cachemgr",))


def _clock_back(name: str, hours: float = 1.0) -> Outage:
    async def act(stage: Stage) -> None:
        try:
            async with stage.shifted(name, -3600.0 * hours):
                await stage.restart(name)
                await asyncio.sleep(2.0)
        finally:
            # From the next start on, the process has the right clock again.
            await stage.restart(name)

    return Outage(f"clock of {name} {hours:.0f} h back", act, loses=name == "scheduler", away=(name,))


def _full_disk(name: str) -> Outage:
    async def act(stage: Stage) -> None:
        stage.limit_files(0 if name == REDIS else 16 << 20, name)
        await asyncio.sleep(5.0)
        stage.limit_files(None, name)

    return Outage(f"full disk of {name} 5 s", act, restarts=False)


def _idle_connections(count: int) -> Outage:
    async def act(stage: Stage) -> list[str]:
        grpc_socket = stage.stack.scheduler.removeprefix("unix:")
        targets = [stage.stack.http, *(stage.metrics[name] for name in MODULES), grpc_socket]
        idle, begin = [], time.monotonic()
        for first in range(0, count, BATCH):
            numbers = range(first, min(count, first + BATCH))
            idle += await asyncio.gather(*[_idle(targets[n % len(targets)], half=n % 2 == 1) for n in numbers])
        refused = sum(reader is None for reader, _ in idle)
        closing = [asyncio.create_task(reader.read()) for reader, _ in idle if reader is not None]
        _, still = await asyncio.wait(closing, timeout=IDLE_SECONDS) if closing else (set(), set())
        for task in still:
            task.cancel()
        for _, writer in idle:
            if writer is not None:
                writer.close()
        taken = time.monotonic() - begin
        print(f"idle: {refused} refused, {len(still)} of {count} open after {taken:.0f} s", file=sys.stderr)
        return [f"{len(still)} of {count} idle connections stay open for {IDLE_SECONDS:.0f} s"] if still else []

    return Outage(f"{count} idle and half-open connections", act, restarts=False)


async def _idle(target: str, *, half: bool) -> tuple[asyncio.StreamReader | None, asyncio.StreamWriter | None]:
    """A connection that sends nothing, or half of a request's headers; None if it is refused."""
    host, _, port = target.rpartition(":")
    try:
        opened = asyncio.open_connection(host, int(port)) if host else asyncio.open_unix_connection(target)
        reader, writer = await asyncio.wait_for(opened, PROBE_TIMEOUT)
    except (OSError, TimeoutError):
        return None, None
    if half:
        writer.write(b"GET / HTTP/1.1\r\nX-Half: ")
    return reader, writer


def outages() -> list[Outage]:
    """All outages, the mildest first."""
    return [
        _idle_connections(IDLE_CONNECTIONS),
        *[_pause(name, seconds) for seconds in (3, 12, 60) for name in ("cachemgr", "executor", "scheduler", REDIS)],
        _full_disk(REDIS),
        _full_disk("executor"),
        *[_kill(name) for name in ("cachemgr", "executor", REDIS, "scheduler")],
        _kill("cachemgr", "executor", REDIS, "scheduler"),
        *[_late_redis(seconds) for seconds in (5, 60)],
        *[_clock_back(name) for name in ("cachemgr", "executor", "scheduler")],
    ]


def _limit_files(soft: int | None) -> None:
    """Sets the soft limit of open files, which children inherit; None sets it to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft is None else soft, hard))


async def measure(chosen: Sequence[Outage], tell: Callable[[str], None], seed: int = 1) -> list[Row]:
    """Runs the outages one after the other on one stack."""
    _limit_files(SOFT_FILES)
    http = free_address()
    stage = single(seed, proxied=False, tell=tell, scheduler_http_address=http, executor_max_tokens=16_384)
    async with stage:
        # This process opens the idle connections.
        _limit_files(None)
        found = Table(stage, http, tell)
        await found.learn()
        for outage in chosen:
            await found.run(outage)
        for failure in stage.failures:
            tell(f"FAULT {failure}")
            found.rows[-1].faults.append(failure)
    return found.rows


def main() -> int:
    """Runs the chosen outages and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="outages whose name contains this; separate several by commas")
    parser.add_argument("--fleet", action="store_true", help="outages of a fleet, without a model")
    parser.add_argument("--real", action="store_true", help="with --fleet: executors that run the default model")
    given = parser.parse_args()
    if given.real and not given.fleet:
        parser.error("argument --real: only with --fleet")
    begin = time.monotonic()

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f}] {line}", file=sys.stderr, flush=True)

    rows: Sequence[Row] | Sequence[fleet_outages.Row]
    if given.fleet:
        in_fleet = _chosen(parser, fleet_outages.outages(), given.only)
        rows = asyncio.run(fleet_outages.measure(in_fleet, tell, real=given.real))
    else:
        rows = asyncio.run(measure(_chosen(parser, outages(), given.only), tell))
    print(table(list(rows[0].cells()), [list(row.cells().values()) for row in rows]))
    for row in rows:
        for fault in row.faults:
            print(f"FAULT {row.outage}: {fault}")
    name = "outages" + ("_fleet" if given.fleet else "") + ("_real" if given.real else "")
    # Answers about health are long, and wrong ones are faults.
    kept = [{key: value for key, value in vars(row).items() if key != "health"} for row in rows]
    Result(name, {"rows": kept}).write()
    return 1 if any(row.faults for row in rows) else 0


def _chosen(parser: argparse.ArgumentParser, known: Sequence[T], only: str) -> Sequence[T]:
    names = [name.strip() for name in only.split(",")]
    chosen = [outage for outage in known if any(name in outage.name for name in names)]
    if not chosen:
        parser.error(f"argument --only: no outage is called so; there are: {', '.join(one.name for one in known)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
