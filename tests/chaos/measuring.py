"""What a death costs: blocks that come back, and how long nobody is admitted. And what is in the cache."""

from __future__ import annotations

import asyncio
import contextlib
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
from tests.chaos.stage import Absence, Stage
from tests.support.prompts import prose

CALL_SECONDS = 5.0
LOOK_SECONDS = 0.02
# Until what was lost has come back, or never will.
RETURN_SECONDS = 60.0
# A prompt that another one's blocks are copied for may be answered before the copy is confirmed: then it is not cached.
STEADY_ROUNDS = 3
REGISTERED = "registered with the cache manager"

Place = tuple[str, int, int]


@dataclass(frozen=True)
class Death:
    """One kill of a process. Blocks: what could be found before, and what could again when it was back.

    seconds_to_admission: from its start until a request had blocks. None is what was not seen.
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
        """Of the blocks, those that came back; None where there were none."""
        before = self.lower_blocks if lower else self.device_blocks
        after = self.restored_lower_blocks if lower else self.restored_blocks
        return None if not before or after is None else after / before


class Manager:
    """Asks the cache manager what operators ask. Use it in an async with statement."""

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

    async def index(self) -> dict[Place, tuple[object, ...]]:
        """What can be found, by pool, tier and slot."""
        found: dict[Place, tuple[object, ...]] = {}
        for pool in await self.pools():
            token = ""
            while True:
                request = kv.ListBlocksRequest(pool_id=pool.pool_id, page_size=1000, page_token=token)
                page = await self.admin.ListBlocks(request, timeout=CALL_SECONDS)
                for block in page.blocks:
                    if block.key:
                        owners = block.salt, block.tenant_id, block.session_id
                        found[block.pool_id, block.tier, block.slot] = (
                            block.key,
                            block.depth,
                            block.num_tokens,
                            *owners,
                        )
                token = page.next_page_token
                if not token:
                    break
        return found

    async def sequences(self) -> set[str]:
        """Ids of the live ones."""
        answer = await self.admin.ListSequences(kv.ListSequencesRequest(page_size=1000), timeout=CALL_SECONDS)
        return {sequence.sequence_id for sequence in answer.sequences}


def _lower_blocks(index: Iterable[Place]) -> int:
    return sum(tier != kv.TIER_DEVICE for _, tier, _ in index)


async def kill(stage: Stage, name: str) -> Death:
    """Kills a process, starts it again and sees what comes back; it waits for that."""
    if name not in ("cachemgr", "executor"):
        absence = await stage.restart(name)
        return Death(name, absence.begin, absence.end - absence.begin)
    async with Manager(stage.stack.admin) as manager:
        before, sequences = None, set[str]()
        # A manager that is paused says nothing.
        with contextlib.suppress(grpc.aio.AioRpcError):
            before, sequences = await manager.index(), await manager.sequences()
        lines = Lines(stage)
        absence = await stage.restart(name)
        registered = await lines.registered()
        if name == "cachemgr":
            return await _manager_death(manager, absence, before, sequences, registered)
        lower = None if before is None else _lower_blocks(before)
        return Death(
            name,
            absence.begin,
            absence.end - absence.begin,
            lower_blocks=lower,
            restored_lower_blocks=registered.get("restored_lower_blocks"),
        )


async def _manager_death(
    manager: Manager,
    absence: Absence,
    before: dict[Place, tuple[object, ...]] | None,
    sequences: set[str],
    registered: dict[str, Any],
) -> Death:
    admitted = await _new_sequence(manager, sequences)
    lower = None if before is None else _lower_blocks(before)
    return Death(
        "cachemgr",
        absence.begin,
        absence.end - absence.begin,
        device_blocks=None if before is None or lower is None else len(before) - lower,
        restored_blocks=registered.get("restored_blocks"),
        lower_blocks=lower,
        restored_lower_blocks=registered.get("restored_lower_blocks"),
        seconds_to_admission=None if admitted is None else admitted - absence.started,
    )


async def _new_sequence(manager: Manager, known: set[str]) -> float | None:
    """When there was a sequence that was not known before."""
    deadline = time.monotonic() + RETURN_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(grpc.aio.AioRpcError):
            if await manager.sequences() - known:
                return time.monotonic()
        await asyncio.sleep(LOOK_SECONDS)
    return None


class Lines:
    """What the executor's log says from now on."""

    def __init__(self, stage: Stage) -> None:
        self._path = stage.stack.log_path("executor")
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


class PrefixSet:
    """Prompts that are sent again and again, to see what the cache still knows of them."""

    def __init__(self, count: int = 6, characters: int = 1200) -> None:
        self._requests = [
            pb.StreamGenerateRequest(text=f"Set {index}: {prose(index)[index * 613 :][:characters]}", max_tokens=1)
            for index in range(count)
        ]

    async def hit_rate(self, address: str) -> float:
        """Share of the prompts' tokens that came from the cache, of what can: all but the last token of each."""
        usable = cached = 0
        async with grpc.aio.insecure_channel(address) as channel:
            stub: generation_rpc.GenerationServiceAsyncStub = generation_rpc.GenerationServiceStub(channel)
            for request in self._requests:
                async for message in stub.StreamGenerate(request, timeout=RETURN_SECONDS):
                    usable += max(0, message.usage.prompt_tokens - 1)
                    cached += message.usage.cached_tokens
        return cached / usable

    async def steady_hit_rate(self, address: str) -> float:
        """What it is once all have been asked before."""
        return [await self.hit_rate(address) for _ in range(STEADY_ROUNDS)][-1]


async def first_token_seconds(address: str, prompts: Iterable[list[int]]) -> float:
    """Median time to the first token, one prompt after the other."""
    times = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub: generation_rpc.GenerationServiceAsyncStub = generation_rpc.GenerationServiceStub(channel)
        for prompt in prompts:
            begin = time.monotonic()
            request = pb.StreamGenerateRequest(token_ids=pb.TokenIds(token_ids=prompt), max_tokens=1, ignore_eos=True)
            await stub.StreamGenerate(request, timeout=RETURN_SECONDS).read()
            times.append(time.monotonic() - begin)
    return statistics.median(times)
