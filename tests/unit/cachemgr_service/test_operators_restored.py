"""What operators said outlives the cache manager: rules, quotas, shares of pools, and pins."""

import asyncio
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from cachemgr.oplog import replay
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.support.cachemgr_client import NUM_BLOCKS
from tests.support.managers import (
    Managers,
    cached,
    holds,
    leases,
    make_rule,
    pin,
    quotas,
    refusal,
    remaining,
    rules,
    share,
    state_of,
    sync_redis,
    written,
)
from tests.support.patience import patience
from tests.support.redis_servers import Server

EVERYTHING = pb.RetentionRule(
    name="tenants.of-note_1",
    order=-3,
    match=pb.RuleMatch(salt="ü\x00/s", tenant_id="acme", adapter_id=0, prefix_token_ids=range(9), start=4, end=1000),
    action=pb.RuleAction(
        retention_priority=0,
        retention_duration=Duration(seconds=86_400, nanos=123_456_789),
        pin_duration=Duration(nanos=1_000_001),
        offload_min_priority=100,
        eviction_policy=common.EvictionPolicy(kind="EVICTION_KIND_SLIDING_WINDOW", start_tokens=4, recent_tokens=60),
    ),
)
QUOTAS = (
    pb.Quota(tenant_id="acme", device_floor_blocks=2, device_ceiling_blocks=9, host_ceiling_blocks=0),
    pb.Quota(salt="acme", host_floor_blocks=0, device_floor_blocks=1),
    pb.Quota(salt="a/ü\x00", device_ceiling_blocks=4),
)


async def test_rules_are_restored_as_they_were(managers: Managers) -> None:
    async with managers.run() as client:
        kept = await make_rule(client, "kept")
        await client.admin.CreateRetentionRule(pb.CreateRetentionRuleRequest(rule=EVERYTHING))
        await make_rule(client, "gone")
        await client.admin.DeleteRetentionRule(pb.DeleteRetentionRuleRequest(name="gone"))
        update = pb.RetentionRule(name="kept", etag=kept.etag, order=5)
        mask = FieldMask(paths=["order"])
        await client.admin.UpdateRetentionRule(pb.UpdateRetentionRuleRequest(rule=update, update_mask=mask))
        before, state = await rules(client), await state_of(client, "rule")
    async with managers.run() as client:
        assert await rules(client) == before
        assert [rule.name for rule in before] == [EVERYTHING.name, "kept"]
        # Also values that are not shown, such as every nanosecond.
        assert await state_of(client, "rule") == state
        # An operator that read a rule before the restart may change it now, and no other may.
        for etag, code in ((kept.etag, grpc.StatusCode.ABORTED), (before[1].etag, None)):
            request = pb.UpdateRetentionRuleRequest(rule=pb.RetentionRule(name="kept", etag=etag), update_mask=mask)
            assert await refusal(client.admin.UpdateRetentionRule(request)) == code


async def test_a_rule_made_again_never_has_an_etag_of_before(managers: Managers) -> None:
    etags = set()
    for _ in range(3):
        async with managers.run() as client:
            for _ in range(3):
                etags.add((await make_rule(client)).etag)
                await client.admin.DeleteRetentionRule(pb.DeleteRetentionRuleRequest(name="r"))
    assert len(etags) == 9


async def test_quotas_are_restored_as_they_were(managers: Managers) -> None:
    async with managers.run() as client:
        for quota in (*QUOTAS, pb.Quota(salt="gone", device_floor_blocks=1)):
            await client.admin.SetQuota(pb.SetQuotaRequest(quota=quota))
        await client.admin.DeleteQuota(pb.DeleteQuotaRequest(salt="gone"))
        before = await quotas(client)
    async with managers.run() as client:
        assert await quotas(client) == before
        assert len(before) == len(QUOTAS)


async def test_a_share_of_a_pool_is_restored_with_its_etag_and_its_blocks(managers: Managers) -> None:
    async with managers.run() as client:
        await client.register()
        steps = await cached(client)
        await share(client, 5)
        before = await client.pool()
    async with managers.run() as client:
        assert (await client.register(last_write_steps=steps)).restored_blocks == 2
        again = await client.pool()
        assert (again.total_blocks, again.free_blocks, again.etag) == (5, 5, before.etag)
    async with managers.run(epoch=8) as client:
        await client.register()
        assert (await client.pool()).total_blocks == 5


async def test_pins_are_restored_with_name_owner_time_and_blocks(managers: Managers) -> None:
    prefix = pb.PrefixSelector(token_ids=range(8))
    async with managers.run() as client:
        await client.register()
        steps = await cached(client, 13)
        pinned = await pin(client, prefix, "ops", 100)
        other = await pin(client, pb.PrefixSelector(token_ids=range(4)), "agent", 50)
        gone = await pin(client, prefix, "else", 70)
        managers.now += 20
        await client.admin.ReleaseHold(pb.ReleaseHoldRequest(name=gone.hold_name))
        before = await holds(client)
    managers.now += 1000
    async with managers.run() as client:
        assert (await client.register(last_write_steps=steps)).restored_blocks == 3
        # How long no manager ran is not known: that time does not count.
        assert await holds(client) == before
        assert [(hold.name, hold.owner, hold.remaining_duration.seconds, hold.num_blocks) for hold in before] == [
            (pinned.hold_name, "ops", 80, 2),
            (other.hold_name, "agent", 30, 1),
        ]
        assert (await client.pool()).used_blocks == 2
        await client.check()
        managers.now += 31
        async with asyncio.timeout(patience(10)):
            while len(left := await holds(client)) > 1:
                await asyncio.sleep(0.02)
        assert [hold.name for hold in left] == [pinned.hold_name]
        await client.admin.ReleaseHold(pb.ReleaseHoldRequest(name=pinned.hold_name))
        assert (await client.pool()).used_blocks == 0
    async with managers.run() as client:
        await client.register(last_write_steps=steps)
        assert await holds(client) == []


async def test_a_pin_keeps_its_restored_blocks(managers: Managers) -> None:
    async with managers.run() as client:
        await client.register()
        admitted = await client.admit("a", 13)
        await client.compute(admitted, 12)
        await pin(client, pb.PrefixSelector(token_ids=range(12)), "ops", 100)
    steps = list(written(admitted, 1))
    # The last of the three blocks was written again behind the manager's back.
    steps[admitted.block_tables[0].slots[2] - 1] = 9
    async with managers.run() as client:
        assert (await client.register(last_write_steps=tuple(steps))).restored_blocks == 2
        assert [hold.num_blocks for hold in await holds(client)] == [2]
    async with managers.run(epoch=8) as client:
        await client.register()
        assert await holds(client) == []


async def test_with_a_smaller_budget_the_oldest_pins_become_leases(managers: Managers) -> None:
    async with managers.run() as client:
        await client.register()
        steps = await cached(client, 13)
        await pin(client, pb.PrefixSelector(token_ids=range(8)), "old", 100)
        await pin(client, pb.PrefixSelector(token_ids=range(4)), "new", 100)
    async with managers.run(pin_budget=0.05) as client:
        await client.register(last_write_steps=steps)
        await client.check()
        assert [hold.owner for hold in await holds(client)] == ["new"]
        assert [lease.lease.retention_priority for lease in await leases(client)] == [100, 100]


async def test_remaining_times_of_leases_are_restored_exactly(managers: Managers) -> None:
    ranges = [common.RetentionRange(start=0, end=4, retention_priority=80, retention_duration=Duration(seconds=500))]
    retention = pb.RetentionConfig(ranges=ranges)
    async with managers.run() as client:
        await client.register()
        steps = await cached(client, retention=retention)
        managers.now += 123.5
        # Nothing of the block changes, and time passes.
        await client.admin.SetQuota(pb.SetQuotaRequest(quota=QUOTAS[0]))
        before = await remaining(client)
    assert before == [500 - 123.5]
    for _ in range(3):
        managers.now += 5000
        async with managers.run() as client:
            await client.register(last_write_steps=steps)
            assert await remaining(client) == pytest.approx(before, abs=1e-6)
            await client.check()
            managers.now += 10
            before = [before[0] - 10]
            await client.admin.SetQuota(pb.SetQuotaRequest(quota=QUOTAS[0]))


async def test_the_leases_of_a_rule_that_only_steers_offloading_are_restored(managers: Managers) -> None:
    async with managers.run() as client:
        await client.register()
        await make_rule(client, offload_min_priority=60)
        steps = await cached(client)
        before = await leases(client)
        assert [one.lease.holder for one in before] == ["rule/r"] * 2
    async with managers.run() as client:
        await client.register(last_write_steps=steps)
        assert await leases(client) == before


async def test_a_lease_of_a_deleted_rule_is_not_restored(managers: Managers) -> None:
    async with managers.run() as client:
        await client.register()
        await make_rule(client, retention_priority=90)
        steps = await cached(client)
        assert len(await leases(client)) == 2
    # As when the manager dies after the rule was deleted in Redis, and before its leases were.
    with sync_redis(managers.url) as server:
        server.hdel("kvkeep:{operators}:rules", "r")
    for _ in range(2):
        async with managers.run() as client:
            await client.register(last_write_steps=steps)
            assert await leases(client) == []


async def test_what_another_version_wrote_is_left_out_and_stays(managers: Managers, capsys) -> None:
    async with managers.run() as client:
        await make_rule(client)
    fields = {
        "rules": [b"future", b"r2", b"\xff"],
        "quotas": [b"salt/x", b"salt/"],
        "shares": [b"gpu-0/0"],
    }
    with sync_redis(managers.url) as server:
        for kind, names in fields.items():
            for name in names:
                server.hset(f"kvkeep:{{operators}}:{kind}", name, b"\x09 whatever")
        server.hset("kvkeep:{operators}:rules", "broken", b"\x01\xff\xff")
        good = server.hget("kvkeep:{operators}:rules", "r")
        server.hset("kvkeep:{operators}:rules", "elsewhere", good)
        async with managers.run() as client:
            async with asyncio.timeout(patience(20)):
                # A start does not wait long for a slow Redis.
                while [rule.name for rule in await rules(client)] != ["r"]:
                    await asyncio.sleep(0.02)
            assert await quotas(client) == []
            await make_rule(client, "s")
        assert server.hget("kvkeep:{operators}:rules", "future") == b"\x09 whatever"
        assert server.hlen("kvkeep:{operators}:rules") == 7
    assert "operators' records that cannot be read are ignored" in capsys.readouterr().out


async def test_redis_away_at_the_start_keeps_no_call_waiting_and_nothing_newer_is_lost(
    managers: Managers, server: Server
) -> None:
    async with managers.run() as client:
        for name in ("both", "deleted", "old"):
            await make_rule(client, name, retention_priority=10)
        await client.admin.SetQuota(pb.SetQuotaRequest(quota=QUOTAS[0]))
    server.stop()
    async with managers.run(patient=False) as client:
        assert await rules(client) == []
        await client.register()
        for name in ("both", "deleted", "new"):
            await make_rule(client, name, retention_priority=20)
        await client.admin.DeleteRetentionRule(pb.DeleteRetentionRuleRequest(name="deleted"))
        changed = pb.Quota(tenant_id="acme", device_ceiling_blocks=3)
        await client.admin.SetQuota(pb.SetQuotaRequest(quota=changed))
        await share(client, 9)
        server.start()
        wanted = {"both": 20, "new": 20, "old": 10}
        async with asyncio.timeout(patience(20)):
            while len(after := await rules(client)) < len(wanted):
                await asyncio.sleep(0.02)
        assert {rule.name: rule.action.retention_priority for rule in after} == wanted
        assert await quotas(client) == [changed]
    async with managers.run() as client:
        assert {rule.name: rule.action.retention_priority for rule in await rules(client)} == wanted
        assert await quotas(client) == [changed]
        await client.register()
        assert (await client.pool()).total_blocks == 9


async def test_a_late_share_of_a_pool_applies_at_once_when_it_fits(managers: Managers, server: Server) -> None:
    async with managers.run() as client:
        await client.register()
        await share(client, 9)
    server.stop()
    async with managers.run(patient=False) as client:
        await client.register()
        assert (await client.pool()).total_blocks == NUM_BLOCKS
        server.start()
        async with asyncio.timeout(patience(20)):
            while (await client.pool()).total_blocks != 9:
                await asyncio.sleep(0.02)


async def test_a_log_with_everything_that_was_restored_replays_to_the_same_state(
    managers: Managers, tmp_path: Path
) -> None:
    async with managers.run() as client:
        await client.register()
        await make_rule(client, pin_duration=timedelta(seconds=50), retention_priority=3)
        await client.admin.CreateRetentionRule(pb.CreateRetentionRuleRequest(rule=EVERYTHING))
        await client.admin.SetQuota(pb.SetQuotaRequest(quota=QUOTAS[0]))
        await share(client, 20)
        steps = await cached(client, tenant_id="acme")
        managers.now += 7
        assert len(await holds(client)) == 1
    log = tmp_path / "operations"
    async with managers.run(operation_log=log) as client:
        await client.register(last_write_steps=steps)
        assert len(await holds(client)) == 1
        *_, last = [message async for message in client.admin.DumpState(pb.DumpStateRequest())]
    assert replay.report(log).splitlines()[-1] == f"state {last.state_hash}"
