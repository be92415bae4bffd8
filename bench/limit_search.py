"""Limits of a stack: the longest output, or the most prompts at once, that its cache and time allow.

| mode | rounds |
| --- | --- |
| length | a prompt with an output of 1, 2, 4, ... tokens, until a round is not done |
| prompts | 1, 2, 4, ... prompts at once until a round is not done, then numbers in between |

A round is not done when it takes too long, when a request waits for blocks or is preempted, or when a request is
refused as too long. The rules are those of OpenVINO GenAI's limit checker. Rounds read nothing from the cache and store
nothing in it, so that no round helps the next round. `--set` changes the stack: executor_max_tokens=4096.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import grpc
from google.protobuf import json_format

from bench.result import Result, add_json_argument
from bench.tables import table
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import RemoteError, from_rpc_error
from tests.stack import Stack
from tests.support.generation import greedy_request
from tests.support.idle import until_idle

LOOK_SECONDS = 0.05
CALL_SECONDS = 30.0
# More than the share of a pool that admissions leave free, which is 0.01 by default (the free watermark).
FREE_SHARE = 0.02
LENGTH, PROMPTS = "length", "prompts"


class Ending(StrEnum):
    """How a round ended."""

    DONE = "done"
    TIMEOUT = "time-out"
    EXHAUSTED = "cache exhausted"
    # Neither ending means that the cache was too small.
    MODEL = "longer than the model takes"
    BOUND = "as many requests as the scheduler runs at once"


@dataclass
class Round:
    """One round. size: requested tokens, or prompts. cache: shares of the pool in use, one per look at the pool."""

    size: int
    seconds: float = 0.0
    output_tokens: int = 0
    ending: Ending = Ending.DONE
    cache: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """The figures that are shown."""
        return {
            "size": self.size,
            "seconds": self.seconds,
            "output_tokens": self.output_tokens,
            "ending": self.ending.value,
            "cache_mean": statistics.fmean(self.cache) if self.cache else 0.0,
            "cache_most": max(self.cache, default=0.0),
        }


Runs = Callable[[int], Awaitable[Round]]


async def double(run: Runs) -> list[Round]:
    """Rounds of 1, 2, 4, ... until a round is not done."""
    rounds = [await run(1)]
    while rounds[-1].ending is Ending.DONE:
        rounds.append(await run(2 * rounds[-1].size))
    return rounds


async def double_and_bisect(run: Runs) -> list[Round]:
    """Doubles, and then tries sizes in between until the largest round that is done is found."""
    rounds = await double(run)
    most, least = best(rounds), rounds[-1].size
    while least - most > 1:
        rounds.append(await run((most + least) // 2))
        if rounds[-1].ending is Ending.DONE:
            most = rounds[-1].size
        else:
            least = rounds[-1].size
    return rounds


def best(rounds: Sequence[Round]) -> int:
    """Size of the largest round that was done, or 0."""
    return max((item.size for item in rounds if item.ending is Ending.DONE), default=0)


@dataclass(frozen=True)
class Load:
    """The load of a round, the same for each request. Lengths in tokens, time in seconds."""

    prompt_tokens: int
    round_seconds: float
    policy: common.EvictionPolicy | None = None


class Checker:
    """Runs rounds on a stack. vocab_size: of the served model."""

    def __init__(
        self, stack: Stack, stub: rpc.GenerationServiceAsyncStub, admin: grpc.aio.Channel, load: Load, vocab_size: int
    ) -> None:
        self._stack = stack
        self._stub = stub
        self._admin: kvcache_pb2_grpc.CacheAdminServiceAsyncStub = kvcache_pb2_grpc.CacheAdminServiceStub(admin)
        self._load = load
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    async def run(self, size: int, prompts: int, output_tokens: int) -> Round:
        """Runs a round, which ends early as soon as its ending is known."""
        requests = [self._request(output_tokens) for _ in range(prompts)]
        await until_idle(self._stack.admin)
        preemptions = (await self._loads()).preemptions
        made, started = Round(size), time.monotonic()
        watching = asyncio.create_task(self._watch(made, preemptions))
        generating = asyncio.gather(*[self._generate(made, request) for request in requests])
        try:
            done, _ = await asyncio.wait((watching, generating), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            made.seconds = time.monotonic() - started
        finally:
            for task in (watching, generating):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
        if made.ending is Ending.DONE:
            if (await self._loads()).preemptions > preemptions:
                made.ending = Ending.EXHAUSTED
            elif made.seconds > self._load.round_seconds:
                made.ending = Ending.TIMEOUT
        return made

    def _request(self, output_tokens: int) -> pb.StreamGenerateRequest:
        prompt = [self._random.randrange(self._vocab_size) for _ in range(self._load.prompt_tokens)]
        return greedy_request(prompt, output_tokens, reuse=False, eviction_policy=self._load.policy)

    async def _loads(self) -> pb.GetLoadsResponse:
        return await self._stub.GetLoads(pb.GetLoadsRequest(), timeout=CALL_SECONDS)

    async def _pools(self) -> Sequence[kvcache_pb2.Pool]:
        """The pools: one for each group of layers."""
        return (await self._admin.ListPools(kvcache_pb2.ListPoolsRequest(), timeout=CALL_SECONDS)).pools

    async def _watch(self, made: Round, preemptions: int) -> None:
        """Looks at the cache and at loads; returns when a request has to wait or was preempted."""
        waits = 0
        while True:
            pools = await self._pools()
            made.cache.append(max(pool.used_blocks / pool.total_blocks for pool in pools))
            loads = await self._loads()
            # Every request waits for a moment, until the cache manager has answered.
            waits = waits + 1 if loads.waiting_requests else 0
            if loads.preemptions > preemptions:
                made.ending = Ending.EXHAUSTED
                return
            if waits > 2:
                made.ending = why_requests_wait(pools, self._load.prompt_tokens)
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def _generate(self, made: Round, request: pb.StreamGenerateRequest) -> None:
        """Raises RemoteError for an error that says nothing about limits."""
        try:
            async for message in self._stub.StreamGenerate(request, timeout=self._load.round_seconds):
                made.output_tokens += len(message.token_ids)
        except grpc.aio.AioRpcError as caught:
            error = from_rpc_error(caught)
            ending = await self._ending(error, request)
            if ending is None:
                raise error from caught
            # Of several endings the first counts.
            made.ending = ending if made.ending is Ending.DONE else made.ending

    async def _ending(self, error: RemoteError, request: pb.StreamGenerateRequest) -> Ending | None:
        """The ending of a round by an error; None if the error says nothing about limits."""
        if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Ending.TIMEOUT
        if "SEQUENCE_TOO_LONG" in (error.reason, error.metadata.get("cause")):
            return Ending.EXHAUSTED
        if error.reason == "QUEUE_FULL":
            return why_requests_wait(await self._pools(), self._load.prompt_tokens)
        if "max_tokens" in error.fields:
            most = min(pool.total_blocks * pool.block_size for pool in await self._pools())
            tokens = len(request.token_ids.token_ids) + request.max_tokens
            bounded = self._load.policy is None and tokens > most
            return Ending.EXHAUSTED if bounded else Ending.MODEL
        return None


def why_requests_wait(pools: Sequence[kvcache_pb2.Pool], prompt_tokens: int) -> Ending:
    """Returns why the requests of a round wait: the cache is exhausted if a further prompt lacks blocks in any pool."""
    misses_blocks = any(
        pool.free_blocks < -(-prompt_tokens // pool.block_size) + 1 + FREE_SHARE * pool.total_blocks for pool in pools
    )
    return Ending.EXHAUSTED if misses_blocks else Ending.BOUND


async def search(stack: Stack, mode: str, load: Load, output_tokens: int) -> list[Round]:
    """All rounds, in order. output_tokens: of each prompt, for PROMPTS.

    Raises RemoteError for a load that the stack refuses, RpcError and TimeoutError for a stack that does not answer.
    """
    async with (
        grpc.aio.insecure_channel(stack.scheduler) as scheduler,
        grpc.aio.insecure_channel(stack.admin) as admin,
    ):
        stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(scheduler)
        model = await stub.GetModel(pb.GetModelRequest(), timeout=CALL_SECONDS)
        checker = Checker(stack, stub, admin, load, model.vocab_size)

        async def run(size: int) -> Round:
            length = mode == LENGTH
            made = await checker.run(size, 1 if length else size, size if length else output_tokens)
            print(f"{size}: {made.ending} after {made.seconds:.2f} s", file=sys.stderr, flush=True)
            return made

        return await (double(run) if mode == LENGTH else double_and_bisect(run))


def show(mode: str, rounds: Sequence[Round]) -> str:
    """The limit, and a row for each round."""
    most = best(rounds)
    failed = min((item for item in rounds if item.size > most), key=lambda item: item.size)
    limit = {LENGTH: f"longest output: {most} tokens", PROMPTS: f"most prompts at once: {most}"}[mode]
    rows = [
        [
            str(one["size"]),
            f"{one['seconds']:.2f}",
            f"{one['output_tokens'] / one['seconds'] if one['seconds'] else 0.0:.1f}",
            f"{one['cache_mean']:.1%}",
            f"{one['cache_most']:.1%}",
            one["ending"],
        ]
        for one in (item.summary() for item in rounds)
    ]
    head = [mode, "s", "output\ntokens/s", "cache\nmean", "\nmost", ""]
    return f"{limit}; {failed.size}: {failed.ending}\n\n{table(head, rows)}"


def parse(arguments: list[str]) -> tuple[argparse.Namespace, Load]:
    """The command line, and the load that it asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=(LENGTH, PROMPTS), required=True)
    parser.add_argument("--round-seconds", type=float, default=120, help="most seconds of a round (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="tokens of each prompt (%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=128, help="of each prompt, with prompts (%(default)s)")
    policy = """how to evict tokens: {"kind": "EVICTION_KIND_NORM_SUM", "max_cache_tokens": 64}"""
    parser.add_argument("--policy", metavar="JSON", help=policy)
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings: executor_max_tokens=4096")
    add_json_argument(parser)
    given = parser.parse_args(arguments)
    if min(given.round_seconds, given.prompt_tokens, given.output_tokens) <= 0:
        parser.error("--round-seconds, --prompt-tokens and --output-tokens must be more than 0")
    try:
        evict = None if given.policy is None else json_format.Parse(given.policy, common.EvictionPolicy())
        given.settings = dict(pair.split("=", 1) for pair in given.set)
    except json_format.ParseError as error:
        parser.error(f"--policy: {error}")
    except ValueError:
        parser.error("--set takes NAME=VALUE")
    return given, Load(given.prompt_tokens, given.round_seconds, evict)


def _failed(cause: str) -> int:
    print(f"error: {cause}", file=sys.stderr)
    return 1


def main(arguments: list[str]) -> int:
    """Searches and prints the limit; returns 1 for an error that says nothing about limits, 130 after Ctrl-C."""
    given, load = parse(arguments)
    try:
        with Stack(**given.settings) as stack:
            try:
                rounds = asyncio.run(search(stack, given.mode, load, given.output_tokens))
            except RemoteError as error:
                return _failed(error.message)
            except grpc.RpcError as error:
                return _failed(from_rpc_error(error).message)
            except TimeoutError:
                return _failed("the stack does not become idle")
    except KeyboardInterrupt:
        return 130
    print(show(given.mode, rounds))
    figures = {"mode": given.mode, "best": best(rounds), "rounds": [item.summary() for item in rounds]}
    asked = {name: getattr(given, name) for name in ("prompt_tokens", "output_tokens", "round_seconds", "policy")}
    Result("limit_search", figures, asked | given.settings).write(given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
