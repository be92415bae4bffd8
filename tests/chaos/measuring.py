"""The cost of a death, in blocks that are not restored and in time without admissions; contents of the cache."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as generation_rpc
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from protos.kvcommon.v1 import kvcommon_pb2 as kvcommon
from tests.chaos.stage import RESTART_SECONDS, Stage
from tests.support.generation import generate, greedy_request
from tests.support.patience import patience
from tests.support.prompts import prose

CALL_SECONDS = patience(5)
# A kill waits at most this time for the blocks of a paused manager; after this time they are unknown.
LOOKING_SECONDS = patience(1.25)
LOOK_SECONDS = 0.02
# After this time, blocks that are not restored never will be.
RETURN_SECONDS = patience(60)
# Number of prompts that are repeated to see how much of them is cached, and the characters of each.
REPEATED, CHARACTERS = 6, 1200
# A prompt that copies blocks of another prompt is not cached if it is answered before the copy is confirmed.
STEADY_ROUNDS = 3
# Of the repeated prompts for this time: pools are full of the load's blocks, some of which keep a high priority.
HIGHEST_PRIORITY, PRIORITY_SECONDS = 100, 60
REGISTERED = "registered with the cache manager"

# Pool, tier and slot.
BlockSlot = tuple[str, int, int]


def longest_gap(times: Iterable[float]) -> float:
    """The longest time between two pieces of a stream with these times; 0 for fewer than two pieces."""
    return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


@dataclass(frozen=True)
class Death:
    """A kill of a process, at a time of the monotonic clock. Blocks: in the index before the kill, and restored blocks.

    seconds_to_admission: from its start until a request had blocks. None is an unknown value.
    """

    name: str
    at: float
    back_seconds: float
    device_blocks: int | None = None
    restored_blocks: int | None = None
    lower_blocks: int | None = None
    restored_lower_blocks: int | None = None
    seconds_to_admission: float | None = None

    def share(self, *, lower: bool = False) -> float | None:
        """The share of the blocks that was restored; None if there were no blocks."""
        before = self.lower_blocks if lower else self.device_blocks
        after = self.restored_lower_blocks if lower else self.restored_blocks
        return None if not before or after is None else after / before


class Manager:
    """The cache manager from the operators' view. Use it in an async with statement."""

    def __init__(self, address: str) -> None:
        options = [("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 100)]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self.admin: kvcache_rpc.CacheAdminServiceAsyncStub = kvcache_rpc.CacheAdminServiceStub(self._channel)

    async def __aenter__(self) -> Manager:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def pools(self) -> list[kv.Pool]:
        """All pools."""
        return list((await self.admin.ListPools(kv.ListPoolsRequest(), timeout=CALL_SECONDS)).pools)

    async def index(self) -> dict[BlockSlot, tuple[object, ...]]:
        """Every findable block."""
        found: dict[BlockSlot, tuple[object, ...]] = {}
        for pool in await self.pools():
            request = kv.ListBlocksRequest(pool_id=pool.pool_id, page_size=1000)
            while True:
                page = await self.admin.ListBlocks(request, timeout=CALL_SECONDS)
                for block in page.blocks:
                    if block.key:
                        owners = block.salt, block.tenant_id, block.session_id
                        record = block.key, block.depth, block.num_tokens, *owners
                        found[block.pool_id, block.tier, block.slot] = record
                request.page_token = page.next_page_token
                if not request.page_token:
                    break
        return found

    async def sequences(self) -> set[str]:
        """Ids of the live sequences."""
        answer = await self.admin.ListSequences(kv.ListSequencesRequest(page_size=1000), timeout=CALL_SECONDS)
        return {sequence.sequence_id for sequence in answer.sequences}

    async def new_sequence(self, known: set[str]) -> float | None:
        """The time at which an unknown sequence was live; None if there was none in time."""
        deadline = time.monotonic() + RETURN_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if await self.sequences() - known:
                    return time.monotonic()
            await asyncio.sleep(LOOK_SECONDS)
        return None


async def kill(stage: Stage, name: str, away: float = 0.0) -> Death:
    """Kills a process, starts it again after `away` seconds or a supervisor's pause, and waits for restored blocks."""
    away = max(away, RESTART_SECONDS)
    if name not in ("cachemgr", "executor"):
        absence = await stage.restart(name, away=away)
        return Death(name, absence.begin, absence.end - absence.begin)
    async with Manager(stage.stack.admin) as manager:
        device = lower = admitted = None
        sequences: set[str] = set()
        # A paused manager does not answer, and is killed during its pause.
        with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(LOOKING_SECONDS):
                tiers = [tier for _, tier, _ in await manager.index()]
                device = tiers.count(kv.TIER_DEVICE)
                lower = len(tiers) - device
                sequences = await manager.sequences()
        log = ExecutorLog(stage)
        absence = await stage.restart(name, away=away)
        registered = await log.registered()
        if name == "cachemgr":
            admitted = await manager.new_sequence(sequences)
    return Death(
        name,
        absence.begin,
        absence.end - absence.begin,
        device_blocks=device if name == "cachemgr" else None,
        restored_blocks=registered.get("restored_blocks"),
        lower_blocks=lower,
        restored_lower_blocks=registered.get("restored_lower_blocks"),
        seconds_to_admission=None if admitted is None else admitted - absence.started,
    )


class ExecutorLog:
    """An executor's log from now on."""

    def __init__(self, stage: Stage, executor: str = "executor") -> None:
        self._path = stage.stack.log_path(executor)
        self._begin = self._path.stat().st_size

    async def registered(self) -> dict[str, Any]:
        """The next registration; empty when there is none in time."""
        deadline = time.monotonic() + RETURN_SECONDS
        while time.monotonic() < deadline:
            with self._path.open("rb") as log:
                log.seek(self._begin)
                for line in log:
                    if REGISTERED.encode() in line:
                        found: dict[str, Any] = json.loads(line)
                        return found
            await asyncio.sleep(LOOK_SECONDS)
        return {}


async def steady_hit_rate(address: str) -> tuple[float, list[str]]:
    """How much of repeated prompts is cached in the end.

    Returns the cached tokens as a share of the tokens that can be cached, which are all but the last of each prompt,
    and the prompts that were not cached completely, with the reasons.
    """
    requests = []
    for index in range(REPEATED):
        text = f"Set {index}: {prose(index)[index * 613 :][:CHARACTERS]}"
        requests.append(pb.StreamGenerateRequest(text=text, max_tokens=1))
        requests[-1].cache.explain_miss = True
        retained = requests[-1].cache.retention_ranges.add(start=0, retention_priority=HIGHEST_PRIORITY)
        retained.retention_duration.FromSeconds(PRIORITY_SECONDS)
    usages: list[pb.Usage] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub: generation_rpc.GenerationServiceAsyncStub = generation_rpc.GenerationServiceStub(channel)
        for _ in range(STEADY_ROUNDS):
            usages = [(await generate(stub, request, RETURN_SECONDS)).usage for request in requests]
    usable, cached = ([usage.prompt_tokens - 1 for usage in usages], [usage.cached_tokens for usage in usages])
    missed = [
        f"{found} of {most} tokens of prompt {index} ({kvcommon.MissCause.Name(usage.prefix_miss.cause)})"
        for index, (found, most, usage) in enumerate(zip(cached, usable, usages, strict=True))
        if found < most
    ]
    return sum(cached) / sum(usable), missed


async def ttft_seconds(address: str, prompts: Iterable[list[int]]) -> float:
    """Median time to first token, one prompt after the other."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: generation_rpc.GenerationServiceAsyncStub = generation_rpc.GenerationServiceStub(channel)
        outputs = [await generate(stub, greedy_request(prompt, 1), RETURN_SECONDS) for prompt in prompts]
    return statistics.median(output.token_times[0] - output.started for output in outputs)
