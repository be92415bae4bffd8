"""Which engine has which block in which tier, as the events of all cache managers tell. Advisory: owners decide."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import grpc
import structlog

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as rpc
from protos.kvcommon.block_keys import read_low_keys, root_key
from protos.kvcommon.tokens import packed_bytes
from protos.rpc.channel import open_channel
from protos.rpc.errors import from_rpc_error
from protos.rpc.security import Security
from scheduler.router.score import Match

# Bits of a mask for each lane: the number of a tier, 0 for none.
_WIDTH, _LANE = 2, 3
# Blocks that are looked at in one turn of the event loop when a lane is cleared: some milliseconds.
SWEPT_AT_A_TIME = 20_000
RETRY_SECONDS = 0.5

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class KnownExecutor:
    """An executor as its cache manager announces it. shard: the address of that one's events."""

    executor_id: str
    epoch: int
    model_fingerprint: bytes
    block_size: int
    shard: str


@dataclass(slots=True)
class Generation:
    """What a cache manager's events have told since one snapshot: its executors, each with the lane of its blocks.

    lanes: by the pool whose blocks count. Of several layer groups that is the one with full attention, which keeps the
    whole prefix, or the first.
    """

    shard: str
    executors: dict[str, KnownExecutor] = field(default_factory=dict)
    lanes: dict[str, int] = field(default_factory=dict)
    pools: dict[str, str] = field(default_factory=dict)


class CacheView:
    """Blocks by the low 64 bits of their keys, with a mask of the lanes that have them.

    A lane is an executor in one generation. The lanes of a generation are read only once it is `shown`, and no more
    once it is dropped: their bits are cleared in slices, and then they are given again.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        # One object for each mask: very many blocks have the same one.
        self._masks: dict[int, int] = {}
        self._shown: dict[str, Generation] = {}
        self._num_lanes = 0
        self._free_lanes: list[int] = []
        # Lanes that are to be cleared.
        self._dropped: set[int] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def executors(self) -> dict[str, KnownExecutor]:
        """All executors of complete views, by name."""
        return {name: one for generation in self._shown.values() for name, one in generation.executors.items()}

    def is_complete(self, executor_id: str) -> bool:
        """Whether the executor's blocks are known."""
        return any(executor_id in generation.executors for generation in self._shown.values())

    def keys(self, executor_id: str, token_ids: array[int], salt: str | None) -> Sequence[int]:
        """Keys of the full blocks of a prompt; none for an executor that is not known."""
        executor = self.executors.get(executor_id)
        if executor is None:
            return ()
        root = root_key(executor.model_fingerprint, salt, None)
        return list(read_low_keys(root, packed_bytes(token_ids), executor.block_size))

    def match(self, executor_ids: Iterable[str], keys: Iterable[int]) -> dict[str, Match]:
        """Blocks at the begin of a prompt that each executor has, by the tier of each; only executors with any."""
        lanes = self._lanes_of(executor_ids)
        counts = {lane: [0, 0, 0, 0] for lane in lanes.values()}
        going = set(counts)
        last, run = -1, 0
        get = self._blocks.get
        for key in keys:
            mask = get(key, 0)
            # There is one object for each mask.
            if mask is last:
                run += 1
                continue
            _count(counts, going, last, run)
            last, run = mask, 1
            going = {lane for lane in going if mask >> lane & _LANE}
            if not going:
                break
        _count(counts, going, last, run)
        return {name: Match(*counts[lane][1:]) for name, lane in lanes.items() if counts[lane][1:] != [0, 0, 0]}

    def _lanes_of(self, executor_ids: Iterable[str]) -> dict[str, int]:
        wanted = set(executor_ids)
        return {
            generation.pools[pool_id]: lane
            for generation in self._shown.values()
            for pool_id, lane in generation.lanes.items()
            if generation.pools[pool_id] in wanted
        }

    def show(self, generation: Generation) -> None:
        """A generation is complete, and takes the place of the one before of its cache manager."""
        before = self._shown.get(generation.shard)
        self._shown[generation.shard] = generation
        if before is not None and before is not generation:
            self.drop(before)

    def drop(self, generation: Generation) -> None:
        """A generation counts no more."""
        if self._shown.get(generation.shard) is generation:
            del self._shown[generation.shard]
        self._dropped.update(generation.lanes.values())
        generation.lanes.clear()

    def apply(self, generation: Generation, changes: Iterable[pb.CacheChange]) -> None:
        """Takes in what a cache manager has sent."""
        for change in changes:
            match change.WhichOneof("change"):
                case "blocks":
                    lane = generation.lanes.get(change.blocks.pool_id)
                    if lane is not None:
                        self._set(lane, change.blocks.tier, change.blocks.keys)
                case "registered":
                    self._register(generation, change.registered)
                case "lost":
                    self._lose(generation, change.lost.executor_id)

    def _register(self, generation: Generation, executor: pb.Executor) -> None:
        name = executor.executor_id
        known = KnownExecutor(
            name, executor.executor_epoch, executor.model_fingerprint, executor.block_size, generation.shard
        )
        before = generation.executors.get(name)
        if before is not None and before.model_fingerprint != known.model_fingerprint:
            self._lose(generation, name)
            before = None
        generation.executors[name] = known
        if before is None and executor.pools:
            pool = min(executor.pools, key=lambda pool: (pool.HasField("attention_window"), pool.group))
            pool_id = f"{name}/{pool.group}"
            generation.pools[pool_id] = name
            generation.lanes[pool_id] = self._new_lane()

    def _lose(self, generation: Generation, executor_id: str) -> None:
        generation.executors.pop(executor_id, None)
        for pool_id in [pool_id for pool_id, name in generation.pools.items() if name == executor_id]:
            del generation.pools[pool_id]
            self._dropped.add(generation.lanes.pop(pool_id))

    def _new_lane(self) -> int:
        if self._free_lanes:
            return self._free_lanes.pop()
        self._num_lanes += 1
        return (self._num_lanes - 1) * _WIDTH

    def _set(self, lane: int, tier: int, keys: Iterable[int]) -> None:
        """tier: 0 for blocks that the executor has no more."""
        keep, bits = ~(_LANE << lane), tier << lane
        blocks, masks = self._blocks, self._masks
        for key in keys:
            mask = blocks.get(key, 0) & keep | bits
            if mask:
                blocks[key] = masks.setdefault(mask, mask)
            else:
                blocks.pop(key, None)

    async def sweep(self) -> None:
        """Clears the lanes that were dropped so far, in slices."""
        lanes, self._dropped = self._dropped, set()
        if not lanes:
            return
        dead = sum(_LANE << lane for lane in lanes)
        keys = list(self._blocks)
        for start in range(0, len(keys), SWEPT_AT_A_TIME):
            for key in keys[start : start + SWEPT_AT_A_TIME]:
                mask = self._blocks.get(key, 0)
                if mask & dead:
                    left = mask & ~dead
                    if left:
                        self._blocks[key] = self._masks.setdefault(left, left)
                    else:
                        del self._blocks[key]
            await asyncio.sleep(0)
        self._masks = {mask: mask for mask in set(self._masks) if not mask & dead}
        self._free_lanes += lanes


def _count(counts: dict[int, list[int]], going: Iterable[int], mask: int, run: int) -> None:
    if run:
        for lane in going:
            counts[lane][mask >> lane & _LANE] += run


class ViewFeed:
    """Follows the events of one cache manager."""

    def __init__(self, view: CacheView, address: str, security: Security) -> None:
        self._view = view
        self._address = address
        self._security = security
        # The complete one, with the last event that it has.
        self._generation: Generation | None = None
        self._number = self._manager_epoch = 0

    async def run(self) -> None:
        """Follows until cancelled, across restarts of the cache manager."""
        said = ""
        async with open_channel(self._address, self._security) as channel:
            stub: rpc.CacheEventServiceAsyncStub = rpc.CacheEventServiceStub(channel)
            while True:
                try:
                    await self._follow(stub)
                    cause = "it ended the stream"
                except grpc.aio.AioRpcError as error:
                    cause = str(from_rpc_error(error))
                    if error.code() is grpc.StatusCode.OUT_OF_RANGE:
                        # What it knew may be wrong now; it stays in sight until a snapshot is complete.
                        self._number = self._manager_epoch = 0
                if cause != said:
                    log.info("following a cache manager again", address=self._address, cause=cause)
                    said = cause
                await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self, stub: rpc.CacheEventServiceAsyncStub) -> None:
        request = pb.WatchEventsRequest(keys_only=True)
        generation = self._generation
        if generation is None or not self._manager_epoch:
            generation = Generation(self._address)
        else:
            request.after_event_number, request.manager_epoch = self._number, self._manager_epoch
        try:
            # No deadline: the stream lasts as long as both processes.
            async for message in stub.WatchEvents(request):
                self._view.apply(generation, message.changes)
                if message.snapshot and not message.snapshot_end:
                    continue
                self._number, self._manager_epoch = message.last_event_number, message.manager_epoch
                if generation is not self._generation:
                    self._generation = generation
                    self._view.show(generation)
                    log.info("view complete", address=self._address, executors=len(generation.executors))
        finally:
            if generation is not self._generation:
                self._view.drop(generation)
