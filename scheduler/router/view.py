"""Which engine has which block in which tier, according to all cache managers' events. Advisory: owners decide."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc
import numpy as np
import numpy.typing as npt
import structlog

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as rpc
from protos.rpc.channel import open_channel
from protos.rpc.errors import from_rpc_error
from protos.rpc.security import Security
from scheduler.router.expected_seconds import Match
from scheduler.router.key_space import KeySpace
from scheduler.router.key_table import KeyTable, Numbers

# Number of bits of a lane in a mask, and a lane with all bits set. The bits hold the number of a tier, 0 for none.
_WIDTH, _LANE = 2, 3
# Keys of a prompt that are looked up first: few prompts are cached beyond their beginning.
_FIRST_KEYS = 64
RETRY_SECONDS = 0.5

log = structlog.get_logger()


class Owner(NamedTuple):
    """An executor of one shard. Another shard may have an executor with the same id but different blocks.

    shard: the address of its cache manager's events, as announced by the executor's engine.
    """

    shard: str
    executor_id: str


@dataclass(frozen=True, slots=True)
class KnownExecutor:
    """An executor as its cache manager announces it.

    pool_id: the pool whose blocks count: with several layer groups, the pool with full attention, which keeps the whole
    prefix, or else the first. lane: offset of the bits in the blocks' masks that say what this pool has.
    """

    space: KeySpace
    pool_id: str
    lane: int


@dataclass(slots=True)
class ShardView:
    """What one cache manager's events have told since a snapshot: its executors by id."""

    shard: str
    executors: dict[str, KnownExecutor] = field(default_factory=dict)

    def lane(self, pool_id: str) -> int | None:
        """Returns the lane of a pool; None for a pool that does not count, or that belongs to an unknown executor."""
        executor = self.executors.get(pool_id.rpartition("/")[0])
        return executor.lane if executor is not None and executor.pool_id == pool_id else None


class _Masks:
    """Numbers for the masks of blocks. Very many blocks have the same mask; a mask that no block has is forgotten."""

    def __init__(self) -> None:
        # Masks and their counts of blocks, by number. Number 0 is the empty mask, of blocks that are nowhere.
        self._masks, self._blocks = [0], [0]
        self._numbers = {0: 0}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers) - 1

    def __getitem__(self, number: int) -> int:
        return self._masks[number]

    def number(self, mask: int) -> int:
        """Returns the number of a mask, a new number if no block has the mask."""
        number = self._numbers.get(mask)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._masks[number] = mask
            else:
                number = len(self._masks)
                self._masks.append(mask)
                self._blocks.append(0)
            self._numbers[mask] = number
        return number

    def count(self, changed: Counter[int], after: Mapping[int, int]) -> None:
        """Moves the changed blocks of each number to the number `after` it."""
        for before, blocks in changed.items():
            self._blocks[after[before]] += blocks
            self._blocks[before] -= blocks
        for before in changed:
            if before and not self._blocks[before]:
                del self._numbers[self._masks[before]]
                self._free.append(before)

    @property
    def blocks(self) -> int:
        """The number of blocks that are anywhere."""
        # Number 0 has lost what all other numbers have gained.
        return -self._blocks[0]


class _After(dict[int, int]):
    """Maps a mask's number to the number of the mask with some bits cleared and others set."""

    def __init__(self, masks: _Masks, keep: int, bits: int) -> None:
        super().__init__()
        self._masks, self._keep, self._bits = masks, keep, bits

    def __missing__(self, number: int) -> int:
        found = self[number] = self._masks.number(self._masks[number] & self._keep | self._bits)
        return found


class CacheView:
    """Blocks by the low 64 bits of their keys, with a mask of the lanes that have them.

    A lane is an executor in one shard's view. The lanes of a shard's view are read from when that view is shown until
    the view is dropped: their bits are then cleared in slices, and afterwards the lanes are reused.
    """

    def __init__(self) -> None:
        # The number of each block's mask.
        self._table = KeyTable()
        self._masks = _Masks()
        self._shown: dict[str, ShardView] = {}
        self._num_lanes = 0
        self._free_lanes: list[int] = []
        # Lanes that have yet to be cleared.
        self._dropped: set[int] = set()

    def __len__(self) -> int:
        return self._masks.blocks

    @property
    def executors(self) -> Mapping[Owner, KnownExecutor]:
        """All executors of complete views."""
        return {
            Owner(shard_view.shard, executor_id): executor
            for shard_view in self._shown.values()
            for executor_id, executor in shard_view.executors.items()
        }

    def find(self, owner: Owner) -> KnownExecutor | None:
        """Returns an executor if its blocks are known, otherwise None."""
        shard_view = self._shown.get(owner.shard)
        return None if shard_view is None else shard_view.executors.get(owner.executor_id)

    def match(self, owners: Iterable[Owner], keys: array[int]) -> dict[Owner, Match]:
        """Returns each executor's leading blocks of a prompt, by their tiers; omits executors without any.

        owners: executors that share the key space of the keys.
        """
        known = [(owner, executor.lane) for owner in owners if (executor := self.find(owner)) is not None]
        found = self._beginning(np.frombuffer(keys, np.uint64)) if known and keys else ()
        if not len(found):
            return {}
        # Neighbouring blocks mostly have the same mask: each run of equal masks is processed once.
        starts = np.flatnonzero(np.diff(found, prepend=0))
        lengths = np.diff(starts, append=len(found))
        tiers = self._tiers(found[starts])[:, [lane // _WIDTH for _, lane in known]]
        tiers *= np.logical_and.accumulate(tiers != 0)
        device, host, disk = ((lengths @ (tiers == tier)).tolist() for tier in (1, 2, 3))
        matches = zip((owner for owner, _ in known), map(Match, device, host, disk), strict=True)
        return {owner: match for owner, match in matches if match.blocks}

    def _beginning(self, keys: npt.NDArray[np.uint64]) -> Numbers:
        """Returns the mask numbers of a prompt's blocks, up to the first block that is nowhere."""
        found = self._table.get(keys[:_FIRST_KEYS])
        if found.all() and len(keys) > _FIRST_KEYS:
            found = np.concatenate((found, self._table.get(keys[_FIRST_KEYS:])))
        nowhere = np.flatnonzero(found == 0)
        return found[: nowhere[0]] if len(nowhere) else found

    def _tiers(self, numbers: Numbers) -> npt.NDArray[np.uint8]:
        """Returns the tier in each lane of each of these masks, 0 for none."""
        size = (self._num_lanes * _WIDTH + 7) // 8
        packed = b"".join(self._masks[number].to_bytes(size, "little") for number in numbers.tolist())
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little").reshape(len(numbers), -1, _WIDTH)
        return bits[:, :, 0] + 2 * bits[:, :, 1]

    def show(self, shard_view: ShardView) -> None:
        """Shows a shard's complete view, which replaces the previous view of the shard."""
        before = self._shown.get(shard_view.shard)
        self._shown[shard_view.shard] = shard_view
        if before is not None and before is not shard_view:
            self.drop(before)

    def drop(self, shard_view: ShardView) -> None:
        """Drops a shard's view, which no longer counts."""
        if self._shown.get(shard_view.shard) is shard_view:
            del self._shown[shard_view.shard]
        for executor_id in list(shard_view.executors):
            self._lose(shard_view, executor_id)

    def apply(self, shard_view: ShardView, changes: Iterable[pb.CacheChange]) -> None:
        """Applies the changes that a cache manager has sent."""
        for change in changes:
            match change.WhichOneof("change"):
                case "blocks":
                    lane = shard_view.lane(change.blocks.pool_id)
                    if lane is not None:
                        self._set(lane, change.blocks.tier, change.blocks.keys)
                case "registered":
                    self._register(shard_view, change.registered)
                case "lost":
                    self._lose(shard_view, change.lost.executor_id)

    def _register(self, shard_view: ShardView, executor: pb.Executor) -> None:
        """Registers an executor. A new epoch keeps its lane: lost blocks are reported one by one."""
        if not executor.pools:
            return
        name = executor.executor_id
        space = KeySpace(executor.model_fingerprint, executor.block_size, executor.weight_version)
        pool = min(executor.pools, key=lambda pool: (pool.HasField("attention_window"), pool.group))
        pool_id = f"{name}/{pool.group}"
        before = shard_view.executors.get(name)
        # Blocks of other weights stay: they match again once those weights are back.
        is_same = before is not None and before.space._replace(weight_version=space.weight_version) == space
        if before is not None and is_same and before.pool_id == pool_id:
            lane = before.lane
        else:
            self._lose(shard_view, name)
            lane = self._new_lane()
        shard_view.executors[name] = KnownExecutor(space, pool_id, lane)

    def _lose(self, shard_view: ShardView, executor_id: str) -> None:
        executor = shard_view.executors.pop(executor_id, None)
        if executor is not None:
            self._dropped.add(executor.lane)

    def _new_lane(self) -> int:
        if self._free_lanes:
            return self._free_lanes.pop()
        self._num_lanes += 1
        return (self._num_lanes - 1) * _WIDTH

    def _set(self, lane: int, tier: int, keys: Sequence[int]) -> None:
        """tier: 0 for blocks that the executor no longer has. A tier unknown to this version counts as none, too."""
        tier = tier if tier <= _LANE else 0
        after = _After(self._masks, ~(_LANE << lane), tier << lane)
        self._masks.count(self._table.change(keys, after), after)

    async def sweep(self) -> None:
        """Clears the lanes that have been dropped so far, in slices."""
        lanes, self._dropped = self._dropped, set()
        if not lanes:
            return
        masks, dead = self._masks, sum(_LANE << lane for lane in lanes)

        def after(numbers: list[int]) -> dict[int, int]:
            return {number: masks.number(masks[number] & ~dead) for number in numbers if masks[number] & dead}

        for follows, changed in self._table.change_all(after):
            masks.count(changed, follows)
            await asyncio.sleep(0)
        self._free_lanes += lanes


class ViewFeed:
    """Follows the events of one cache manager."""

    def __init__(self, view: CacheView, address: str, security: Security) -> None:
        self._view = view
        self._address = address
        self._security = security
        # The shard's complete view, and the number of its last event.
        self._shard_view: ShardView | None = None
        self._number = self._manager_epoch = 0

    async def run(self) -> None:
        """Follows until cancelled, across restarts of the cache manager; once cancelled, its executors are unknown."""
        try:
            await self._run()
        finally:
            if self._shard_view is not None:
                self._view.drop(self._shard_view)

    async def _run(self) -> None:
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
                        # The shard's view may be wrong now, but stays visible until a snapshot is complete.
                        self._number = self._manager_epoch = 0
                if cause != said:
                    log.info("following a cache manager again", address=self._address, cause=cause)
                    said = cause
                await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self, stub: rpc.CacheEventServiceAsyncStub) -> None:
        request = pb.WatchEventsRequest(keys_only=True)
        shard_view = self._shard_view
        if shard_view is None or not self._manager_epoch:
            shard_view = ShardView(self._address)
        else:
            request.after_event_number, request.manager_epoch = self._number, self._manager_epoch
        try:
            # No deadline: the stream lasts as long as both processes.
            async for message in stub.WatchEvents(request):
                self._view.apply(shard_view, message.changes)
                if message.snapshot and not message.snapshot_end:
                    continue
                self._number, self._manager_epoch = message.last_event_number, message.manager_epoch
                if shard_view is not self._shard_view:
                    self._shard_view = shard_view
                    self._view.show(shard_view)
                    log.info("view complete", address=self._address, executors=len(shard_view.executors))
        finally:
            if shard_view is not self._shard_view:
                self._view.drop(shard_view)
