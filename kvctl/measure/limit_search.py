"""The limits of a running stack: the longest output, or the most prompts at once, that cache and time allow.

The rules are those of OpenVINO GenAI's limit checker. Rounds read nothing from the cache and store nothing in it, so
that no round helps the next round; cached blocks of others are evicted.
"""

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import grpc

from kvctl.measure.metrics import samples
from kvctl.remote import all_pages
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import RemoteError, from_rpc_error
from protos.rpc.security import Security

LOOK_SECONDS = 0.05
IDLE_SECONDS = 30.0
# More than the share of a pool that admissions leave free, which is 0.01 by default (the free watermark).
FREE_SHARE = 0.02


class Ending(StrEnum):
    """How a round ended."""

    DONE = "done"
    TIMEOUT = "time-out"
    EXHAUSTED = "cache exhausted"
    # None of these endings means that the cache was too small.
    MODEL = "longer than the model takes"
    BOUND = "as many requests as the scheduler runs at once"
    TENANT = "as many requests as the caller's tenant may have"


class LimitsError(Exception):
    """The limit cannot be measured; the message says why."""


@dataclass
class Round:
    """One round. size: requested tokens, or prompts. cache: shares of the pool in use, one per look at the pool."""

    size: int
    seconds: float = 0.0
    output_tokens: int = 0
    ending: Ending = Ending.DONE
    cache: list[float] = field(default_factory=list)
    # The largest resident bytes of each process.
    resident: dict[str, int] = field(default_factory=dict)

    @property
    def cache_mean(self) -> float:
        """The mean share of the pool in use."""
        return statistics.fmean(self.cache) if self.cache else 0.0

    @property
    def cache_most(self) -> float:
        """The largest share of the pool in use."""
        return max(self.cache, default=0.0)


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
    """Runs rounds on a stack.

    metrics: host:port of each local process whose memory is measured. timeout: seconds to wait for each call.
    """

    def __init__(
        self,
        scheduler: grpc.aio.Channel,
        admin: grpc.aio.Channel,
        load: Load,
        metrics: Mapping[str, str],
        security: Security,
        timeout: float,
    ) -> None:
        self._stub: rpc.GenerationServiceAsyncStub = rpc.GenerationServiceStub(scheduler)
        self._admin: kvcache_pb2_grpc.CacheAdminServiceAsyncStub = kvcache_pb2_grpc.CacheAdminServiceStub(admin)
        self._load = load
        self._metrics = metrics
        self._security = security
        self._timeout = timeout
        self._random = random.Random(0)  # noqa: S311 - the same prompts each time

    async def output_of(self, tokens: int) -> Round:
        """One prompt with an output of this length."""
        return await self._round(tokens, [await self._request(tokens)])

    async def prompts_at_once(self, count: int, output_tokens: int) -> Round:
        """`count` prompts with an output each."""
        return await self._round(count, [await self._request(output_tokens) for _ in range(count)])

    async def _request(self, output_tokens: int) -> pb.StreamGenerateRequest:
        model = await self._stub.GetModel(pb.GetModelRequest(), timeout=self._timeout)
        ids = [self._random.randrange(model.vocab_size) for _ in range(self._load.prompt_tokens)]
        return pb.StreamGenerateRequest(
            token_ids=pb.TokenIds(token_ids=ids),
            max_tokens=output_tokens,
            ignore_eos=True,
            cache=pb.CacheOptions(no_read=True, no_store=True),
            eviction_policy=self._load.policy,
        )

    async def _round(self, size: int, requests: Sequence[pb.StreamGenerateRequest]) -> Round:
        """Runs a round, which ends early as soon as its ending is known."""
        preemptions = await self._wait_until_idle()
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
            loads = await self._loads()
            if loads.preemptions > preemptions:
                made.ending = Ending.EXHAUSTED
            elif made.seconds > self._load.round_seconds:
                made.ending = Ending.TIMEOUT
        return made

    async def _wait_until_idle(self) -> int:
        """Waits until nothing runs; returns the preemptions so far. Raises LimitsError when others use the stack."""
        await self._pools()
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            loads = await self._loads()
            if not loads.running_requests and not loads.waiting_requests:
                return loads.preemptions
            if time.monotonic() > deadline:
                raise LimitsError(
                    "the stack is serving other requests: limits are those of a stack without other requests"
                )
            await asyncio.sleep(LOOK_SECONDS)

    async def _loads(self) -> pb.GetLoadsResponse:
        return await self._stub.GetLoads(pb.GetLoadsRequest(), timeout=self._timeout)

    async def _pools(self) -> Sequence[kvcache_pb2.Pool]:
        listed = await all_pages(self._admin.ListPools, kvcache_pb2.ListPoolsRequest(), timeout=self._timeout)
        return listed.pools

    async def _watch(self, made: Round, preemptions: int) -> None:
        """Looks at cache, memory and loads; returns when a request has to wait or was preempted."""
        waits = 0
        while True:
            pools = await self._pools()
            made.cache.append(max(pool.used_blocks / pool.total_blocks for pool in pools))
            for name, held in (await asyncio.to_thread(self._resident)).items():
                made.resident[name] = max(held, made.resident.get(name, 0))
            loads = await self._loads()
            # Every request waits for a moment, until the cache manager has answered.
            waits = waits + 1 if loads.waiting_requests else 0
            if loads.preemptions > preemptions:
                made.ending = Ending.EXHAUSTED
                return
            if waits > 2:
                made.ending = self._why_requests_wait(pools)
                return
            await asyncio.sleep(LOOK_SECONDS)

    def _why_requests_wait(self, pools: Sequence[kvcache_pb2.Pool]) -> Ending:
        """The ending of a round whose requests wait: whether another prompt would find too few blocks in any pool."""
        misses_blocks = any(
            pool.free_blocks < -(-self._load.prompt_tokens // pool.block_size) + 1 + FREE_SHARE * pool.total_blocks
            for pool in pools
        )
        return Ending.EXHAUSTED if misses_blocks else Ending.BOUND

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
        """The ending of a round by an error; None if the error says nothing about limits. Raises LimitsError."""
        if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Ending.TIMEOUT
        if "SEQUENCE_TOO_LONG" in (error.reason, error.metadata.get("cause")):
            return Ending.EXHAUSTED
        if error.reason == "QUEUE_FULL":
            return self._why_requests_wait(await self._pools())
        if error.reason == "TENANT_BUSY":
            return Ending.TENANT
        if error.code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            raise LimitsError(f"the caller's token: {error.message}")
        if "max_tokens" in error.fields:
            most = min(pool.total_blocks * pool.block_size for pool in await self._pools())
            bounded = self._load.policy is None and len(request.token_ids.token_ids) + request.max_tokens > most
            return Ending.EXHAUSTED if bounded else Ending.MODEL
        return None

    def _resident(self) -> dict[str, int]:
        """Resident bytes of each process. Raises LimitsError if a process does not report them."""
        return {name: resident(address, self._security, self._timeout) for name, address in self._metrics.items()}


def resident(address: str, security: Security, timeout: float) -> int:
    """Resident bytes of the process with these metrics. Raises LimitsError if the process does not report them."""
    try:
        found = samples(address, timeout, security)
    except (OSError, ValueError) as error:
        raise LimitsError(f"no metrics at {address}: {error}") from error
    if "process_resident_memory_bytes" not in found:
        raise LimitsError(f"the metrics at {address} have no process_resident_memory_bytes")
    return int(found["process_resident_memory_bytes"])
