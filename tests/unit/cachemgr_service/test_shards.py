"""Several cache managers on one Redis: each has its own records, whatever the other managers do."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.persistence.redis_index import RESYNCS
from cachemgr.persistence.redis_keys import OPERATORS, Keys
from protos.kvcache.v1 import kvcache_pb2 as pb
from tests.support.cachemgr_client import EXECUTOR, Client
from tests.support.managers import (
    Managers,
    agreed,
    cached,
    compared,
    holds,
    make_rule,
    pin,
    quotas,
    rules,
    share,
    sync_redis,
)
from tests.support.patience import patience
from tests.support.redis_servers import Server

# One that keeps the names of a single manager, and one with a name.
SHARDS = ("", "east")
TIMES = ("clock", "time")
SERVING = health_pb2.HealthCheckResponse.SERVING


async def fill(client: Client, shard: str, blocks: int) -> tuple[int, ...]:
    """Blocks, a pin, a rule, a quota and a share that no other shard has; the steps that wrote the blocks."""
    await make_rule(client, f"rule-{shard}", retention_priority=60 + blocks)
    await client.admin.SetQuota(pb.SetQuotaRequest(quota=pb.Quota(salt=f"salt-{shard}", device_floor_blocks=blocks)))
    await share(client, 20 + blocks)
    steps = await cached(client, 4 * blocks + 1)
    await pin(client, pb.PrefixSelector(token_ids=range(4)), f"owner-{shard}", 1000)
    return steps


async def check(client: Client, shard: str, blocks: int) -> None:
    """The manager has the records from `fill`, and no records of other managers."""
    assert [rule.name for rule in await rules(client)] == [f"rule-{shard}"]
    assert [quota.salt for quota in await quotas(client)] == [f"salt-{shard}"]
    assert [hold.owner for hold in await holds(client)] == [f"owner-{shard}"]
    assert (await client.pool()).total_blocks == 20 + blocks
    listed = await client.admin.ListBlocks(pb.ListBlocksRequest(pool_id=f"{EXECUTOR}/0"))
    assert len(listed.blocks) == blocks
    await agreed(client)


def stored(url: str, shard: str) -> dict[bytes, object]:
    """All that Redis has of a shard, without the clocks, which go on."""
    with sync_redis(url) as redis:
        keys = [key for key in redis.scan_iter("*") if (b"/" in key) == bool(shard)]
        kept = [key for key in keys if not key.endswith(tuple(f":{time}".encode() for time in TIMES))]
        return {key: redis.hgetall(key) if redis.type(key) == b"hash" else redis.get(key) for key in kept}


def clocks(redis: Any) -> list[object]:
    """The times that Redis has of all shards, and of records without an executor."""
    return [redis.get(Keys(shard).clock(owner)) for shard in SHARDS for owner in (OPERATORS, EXECUTOR)]


async def test_two_managers_of_one_redis_keep_to_their_own_records(tmp_path: Path, any_server: Server) -> None:
    """With one executor id for both, which is the worst case."""
    managers = {}
    for shard in SHARDS:
        (tmp_path / f"shard-{shard}").mkdir()
        managers[shard] = Managers(tmp_path / f"shard-{shard}", any_server.url)
    blocks, steps = {"": 2, "east": 3}, {}
    async with AsyncExitStack() as running:
        for shard in SHARDS:
            client = await running.enter_async_context(managers[shard].run(shard=shard))
            await client.register()
            steps[shard] = await fill(client, shard, blocks[shard])
            await check(client, shard, blocks[shard])
        # Each writes its clock now and then: no manager may take another's for a loss.
        resyncs = RESYNCS._value.get()
        with sync_redis(any_server.url) as redis:
            for _ in range(2):
                shown = clocks(redis)
                # No two show the same time.
                for seconds, shard in enumerate(SHARDS, 1):
                    managers[shard].now += seconds
                async with asyncio.timeout(patience(30)):
                    while any(time == before for time, before in zip(clocks(redis), shown, strict=True)):
                        await asyncio.sleep(0.05)
    assert RESYNCS._value.get() == resyncs
    for restarted, other in (SHARDS, SHARDS[::-1]):
        async with managers[other].run(shard=other) as remaining:
            await remaining.register(last_write_steps=steps[other])
            await check(remaining, other, blocks[other])
            before = stored(any_server.url, other)
            async with managers[restarted].run(shard=restarted) as client:
                answer = await client.register(last_write_steps=steps[restarted])
                assert answer.restored_blocks == blocks[restarted]
                await check(client, restarted, blocks[restarted])
                await client.admin.ForgetBlocks(pb.ForgetBlocksRequest(session_id="nothing"))
            await check(remaining, other, blocks[other])
            assert stored(any_server.url, other) == before
    assert RESYNCS._value.get() == resyncs


async def test_of_two_managers_with_the_same_names_only_the_later_one_writes(managers: Managers) -> None:
    async with managers.run() as earlier:
        await earlier.register()
        await make_rule(earlier, "early")
        await agreed(earlier)
        async with managers.run() as later:
            assert [rule.name for rule in await rules(later)] == ["early"]
            await later.register()
            await make_rule(later, "late")
            await agreed(later)
            before = stored(managers.url, "")
            await make_rule(earlier, "lost")
            assert await compared(earlier) is None
            stub: health_pb2_grpc.HealthAsyncStub = health_pb2_grpc.HealthStub(earlier.admin_channel)
            async with asyncio.timeout(patience(10)):
                while (await stub.Check(health_pb2.HealthCheckRequest(service="redis"))).status == SERVING:
                    await asyncio.sleep(0.05)
            assert stored(managers.url, "") == before
            await agreed(later)
    async with managers.run() as last:
        assert [rule.name for rule in await rules(last)] == ["early", "late"]


async def test_a_manager_whose_claim_redis_has_lost_claims_its_keys_again(managers: Managers) -> None:
    async with managers.run() as client:
        await client.register()
        with sync_redis(managers.url) as redis:
            for stale in (None, "5"):
                redis.delete("kvkeep:{operators}:manager")
                if stale:
                    redis.set("kvkeep:{operators}:manager", stale)
                await make_rule(client, f"rule-{stale}")
                await agreed(client)
                assert int(redis.get("kvkeep:{operators}:manager")) == client.manager_epoch


@given(
    st.lists(
        st.tuples(st.from_regex(r"[A-Za-z0-9._-]{0,8}", fullmatch=True), st.text(max_size=8)),
        min_size=2,
        max_size=2,
        unique=True,
    )
)
def test_no_two_shards_and_no_two_executors_have_a_key_in_common(pairs: list[tuple[str, str]]) -> None:
    names = [
        {
            *(Keys(shard).executor(executor_id, what) for what in ("blocks", "epoch", "pins")),
            Keys(shard).clock(executor_id or "e"),
        }
        for shard, executor_id in pairs
    ]
    assert names[0].isdisjoint(names[1]) or {executor_id or "e" for _, executor_id in pairs} == {"e"}
    operators = [{Keys(shard).operators("rules"), Keys(shard).clock(OPERATORS)} for shard, _ in pairs]
    assert operators[0].isdisjoint(operators[1]) == (pairs[0][0] != pairs[1][0])
    assert all(name.isdisjoint(other) for name in names for other in operators)
