"""Events as a stream in Redis."""

import asyncio
from pathlib import Path

import pytest

from protos.kvcache.v1 import kvcache_pb2 as pb
from tests.unit.cachemgr_service.conftest import Client
from tests.unit.cachemgr_service.managers import POOL, Managers, cached, pin, sync_redis
from tests.unit.cachemgr_service.servers import Server

KEY = "kvkeep:{operators}:events"


@pytest.fixture
def managers(tmp_path: Path, server: Server) -> Managers:
    return Managers(tmp_path, server.url)


def stream(url: str) -> list[dict[bytes, bytes]]:
    with sync_redis(url) as server:
        return [fields for _, fields in server.xrange(KEY)]


async def last_number(client: Client) -> int:
    """Number of the newest event, that a snapshot carries."""
    watch = client.events.WatchEvents(pb.WatchEventsRequest())
    number = (await anext(aiter(watch))).events[0].event_number
    watch.cancel()
    return number


async def test_every_event_is_in_the_stream_once_and_in_order(managers: Managers) -> None:
    async with managers.run(redis_events=1000) as client:
        await client.register()
        await cached(client, 9, salt="secret")
        await pin(client, pb.PrefixSelector(token_ids=range(4)), "ops", 100)
        last = await last_number(client)
        async with asyncio.timeout(10):
            while len(events := stream(managers.url)) < last:
                await asyncio.sleep(0.02)
    assert [int(event[b"number"]) for event in events] == list(range(1, last + 1))
    created, first, second = events[:3]
    assert {name: created[name] for name in (b"kind", b"pool")} == {b"kind": b"CREATED", b"pool": POOL.encode()}
    for event, depth in ((first, b"0"), (second, b"1")):
        assert (event[b"kind"], event[b"depth"], event[b"tokens"], event[b"tier"]) == (
            b"STORED",
            depth,
            b"4",
            b"DEVICE",
        )
    assert second[b"parent"] == first[b"key"]
    assert b"secret" not in repr(events).encode()


async def test_the_stream_is_bounded_and_goes_on_after_an_outage(managers: Managers, server: Server) -> None:
    async with managers.run(redis_events=100) as client:
        await client.register()
        server.stop()
        for number in range(150):
            await client.compute(await client.admit(f"s{number}", [number] * 9), 8)
        server.start()
        last = await last_number(client)
        async with asyncio.timeout(20):
            while not (events := stream(managers.url)) or int(events[-1][b"number"]) < last:
                await asyncio.sleep(0.02)
    # About so many: whole nodes of the stream go, of 100 events by default.
    assert 100 <= len(events) <= 250
    assert last > 300


async def test_without_the_setting_there_is_none(managers: Managers) -> None:
    async with managers.run() as client:
        await client.register()
        await cached(client)
    assert stream(managers.url) == []
