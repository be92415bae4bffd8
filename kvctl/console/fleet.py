"""The cache managers on the page: the named cache managers, else the cache managers of a router's engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import grpc

from kvctl.console.data import Cache, Json, Options, Query
from kvctl.display.output import plain
from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.addresses import AddressError
from protos.rpc.channel import open_channel
from protos.rpc.errors import InvalidField
from protos.rpc.security import Security


class Fleet:
    """The cache managers and the router of the page. Use it in an async with statement.

    Each call carries the viewer's token, never the token of this process.
    """

    def __init__(self, shards: Sequence[str], router: str, security: Security) -> None:
        """shards: addresses for operators; none if the router knows them. router: empty for none.

        Raises AddressError if a viewer's token would travel unencrypted.
        """
        self._security = replace(security, token_file=None)
        self._named = tuple(shards)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._caches: dict[str, Cache] = {}
        self._router: rpc.RouterServiceAsyncStub | None = None
        for address in shards:
            self._add(address)
        if router:
            self._security.check_private(router)
            self._router = rpc.RouterServiceStub(self._channel(router))

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def read(self, _query: Query, options: Options) -> Json:
        """The shards by address and, with a router, its engines. Raises AioRpcError, InvalidField."""
        if self._router is None:
            return {"shards": list(self._named)}
        try:
            found = await self._router.ListEngines(pb.ListEnginesRequest(), **options)
        except grpc.aio.AioRpcError as error:
            # The router is away, or the token is of one tenant: the shards can still be shown.
            if not self._caches or error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise
            return {"shards": list(self._caches), "problem": error.details()}
        if not self._named:
            known = sorted({one.cachemgr_admin_address for one in found.engines} - {""})
            for address in set(self._caches).difference(known):
                # The channel to this shard stays open: pages may still read from it.
                del self._caches[address]
            for address in known:
                try:
                    self._add(address)
                except AddressError as error:
                    raise InvalidField("shard", str(error)) from None
        return {"shards": list(self._named or known), **plain(found)}

    async def cache(self, query: Query, options: Options) -> Cache:
        """The cache manager that a read is about. Raises InvalidField, AioRpcError."""
        if not self._caches:
            await self.read(query, options)
        address = query.get("shard", "")
        if not address and len(self._caches) == 1:
            [only] = self._caches.values()
            return only
        if address not in self._caches and not self._named:
            await self.read(query, options)
        if address not in self._caches:
            raise InvalidField("shard", f"must be one of {', '.join(self._caches)}")
        return self._caches[address]

    def _add(self, address: str) -> None:
        if address in self._caches:
            return
        self._security.check_private(address)
        self._caches[address] = Cache(self._channel(address))

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address, self._security)
        return self._channels[address]
