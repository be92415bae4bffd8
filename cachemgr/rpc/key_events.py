"""Events as routers need them: the net changes of many events, by pool and tier, with the low 64 bits of each key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from cachemgr.blocks.events import Event
from cachemgr.rpc import convert
from cachemgr.types import EventKind, TierKind
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.block_keys import low_keys

# Looked up once for speed.
_STORED, _REMOVED, _UPDATED = EventKind.STORED, EventKind.REMOVED, EventKind.UPDATED
_EXECUTORS = (EventKind.EXECUTOR_REGISTERED, EventKind.EXECUTOR_LOST)


def changes(events: Iterable[Event], is_wanted: Callable[[Event], bool] | None = None) -> list[pb.CacheChange]:
    """Returns the net changes of successive events."""
    found: list[pb.CacheChange] = []
    # By pool and key: the tier in which the block finally is; None if it has left the index.
    pools: dict[str, dict[bytes, TierKind | None]] = {}
    for event in events:
        kind, block = event.kind, event.block
        if kind is _STORED or kind is _REMOVED or kind is _UPDATED:
            if is_wanted is None or is_wanted(event):
                pool = pools.get(block.pool_id)
                if pool is None:
                    pool = pools[block.pool_id] = {}
                pool[block.key] = None if kind is _REMOVED else block.tier
        elif kind in _EXECUTORS and (is_wanted is None or is_wanted(event)):
            found += _of_pools(pools)
            pools = {}
            found.append(of_executor(event))
    return found + _of_pools(pools)


def _of_pools(pools: Mapping[str, Mapping[bytes, TierKind | None]]) -> list[pb.CacheChange]:
    found: list[pb.CacheChange] = []
    for pool_id, blocks in pools.items():
        by_tier: dict[TierKind | None, list[bytes]] = {}
        for key, tier in blocks.items():
            by_tier.setdefault(tier, []).append(key)
        found += of_keys(pool_id, by_tier.items())
    return found


def of_keys(pool_id: str, by_tier: Iterable[tuple[TierKind | None, list[bytes]]]) -> list[pb.CacheChange]:
    """The changes of a pool's blocks by their present tier; None for blocks that have left the index."""
    return [
        pb.CacheChange(
            blocks=pb.BlockKeys(
                pool_id=pool_id,
                kind=convert.KINDS[_REMOVED if tier is None else _STORED],
                tier=None if tier is None else convert.TIERS[tier],
                keys=low_keys(keys),
            )
        )
        for tier, keys in by_tier
    ]


def of_executor(event: Event) -> pb.CacheChange:
    """The change of an event about an executor."""
    assert event.executor is not None
    if event.kind is EventKind.EXECUTOR_LOST:
        return pb.CacheChange(lost=convert.executor(event.executor, lost=True))
    return pb.CacheChange(registered=convert.executor(event.executor))
