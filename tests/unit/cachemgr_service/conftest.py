"""The real cache manager behind its real servers, on unix sockets."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from cachemgr.process import CacheManagerProcess
from tests.support import redis_servers
from tests.support.cachemgr_client import Client, settings_for
from tests.support.local_redis import LocalRedis
from tests.support.managers import Managers
from tests.support.redis_cluster import RedisCluster


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RedisCluster]]:
    """The cluster of a family of servers: starting one takes seconds."""
    made: dict[str, RedisCluster] = {}

    def cluster(family: str) -> RedisCluster:
        if family not in made:
            made[family] = RedisCluster(redis_servers.binary_of(family), tmp_path_factory.mktemp(f"{family}-cluster"))
        return made[family]

    yield cluster
    for one in made.values():
        one.stop()


@pytest.fixture(params=redis_servers.SERVERS)
def any_server(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    clusters: Callable[[str], RedisCluster],
) -> Iterator[redis_servers.Server]:
    """Each kind of Redis, empty; still running at the end of the test or not."""
    started = redis_servers.open_server(request.param, tmp_path, monkeypatch, clusters)
    yield started
    if isinstance(started, LocalRedis):
        started.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalRedis]:
    """A Redis of the test's own."""
    server = LocalRedis(tmp_path / "redis-server")
    yield server
    server.stop()


@pytest.fixture
def managers(tmp_path: Path, server: LocalRedis) -> Managers:
    """Cache managers one after the other, on a Redis of the test's own."""
    return Managers(tmp_path, server.url)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    settings = settings_for(tmp_path)
    process = CacheManagerProcess(settings)
    await process.start()
    client = Client(settings)
    yield client
    await client.check()
    await client.close()
    await process.stop()
