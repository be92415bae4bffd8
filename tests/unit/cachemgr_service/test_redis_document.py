"""What docs/redis.md says of the keys and of the rights that are enough is so."""

import asyncio
import re
from array import array
from pathlib import Path

import pytest
import redis
from run_stack import redis_problem

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.settings import cluster_nodes
from scheduler.router import key_index
from scheduler.router.expected_seconds import Match
from scheduler.router.key_index import KeyIndex
from tests.stack import ROOT
from tests.support.cachemgr_client import BLOCK_SIZE, EXECUTOR
from tests.support.managers import Managers, agreed, cached, make_rule, pin, rules, share, sync_redis
from tests.support.patience import patience
from tests.support.redis_servers import Server

DOCUMENT = (ROOT / "docs/redis.md").read_text()


def keys_of(url: str) -> dict[str, str]:
    """Every key with its type."""
    with sync_redis(url) as server:
        return {key.decode(): server.type(key).decode() for key in server.scan_iter("*")}


def create_user(url: str, name: str = "kvkeep") -> str:
    """Makes a user of the document on every node. Returns the URL with it."""
    (command,) = re.findall(rf"^ACL SETUSER {name} .*$", DOCUMENT, re.MULTILINE)
    first, nodes = cluster_nodes(url)
    for node in [f"redis://{host}:{port}" for host, port in nodes] or [first]:
        with redis.Redis.from_url(node) as server:
            server.execute_command(*command.split())
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{name}:PASSWORD@{rest}"


async def found_by_a_router(url: str) -> Match:
    """What a router with the document's user finds of two full blocks."""
    index = KeyIndex(create_user(url, "router"))
    running = asyncio.create_task(index.run(lambda: [EXECUTOR]))
    async with asyncio.timeout(patience(20)):
        while not index.executors:
            await asyncio.sleep(0.01)
    found = await index.match([EXECUTOR], array("I", range(2 * BLOCK_SIZE)), None)
    running.cancel()
    await asyncio.wait([running])
    with pytest.raises(redis.exceptions.NoPermissionError):
        await index._redis.hmget(f"kvkeep:{{{EXECUTOR}}}:blocks", "any")
    await index.close()
    return found.get(EXECUTOR, Match())


async def test_the_keys_are_those_of_the_document_and_its_user_may_write_them(
    tmp_path: Path, any_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_index, "LOOKUP_SECONDS", 20)
    url = create_user(any_server.url)
    with sync_redis(url) as client, pytest.raises(redis.RedisError):
        client.set("other", "1")
    managers = Managers(tmp_path, url)
    for _ in range(2):
        async with managers.run(key_index=True) as client:
            await client.register()
            if not await rules(client):
                await make_rule(client, retention_priority=70)
            await client.admin.SetQuota(pb.SetQuotaRequest(quota=pb.Quota(salt="s", device_floor_blocks=1)))
            await share(client, 20)
            await cached(client, 9)
            await pin(client, pb.PrefixSelector(token_ids=range(8)), "ops", 100)
            await agreed(client)
        managers.epoch += 1
    # The executor's blocks count also while no cache manager runs.
    assert await found_by_a_router(any_server.url) == Match(device=2)
    rows = re.findall(r"^\| `(kvkeep:[^`]*)` \| (\w+) \|", DOCUMENT, re.MULTILINE)
    found = {
        re.sub("{[0-9a-f]{64}}:[0-9a-f]{64}", "{FIRST}:KEY", key.replace(EXECUTOR, "EXECUTOR")): kind
        for key, kind in keys_of(any_server.url).items()
    }
    assert found == dict(rows)


async def test_what_the_document_says_can_be_used_is_no_problem_for_the_process(any_server: Server) -> None:
    url = create_user(any_server.url)
    assert redis_problem(url) == ""
    assert "PASSWORD" not in redis_problem(url.replace("PASSWORD", "PASSWORDS")) != ""
