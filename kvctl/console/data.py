"""Reads the page's data from a cache manager, as JSON, without token ids."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from kvctl.display.output import plain
from kvctl.remote import all_pages
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as rpc
from protos.rpc.durations import seconds
from protos.rpc.errors import InvalidField, from_rpc_error

Json = dict[str, Any]
Query = Mapping[str, str]
# Metadata and timeout of a call.
Options = dict[str, Any]
Read = Callable[[Query, Options], Awaitable[Json]]

PAGE = 1000
EVENTS = 200
# How long a read waits for events after a known number.
EVENT_SECONDS = 0.2
GHOST_SECONDS = 3600
# Enough digits of a key to distinguish the blocks of a pool.
_KEY_BYTES = 8
# No event has this number: the cache manager refuses it, and names its oldest and newest events.
_NO_EVENT = (1 << 64) - 1


class Cache:
    """The cache manager as the viewer of a call may see it. All reads raise AioRpcError, `events` also InvalidField."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._admin: rpc.CacheAdminServiceAsyncStub = rpc.CacheAdminServiceStub(channel)
        self._events: rpc.CacheEventServiceAsyncStub = rpc.CacheEventServiceStub(channel)

    async def pools(self, _query: Query, options: Options) -> Json:
        """The pools with their counters."""
        return _plain(await all_pages(self._admin.ListPools, pb.ListPoolsRequest(page_size=PAGE), **options))

    async def blocks(self, query: Query, options: Options) -> Json:
        """A page of blocks in use or cached, a row each; a row's last value points into `owners`.

        A row: tier, slot, key and parent's key in hexadecimal, depth, tokens, references, priority, hits, seconds since
        the last use, owner.
        """
        request = pb.ListBlocksRequest(pool_id=_pool(query), page_size=PAGE, page_token=query.get("page", ""))
        page = await self._admin.ListBlocks(request, **options)
        owners: dict[tuple[str | None, str | None], int] = {}
        rows = [
            (
                item.tier,
                item.slot,
                item.key[:_KEY_BYTES].hex(),
                item.parent_key[:_KEY_BYTES].hex(),
                item.depth,
                item.num_tokens,
                item.references,
                item.retention_priority,
                item.hits,
                round(seconds(item.last_use_age), 1),
                owners.setdefault(_owner(item), len(owners)),
            )
            for item in page.blocks
        ]
        names = [{"tenant": tenant, "salt": salt} for tenant, salt in owners]
        return {"rows": rows, "owners": names, "next": page.next_page_token}

    async def sequences(self, query: Query, options: Options) -> Json:
        """A page of an executor's live sequences, a row each.

        A row: id, computed tokens, tokens that its blocks have slots for, blocks, whether it has evicted tokens.
        """
        request = pb.ListSequencesRequest(
            executor_id=query.get("executor", ""), page_size=PAGE, page_token=query.get("page", "")
        )
        page = await self._admin.ListSequences(request, **options)
        rows = [
            (one.sequence_id, one.computed_tokens, one.capacity_tokens, one.num_blocks, one.evicting)
            for one in page.sequences
        ]
        return {"rows": rows, "next": page.next_page_token}

    async def leases(self, query: Query, options: Options) -> Json:
        """A page of leases. Leases that differ only in the block form one entry, with tier and slot of each block."""
        request = pb.ListLeasesRequest(pool_id=_pool(query), page_size=PAGE, page_token=query.get("page", ""))
        page = await self._admin.ListLeases(request, **options)
        groups: dict[tuple[object, ...], Json] = {}
        for item in page.leases:
            lease = item.lease
            left = round(seconds(lease.remaining_duration)) if lease.HasField("remaining_duration") else None
            group = {
                "holder": lease.holder,
                "priority": lease.retention_priority,
                "remaining": left,
                "started": lease.started,
            }
            found = groups.setdefault(tuple(group.values()), group | {"slots": []})
            found["slots"].append((item.block.tier, item.block.slot))
        return {"leases": list(groups.values()), "next": page.next_page_token}

    async def holds(self, _query: Query, options: Options) -> Json:
        """Holds and pins."""
        return _plain(await all_pages(self._admin.ListHolds, pb.ListHoldsRequest(page_size=PAGE), **options))

    async def tenants(self, query: Query, options: Options) -> Json:
        """Lookups by salt, and quotas."""
        stats = await self._admin.GetStats(pb.GetStatsRequest(pool_id=_pool(query)), **options)
        quotas = await all_pages(self._admin.ListQuotas, pb.ListQuotasRequest(page_size=PAGE), **options)
        return _plain(stats) | _plain(quotas)

    async def ghosts(self, query: Query, options: Options) -> Json:
        """Ghost caches of the last hour."""
        request = pb.GetGhostCachesRequest(
            executor_id=query.get("executor", ""), window=Duration(seconds=GHOST_SECONDS)
        )
        return _plain(await self._admin.GetGhostCaches(request, **options))

    async def check_sees_all(self, query: Query, options: Options) -> None:
        """Makes a call that the cache manager refuses for the token of a single tenant."""
        try:
            await self.ghosts(query, options)
        except grpc.aio.AioRpcError as error:
            # The cache manager checks the token first, and then looks for the executor, which may be missing.
            if error.code() not in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND):
                raise

    async def events(self, query: Query, options: Options) -> Json:
        """The newest events after a number. `last` is the number of the last event, for the next read."""
        after = query.get("after", str(_NO_EVENT))
        if not (
            after.isascii() and after.isdecimal() and len(after) <= len(str(_NO_EVENT)) and int(after) <= _NO_EVENT
        ):
            raise InvalidField("after", "must be the number of an event")
        number = int(after)
        try:
            found = await self._events_after(number, options)
        except grpc.aio.AioRpcError as error:
            remote = from_rpc_error(error)
            if remote.reason != "EVENTS_GONE":
                raise
            number = max(int(remote.metadata["oldest"]) - 1, int(remote.metadata["newest"]) - EVENTS)
            found = await self._events_after(number, options)
        last = found[-1].event_number if found else number
        return {"last": last, "events": [_plain(event) for event in found[-EVENTS:]]}

    async def _events_after(self, number: int, options: Options) -> list[pb.Event]:
        request = pb.WatchEventsRequest(after_event_number=number)
        # The cache manager refuses a number that it does not know, and the refusal may take the time of any call.
        is_known = number != _NO_EVENT
        found: list[pb.Event] = []
        try:
            async for batch in self._events.WatchEvents(
                request, **options | ({"timeout": EVENT_SECONDS} if is_known else {})
            ):
                found += batch.events
        except grpc.aio.AioRpcError as error:
            if not is_known or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        return found


def _plain(message: Any) -> Json:
    fields: Json = plain(message)
    return fields


def _pool(query: Query) -> str:
    return query.get("pool", "")


def _owner(block: pb.Block) -> tuple[str | None, str | None]:
    return (
        block.tenant_id if block.HasField("tenant_id") else None,
        block.salt if block.HasField("salt") else None,
    )
