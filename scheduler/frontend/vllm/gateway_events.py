"""Events about what an engine's cache holds for a caller's requests, in the shared contract of gateways.

Gateways find blocks by their tokens, and know neither salts nor adapters. So a subscriber is told only about blocks
that its own requests could use. Each subscription begins with all such blocks: a gateway that was away misses nothing.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncGenerator, Iterable, Sequence

import grpc

from protos.execution.v1 import execution_pb2
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as rpc
from protos.kvcommon.block_keys import low_keys
from protos.rpc.channel import open_channel
from protos.rpc.errors import ServiceError, from_rpc_error
from protos.rpc.security import Security
from protos.smg import common_pb2 as smg

_EXECUTOR_CHANGES = (pb.EventKind.EVENT_KIND_EXECUTOR_REGISTERED, pb.EventKind.EVENT_KIND_EXECUTOR_LOST)
_PRESENT = (pb.EventKind.EVENT_KIND_STORED, pb.EventKind.EVENT_KIND_UPDATED)
_TIERS = {
    pb.Tier.TIER_DEVICE: smg.KvCacheTier.KV_CACHE_TIER_DEVICE,
    pb.Tier.TIER_HOST: smg.KvCacheTier.KV_CACHE_TIER_HOST,
    pb.Tier.TIER_DISK: smg.KvCacheTier.KV_CACHE_TIER_DISK,
}
_LEVELS = {pb.Tier.TIER_DEVICE: 0, pb.Tier.TIER_HOST: 1, pb.Tier.TIER_DISK: 2}
RETRY_SECONDS = 0.5


class EventsEndedError(ServiceError):
    """The executor or the cache manager has restarted, or the subscriber is too slow: it must subscribe again."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "EVENTS_ENDED"


class NoEventsError(ServiceError):
    """No events are served here."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "NO_EVENTS"


class KvEvents:
    """Subscriptions to the events of a cache manager."""

    def __init__(self, address: str, security: Security) -> None:
        """address: where the cache manager serves its watchers."""
        self._address = address
        self._security = security

    async def batches(
        self, executor: execution_pb2.GetExecutorResponse, salt: str | None, number: int
    ) -> AsyncGenerator[smg.KvEventBatch]:
        """Yields batches, numbered from `number` + 1. salt: of the subscriber's requests. Raises EventsEndedError."""
        told = Told(executor.block_size, salt)
        yield _batch(number := number + 1, [smg.KvCacheEvent(cleared=smg.KvCacheCleared())])
        request = pb.WatchEventsRequest(pool_id=pool_id(executor), salt=salt, include_token_ids=True)
        async with open_channel(self._address, self._security) as channel:
            stub: rpc.CacheEventServiceAsyncStub = rpc.CacheEventServiceStub(channel)
            try:
                # No deadline: the stream lasts as long as the subscription.
                async for message in stub.WatchEvents(request):
                    if events := told.of(message.events):
                        yield _batch(number := number + 1, events)
            except grpc.aio.AioRpcError as error:
                cause = from_rpc_error(error)
                raise EventsEndedError(
                    f"the events of the cache manager ended: {cause.reason or cause.code.name}",
                    retry_after=RETRY_SECONDS,
                ) from error
        raise EventsEndedError("the events of the cache manager ended", retry_after=RETRY_SECONDS)


def pool_id(executor: execution_pb2.GetExecutorResponse) -> str:
    """Returns the executor's pool with full attention, which keeps the whole prefix, or else the first pool."""
    windows = list(executor.attention_windows)
    return f"{executor.executor_id}/{windows.index(0) if 0 in windows else 0}"


def _batch(number: int, events: Sequence[smg.KvCacheEvent]) -> smg.KvEventBatch:
    for index, event in enumerate(events):
        event.event_id = index
    return smg.KvEventBatch(sequence_number=number, timestamp=time.time(), events=events)


class Told:
    """The blocks that a subscriber knows."""

    def __init__(self, block_size: int, salt: str | None) -> None:
        self._block_size = block_size
        self._salt = salt
        # The tiers of known blocks by the blocks' names.
        self._known: dict[int, pb.Tier] = {}
        self._found: list[smg.KvCacheEvent] = []
        # The block that was last reported as stored.
        self._last: int | None = None

    def of(self, events: Iterable[pb.Event]) -> list[smg.KvCacheEvent]:
        """Returns what is new in the manager's events. Raises EventsEndedError if the executor restarts or is lost."""
        self._found, self._last = [], None
        for event in events:
            if event.kind in _EXECUTOR_CHANGES and not event.snapshot:
                raise EventsEndedError("the executor has started again, or is lost", retry_after=RETRY_SECONDS)
            if not event.block.key:
                continue
            name = _name(event.block.key)
            before = self._known.get(name)
            if event.kind == pb.EventKind.EVENT_KIND_REMOVED and before is not None:
                self._remove(name, before)
            elif event.kind in _PRESENT and event.block.tier != before and self._is_usable(event.block):
                # A block is in only one tier at a time.
                if before is not None:
                    self._remove(name, before)
                self._store(name, event.block)
        return self._found

    def _remove(self, name: int, tier: pb.Tier) -> None:
        del self._known[name]
        found = self._found
        if not found or not found[-1].HasField("removed") or found[-1].removed.tier != _TIERS[tier]:
            left = smg.KvBlocksRemoved(tier=_TIERS[tier], cache_level=_LEVELS[tier])
            found.append(smg.KvCacheEvent(removed=left))
        found[-1].removed.block_hashes.append(name)

    def _store(self, name: int, block: pb.Block) -> None:
        self._known[name] = block.tier
        tier, parent = _TIERS[block.tier], _name(block.parent_key) if block.parent_key else None
        found = self._found
        continues = parent is not None and parent == self._last
        if not continues or not found[-1].HasField("stored") or found[-1].stored.tier != tier:
            found.append(smg.KvCacheEvent(stored=smg.KvBlocksStored(parent_block_hash=parent, tier=tier)))
        found[-1].stored.blocks.add(
            block_hash=name,
            token_ids=block.token_ids,
            block_size=self._block_size,
            cache_level=_LEVELS[block.tier],
        )
        self._last = name

    def _is_usable(self, block: pb.Block) -> bool:
        """Returns whether the subscriber's requests could use the block, and find it."""
        salt = block.salt if block.HasField("salt") else None
        # A block that was forgotten after the event has no tokens; a block whose parent is unknown has no position.
        return (
            salt == self._salt
            and not block.HasField("adapter_id")
            and len(block.token_ids) == self._block_size
            and (not block.parent_key or _name(block.parent_key) in self._known)
        )


def _name(key: bytes) -> int:
    """Returns the low 64 bits of a key as the contract's signed number."""
    [signed] = array("q", low_keys([key]).tobytes())
    return signed
