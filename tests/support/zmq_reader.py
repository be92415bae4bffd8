"""A router like other projects' routers: follows one executor's events over ZeroMQ, knows only vLLM's messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from cachemgr.manager import CacheManager
from cachemgr.queries import Queries
from cachemgr.rpc.event_feed import EventFeed
from cachemgr.rpc.vllm_event_publisher import ZmqEvents, ZmqSettings
from cachemgr.types import TierKind
from protos.kvcommon.tokens import unpack
from tests.support.patience import patience

MEDIA = {TierKind.DEVICE: "GPU", TierKind.HOST: "CPU", TierKind.DISK: "STORAGE"}
END = (1 << 64) - 1


# The fields as vLLM declares them; vLLM refuses unknown fields.
class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Event]
    data_parallel_rank: int | None


class Known(NamedTuple):
    """The known facts of a block. Tokens are empty if they are not sent."""

    medium: str
    parent: int | None
    tokens: tuple[int, ...]
    extra_keys: tuple[Any, ...]


class RouterView:
    """A router's knowledge of each block, by hash.

    A reader that has missed batches asks for all batches from the first missing batch on. `last` is the number of the
    last batch that counts, -1 before the first.
    """

    def __init__(self, events: str, replays: str) -> None:
        self.index: dict[int, Known] = {}
        self.last = -1
        self.batches = 0
        # The events in order, and the numbers of the batches that replays brought.
        self.events: list[Event] = []
        self.replayed: list[int] = []
        self.asked: list[int] = []
        self._addresses = events, replays

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[RouterView]:
        """Reads as long as the context lasts. Messages between two contexts are missed."""
        events, replays = self._addresses
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as reader, context.socket(zmq.DEALER) as asking:
            for socket, address in ((reader, events), (asking, replays)):
                socket.linger = 0
                socket.connect(f"tcp://{address}")
            reader.subscribe(b"")
            task = asyncio.create_task(self._follow(reader, asking))
            try:
                yield self
            finally:
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    task.result()

    async def _follow(self, reader: zmq.asyncio.Socket, asking: zmq.asyncio.Socket) -> None:
        while True:
            _, number, message = await reader.recv_multipart()
            if int.from_bytes(number, "big") > self.last + 1:
                await self._catch_up(asking)
            self._take(number, message)

    async def _catch_up(self, asking: zmq.asyncio.Socket) -> None:
        first = self.last + 1
        self.asked.append(first)
        await asking.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            empty, number, message = await asking.recv_multipart()
            assert not empty
            if int.from_bytes(number, "big") == END:
                assert not message
                return
            self.replayed.append(int.from_bytes(number, "big"))
            self._take(number, message)

    def _take(self, number: bytes, message: bytes) -> None:
        assert len(number) == 8
        if int.from_bytes(number, "big") <= self.last:
            return
        self.last = int.from_bytes(number, "big")
        self.batches += 1
        for event in msgspec.msgpack.decode(message, type=Batch).events:
            self.events.append(event)
            self._apply(event)

    def _apply(self, event: Event) -> None:
        match event:
            case AllBlocksCleared():
                self.index.clear()
            case BlockRemoved(block_hashes=hashes, medium=medium):
                for one in hashes:
                    if self._medium(one) == medium:
                        del self.index[one]
            case BlockStored():
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        hashes, parent, size = event.block_hashes, event.parent_block_hash, event.block_size
        assert len(hashes) == len(event.extra_keys) == len(set(hashes))
        assert len(event.token_ids) in (0, len(hashes) * size)
        # Routers refuse a block of the device if its parent is not on the device.
        assert event.medium != "GPU" or parent is None or self._medium(parent) == "GPU"
        for at, (one, extra) in enumerate(zip(hashes, event.extra_keys, strict=True)):
            tokens = tuple(event.token_ids[at * size : (at + 1) * size])
            self.index[one] = Known(event.medium, parent, tokens, tuple(extra or ()))
            parent = one

    def _medium(self, block_hash: int) -> str | None:
        known = self.index.get(block_hash)
        return None if known is None else known.medium

    async def until(self, expected: dict[int, Known], *, behind: int = -2) -> None:
        """Waits until the reader knows exactly these blocks, and a batch after a number."""
        try:
            async with asyncio.timeout(patience(20)):
                while self.index != expected or self.last <= behind:
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"{self.index} is not {expected}") from None


def truth(manager: CacheManager, *, token_ids: bool = False) -> dict[int, Known]:
    """The full blocks of the first group with full attention, by the hash of the key; without extra content."""
    pools = [pool for pool in manager.queries.pools() if pool.spec.attention_window is None]
    found = {}
    for pool in pools[:1]:
        for _, view in filter(None, manager.queries.blocks(pool.pool_id)):
            if view.key and view.num_tokens == pool.block_size:
                parent = _hash(view.parent_key) if view.parent_key else None
                tokens = unpack(view.tokens) if token_ids else ()
                found[_hash(view.key)] = Known(MEDIA[view.tier], parent, tokens, _extra_keys(view.scope))
    return found


def _hash(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


def _extra_keys(scope: Any) -> tuple[str, ...]:
    adapter = () if scope.adapter_id is None else (f"{scope.adapter_id}",)
    salt = () if scope.salt is None else (f"dynamo-cache-salt:{sha256(scope.salt.encode()).hexdigest()[:16]}",)
    weights = (f"weights:{scope.weight_version}",) if scope.weight_version else ()
    return adapter + salt + weights


class Publishing:
    """The publisher of a manager, run as in its process."""

    def __init__(self, queries: Queries, settings: ZmqSettings, first_number: int) -> None:
        self.feed = EventFeed(queries)
        self.zmq = ZmqEvents(queries, self.feed, settings, first_number)
        self._task = asyncio.create_task(self.zmq.run())

    async def stop(self) -> None:
        """Ends the publisher like a process that ends."""
        self.feed.close()
        await asyncio.sleep(0)
        assert not self._task.done()
        self._task.cancel()
        await asyncio.wait([self._task])
        assert self._task.cancelled(), repr(self._task.exception())
