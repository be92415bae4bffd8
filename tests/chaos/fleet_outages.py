"""What callers of a fleet see of each outage, as a table: `make outages ARGS=--fleet`.

Greedy streams run through a router while one process of the fleet is killed or paused. Each row says how many streams
were lost or wrong, the gaps between their tokens, how long requests during the outage waited, and how the next round
went.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import grpc

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as generation_rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from tests.chaos.checks import CHECK_SECONDS
from tests.chaos.measuring import Manager, longest_gap
from tests.chaos.stage import REDIS, RESTART_SECONDS, SHARDS, Stage, admin_of, fleet
from tests.support.generation import greedy_request
from tests.support.patience import patience

STREAMS, PROMPT_TOKENS = 16, 62
# A stream lasts some seconds: with the model, and with executors that compute tokens without a model.
OUTPUT_TOKENS, STUB_OUTPUT_TOKENS = 120, 400
# An outage begins once every stream has this many tokens.
FIRST_TOKENS = 4
# When new requests come after the beginning of an outage, and how long their first token may take with a free engine.
COME_SECONDS = (0.1, 2.0)
WAIT_SECONDS = 2.0  # subject: the table says which requests waited longer
ROUND_SECONDS = patience(90)
SETTLE_SECONDS = patience(60)
ROUTER = "router-0"


@dataclass
class Stream:
    """One caller's stream. error: why the stream broke off; empty if it ended."""

    begun: float = field(default_factory=time.monotonic)
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    finished: bool = False
    error: str = ""

    @property
    def gap(self) -> float:
        """The longest time between two tokens, in seconds; 0 for fewer than two tokens."""
        return longest_gap(self.times)

    @property
    def waited(self) -> str:
        """Seconds until the first token, or why there was no token."""
        return f"{self.times[0] - self.begun:.1f}" if self.times else self.error or "none"


@dataclass(frozen=True)
class Outage:
    """act: performs the outage until it is over. loses: streams may be lost, as the process that holds them dies.

    delays: requests may wait, as no engine can be reached during the outage.
    """

    name: str
    act: Callable[[Stage], Awaitable[object]]
    loses: bool = False
    delays: bool = False


@dataclass
class Row:
    """The cost of an outage. waited: waits of requests during the outage, by the time of their arrival."""

    outage: str
    lost: int = 0
    wrong: int = 0
    longest_gap_s: float = 0.0
    median_gap_s: float = 0.0
    waited: dict[str, str] = field(default_factory=dict)
    next_round_right: int = 0
    next_round_cached_tokens: int = 0
    violations: int = 0
    faults: list[str] = field(default_factory=list)

    def cells(self) -> dict[str, str]:
        """The row's values by the table's heads."""
        return {
            "outage": self.outage,
            "streams\nlost": f"{self.lost}/{STREAMS}",
            "wrong": str(self.wrong),
            "longest gap s\n(median)": f"{self.longest_gap_s:.1f} ({self.median_gap_s:.1f})",
            **{f"first token s\nof one at +{came} s": waited for came, waited in self.waited.items()},
            "next\nround": f"{self.next_round_right}/{STREAMS}",
            "of it cached\ntokens": str(self.next_round_cached_tokens),
            "viola-\ntions": str(self.violations),
        }


def outages() -> list[Outage]:
    """All outages."""
    return [
        _kill("executor-0"),
        _kill("executor-1", away=25.0),
        _kill("scheduler-0"),
        _kill("cachemgr-1"),
        _kill("cachemgr-1", away=20.0),
        _kill(REDIS),
        _kill(ROUTER, loses=True, delays=True),
        *(
            _pause(name, seconds)
            for name in ("executor-1", "scheduler-0", "cachemgr-1")
            for seconds in (4.9, 12.0, 45.0)
        ),
        *(_pause(ROUTER, seconds, delays=True) for seconds in (4.9, 12.0)),
        _pause(REDIS, 12.0),
    ]


def _kill(name: str, away: float = RESTART_SECONDS, *, loses: bool = False, delays: bool = False) -> Outage:
    title = f"kill {name}" + (f", {away:g} s away" if away > RESTART_SECONDS else "")
    return Outage(title, lambda stage: stage.restart(name, away=away), loses=loses, delays=delays)


def _pause(name: str, seconds: float, *, delays: bool = False) -> Outage:
    return Outage(f"pause {name} {seconds:g} s", lambda stage: stage.pause(name, seconds), delays=delays)


class Table:
    """Runs outages on one fleet and keeps a row of each."""

    def __init__(self, stage: Stage, output_tokens: int, tell: Callable[[str], None]) -> None:
        self._stage = stage
        self._output_tokens = output_tokens
        self._tell = tell
        self._reference: list[list[int]] = []
        # Every request during an outage has a unique prompt.
        self._prompts = itertools.count(STREAMS)
        self.rows: list[Row] = []

    async def learn(self) -> None:
        """Computes the reference outputs in calm, and checks that they can be reproduced."""
        first, again = await self._round(), await self._round()
        self._reference = [stream.token_ids for stream in first]
        if not all(stream.finished for stream in first) or [stream.token_ids for stream in again] != self._reference:
            raise RuntimeError(f"calm rounds differ or fail: {sorted({one.error for one in (*first, *again)})}")

    async def run(self, outage: Outage) -> None:
        """Performs one outage under load and measures it."""
        row = Row(outage.name)
        self._tell(outage.name)
        async with self._stub() as stub:
            streams = [Stream() for _ in range(STREAMS)]
            tasks = [
                asyncio.create_task(_follow(stub, self._request(number), stream))
                for number, stream in enumerate(streams)
            ]
            await _until_begun(streams)
            late = [asyncio.create_task(self._come(seconds)) for seconds in COME_SECONDS]
            try:
                await outage.act(self._stage)
            except TimeoutError:
                row.faults.append("a process did not serve again in time")
            await asyncio.wait([*tasks, *late], timeout=ROUND_SECONDS)
            hanging = [task for task in (*tasks, *late) if not task.done()]
            for task in hanging:
                task.cancel()
            if hanging:
                row.faults.append(f"{len(hanging)} requests hang")
        self._judge_streams(outage, row, streams)
        self._judge_late(outage, row, [task.result() for task in late if task not in hanging])
        await self._judge_rest(row)
        self.rows.append(row)
        self._tell("  ".join(row.cells().values()) + "".join(f"\n  FAULT {fault}" for fault in row.faults))

    def _judge_streams(self, outage: Outage, row: Row, streams: Sequence[Stream]) -> None:
        for stream, whole in zip(streams, self._reference, strict=True):
            row.lost += not stream.finished
            row.wrong += stream.token_ids != (whole if stream.finished else whole[: len(stream.token_ids)])
        row.longest_gap_s = max(stream.gap for stream in streams)
        row.median_gap_s = statistics.median(stream.gap for stream in streams)
        if row.wrong:
            row.faults.append(f"{row.wrong} streams have wrong tokens")
        if row.lost and not outage.loses:
            row.faults.append(f"{row.lost} streams are lost: {next(one.error for one in streams if not one.finished)}")

    def _judge_late(self, outage: Outage, row: Row, late: Iterable[Stream]) -> None:
        for came, stream in zip(COME_SECONDS, late, strict=False):
            row.waited[f"{came:g}"] = stream.waited
            slow = not stream.times or stream.times[0] - stream.begun > WAIT_SECONDS
            if slow and not outage.delays:
                row.faults.append(f"a request at +{came:g} s waited for its first token: {stream.waited} s")

    async def _judge_rest(self, row: Row) -> None:
        for name in self._stage.names:
            await self._stage.until_serving(name)
        async with asyncio.timeout(SETTLE_SECONDS):
            while not (await self._come(0)).finished:
                await asyncio.sleep(0.2)
        for shard in range(SHARDS):
            async with Manager(admin_of(self._stage.stack, shard)) as manager:
                checked = await manager.admin.CheckPool(kv.CheckPoolRequest(), timeout=CHECK_SECONDS)
                row.violations += len(checked.violations)
        if row.violations:
            row.faults.append(f"CheckPool: {row.violations} violations")
        after = await self._round()
        row.next_round_right = sum(one.token_ids == whole for one, whole in zip(after, self._reference, strict=True))
        row.next_round_cached_tokens = sum(stream.cached_tokens for stream in after)
        if row.next_round_right < STREAMS:
            row.faults.append(f"{STREAMS - row.next_round_right} streams are wrong or lost in the next round")

    async def _come(self, seconds: float) -> Stream:
        """A request of a few tokens that arrives after these seconds."""
        await asyncio.sleep(seconds)
        async with self._stub() as stub:
            return await _follow(stub, greedy_request(_prompt(next(self._prompts)), 2), Stream())

    async def _round(self) -> list[Stream]:
        async with self._stub() as stub:
            return await asyncio.gather(*[_follow(stub, self._request(n), Stream()) for n in range(STREAMS)])

    def _request(self, number: int) -> pb.StreamGenerateRequest:
        return greedy_request(_prompt(number), self._output_tokens)

    @contextlib.asynccontextmanager
    async def _stub(self) -> AsyncIterator[generation_rpc.GenerationServiceAsyncStub]:
        address = str(self._stage.stack.own[ROUTER]["router_address"])
        async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            yield generation_rpc.GenerationServiceStub(channel)


def _prompt(number: int) -> list[int]:
    """A prompt; its first half is common to all prompts."""
    common = [7 + place * 17 % 251 for place in range(PROMPT_TOKENS // 2)]
    return common + [7 + (number * 131 + place * 29) % 251 for place in range(PROMPT_TOKENS - len(common))]


async def _follow(
    stub: generation_rpc.GenerationServiceAsyncStub, request: pb.StreamGenerateRequest, stream: Stream
) -> Stream:
    """Reads a stream to its end; an error is kept as its code."""
    try:
        async for message in stub.StreamGenerate(request, timeout=ROUND_SECONDS):
            stream.times += [time.monotonic()] * len(message.token_ids)
            stream.token_ids += message.token_ids
            if message.finish_reason:
                stream.finished = message.finish_reason == pb.FINISH_REASON_LENGTH
                stream.cached_tokens = message.usage.cached_tokens
    except grpc.aio.AioRpcError as error:
        stream.error = f"{error.code().name}: {(error.details() or '')[:100]}"
    return stream


async def _until_begun(streams: Iterable[Stream]) -> None:
    async with asyncio.timeout(ROUND_SECONDS):
        while any(len(stream.times) < FIRST_TOKENS and not stream.error for stream in streams):
            await asyncio.sleep(0.02)


async def measure(chosen: Sequence[Outage], tell: Callable[[str], None], *, real: bool, seed: int = 1) -> list[Row]:
    """Runs the outages one after the other on one fleet. real: with executors that run the default model."""
    stage = fleet(seed, real=real, tell=tell, executor_max_tokens=16_384)
    async with stage:
        found = Table(stage, OUTPUT_TOKENS if real else STUB_OUTPUT_TOKENS, tell)
        await found.learn()
        for outage in chosen:
            await found.run(outage)
        for failure in stage.failures:
            tell(f"FAULT {failure}")
            found.rows[-1].faults.append(failure)
    return found.rows
