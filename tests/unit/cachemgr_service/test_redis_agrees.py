"""After any event in Redis, it agrees with the manager again, and CheckPool reports where it does not."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cachemgr.blocks.block_record import BlockRecord
from cachemgr.persistence.reading import Reading
from cachemgr.persistence.redis_index import WAIT_SECONDS, IndexStore
from cachemgr.queries import Queries
from executor.rpc.manager_client import CALL_SECONDS
from protos.kvcache.v1 import kvcache_pb2 as pb
from tests.support import redis_servers
from tests.support.cachemgr_client import EXECUTOR, Client
from tests.support.managers import POOL, Managers, agreed, cached, compared, leases, make_rule, pin, sync_redis
from tests.support.patience import patience
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_servers import Server

BLOCKS = f"kvkeep:{{{EXECUTOR}}}:blocks"
PINS = f"kvkeep:{{{EXECUTOR}}}:pins"
RULES, QUOTAS = "kvkeep:{operators}:rules", "kvkeep:{operators}:quotas"


@pytest.fixture
def managers(tmp_path: Path, any_server: Server) -> Managers:
    return Managers(tmp_path, any_server.url)


one_server = pytest.mark.parametrize("any_server", redis_servers.FAMILIES, indirect=True)
cluster_only = pytest.mark.parametrize("any_server", redis_servers.CLUSTERS, indirect=True)


async def redis_health(client: Client) -> int:
    stub = health_pb2_grpc.HealthStub(client.admin_channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service="redis"))).status


async def becomes(client: Client, status: int) -> None:
    async with asyncio.timeout(patience(20)):
        while await redis_health(client) != status:
            await asyncio.sleep(0.02)


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """A Redis that takes commands and answers none of them before the end."""
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


async def furnish(client: Client) -> None:
    """Blocks with leases, a pin, a rule and a quota."""
    await client.register()
    await make_rule(client, retention_priority=70)
    await client.admin.SetQuota(pb.SetQuotaRequest(quota=pb.Quota(salt="s", device_floor_blocks=1)))
    await cached(client, 13)
    await pin(client, pb.PrefixSelector(token_ids=range(8)), "ops", 100)


async def test_what_an_operator_was_answered_is_in_redis(managers: Managers) -> None:
    async with managers.run(redis_flush_seconds=5) as client:
        await client.register()
        with sync_redis(managers.url) as server:
            for number in range(20):
                quota = pb.Quota(salt=f"s{number}", device_floor_blocks=1)
                await client.admin.SetQuota(pb.SetQuotaRequest(quota=quota))
                assert server.hexists(QUOTAS, f"salt/s{number}")
                await client.admin.DeleteQuota(pb.DeleteQuotaRequest(salt=f"s{number}"))
                assert not server.hexists(QUOTAS, f"salt/s{number}")
            await cached(client, 13)
            # The answer waits for all earlier changes.
            await client.admin.SetQuota(pb.SetQuotaRequest(quota=pb.Quota(salt="s", device_floor_blocks=1)))
            assert server.hlen(BLOCKS)
            await client.admin.PurgeBlocks(pb.PurgeBlocksRequest())
            assert not server.hlen(BLOCKS)


async def test_what_redis_loses_is_written_again(managers: Managers) -> None:
    async with managers.run() as client:
        await furnish(client)
        await agreed(client)
        with sync_redis(managers.url) as server:
            server.flushall()
        await agreed(client)
        with sync_redis(managers.url) as server:
            assert len(server.hgetall(BLOCKS)) == 3
            assert [len(server.hkeys(key)) for key in (PINS, RULES, QUOTAS)] == [1, 1, 1]


async def test_a_redis_that_starts_again_with_an_older_state_gets_what_it_lacks(managers: Managers) -> None:
    clocks = (f"kvkeep:{{{EXECUTOR}}}:clock", "kvkeep:{operators}:time")
    async with managers.run() as client:
        await furnish(client)
        await agreed(client)
        with sync_redis(managers.url) as server:
            old = {key: server.dump(key) for key in (BLOCKS, PINS, RULES, QUOTAS, *clocks)}
        managers.now += 1
        admitted = await client.admit("more", [7] * 9)
        await client.compute(admitted, 8, step=2)
        await make_rule(client, "later", retention_priority=10)
        await agreed(client)
        with sync_redis(managers.url) as server:
            for key, value in old.items():
                server.restore(key, 0, value, replace=True)
        await agreed(client)
        with sync_redis(managers.url) as server:
            assert len(server.hgetall(BLOCKS)) == 5
            assert sorted(server.hkeys(RULES)) == [b"later", b"r"]


@one_server
async def test_leases_keep_their_ends_while_blocks_are_read_one_after_the_other(
    managers: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = Queries.records

    def slowly(self: Queries, executor_id: str) -> Iterator[BlockRecord]:
        for record in records(self, executor_id):
            yield record
            # Another call of the manager.
            self._state.leases.advance(self.now + 0.1)

    async with managers.run() as client:
        await client.register()
        await make_rule(client, retention_priority=70, retention_duration=Duration(seconds=1000))
        await cached(client, 13)
        await agreed(client)
        assert [one.lease.remaining_duration.seconds for one in await leases(client)] == [1000, 1000, 1000]
        with monkeypatch.context() as patch:
            patch.setattr(Queries, "records", slowly)
            assert await compared(client) == []
            with sync_redis(managers.url) as server:
                server.flushall()
            await agreed(client)
        assert await compared(client) == []


async def test_a_pin_whose_time_is_over_and_that_is_still_there_is_no_difference(managers: Managers) -> None:
    async with managers.run() as client:
        await furnish(client)
        await agreed(client)
        managers.now += 101
        await client.admit("more", [7] * 9)
        await agreed(client)


async def test_every_difference_is_found(managers: Managers) -> None:
    async with managers.run() as client:
        await furnish(client)
        await agreed(client)
        with sync_redis(managers.url) as server:
            blocks = server.hgetall(BLOCKS)
            assert len(blocks) == 3
            first, second, third = sorted(blocks)
            server.hdel(BLOCKS, first)
            server.hset(BLOCKS, second, blocks[third])
            server.hset(BLOCKS, b"\x00" * 5 + b"\x1f\x00\x00\x00", blocks[third])
            server.hset(BLOCKS, b"unreadable", b"")
            (name,) = server.hkeys(PINS)
            server.hdel(PINS, name)
            server.hdel(RULES, "r")
            server.hset(QUOTAS, "salt/s", b"\x01" + pb.Quota(salt="s").SerializeToString())
        found = await compared(client)
        assert sorted(found or ()) == [
            " 0: r (rules) is missing or different in Redis or the manager",
            " 0: salt/s (quotas) is missing or different in Redis or the manager",
            f"{POOL} 0: Redis holds a record that cannot be read: a key or the tokens have a wrong length",
            f"{POOL} 0: {name.decode()} (pins) is missing or different in Redis or the manager",
            f"{POOL} {first[5]}: a block on device is in the index and not in Redis",
            f"{POOL} {second[5]}: a block on device differs between Redis and the index",
            f"{POOL} 31: a block on device is in Redis and not in the index",
        ]
        # A call that does not ask costs nothing.
        answer = await client.admin.CheckPool(pb.CheckPoolRequest())
        assert (list(answer.violations), answer.store_compared) == ([], False)


async def test_redis_away_is_reported_and_changes_wait_for_it(managers: Managers, any_server: Server) -> None:
    async with managers.run() as client:
        await furnish(client)
        await becomes(client, health_pb2.HealthCheckResponse.SERVING)
        any_server.stop()
        await becomes(client, health_pb2.HealthCheckResponse.NOT_SERVING)
        stub = health_pb2_grpc.HealthStub(client.admin_channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        assert await compared(client) is None
        await client.compute(await client.admit("b", [9] * 9), 8)
        await make_rule(client, "s")
        forgotten = await client.admin.ForgetBlocks(pb.ForgetBlocksRequest(prefix=pb.PrefixSelector(token_ids=[9] * 4)))
        assert not forgotten.store_updated
        any_server.start()
        await becomes(client, health_pb2.HealthCheckResponse.SERVING)
        await agreed(client)


@one_server
@pytest.mark.parametrize(
    ("trouble", "relief"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
        (("ACL", "SETUSER", "default", "-@write"), ("ACL", "SETUSER", "default", "+@all")),
    ],
    ids=["full", "a read-only replica", "no permission"],
)
async def test_a_redis_that_takes_no_writes_loses_nothing(
    managers: Managers, any_server: Server, trouble: tuple[str, ...], relief: tuple[str, ...], capsys
) -> None:
    async with managers.run() as client:
        await furnish(client)
        with sync_redis(any_server.url) as direct:
            direct.execute_command(*trouble)
            await becomes(client, health_pb2.HealthCheckResponse.NOT_SERVING)
            await make_rule(client, "s")
            await client.compute(await client.admit("b", [9] * 9), 8)
            assert await compared(client) is None
            direct.execute_command(*relief)
        await agreed(client)
    logged = capsys.readouterr().out
    assert "redis is down" in logged
    assert "HSET" not in logged


@one_server
async def test_a_slow_redis_keeps_no_call_waiting_for_long(
    managers: Managers, any_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush_soon = IndexStore.flush_soon
    bounds: list[float | None] = []

    async def and_note_it(self: IndexStore, seconds: float | None = WAIT_SECONDS) -> bool:
        bounds.append(seconds)
        return await flush_soon(self, seconds)

    monkeypatch.setattr(IndexStore, "flush_soon", and_note_it)
    async with managers.run() as client:
        await furnish(client)
        with stopped(any_server):
            bounds.clear()
            await client.compute(await client.admit("b", [9] * 9), 8)
            # The background writes without a bound, and no call waits for it.
            assert WAIT_SECONDS not in bounds
            # Nor does the validation of a change.
            quota = pb.Quota(salt="s", device_floor_blocks=1)
            await client.admin.SetQuota(pb.SetQuotaRequest(quota=quota, validate_only=True))
            assert WAIT_SECONDS not in bounds
            # Operators are answered without Redis, after a while.
            async with asyncio.timeout(patience(20)):
                await make_rule(client, "s")
                await client.admin.ForgetBlocks(pb.ForgetBlocksRequest(salt="s"))
            assert WAIT_SECONDS in bounds
            await becomes(client, health_pb2.HealthCheckResponse.NOT_SERVING)
        await agreed(client)


@one_server
async def test_blocks_are_not_said_to_be_removed_from_redis_while_stored_blocks_are_restored(
    managers: Managers, any_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore, may_restore = IndexStore.restore, asyncio.Event()

    async def later(self: IndexStore, reading: Reading) -> None:
        await may_restore.wait()
        await restore(self, reading)

    forget = pb.ForgetBlocksRequest(prefix=pb.PrefixSelector(token_ids=[9] * 4))
    async with managers.run() as client:
        await client.register()
        await client.compute(await client.admit("b", [9] * 9), 8)
    monkeypatch.setattr(IndexStore, "restore", later)
    async with managers.run() as client:
        await client.register()
        assert not (await client.admin.ForgetBlocks(forget)).store_updated
        may_restore.set()
        await agreed(client)
        assert (await client.admin.ForgetBlocks(forget)).store_updated


@one_server
async def test_a_registration_waits_for_a_slow_redis_less_than_its_executor_does(
    managers: Managers, any_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    recover = IndexStore.recover
    left: list[float] = []

    async def and_note_it(self: IndexStore, reading: Reading, seconds: float) -> None:
        left.append(seconds)
        await recover(self, reading, seconds)

    async with managers.run() as client:
        await client.register()
    monkeypatch.setattr(IndexStore, "recover", and_note_it)
    with stopped(any_server):
        async with managers.run(patient=False) as client:
            await client.register()
            # Reading and restoring wait for Redis for one such time together.
            assert left == [pytest.approx(0, abs=0.01)]
            any_server.signal(signal.SIGCONT)
            await agreed(client)
    assert WAIT_SECONDS < CALL_SECONDS


@cluster_only
async def test_a_url_without_cluster_that_leads_to_one_is_explained(
    managers: Managers, any_server: Server, capsys
) -> None:
    managers.url = f"redis://{any_server.url.partition('//')[2].partition(',')[0]}"
    async with managers.run() as client:
        for name in "abcdef":
            await make_rule(client, name)
        managers.epoch += 1
        await client.register()
        await becomes(client, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert "write redis+cluster://" in capsys.readouterr().out


@cluster_only
async def test_keys_that_move_to_another_node_are_followed(managers: Managers, any_server: RedisCluster) -> None:
    async with managers.run() as client:
        await furnish(client)
        await agreed(client)
        for key in (BLOCKS, "kvkeep:{operators}:rules"):
            await asyncio.to_thread(any_server.move, key)
        await make_rule(client, "s")
        await client.compute(await client.admit("b", [9] * 9), 8)
        await agreed(client)


@one_server
async def test_few_permissions_are_enough_and_the_password_stays_secret(
    managers: Managers, any_server: Server, capsys
) -> None:
    commands = ["+get", "+set", "+del", "+hset", "+hdel", "+hscan"]
    with sync_redis(any_server.url) as direct:
        direct.acl_setuser("kvkeep", enabled=True, passwords=["+s3cret"], keys=["kvkeep:*"], commands=commands)
    path = urlsplit(any_server.url).path
    managers.url = f"unix://kvkeep:s3cret@{path}"
    async with managers.run() as client:
        await furnish(client)
        await agreed(client)
    managers.url = f"unix://kvkeep:wr0ng@{path}"
    async with managers.run() as client:
        await becomes(client, health_pb2.HealthCheckResponse.NOT_SERVING)
    logged = capsys.readouterr().out
    assert "WRONGPASS" in logged or "invalid username-password" in logged
    assert "s3cret" not in logged
    assert "wr0ng" not in logged
