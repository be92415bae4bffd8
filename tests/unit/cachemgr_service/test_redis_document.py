"""What docs/redis.md says of the keys and of the rights that are enough is so."""

import re
from pathlib import Path

import pytest
import redis
from run_stack import redis_problem

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.settings import cluster_nodes
from tests.stack import ROOT
from tests.support.cachemgr_client import EXECUTOR
from tests.support.managers import Managers, agreed, cached, make_rule, pin, rules, share, sync_redis
from tests.support.redis_servers import Server

DOCUMENT = (ROOT / "docs/redis.md").read_text()


def keys_of(url: str) -> dict[str, str]:
    """Every key with its type."""
    with sync_redis(url) as server:
        return {key.decode(): server.type(key).decode() for key in server.scan_iter("*")}


def create_user(url: str) -> str:
    """Makes the document's user on every node. Returns the URL with it."""
    (command,) = re.findall(r"^ACL SETUSER .*$", DOCUMENT, re.MULTILINE)
    first, nodes = cluster_nodes(url)
    for node in [f"redis://{host}:{port}" for host, port in nodes] or [first]:
        with redis.Redis.from_url(node) as server:
            server.execute_command(*command.split())
    scheme, _, rest = url.partition("://")
    return f"{scheme}://kvkeep:PASSWORD@{rest}"


async def test_the_keys_are_those_of_the_document_and_its_user_may_write_them(
    tmp_path: Path, any_server: Server
) -> None:
    url = create_user(any_server.url)
    with sync_redis(url) as client, pytest.raises(redis.RedisError):
        client.set("other", "1")
    managers = Managers(tmp_path, url)
    for _ in range(2):
        async with managers.run() as client:
            await client.register()
            if not await rules(client):
                await make_rule(client, retention_priority=70)
            await client.admin.SetQuota(pb.SetQuotaRequest(quota=pb.Quota(salt="s", device_floor_blocks=1)))
            await share(client, 20)
            await cached(client, 9)
            await pin(client, pb.PrefixSelector(token_ids=range(8)), "ops", 100)
            await agreed(client)
        managers.epoch += 1
    rows = re.findall(r"^\| `(kvkeep:[^`]*)` \| (\w+) \|", DOCUMENT, re.MULTILINE)
    assert {key.replace(EXECUTOR, "EXECUTOR"): kind for key, kind in keys_of(any_server.url).items()} == dict(rows)


async def test_what_the_document_says_can_be_used_is_no_problem_for_the_process(any_server: Server) -> None:
    url = create_user(any_server.url)
    assert redis_problem(url) == ""
    assert "PASSWORD" not in redis_problem(url.replace("PASSWORD", "PASSWORDS")) != ""
